"""Sends and receives of Gloo, with a wait that another thread can end.

Gloo's event loop runs sends and receives, without a thread of torch. Torch's Work only waits for a signal of the event
loop. That signal never comes when a connection ends in the middle of a message, and a timeout of the wait would end the
group. Torch's C++ classes have an `abort` that wakes the waiter, but Python can't call it.

So this file calls `abort` through the C interface of the library, by its symbol name. The target is the object that
torch's Python handle points to. The call happens only if the object's virtual function table belongs to the function's
class. By then the connections are shut down and no data can arrive, so a timeout is harmless too.

Law of this file: one group's transfers; nothing of connections, and no other call into C++.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from tft_pg.errors import UnsupportedOperationError
from tft_pg.work import FailedWork

__all__ = ["Transfers", "check_supported"]

_MOMENT = timedelta(milliseconds=1)
_CLASSES = ("SendWork", "RecvWork")
# Symbols of c10d::ProcessGroupGloo's member classes in the Itanium C++ ABI: the virtual function table, and `abort()`.
# An object's pointer refers to the address after the table's first two entries.
_TABLE = "_ZTVN4c10d16ProcessGroupGloo8{}E"
_ABORT = "_ZN4c10d16ProcessGroupGloo8{}5abortEv"
_TABLE_START_BYTES = 2 * ctypes.sizeof(ctypes.c_void_p)

_Abort = Callable[[int], None]


@functools.cache
def _aborts() -> Mapping[int, _Abort]:
    """Return the functions that end a wait, by the address of the virtual function table.

    Raises: UnsupportedOperationError: this torch has no such functions.
    """
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        found: dict[int, _Abort] = {}
        for name in _CLASSES:
            table = ctypes.addressof(ctypes.c_char.in_dll(library, _TABLE.format(name)))
            abort = library[_ABORT.format(name)]
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            found[table + _TABLE_START_BYTES] = abort
    except (OSError, ValueError, AttributeError) as error:
        raise UnsupportedOperationError(
            f"tft-pg can't interrupt a send or a receive of torch {torch.__version__}; install a torch version that "
            "tft-pg supports"
        ) from error
    return found


def check_supported() -> None:
    """Check that this torch can end the wait of a send or a receive. Raises: UnsupportedOperationError: it can't."""
    _aborts()


def _waker(work: dist.Work) -> Callable[[], None]:
    """Return a function that ends a wait of this torch Work. It is valid while the Work exists.

    Raises: UnsupportedOperationError: the Work is not a send or a receive of a supported torch.
    """
    # In a pybind11 object, the address of the C++ object follows the Python object head.
    address = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
    table = ctypes.c_void_p.from_address(address).value if address else None
    abort = _aborts().get(table) if table else None
    if address is None or abort is None:
        raise UnsupportedOperationError(
            f"tft-pg can't interrupt a wait for {work!r}; install a torch version that tft-pg supports"
        )
    return functools.partial(abort, address)


@final
class Transfers:
    """The sends and receives of one group with a waiting thread.

    Args:
        timeout: of each transfer, because torch's own timeout is fixed when the group is built.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._lock = threading.Lock()
        self._waited_for: dict[dist.Work, Callable[[], None]] = {}
        self._over = False
        self._timeout = timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later transfers, for waits without their own timeout."""
        self._timeout = timeout

    def adopt(self, work: dist.Work) -> dist.Work:
        """Wrap the Work of a send or a receive so that its wait can be ended. Raises: UnsupportedOperationError: with
        another torch.
        """
        return _Transfer(work, _waker(work), self, self._timeout)

    def end(self) -> None:
        """End every wait, after the connections have been shut down and no data can arrive any more."""
        with self._lock:
            self._over = True
            for wake in self._waited_for.values():
                wake()

    def wait(self, work: dist.Work, wake: Callable[[], None], timeout: timedelta | None) -> bool:
        """Wait for one of torch's Works. Returns False if it will never end."""
        with self._lock:
            over = self._over
            if not over:
                self._waited_for[work] = wake
        if over:
            return _has_ended(work)
        try:
            ended = work.wait(timeout) if timeout else work.wait()
        finally:
            with self._lock:
                del self._waited_for[work]
        # The wake-up may come at the moment when the transfer ends.
        return ended or _has_ended(work)


def _has_ended(work: dist.Work) -> bool:
    """Return whether a transfer had finished before its group lost its connections. Raises: RuntimeError: it failed."""
    try:
        return work.wait(_MOMENT)
    except RuntimeError as error:
        if "Timed out waiting" in str(error):
            return False
        raise


@final
class _Transfer(dist.Work):
    """One send or receive. It waits once for torch's Work, and keeps the result.

    Args:
        work: torch's Work. If a timeout given to its `wait` expires, the group ends, as in torch.
        wake: ends that wait.
        transfers: of its group.
        limit: how long a wait without its own timeout waits.
    """

    def __init__(self, work: dist.Work, wake: Callable[[], None], transfers: Transfers, limit: timedelta) -> None:
        super().__init__()
        self._limit = limit
        self._work = work
        self._wake = wake
        self._transfers = transfers
        self._lock = threading.Lock()
        self._ended = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._lock.acquire(timeout=timeout.total_seconds() if timeout else -1):
            assert timeout is not None
            raise RuntimeError(f"Timed out waiting {timeout.total_seconds():g} s for a send or a receive")
        try:
            if not self._ended:
                self._end(timeout)
        finally:
            self._lock.release()
        return not isinstance(self._work, FailedWork) or self._work.wait()

    def _end(self, timeout: timedelta | None) -> None:
        try:
            if not self._transfers.wait(self._work, self._wake, timeout or self._limit):
                self._work = FailedWork(RuntimeError("Connection closed in the middle of a message"))
        except RuntimeError as error:
            # Without its frames, because a stored error must not keep torch's Work and its connections alive.
            self._work = FailedWork(RuntimeError(*error.args))
        self._ended = True

    def get_future(self) -> torch.futures.Future[Any]:
        raise UnsupportedOperationError(
            "a send or a receive over Gloo has no future; call wait instead, on your own thread if needed"
        )

    def is_completed(self) -> bool:
        return self._ended

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work._source_rank()

    _source_rank = source_rank

    def synchronize(self) -> None:
        self._work.synchronize()
