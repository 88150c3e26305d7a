"""The accelerator libraries with a torch class, adapted to `accelerator`. NCCL and XCCL differ only in names.

Torch's class starts a watchdog, which ends the process when an operation has failed or is late. The watchdog also
affects other groups, because it raises a flag for the whole process. This package expects failed operations and has its
own watch. The only way to have no watchdog is to request blocking waits while the class makes its object.

Blocking waits happen only in torch's `wait`, which this package calls only after the operation has ended. So the
variable that requests them is set only for that moment. The watchdog also had two safeguards, which this file replaces.
A query from another thread must not initialise another device, and must not invalidate a CUDA graph capture.

Law of this file: how torch's objects are made, verified and ended. No life cycle, no watch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from tft_pg.backends.device_library import AcceleratorBackend, Communicator
from tft_pg.errors import ConfigError, UnsupportedOperationError
from tft_pg.forks import fork_safe_lock
from tft_pg.ops import Collective

__all__ = ["Library", "TorchLibrary", "checked_device"]

# Torch waits this long for its own abort. This package's abort runs on a thread whose waiters give up earlier.
_TORCH_LIMIT = timedelta(minutes=10)
_LOOK_S = 0.001
_DRIVER = "libcuda.so.1"
_CAPTURE_MODE_THREAD_LOCAL = 1  # the driver's number of this mode
_NO = frozenset({"0", "n", "no", "f", "false"})

_Arguments = tuple[tuple[object, ...], Mapping[str, object]]

_log = logging.getLogger("tft_pg")
_environment = fork_safe_lock()


@dataclass(frozen=True)
class Library:
    """The names of one library.

    Args:
        name: for people.
        torch_class: in `torch.distributed`.
        group: in this package.
        device_type: of the tensors.
        backend_type: torch's name of the backend's enum member.
        blocking_wait_envs: variables that request blocking waits from torch's class. The first one is set.
        connect_limit_env: how many seconds torch's class waits for the library in a call; read once a process.
        is_abortable: whether torch's class can end running operations.
        lacks: for a call and a world size, why the library can't run it; see `Communicator.lacks`.
        fit: for a call and a world size, the arguments that work; see `Communicator.fit`.
    """

    name: str
    torch_class: str
    group: str
    device_type: str
    backend_type: str
    blocking_wait_envs: tuple[str, ...]
    connect_limit_env: str
    is_abortable: bool
    lacks: Callable[[Collective, tuple[object, ...], Mapping[str, object], int], str] | None = None
    fit: Callable[[Collective, tuple[object, ...], Mapping[str, object], int], _Arguments] | None = None


def checked_device(device: torch.device | int | str | None, library: Library) -> torch.device | None:
    """Return a device of the library from the user's setting. Raises: ConfigError: the device has another type."""
    if device is None:
        return None
    found = torch.device(library.device_type, device) if isinstance(device, int) else torch.device(device)
    if found.type != library.device_type:
        raise ConfigError(f"the device of {library.group} is {found}; pass a {library.device_type} device")
    return found


@final
class TorchLibrary(AcceleratorBackend):
    """One library, used through its torch class."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def check(self) -> None:
        library = self._library
        if getattr(dist, library.torch_class, None) is None:
            raise UnsupportedOperationError(
                f"this torch ({torch.__version__}) was built without {library.name}, which {library.group} needs; "
                f"install a build of torch for {library.device_type} devices, or use ProcessGroupGloo"
            )
        for name in library.blocking_wait_envs:
            if os.environ.get(name, "").strip().lower() in _NO:
                raise ConfigError(
                    f"{name} is {os.environ[name]!r}, so torch's watchdog would end the process when an operation of "
                    f"{library.group} fails; unset {name}"
                )

    def current_device(self) -> torch.device | None:
        module = torch.get_device_module(self._library.device_type)
        if not module.is_initialized():
            return None
        return torch.device(self._library.device_type, module.current_device())

    def communicator(
        self, store: Store, rank: int, world_size: int, device: torch.device | None, limit: timedelta
    ) -> Communicator:
        library = self._library
        module: Any = torch.get_device_module(library.device_type)
        if device is None or device.index is None:
            device = torch.device(library.device_type, module.current_device())
        made_by: Any = getattr(dist, library.torch_class)
        options = made_by.Options()
        options._timeout = _TORCH_LIMIT
        if hasattr(options, "config"):
            options.config.blocking = 0  # a blocking communicator can't be aborted while it connects
        with module.device(device), _without_watchdog(library, limit):
            backend = made_by(store, rank, world_size, options)
        backend_type = getattr(dist.ProcessGroup.BackendType, library.backend_type)
        group = dist.ProcessGroup(store, rank, world_size)
        group._register_backend(torch.device(library.device_type), backend_type, backend)
        group._set_default_backend(backend_type)
        return _TorchCommunicator(library, group, backend, device, world_size)


@contextlib.contextmanager
def _without_watchdog(library: Library, limit: timedelta) -> Iterator[None]:
    """Set the environment in which torch's class makes an object. The user's own settings stay."""
    with _environment:
        if library.connect_limit_env not in os.environ:
            seconds = max(1, math.ceil(limit.total_seconds()))
            os.environ[library.connect_limit_env] = str(seconds)
            _log.warning(
                "%s is not set, so %s sets it to %d s for all groups of this process. Without it, torch waits 30 "
                "minutes for a missing rank.",
                library.connect_limit_env,
                library.group,
                seconds,
            )
        missing = not any(os.environ.get(name, "").strip() for name in library.blocking_wait_envs)
        if missing:
            os.environ[library.blocking_wait_envs[0]] = "1"
        try:
            yield
        finally:
            if missing:
                del os.environ[library.blocking_wait_envs[0]]


@final
class _TorchCommunicator(Communicator):
    def __init__(
        self, library: Library, group: dist.ProcessGroup, backend: Any, device: torch.device, world_size: int
    ) -> None:
        self._library = library
        self._group = group
        self._backend = backend
        self._device = device
        self._world_size = world_size
        self._aborted = threading.Event()

    @property
    def torch_group(self) -> dist.ProcessGroup:
        return self._group

    @property
    def device(self) -> torch.device:
        return self._device

    def lacks(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str:
        lacks = self._library.lacks
        return "" if lacks is None else lacks(collective, args, kwargs, self._world_size)

    def fit(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> _Arguments:
        fit = self._library.fit
        return (args, kwargs) if fit is None else fit(collective, args, kwargs, self._world_size)

    def connect(self) -> None:
        """Connect one communicator for all operations, also sends and receives, now instead of in the first
        operation.
        """
        module: Any = torch.get_device_module(self._device.type)
        with module.device(self._device):
            self._backend.eager_connect_single_device(self._device)
            # On a separate stream, which does not wait for the user's queued work.
            with module.stream(module.Stream(device=self._device)):
                proof = torch.ones(1, device=self._device)
                work = self._group.allreduce([proof])
                while not work.is_completed():
                    if self._aborted.wait(_LOOK_S):
                        raise RuntimeError("the group was aborted during configure")
                work.wait()
                found = proof.item()
        if found != self._world_size:
            raise RuntimeError(
                f"{self._library.name} reports {found:g} ranks instead of {self._world_size}; check its settings"
            )

    def looking(self) -> AbstractContextManager[object]:
        return _query_context(self._device)

    def is_recording(self) -> bool:
        asked = getattr(torch.get_device_module(self._device.type), "is_current_stream_capturing", None)
        return asked is not None and bool(asked())

    def abort(self) -> None:
        self._aborted.set()
        if self._library.is_abortable:
            self._backend.abort()


@contextlib.contextmanager
def _query_context(device: torch.device) -> Iterator[None]:
    """Query the device without effects on other devices and on graph captures of other threads."""
    module: Any = torch.get_device_module(device.type)
    with module.device(device):  # a thread's own current device is the first one, and a query would initialise it
        exchange = _capture_mode_exchange() if device.type == "cuda" else None
        mode = ctypes.c_int(_CAPTURE_MODE_THREAD_LOCAL)
        exchanged = exchange is not None and exchange(ctypes.byref(mode)) == 0
        try:
            yield
        finally:
            if exchange is not None and exchanged:
                exchange(ctypes.byref(mode))  # holds the previous mode


@functools.cache
def _capture_mode_exchange() -> Callable[[Any], int] | None:
    """Return the CUDA driver's function that sets which graph captures a thread's calls can invalidate.

    By default a call affects the captures of all threads, and an event query invalidates them. Torch's Python API does
    not offer this function. None: there is no such driver, as on ROCm. ROCm's own function would not help, because an
    event query there invalidates a capture in any mode.
    """
    try:
        exchange: Any = ctypes.CDLL(_DRIVER).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    exchange.argtypes = [ctypes.POINTER(ctypes.c_int)]
    exchange.restype = ctypes.c_int
    return exchange  # type: ignore[no-any-return]
