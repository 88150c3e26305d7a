"""The memory of a CUDA device, shared between processes by the driver's IPC handles.

Torch's own way would change each tensor that it shares, and keep its memory for a child that was killed. So this file
calls the driver. The driver shares whole allocations. The child maps each one once, at its first tensor, and keeps it.

Law of this file: the driver's calls. Nothing here knows a collective or a message.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import torch

from tft_pg.child.device import CALLS_MAX, DeviceMemory, MappedMemory, Place
from tft_pg.errors import ConfigError, UnsupportedOperationError

__all__ = ["CudaMemory", "MappedCudaMemory", "check_driver"]

_DRIVER: Final = "libcuda.so.1"
_HANDLE_BYTES: Final = 64
# The driver's numbers.
_BUFFER_ID: Final = 7
_RANGE_START: Final = 11
_RANGE_SIZE: Final = 12
_IS_SHAREABLE: Final = 13
_PEER_ACCESS: Final = 1
_AT_LEAST: Final = 0
_NON_BLOCKING: Final = 1

_PASSED: Final = CALLS_MAX  # the place of the child's flag, behind the calls' own
_ALL_PASSED: Final = 1 << 30
_WORD: Final = 4


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * _HANDLE_BYTES),)


_POINTER: Final = ctypes.c_uint64
_STREAM: Final = ctypes.c_void_p
_FLAG_CALL: Final = (_STREAM, _POINTER, ctypes.c_uint32, ctypes.c_uint)
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuStreamCreate": (ctypes.POINTER(_STREAM), ctypes.c_uint),
    "cuPointerGetAttribute": (ctypes.c_void_p, ctypes.c_int, _POINTER),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _POINTER),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_POINTER), _Handle, ctypes.c_uint),
    "cuStreamWaitValue32_v2": _FLAG_CALL,
    "cuStreamWriteValue32_v2": _FLAG_CALL,
}


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL(_DRIVER)
    for name, types in _SIGNATURES.items():
        function = getattr(driver, name)
        function.argtypes, function.restype = types, ctypes.c_int
    return driver


def check_driver() -> None:
    """Check that the driver has all calls. Raises: UnsupportedOperationError: it does not."""
    try:
        _driver()
    except (OSError, AttributeError) as error:
        raise UnsupportedOperationError(
            f"ProcessGroupBabyNCCL needs NVIDIA's driver 515 or later ({error}); use ProcessGroupNCCL"
        ) from None


def _call(name: str, *args: object) -> None:
    status = getattr(_driver(), name)(*args)
    if status:
        raise RuntimeError(f"the CUDA driver's {name} failed with error {status}")


@functools.cache
def _context(index: int) -> int:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    assert context.value is not None
    return context.value


@contextmanager
def _current(index: int) -> Iterator[None]:
    """Make a device's context current for the driver's calls of this thread, which may be its first."""
    _call("cuCtxPushCurrent_v2", _context(index))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _own_stream(index: int) -> int:
    """Return a stream that waits for no other, for the life of the process."""
    stream = _STREAM()
    with _current(index):
        _call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    assert stream.value is not None
    return stream.value


def _attribute(kind: int, pointer: int) -> int:
    found = ctypes.c_uint64()
    _call("cuPointerGetAttribute", ctypes.byref(found), kind, pointer)
    return found.value


def _stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


def _new_flags(index: int, own_stream: int) -> torch.Tensor:
    """Return the flags, all zero. Memory that an earlier use on another stream may still write would not do."""
    stream = torch.cuda.ExternalStream(own_stream, device=index)
    with torch.cuda.stream(stream):
        flags = torch.zeros(CALLS_MAX + 1, dtype=torch.int32, device=f"cuda:{index}")
    stream.synchronize()
    return flags


@final
class CudaMemory(DeviceMemory):
    """The trainer's side.

    Args:
        index: of the device.

    Raises: RuntimeError: the device failed. From `settings` ConfigError: torch allocates memory that can't be shared.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._handles: dict[int, str] = {}
        self._ordered: set[int] = set()
        self._own = _own_stream(index)
        self._flags = _new_flags(index, self._own)

    def settings(self) -> dict[str, object]:
        fault = self.fault(self._flags)
        if fault:
            raise ConfigError(f"ProcessGroupBabyNCCL can't use cuda:{self._index}: {fault}")
        place = self.place(self._flags)
        return {"device": self._index, "flags": [place.buffer, place.handle, place.offset]}

    def fault(self, tensor: torch.Tensor) -> str:
        if not tensor.is_cuda or tensor.device.index != self._index:
            return f"a tensor is on {tensor.device}, but this group is for cuda:{self._index}"
        if torch.cuda.is_current_stream_capturing():
            return "a graph can't capture it, because the graph would outlive the group; call it outside"
        with _current(self._index):
            if tensor.numel() and not _attribute(_IS_SHAREABLE, tensor.data_ptr()):
                return (
                    "the memory of a tensor can't be shared with the child process; unset expandable_segments and "
                    "backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF, and allocate it outside of a memory pool"
                )
        return ""

    def place(self, tensor: torch.Tensor) -> Place:
        pointer = tensor.data_ptr()
        with _current(self._index):
            buffer, start = _attribute(_BUFFER_ID, pointer), _attribute(_RANGE_START, pointer)
            handle = self._handles.get(buffer)
            if handle is None:
                found = _Handle()
                _call("cuIpcGetMemHandle", ctypes.byref(found), start)
                size = _attribute(_RANGE_SIZE, pointer)
                handle = self._handles[buffer] = f"{size}:{bytes(found).hex()}"
        return Place(buffer, handle, pointer - start)

    def set_flag(self, number: int) -> None:
        address = self._flags.data_ptr() + number % CALLS_MAX * _WORD
        with _current(self._index):
            _call("cuStreamWriteValue32_v2", _stream(self._index), address, number + 1, 0)

    def order_after(self, number: int) -> None:
        stream = torch.cuda.current_stream(self._index)
        if stream.cuda_stream not in self._ordered:
            self._ordered.add(stream.cuda_stream)
            self._flags.record_stream(stream)  # nothing else may use the memory while a stream waits for it
        with _current(self._index):
            _call("cuStreamWaitValue32_v2", stream.cuda_stream, self._passed, number + 1, _AT_LEAST)

    def release(self) -> None:
        with _current(self._index):
            _call("cuStreamWriteValue32_v2", self._own, self._passed, _ALL_PASSED, 0)

    @property
    def _passed(self) -> int:
        return self._flags.data_ptr() + _PASSED * _WORD


class _Span:
    """Device memory at an address, in the form that `torch.as_tensor` takes without a copy."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 2}


def _bytes_at(pointer: int, size: int, index: int) -> torch.Tensor:
    return torch.as_tensor(_Span(pointer, size), device=f"cuda:{index}")


@final
class MappedCudaMemory(MappedMemory):
    """The child's side.

    Args:
        index: of the device.
        flags: the place of the flags: the allocation's number and handle, and the offset.

    Raises: RuntimeError: the device failed.
    """

    def __init__(self, index: int, flags: tuple[int, str, int]) -> None:
        self._index = index
        self._mapped: dict[int, torch.Tensor] = {}
        torch.cuda.set_device(index)
        buffer, handle, offset = flags
        self._flags = self.map(buffer, handle).data_ptr() + offset

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self._index)

    def map(self, buffer: int, handle: str) -> torch.Tensor:
        found = self._mapped.get(buffer)
        if found is None:
            size, _, hexadecimal = handle.partition(":")
            shared = _Handle.from_buffer_copy(bytes.fromhex(hexadecimal))
            pointer = _POINTER()
            with _current(self._index):
                _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), shared, _PEER_ACCESS)
            found = self._mapped[buffer] = _bytes_at(pointer.value, int(size), self._index)
        return found

    def order_after(self, number: int) -> None:
        address = self._flags + number % CALLS_MAX * _WORD
        with _current(self._index):
            _call("cuStreamWaitValue32_v2", _stream(self._index), address, number + 1, _AT_LEAST)

    def set_passed(self, number: int) -> None:
        with _current(self._index):
            _call("cuStreamWriteValue32_v2", _stream(self._index), self._flags + _PASSED * _WORD, number + 1, 0)
