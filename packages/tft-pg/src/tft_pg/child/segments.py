"""Shared memory for the tensors of running calls.

A segment is an anonymous file (memfd) that two processes map. The files have no names, so the kernel frees them when
both processes are gone, however they end. A segment belongs to one child, and to one call at a time. It is used again
only when the call has been answered, because a running operation of the child may still write. A descriptor is needed
only until the child has the file, so the number of running calls is not bounded by the descriptors.

Law of this file: memory and descriptors; nothing here knows a message or a collective.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

from tft_pg.forks import Inheritance, let_go_in_child

__all__ = [
    "SEGMENT_BYTES_MAX",
    "Pool",
    "Segment",
    "copy_in",
    "copy_out",
    "map_segment",
    "places",
    "strided_view",
    "view",
]

SEGMENT_BYTES_MAX: Final = 1 << 40
"""The largest segment that a child accepts."""

_SMALLEST: Final = 1 << 14
_ALIGNMENT: Final = 64
_HUGE_PAGE: Final = 1 << 21
_FREE_BYTES_MAX: Final = 1 << 30
_FREE_MAX: Final = 1024
_DROPPED_MAX: Final = 1024  # in one message

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


@final
@dataclass(eq=False)
class Segment:
    """One piece of shared memory.

    Args:
        number: unique in its pool.
        size: in bytes.
        descriptor: of the file, to be sent to the child; -1: the child has it.
        memory: all bytes, as a tensor.
    """

    number: int
    size: int
    descriptor: int
    memory: torch.Tensor

    def close(self) -> None:
        """Close the descriptor, once. The memory stays."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def map_segment(descriptor: int, size: int) -> torch.Tensor:
    """Map a shared file of this process or another. Raises: ValueError, OSError: it is not as large as `size`."""
    if not 0 < size <= SEGMENT_BYTES_MAX or os.fstat(descriptor).st_size < size:
        raise ValueError(f"a segment can't have {size} bytes")
    # An object of Python's mmap would keep a copy of the descriptor.
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    mapped = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(mapped, _libc.munmap, address, size).atexit = False
    # A forked child of this process must not keep the memory, and never uses it.
    _libc.madvise(address, size, mmap.MADV_DONTFORK)
    if size >= _HUGE_PAGE:
        _libc.madvise(address, size, mmap.MADV_HUGEPAGE)  # fails on a kernel without huge pages
    return torch.frombuffer(mapped, dtype=torch.uint8)


@final
class Pool:
    """The segments of one child. A free segment is used again by a call that needs about its size.

    The free segments are bounded in bytes and in number. The least recently used ones are dropped first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: OrderedDict[int, Segment] = OrderedDict()  # the least recently used first
        self._sizes: dict[int, list[int]] = {}  # the numbers of the free ones of each size, in the same order
        self._free_bytes = 0
        self._all: dict[int, Segment] = {}
        self._dropped: list[int] = []
        self._next = 0
        self._closed = False
        let_go_in_child(self)

    def take(self, size: int) -> Segment:
        """Return a segment of at least this size. Raises: OSError: there is no memory."""
        step = max(_SMALLEST, 1 << max((size - 1).bit_length() - 3, 0))
        size = -(-size // step) * step
        with self._lock:
            numbers = self._sizes.get(size)
            if numbers:
                self._free_bytes -= size
                return self._free.pop(numbers.pop())
            number = self._next
            self._next += 1
        descriptor = os.memfd_create("tft-pg", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            segment = Segment(number, size, descriptor, map_segment(descriptor, size))
        except BaseException:
            os.close(descriptor)
            raise
        with self._lock:
            self._all[number] = segment
        return segment

    def give(self, segment: Segment) -> None:
        """Take a segment back whose call has ended in both processes."""
        with self._lock:
            if segment.number not in self._all or segment.number in self._free:
                return
            if self._closed or segment.size > _FREE_BYTES_MAX:
                self._drop(segment)
                return
            self._free[segment.number] = segment
            self._sizes.setdefault(segment.size, []).append(segment.number)
            self._free_bytes += segment.size
            while self._free_bytes > _FREE_BYTES_MAX or len(self._free) > _FREE_MAX:
                _, oldest = self._free.popitem(last=False)
                self._sizes[oldest.size].pop(0)
                self._free_bytes -= oldest.size
                self._drop(oldest)

    def _drop(self, segment: Segment) -> None:
        del self._all[segment.number]
        if segment.descriptor < 0:
            self._dropped.append(segment.number)
        segment.close()

    def dropped(self) -> list[int]:
        """Return the numbers of segments that the child has and nobody uses any more. Each is returned once."""
        if not self._dropped:
            return []
        with self._lock:
            found, self._dropped = self._dropped[:_DROPPED_MAX], self._dropped[_DROPPED_MAX:]
        return found

    def close(self) -> None:
        """Free the memory. A segment of a running call is freed when it is given back."""
        with self._lock:
            self._closed = True
            free = list(self._free.values())
            self._free.clear()
            self._sizes.clear()
            self._free_bytes = 0
            for segment in free:
                self._drop(segment)

    def forked(self) -> Inheritance:
        """Release the descriptors in a forked child."""
        self._lock = threading.Lock()
        held, self._all, self._closed = list(self._all.values()), {}, True
        self._free, self._sizes, self._free_bytes = OrderedDict(), {}, 0
        descriptors = [each.descriptor for each in held]
        for each in held:
            each.descriptor = -1
        # The memory is not mapped in the child, so nothing may unmap its addresses there.
        return Inheritance(descriptors=descriptors, kept=[each.memory.untyped_storage() for each in held])


def places(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return the offset of each tensor in a segment, and the size of all."""
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return offsets, size


def view(memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor in a segment. Raises: ValueError: it does not lie inside."""
    count = 1
    for length in shape:
        if length < 0:
            raise ValueError(f"a tensor can't have the shape {list(shape)}")
        count *= length
    end = offset + count * dtype.itemsize
    if offset < 0 or offset % _ALIGNMENT or end > memory.numel():
        raise ValueError(f"bytes {offset} to {end} are not in a segment of {memory.numel()} bytes")
    return memory[offset:end].view(dtype).view(tuple(shape))


def strided_view(
    memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """Return a tensor of any layout, with elements, in some memory. Raises: ValueError: it does not lie inside."""
    last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    end = offset + (last + 1) * dtype.itemsize
    if offset < 0 or min(shape, default=1) < 1 or min(strides, default=0) < 0 or end > memory.numel():
        raise ValueError(f"bytes {offset} to {end} are not in an allocation of {memory.numel()} bytes")
    return memory[offset:end].view(dtype).as_strided(tuple(shape), tuple(strides))


def copy_in(memory: torch.Tensor, offset: int, tensor: torch.Tensor) -> None:
    """Copy a tensor to its place in a segment."""
    if tensor.is_contiguous():
        ctypes.memmove(memory.data_ptr() + offset, tensor.data_ptr(), tensor.numel() * tensor.element_size())
    else:
        view(memory, offset, tensor.dtype, tensor.shape).copy_(tensor.data)


def copy_out(memory: torch.Tensor, offset: int, tensor: torch.Tensor) -> None:
    """Copy a tensor from its place in a segment. Autograd does not see the change, as with torch's own backends."""
    if tensor.is_contiguous():
        ctypes.memmove(tensor.data_ptr(), memory.data_ptr() + offset, tensor.numel() * tensor.element_size())
    else:
        tensor.data.copy_(view(memory, offset, tensor.dtype, tensor.shape))
