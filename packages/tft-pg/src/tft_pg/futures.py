"""Timeouts for futures, blocks of code and device streams, on one thread that exists only while a timeout is pending.

A caller passes a time and a callback, and cancels the callback when it is no longer needed. The thread `tft-pg-timer`
starts with the first pending callback and ends with the last. Callbacks must be short: they start work and don't wait.
A callback that does not return stops every other timeout of the process, and no thread is left to report that. For this
case a hard watchdog ends the process.

The watchdog is off unless `TFT_WATCHDOG_TIMEOUT_SEC` (or torchft's `TORCHFT_WATCHDOG_TIMEOUT_SEC`) sets its seconds. A
process that was stopped and continued, or that runs in a debugger, looks stuck to the watchdog. Ending a training
process by default for that would be worse than the fault.

The watchdog has two layers. A thread, `tft-pg-watchdog`, reports the stuck callback in one sentence and ends the
process. If no Python can run, because a C call holds the interpreter's lock, the standard library's `faulthandler`
takes over. Its thread needs no lock, writes the stack of every thread, and exits. `faulthandler` has one such timer per
process, and the watchdog owns it while it is on.

A forked process has none of the threads. Pending callbacks stay with the parent, and the child starts without any. A
child could never stop `faulthandler`'s timer, so the timer is cancelled during the fork.

Law of this file: `Deadlines` decides and receives the time; `Timer` owns the thread; the functions below use the timer.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar, final

import torch
from torch.futures import Future

from tft_pg.errors import CollectiveTimeoutError, ConfigError

__all__ = [
    "Deadlines",
    "Pending",
    "Timer",
    "context_timeout",
    "future_timeout",
    "future_wait",
    "stream_timeout",
    "timer",
    "watchdog_timeout",
]

_T = TypeVar("_T")

WATCHDOG_ENVS = ("TFT_WATCHDOG_TIMEOUT_SEC", "TORCHFT_WATCHDOG_TIMEOUT_SEC")
"""Seconds after which a stuck timer thread ends the process; the first that is set counts."""

_EXIT_STATUS = 1
# A timer thread on a busy machine may wait that long to run, and is not stuck.
_WATCHDOG_MIN_S = 1.0
# The layer without the lock fires after the layer with the lock, so the sentence is written whenever possible.
_FAULTHANDLER_GRACE_S = 1.0
_FIRST_LOOK_S = 0.005
_LONGEST_LOOK_S = 1.0


def watchdog_timeout() -> timedelta | None:
    """Return after how long the timer thread counts as stuck, from the environment. None: the watchdog is off.

    Raises: ConfigError: the value is not a number of seconds, or is below one second.
    """
    for name in WATCHDOG_ENVS:
        value = os.environ.get(name, "").strip()
        if not value:
            continue
        with suppress(ValueError, OverflowError):
            seconds = float(value)
            if _WATCHDOG_MIN_S <= seconds < math.inf:
                return timedelta(seconds=seconds)
        raise ConfigError(
            f"{name} is {value!r}; set it to a number of seconds, at least {_WATCHDOG_MIN_S:g}, or unset it"
        )
    return None


@final
class Pending:
    """A callback that waits for its time, made by `Deadlines.add`."""

    __slots__ = ("at_s", "callback", "order", "place")

    def __init__(self, at_s: float, order: int, callback: Callable[[], None]) -> None:
        self.at_s = at_s
        self.order = order
        self.callback = callback
        self.place = -1

    def before(self, other: Pending) -> bool:
        return (self.at_s, self.order) < (other.at_s, other.order)


@final
class Deadlines:
    """Callbacks ordered by time, in a heap. Each callback knows its place in the heap, so removal is as fast as
    insertion.
    """

    def __init__(self) -> None:
        self._heap: list[Pending] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_s: float, callback: Callable[[], None]) -> Pending:
        """Add a callback. O(log n)."""
        self._order += 1
        pending = Pending(at_s, self._order, callback)
        self._heap.append(pending)
        self._up(len(self._heap) - 1, pending)
        return pending

    def cancel(self, pending: Pending) -> bool:
        """Remove a callback. Returns False if it is due, was removed before, or belongs to another heap. O(log n)."""
        place = pending.place
        if not 0 <= place < len(self._heap) or self._heap[place] is not pending:
            return False
        pending.place = -1
        last = self._heap.pop()
        if last is not pending:
            self._up(place, last)
            self._down(last.place, last)
        return True

    def next_s(self) -> float | None:
        """Return the time of the first callback, or None if the heap is empty."""
        return self._heap[0].at_s if self._heap else None

    def due(self, now_s: float) -> Pending | None:
        """Remove and return the first callback if its time has come, or return None."""
        if not self._heap or self._heap[0].at_s > now_s:
            return None
        first = self._heap[0]
        self.cancel(first)
        return first

    def _up(self, place: int, pending: Pending) -> None:
        heap = self._heap
        while place > 0 and pending.before(heap[(place - 1) // 2]):
            parent = heap[(place - 1) // 2]
            heap[place], parent.place = parent, place
            place = (place - 1) // 2
        heap[place], pending.place = pending, place

    def _down(self, place: int, pending: Pending) -> None:
        heap = self._heap
        while (child := 2 * place + 1) < len(heap):
            if child + 1 < len(heap) and heap[child + 1].before(heap[child]):
                child += 1
            if not heap[child].before(pending):
                break
            heap[place], heap[child].place = heap[child], place
            place = child
        heap[place], pending.place = pending, place


@final
class Timer:
    """A timer that runs callbacks at their time, on a thread that exists only while a callback is pending.

    A forked process has an empty timer. A timer that has started lives as long as the process, because its fork hooks
    can't be removed.
    """

    def __init__(self) -> None:
        self._has_fork_hooks = False
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._deadlines = Deadlines()
        self._thread: threading.Thread | None = None
        self._fault_handler = _FaultHandlerTimer()

    def __len__(self) -> int:
        """Return the number of pending callbacks."""
        with self._changed:
            return len(self._deadlines)

    def after(self, delay: timedelta, callback: Callable[[], None]) -> Pending:
        """Run a callback on the timer thread after a delay.

        The callback must not wait for anything. If the callback forks, the child must exit or start another program
        instead of returning from the callback.

        Raises: ConfigError: the watchdog's setting is wrong; nothing is pending then.
        """
        return self.after_s(delay.total_seconds(), callback)

    def after_s(self, delay_s: float, callback: Callable[[], None]) -> Pending:
        """Do the same as `after`, with the delay in seconds."""
        with self._changed:
            if self._thread is None:
                self._register_fork_hooks()
                watchdog = _Watchdog.from_environment(self._fault_handler)
                self._thread = threading.Thread(target=self._run, args=(watchdog,), name="tft-pg-timer", daemon=True)
                pending = self._deadlines.add(time.monotonic() + delay_s, callback)
                self._thread.start()
            else:
                pending = self._deadlines.add(time.monotonic() + delay_s, callback)
                self._changed.notify_all()
        return pending

    def cancel(self, pending: Pending) -> bool:
        """Cancel a callback. Returns False if it has run, runs, or was cancelled before. Never waits for a
        running callback.
        """
        with self._changed:
            taken = self._deadlines.cancel(pending)
            if taken and not self._deadlines:
                self._changed.notify_all()
            return taken

    def _register_fork_hooks(self) -> None:
        if not self._has_fork_hooks:
            self._has_fork_hooks = True
            os.register_at_fork(
                before=lambda: self._fault_handler.pause(),
                after_in_parent=lambda: self._fault_handler.resume(),
                after_in_child=self._reset,  # the child lacks the thread that held a lock or was changing the list
            )

    def _run(self, watchdog: _Watchdog | None) -> None:
        while True:
            with self._changed:
                due = self._next(watchdog)
                if due is None:
                    self._thread = None
                    if watchdog is not None:  # before another thread's watchdog starts: both share faulthandler's timer
                        watchdog.end()
                    return
            if watchdog is not None:
                watchdog.begins(due.callback)
            try:
                due.callback()
            except Exception as error:  # this thread has no caller that could handle the error
                _report(error)
            except BaseException as error:  # SystemExit, which Python would ignore silently here, and KeyboardInterrupt
                report = RuntimeError(
                    f"the timer callback {_named(due.callback)} raised {type(error).__name__}, which ends neither "
                    "the process nor the timer; end the process from the main thread"
                )
                report.__cause__ = error
                _report(report)
            if watchdog is not None:
                watchdog.begins(None)
            del due  # objects of the callback must not live until the next callback

    def _next(self, watchdog: _Watchdog | None) -> Pending | None:
        """Wait for and return the next due callback, or None when none is pending."""
        while (next_s := self._deadlines.next_s()) is not None:
            now_s = time.monotonic()
            due = self._deadlines.due(now_s)
            if due is not None:
                return due
            wait_s = min(next_s - now_s, threading.TIMEOUT_MAX)
            if watchdog is not None:
                watchdog.beat()
                wait_s = min(wait_s, watchdog.beat_s)
            self._changed.wait(wait_s)
        return None


def _report(error: BaseException) -> None:
    threading.excepthook(
        threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
    )


@final
class _FaultHandlerTimer:
    """`faulthandler`'s timer, which ends the process unless it is set again in time. Forks cancel it for their
    duration.

    Python does not know the thread of this timer. A forked child would wait for that thread forever, even in order to
    exit.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may fork at any point
        self._delay_s: float | None = None

    def set(self, delay_s: float) -> None:
        with self._lock:
            self._delay_s = delay_s
            faulthandler.dump_traceback_later(delay_s, exit=True, file=_stderr())

    def cancel(self) -> None:
        with self._lock:
            self._delay_s = None
            faulthandler.cancel_dump_traceback_later()

    def pause(self) -> None:
        """Cancel the timer before a fork, and block threads that want to set it."""
        self._lock.acquire()
        if self._delay_s is not None:
            faulthandler.cancel_dump_traceback_later()

    def resume(self) -> None:
        """Set the timer again after a fork, in the parent."""
        try:
            if self._delay_s is not None:
                self.set(self._delay_s)
        finally:
            self._lock.release()


@final
class _Watchdog:
    """A watchdog that ends the process when the timer thread has not beaten for too long.

    Args:
        limit_s: the longest time without a beat.
        fault_handler: ends the process if no Python can run.
    """

    def __init__(self, limit_s: float, fault_handler: _FaultHandlerTimer) -> None:
        self._limit_s = limit_s
        self._fault_handler = fault_handler
        self.beat_s = limit_s / 4
        self._last_beat_s = time.monotonic()
        self._armed_s = -math.inf
        self._running: Callable[[], None] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tft-pg-watchdog", daemon=True)
        self.beat()
        self._thread.start()

    @classmethod
    def from_environment(cls, fault_handler: _FaultHandlerTimer) -> _Watchdog | None:
        limit = watchdog_timeout()
        return None if limit is None else cls(limit.total_seconds(), fault_handler)

    def beat(self) -> None:
        """Record that the timer thread is alive."""
        now_s = time.monotonic()
        self._last_beat_s = now_s
        if now_s - self._armed_s >= self.beat_s / 2:
            self._armed_s = now_s
            self._fault_handler.set(self._limit_s + _FAULTHANDLER_GRACE_S)

    def begins(self, callback: Callable[[], None] | None) -> None:
        """Record that the timer thread enters a callback, or has left it (None)."""
        self._running = callback
        self.beat()

    def end(self) -> None:
        """Stop the watchdog. The timer thread calls this method when it ends normally."""
        self._fault_handler.cancel()
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self.beat_s):
            stuck_s = time.monotonic() - self._last_beat_s
            if stuck_s > self._limit_s:
                self._exit(stuck_s)

    def _exit(self, stuck_s: float) -> None:
        running = self._running
        what = "between two callbacks" if running is None else f"in the callback {_named(running)}"
        sentence = (
            f"tft-pg: the timer thread has been stuck for {stuck_s:.1f} s {what}, so no timeout works any more; "
            f"ending this process, because {WATCHDOG_ENVS[0]} is set\n"
        )
        os.write(_stderr(), sentence.encode())
        os._exit(_EXIT_STATUS)


def _stderr() -> int:
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # replaced by an object without a descriptor
        return 2


def _named(callback: Callable[[], None]) -> str:
    name = getattr(callback, "__qualname__", None) or repr(callback)
    return f"{getattr(callback, '__module__', None) or 'unknown'}.{name}"


_timer = Timer()


def timer() -> Timer:
    """Return the only timer of this process."""
    return _timer


# --- what uses it --------------------------------------------------------------------------------------------------


@contextmanager
def context_timeout(callback: Callable[[], None], timeout: timedelta) -> Iterator[None]:
    """Run a callback if the block does not end in time, for example to abort the operation that the block waits for.

    Args:
        callback: runs on the timer thread, at most once, and must return at once. The callback does not start after the
            block has ended in any way. The end of the block does not wait for a running callback.
        timeout: counted from the start of the block.
    """
    pending = _timer.after(timeout, callback)
    try:
        yield
    finally:
        _timer.cancel(pending)


def future_timeout(fut: Future[_T], timeout: timedelta) -> Future[_T]:
    """Return a future that follows another one, and fails when that takes too long.

    Args:
        fut: the other future. If it holds device tensors, the new future is done only after the device has written
            them. The tensors may then be used from any stream.
        timeout: from now on. Zero or less accepts only a result that exists already.

    Returns: a future of the same value or error, or of a CollectiveTimeoutError, which is a TimeoutError. The other
        future does not change.
    """
    delay_s = timeout.total_seconds()
    limited: Future[_T] = Future()
    lock = threading.Lock()
    settled = threading.Event()
    pending: Pending | None = None

    def first() -> bool:
        with lock:
            before = settled.is_set()
            settled.set()
            return not before

    # The error is set and not raised in a callback, because torch turns an error in a callback into a RuntimeError.
    def too_late() -> None:
        if first():
            limited.set_exception(_future_deadline_passed(timeout))  # type: ignore[arg-type]

    def give(finished: Future[_T]) -> None:
        if not first():
            return
        if pending is not None:
            _timer.cancel(pending)
        try:
            value = finished.value()
        except Exception as error:
            limited.set_exception(error)  # type: ignore[arg-type]
        else:
            limited.set_result(value)

    # The future first: a finished future is in time, whatever the limit.
    fut.add_done_callback(lambda finished: _when_written(finished, lambda: give(finished)))
    if not settled.is_set():
        pending = _timer.after_s(delay_s, too_late)
        if settled.is_set():  # settled in between, by a callback that found no pending timeout to cancel
            _timer.cancel(pending)
    return limited


def future_wait(fut: Future[_T], timeout: timedelta) -> _T:
    """Wait for a future.

    Args:
        fut: the future.
        timeout: the longest wait.

    Returns: the value of the future. Device tensors are ready on the current stream, as after `fut.wait()`.
    Raises: the error of the future. CollectiveTimeoutError, which is a TimeoutError: the future was not done in time.
    """
    done = threading.Event()
    fut.add_done_callback(lambda _: done.set())
    if not done.wait(min(timeout.total_seconds(), threading.TIMEOUT_MAX)):
        raise _future_deadline_passed(timeout)
    return fut.wait()


def stream_timeout(callback: Callable[[], None], timeout: timedelta) -> None:
    """Run a callback if the current work of the accelerator's current stream does not finish in time.

    Without an accelerator nothing is ever pending, and the callback never runs.

    Args:
        callback: runs on the timer thread, at most once, and must return at once.
        timeout: from now on.
    """
    finished = _end_of_current_stream(None)
    if finished is not None:
        _Look(finished, then=_nothing, within=timeout, too_late=callback)


def _nothing() -> None:
    return None


def _future_deadline_passed(timeout: timedelta) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(
        f"a future did not finish within {timeout.total_seconds():g} s; abort its operation, or raise the timeout"
    )


@final
class _Look:
    """A poll, with growing delays, until a condition holds. A condition that holds leaves nothing pending.

    Args:
        holds: the condition; must be quick.
        then: called once, on the timer thread, when the condition holds.
        within: the time limit; None for no limit.
        too_late: called once, on the timer thread, when the time limit expires.
    """

    def __init__(
        self,
        holds: Callable[[], bool],
        *,
        then: Callable[[], None],
        within: timedelta | None = None,
        too_late: Callable[[], None] = _nothing,
    ) -> None:
        self._holds = holds
        self._then = then
        self._too_late = too_late
        self._deadline_s = math.inf if within is None else time.monotonic() + within.total_seconds()
        self._delay_s = _FIRST_LOOK_S
        self._look_later()

    def _look_later(self) -> None:
        _timer.after_s(min(self._delay_s, self._deadline_s - time.monotonic()), self._look)
        self._delay_s = min(2 * self._delay_s, _LONGEST_LOOK_S)

    def _look(self) -> None:
        if self._holds():
            self._then()
        elif time.monotonic() >= self._deadline_s:
            self._too_late()
        else:
            self._look_later()


def _end_of_current_stream(device: torch.device | None) -> Callable[[], bool] | None:
    """Return a check whether the current stream has finished its present work, or None without an accelerator."""
    if not torch.accelerator.is_available():
        return None
    event = torch.Event(device=device or torch.accelerator.current_accelerator())
    event.record(torch.accelerator.current_stream(device))
    query: Callable[[], bool] = event.query
    return query


def _when_written(finished: Future[_T], then: Callable[[], None]) -> None:
    """Call `then` when the tensors of a future have been written. Callers run this in a callback of that future.

    The current streams of such a callback wait for the future's tensors, so events on these streams show the end.
    """
    try:
        devices = _devices(finished.value())
    except Exception:  # the error is the result, and an error has no tensors
        devices = set()
    ends = [end for device in devices if (end := _end_of_current_stream(device)) is not None]
    if all(end() for end in ends):
        then()
    else:
        _Look(lambda: all(end() for end in ends), then=then)


def _devices(value: object) -> set[torch.device]:
    if isinstance(value, torch.Tensor):
        return set() if value.device.type == "cpu" else {value.device}
    if isinstance(value, (list, tuple)):
        return set().union(*map(_devices, value))
    if isinstance(value, dict):
        return set().union(*map(_devices, value.values()))
    return set()
