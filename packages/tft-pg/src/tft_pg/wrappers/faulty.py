"""A group that fails on demand, for tests of the code above it.

A test selects the call that fails, hangs, is delayed or returns a wrong result, counted from now. Every other call goes
to the wrapped group.

Law of this file: only requested faults happen, and an unusable group reports its own error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from tft_pg.base import ProcessGroup
from tft_pg.errors import AbortedError, CollectiveTimeoutError, ConfigError, PeerDisconnectedError, ProcessGroupError
from tft_pg.forwarding import forward
from tft_pg.ops import Collective, collective
from tft_pg.settings import checked_timeout
from tft_pg.work import PendingWork
from tft_pg.wrappers.wrapping import WrappingProcessGroup, takes_one_group

__all__ = ["FakeProcessGroupWrapper"]

_Act = Callable[[Collective, tuple[object, ...], Mapping[str, object]], dist.Work]


@dataclass
class _Fault:
    calls_left: int
    operation: str | None
    act: _Act
    needs_result: bool

    def counts(self, row: Collective, has_result: bool) -> bool:
        return self.operation in (None, row.name) and (has_result or not self.needs_result)


@final
class FakeProcessGroupWrapper(WrappingProcessGroup):
    """A wrapper that fails, hangs, delays or corrupts the n-th call from now. `configure` discards all pending faults.

    If the wrapped group is not configured, in error or shut down, calls go to that group and count for no fault.

    Args:
        pg: the wrapped group.
        timeout: how long a wait for a hanging call takes until it fails. A shorter `set_timeout` takes precedence.
    """

    @takes_one_group
    def __init__(self, pg: ProcessGroup, *, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(pg)
        self._timeout = checked_timeout(timeout)
        self._limit = timeout
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._pending: list[PendingWork] = []
        self._interrupt = threading.Event()

    def fail(self, nth: int = 1, *, operation: str | None = None, error: Exception | None = None) -> None:
        """Fail a call's Work on this rank only. The wrapped group does not receive the call.

        Args:
            nth: the number of the call from now, 1 for the next.
            operation: count only calls of this collective; None: of any.
            error: the error to raise; None: a PeerDisconnectedError that names the injected failure.

        Raises: ConfigError: nth is below 1, or there is no such collective.
        """
        chosen = error or PeerDisconnectedError("a failure was injected; configure the group again")

        def act(row: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
            work = self._hanging(row.name)
            work.fail(chosen)
            return work

        self._add(nth, operation, act)

    def hang(self, nth: int = 1, *, operation: str | None = None) -> None:
        """Hang a call's Work until `abort`, `configure`, `shutdown` or the timeout. For the arguments see `fail`."""
        self._add(nth, operation, lambda row, args, kwargs: self._hanging(row.name))

    def delay(self, nth: int = 1, *, seconds: float, operation: str | None = None) -> None:
        """Delay the start of a call, and block its caller, as on a slow rank. For the other arguments see `fail`."""

        def act(row: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
            self._interrupt.wait(seconds)
            return forward(self._parent, row, args, kwargs)

        self._add(nth, operation, act)

    def corrupt(self, nth: int = 1, *, operation: str | None = None) -> None:
        """Corrupt the first element of a call's result silently. For the other arguments see `fail`.

        Only calls that fill in a tensor count. The result is wrong from the end of the call on, for `wait` and future.

        Raises: ConfigError: also if the collective fills in nothing.
        """
        if operation is not None and collective(operation).outputs is None:
            raise ConfigError(f"{operation} fills in no tensor that a fault could corrupt; name another operation")

        def act(row: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
            return _CorruptedWork(forward(self._parent, row, args, kwargs), row.results(args, kwargs))

        self._add(nth, operation, act, needs_result=True)

    def report_future_error(self, error: Exception) -> None:
        """Fail the next allreduce with this error."""
        self.fail(operation="allreduce", error=error)

    def _add(self, nth: int, operation: str | None, act: _Act, *, needs_result: bool = False) -> None:
        if nth < 1:
            raise ConfigError(f"nth is {nth}; pass 1 for the next call, or a higher number")
        name = collective(operation).name if operation is not None else None
        with self._lock:
            self._faults.append(_Fault(nth, name, act, needs_result))

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        if not self._faults or not self._is_usable():
            return self._forward(collective, args, kwargs)
        due = self._due(collective, any(tensor.numel() for tensor in collective.results(args, kwargs)))
        return (due.act if due is not None else self._forward)(collective, args, kwargs)

    def _is_usable(self) -> bool:
        try:
            self._parent.size()
        except ProcessGroupError:
            return False
        return self._parent.errored() is None

    def _forward(self, row: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        return forward(self._parent, row, args, kwargs)

    def _due(self, row: Collective, has_result: bool) -> _Fault | None:
        """Count the call for every fault. Returns: the first fault that is due, or None."""
        with self._lock:
            counted = [fault for fault in self._faults if fault.counts(row, has_result)]
            for fault in counted:
                fault.calls_left -= 1
            due = next((fault for fault in counted if fault.calls_left <= 0), None)
            if due is not None:
                self._faults.remove(due)
            return due

    def _hanging(self, operation: str) -> PendingWork:
        def on_timeout(limit: timedelta) -> CollectiveTimeoutError:
            return CollectiveTimeoutError(
                f"{operation} hung for {limit.total_seconds():g} s because of an injected fault; abort the group"
            )

        work = PendingWork(on_timeout=on_timeout, limit=self._limit)
        with self._lock:
            self._pending.append(work)
        if self._interrupt.is_set():  # the thread that ended the group may not have seen this Work
            self._end()
        return work

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._limit = min(self._timeout, timeout)

    def _forget(self) -> None:
        self._end()
        with self._lock:
            self._faults.clear()
        self._interrupt = threading.Event()

    def _end(self) -> None:
        self._interrupt.set()
        with self._lock:
            pending, self._pending = self._pending, []
        for work in pending:
            work.fail(AbortedError("the hanging call was aborted; configure the group again"))


@final
class _CorruptedWork(dist.Work):
    """A Work that corrupts its results after it has succeeded."""

    def __init__(self, work: dist.Work, results: list[torch.Tensor]) -> None:
        super().__init__()
        self._work = work
        self._results = results
        self._lock = threading.Lock()
        self._is_corrupted = False

    def _corrupt(self) -> None:
        with self._lock, torch.no_grad():
            if not self._is_corrupted:
                self._is_corrupted = True
                tensor = next(tensor for tensor in self._results if tensor.numel())
                first = (0,) * tensor.dim()
                tensor[first] = torch.tensor(_different_value(tensor[first].item())).to(tensor.dtype)

    def wait(self, timeout: timedelta | None = None) -> bool:
        ended_well = self._work.wait(timeout) if timeout else self._work.wait()
        if ended_well:
            self._corrupt()
        return ended_well

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future().then(self._corrupted_value)

    def _corrupted_value(self, future: torch.futures.Future[Any]) -> object:
        value: object = future.value()
        self._corrupt()
        return value

    def is_completed(self) -> bool:
        """Return whether the operation has ended. A successful result is corrupted by then."""
        if not self._work.is_completed():
            return False
        with suppress(Exception):  # a waiter gets this error
            self.wait()
        return True

    def result(self) -> list[torch.Tensor]:
        return self._results

    def source_rank(self) -> int:
        return self._work._source_rank()

    _source_rank = source_rank  # torch's own functions use this name

    def synchronize(self) -> None:
        self._work.synchronize()


def _different_value(value: bool | complex) -> bool | complex:
    """Return a different value of the same dtype."""
    if isinstance(value, bool):
        return not value
    return value ^ 1 if isinstance(value, int) else -value or 1.0
