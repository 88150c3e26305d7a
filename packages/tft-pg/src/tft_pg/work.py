"""Works: the handle that a collective returns, finished already, guarded, or finished by somebody else.

A Work is waited for from Python (`wait`), through its future (`get_future`), or from C++ by DDP's reducer, which
calls the same two. The law of this file: a Work knows its own operation and nothing of the group's life.
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

__all__ = ["ConvertsErrors", "DummyWork", "FailedWork", "GuardedWork", "PendingWork", "let_waits_rest"]

_Future = torch.futures.Future[Any]

_LOOK_S = 0.03
_REST_S = 0.3
_LOOK = timedelta(seconds=_LOOK_S)
_promising = fork_safe_lock()

# Who waits in shares at this moment. A daemon thread must not come back from C++ while the interpreter ends, because
# Python ends such a thread where it stands, and C++ ends the process for that.
_shares: set[object] = set()
_ending_thread: int | None = None
_MOMENT_S = 0.001


def let_waits_rest() -> None:
    """The process is about to end, in this thread: from now on the others wait at one go, as torch itself does.

    Blocks until nobody waits in shares any more, or 0.3 seconds.
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
        result: what its future holds; for collectives the list of tensors that torch's Work would hold.
        source: the rank that it says it has received from.
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
    """What a guarded Work needs of its group."""

    def convert(self, operation: str, error: Exception) -> Exception:
        """Note what an error says about the group, and give the error to raise for it."""
        ...

    def forgotten(self, operation: str) -> Exception | None:
        """The error of an operation that has not ended and never will; None as long as it may."""
        ...

    def handed_out_future(self, work: GuardedWork) -> None:
        """Somebody waits for this work through its future: call its `give_up` if it never ends."""
        ...


@final
class GuardedWork(dist.Work):
    """A backend's Work, whose errors its group hears of and puts into its own words.

    Args:
        work: the Work that does the waiting.
        converter: the group that it belongs to.
        operation: name of the collective.
        in_shares: whether to look in between whether the backend has forgotten the operation. Then a wait for `work`
            that is left early costs nothing, and it tells when it has ended; else its one wait has another way out.
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
            timeout: how long at most; None or zero: as long as the operation's own time-out allows.
        Raises: ProcessGroupError: the operation failed; the backend's error is attached as its cause.
        """
        if not self._in_shares:
            return self._wait_at_once(timeout)
        deadline_s = time.monotonic() + timeout.total_seconds() if timeout else None
        share = object()
        _shares.add(share)  # between two shares too: what is asked of the backend there comes back from C++ as well
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
                        # The share of the wait may have run out in the moment in which the operation ended well.
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
            # A backend's Work keeps connections and threads; an error that somebody keeps must not.
            self._work = FailedWork(converted)
        raise converted from error

    def get_future(self) -> _Future:
        """A future with the backend's result or error; the group is told of an error when it comes."""
        with _promising:
            promise, made = self._promise, self._promise is None
            if promise is None:
                future = self._work.get_future()  # raises where the backend has none
                promise = self._promise = _Promise()
        if made:
            future.add_done_callback(self._settle)
            self._converter.handed_out_future(self)
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
        """Fail its future, because the backend has forgotten the operation."""
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

    _source_rank = source_rank  # torch's own functions ask by this name

    def synchronize(self) -> None:
        self._work.synchronize()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()


@final
class _Promise:
    """A future that C++ sees the error of too, and that is settled once; what comes second is ignored.

    One that is made by `then` carries an error as such; `set_exception` would look like a result to C++.
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
    """How long to wait before the next look at whether there is anything to wait for."""
    return timedelta(seconds=max(min(_LOOK_S, deadline_s - time.monotonic()), 0.001))


@final
class FailedWork(dist.Work):
    """What is left of an operation that has failed."""

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
    """A Work that somebody else finishes or fails, once; what comes second is ignored.

    Args:
        on_timeout: makes the error that a `wait` raises when its limit passes first.
        limit: how long a `wait` without a time-out of its own waits.
    """

    def __init__(self, *, on_timeout: Callable[[timedelta], Exception], limit: timedelta) -> None:
        super().__init__()
        self._on_timeout = on_timeout
        self._limit = limit
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: Exception | None = None
        self._result: list[torch.Tensor] = []
        self._promise = _Promise()

    def finish(self, result: list[torch.Tensor]) -> None:
        with self._lock:
            if self._done.is_set():
                return
            self._result = result
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

    def synchronize(self) -> None:
        return None
