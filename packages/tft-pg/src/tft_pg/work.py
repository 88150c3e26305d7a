"""Works: the handles that collectives return.

A Work may be finished already, guard a backend's Work, or be finished later by another thread. Python waits for a Work
through `wait` or the future of `get_future`. DDP's reducer calls the same two methods from C++.

Law of this file: a Work knows its own operation and nothing of the group's life.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, Protocol, final

import torch
import torch.distributed as dist

from tft_pg.errors import ProcessGroupError
from tft_pg.forks import fork_safe_lock

__all__ = ["ConvertsErrors", "DummyWork", "FailedWork", "GuardedWork", "PendingWork", "end_shared_waits"]

_Future = torch.futures.Future[Any]

_LOOK_S = 0.03
_REST_S = 0.3
_LOOK = timedelta(seconds=_LOOK_S)
_promise_lock = fork_safe_lock()

# The waits that currently run in short shares. A daemon thread must not return from C++ while the interpreter ends:
# Python ends that thread immediately, and C++ then ends the process.
_shares: set[object] = set()
_ending_thread: int | None = None
_MOMENT_S = 0.001


def end_shared_waits() -> None:
    """Prepare for the end of the process, which this thread runs: other threads then wait without shares, as torch
    does.

    Block until no thread waits in shares, for at most 0.3 seconds.
    """
    global _ending_thread
    _ending_thread = threading.get_ident()
    deadline_s = time.monotonic() + _REST_S
    while _shares and time.monotonic() < deadline_s:
        time.sleep(_MOMENT_S)


@final
class DummyWork(dist.Work):
    """A Work that has finished with a given result.

    Args:
        result: the value of the future; for collectives, the list of tensors that torch's Work holds.
        source: the source rank that the Work reports.
    """

    def __init__(self, result: object, *, source: int = 0) -> None:
        super().__init__()
        self._result = result
        self._source = source
        self._future: _Future | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> _Future:
        if self._future is None:
            self._future = torch.futures.Future()
            self._future.set_result(self._result)
        return self._future

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._result  # type: ignore[return-value]

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def synchronize(self) -> None:
        return None


class ConvertsErrors(Protocol):
    """The methods that a guarded Work needs of its group."""

    def convert(self, operation: str, error: Exception) -> Exception:
        """Record what an error says about the group, and return the error to raise."""
        ...

    def forgotten(self, operation: str) -> Exception | None:
        """Return the error of an operation that will never finish, or None while the operation may still finish."""
        ...

    def track_future(self, work: GuardedWork) -> None:
        """Note that a caller has this work's future, so `give_up` must be called if the operation never finishes."""
        ...


@final
class GuardedWork(dist.Work):
    """A Work that wraps a backend's Work, reports errors to the group and converts them.

    Args:
        work: the backend's Work.
        converter: the group of the operation.
        operation: name of the collective.
        in_shares: whether to wait in short shares, and to check between them whether the backend has forgotten the
            operation. This requires that an interrupted wait for `work` has no side effect, and that `work` reports its
            end. Otherwise the single wait needs another way to end.
    """

    def __init__(self, work: dist.Work, converter: ConvertsErrors, operation: str, *, in_shares: bool = True) -> None:
        super().__init__()
        self._work = work
        self._converter = converter
        self._operation = operation
        self._in_shares = in_shares
        self._promise: _Promise | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation has ended.

        Args:
            timeout: the longest wait. None or zero means the operation's own timeout.

        Raises: ProcessGroupError: the operation failed; the backend's error is attached as the cause.
        """
        if not self._in_shares:
            return self._wait_at_once(timeout)
        deadline_s = time.monotonic() + timeout.total_seconds() if timeout else None
        share = object()
        _shares.add(share)  # kept between two shares too, because the backend calls there also return from C++
        try:
            while _ending_thread is None or _ending_thread == threading.get_ident():
                try:
                    return self._work.wait(_LOOK if deadline_s is None else _share(deadline_s))
                except ProcessGroupError:
                    raise
                except RuntimeError as error:
                    if not self._work.is_completed():
                        if deadline_s is not None and time.monotonic() >= deadline_s:
                            self._fail(error)
                    else:
                        # The share may have expired at the moment when the operation succeeded.
                        return self._wait_at_once(None)
                forgotten = self._converter.forgotten(self._operation)
                if forgotten is not None and not self._work.is_completed():
                    self._abandon(forgotten)
                    raise forgotten
        finally:
            _shares.discard(share)
        return self._work.wait()

    def _wait_at_once(self, timeout: timedelta | None) -> bool:
        try:
            return self._work.wait(timeout) if timeout else self._work.wait()
        except ProcessGroupError:
            raise
        except RuntimeError as error:
            self._fail(error)

    def _fail(self, error: RuntimeError) -> NoReturn:
        converted = self._converter.convert(self._operation, error)
        if self._work.is_completed():
            # A backend's Work keeps connections and threads. A stored error must not keep them alive.
            self._work = FailedWork(converted)
        raise converted from error

    def get_future(self) -> _Future:
        """Return a future with the backend's result or error. The group learns of an error when it occurs."""
        with _promise_lock:
            promise, made = self._promise, self._promise is None
            if promise is None:
                future = self._work.get_future()  # raises if the backend has no future
                promise = self._promise = _Promise()
        if made:
            future.add_done_callback(self._settle)
            self._converter.track_future(self)
        return promise.future

    def _settle(self, future: _Future) -> None:
        assert self._promise is not None
        try:
            value = future.value()
        except Exception as error:
            if isinstance(error, RuntimeError) and not isinstance(error, ProcessGroupError):
                self._converter.convert(self._operation, error)
            self._promise.fail(error)
        else:
            self._promise.keep(value)

    def give_up(self) -> None:
        """Fail the future if the backend has forgotten the operation."""
        forgotten = self._converter.forgotten(self._operation)
        if forgotten is not None and not self._work.is_completed():
            self._abandon(forgotten)

    def _abandon(self, error: Exception) -> None:
        self._work = FailedWork(error)
        if self._promise is not None:
            self._promise.fail(error)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work._source_rank()

    _source_rank = source_rank  # torch's own functions use this name

    def synchronize(self) -> None:
        self._work.synchronize()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()


@final
class _Promise:
    """A future that is settled once, with errors that C++ can see. Later results are ignored.

    A future made by `then` carries an error as an error. After `set_exception`, C++ would see a result.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settled = False
        self._value: object = None
        self._error: Exception | None = None
        self._trigger: _Future = torch.futures.Future()
        self.future: _Future = self._trigger.then(self._outcome)

    def keep(self, value: object) -> None:
        self._settle(value, None)

    def fail(self, error: Exception) -> None:
        self._settle(None, error)

    def _settle(self, value: object, error: Exception | None) -> None:
        with self._lock:
            if self._settled:
                return
            self._settled, self._value, self._error = True, value, error
        self._trigger.set_result(None)

    def _outcome(self, _: _Future) -> object:
        if self._error is not None:
            raise self._error
        return self._value


def _share(deadline_s: float) -> timedelta:
    """Return how long to wait before the next check that the operation still exists."""
    return timedelta(seconds=max(min(_LOOK_S, deadline_s - time.monotonic()), 0.001))


@final
class FailedWork(dist.Work):
    """A Work that holds only the error of a failed operation."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = copy.copy(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise copy.copy(self._error)

    def get_future(self) -> _Future:
        trigger: _Future = torch.futures.Future()
        future = trigger.then(lambda _: self.wait())
        trigger.set_result(None)
        return future

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        raise copy.copy(self._error)

    def synchronize(self) -> None:
        raise copy.copy(self._error)


@final
class PendingWork(dist.Work):
    """A Work that another thread finishes or fails, once. Later outcomes are ignored.

    Args:
        on_timeout: returns the error that a `wait` raises when its limit expires first.
        limit: the limit of a `wait` without its own timeout.
    """

    def __init__(self, *, on_timeout: Callable[[timedelta], Exception], limit: timedelta) -> None:
        super().__init__()
        self._on_timeout = on_timeout
        self._limit = limit
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: Exception | None = None
        self._result: list[torch.Tensor] = []
        self._source = 0
        self._promise = _Promise()

    @property
    def limit(self) -> timedelta:
        """Return the limit of a `wait` without its own timeout."""
        return self._limit

    def finish(self, result: list[torch.Tensor], *, source: int = 0) -> None:
        with self._lock:
            if self._done.is_set():
                return
            self._result, self._source = result, source
            self._done.set()
        self._promise.keep(result)

    def fail(self, error: Exception) -> None:
        with self._lock:
            if self._done.is_set():
                return
            self._error = error
            self._done.set()
        self._promise.fail(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = timeout or self._limit
        if not self._done.wait(min(limit.total_seconds(), threading.TIMEOUT_MAX)):
            raise self._on_timeout(limit)
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> _Future:
        return self._promise.future

    def is_completed(self) -> bool:
        return self._done.is_set()

    def result(self) -> list[torch.Tensor]:
        return self._result

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def synchronize(self) -> None:
        return None
