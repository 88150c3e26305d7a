"""Time-outs for futures, blocks of code and device streams, on one thread that is only there while one is pending.

An alarm clock: whoever needs to be woken hands in a time and a callback, and takes it back when the reason is gone. The
clock is a thread, `tft-pg-timer`, that starts with the first pending callback and ends with the last. Its callbacks
must be short: they start things, they don't wait for them. One that does not return stops every other time-out of the
process, and nobody is left to say so; for this there is a hard watchdog, which ends the process.

The watchdog is off unless `TFT_WATCHDOG_TIMEOUT_SEC` (or torchft's `TORCHFT_WATCHDOG_TIMEOUT_SEC`) names its seconds:
a process that was stopped and goes on, or sits in a debugger, looks stuck to it, and to end a training process by
default for that would be worse than the fault. It has two layers. A thread, `tft-pg-watchdog`, says in one sentence
which callback is stuck, and ends the process. Where no Python can run, because a C call keeps the interpreter's lock,
the standard library's `faulthandler` does: its thread needs no lock, writes what every thread was doing, and exits.
`faulthandler` has one such clock a process, so while the watchdog is on, it is ours.

A process that is forked takes the clock along without its hands: none of the threads is there. So what is pending stays
with the parent, the child begins with an empty clock, and `faulthandler`'s, which a child could never stop, is taken
off for the moment of the fork.

The law of this file: `Deadlines` decides and is given the time; `Timer` owns the thread; the functions below use it.
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

from tft_pg.errors import DeadlinePassed, InvalidSetting

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
# A timer thread may have to wait for its turn that long on a busy machine, and is not stuck for that.
_LEAST_WATCHDOG_S = 1.0
# What needs no lock comes after what does, so that the sentence is said wherever it can be.
_FAULTHANDLER_GRACE_S = 1.0
_FIRST_LOOK_S = 0.005
_LONGEST_LOOK_S = 1.0


def watchdog_timeout() -> timedelta | None:
    """After how long the timer thread counts as stuck, by the environment; None: the watchdog is off.

    Raises: InvalidSetting: it is no number of seconds, or less than one second.
    """
    for name in WATCHDOG_ENVS:
        value = os.environ.get(name, "").strip()
        if not value:
            continue
        with suppress(ValueError, OverflowError):
            seconds = float(value)
            if _LEAST_WATCHDOG_S <= seconds < math.inf:
                return timedelta(seconds=seconds)
        raise InvalidSetting(
            f"{name} is a number of seconds, at least {_LEAST_WATCHDOG_S:g}, but it is set to {value!r}; "
            "mend or unset it"
        )
    return None


@final
class Pending:
    """A callback that waits for its time. Made by `Deadlines.add`."""

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
    """Callbacks by their time: a heap in which each knows its place, so that one is taken out as fast as put in."""

    def __init__(self) -> None:
        self._heap: list[Pending] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_s: float, callback: Callable[[], None]) -> Pending:
        """Put one in. O(log n)."""
        self._order += 1
        pending = Pending(at_s, self._order, callback)
        self._heap.append(pending)
        self._up(len(self._heap) - 1, pending)
        return pending

    def cancel(self, pending: Pending) -> bool:
        """Take one out; False if it has come, was taken out before, or is another's. O(log n)."""
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
        """When the first one's time comes; None if there is none."""
        return self._heap[0].at_s if self._heap else None

    def due(self, now_s: float) -> Pending | None:
        """Take out the first one, if its time has come."""
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
    """Runs callbacks at their time, on a thread that is there only while one is pending.

    A process that is forked has an empty one. One that has begun lives as long as the process, for the sake of forks.
    """

    def __init__(self) -> None:
        self._knows_of_forks = False
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._changed = threading.Condition()
        self._deadlines = Deadlines()
        self._thread: threading.Thread | None = None
        self._last_resort = _LastResort()

    def __len__(self) -> int:
        """How many are pending."""
        with self._changed:
            return len(self._deadlines)

    def after(self, delay: timedelta, callback: Callable[[], None]) -> Pending:
        """Have a callback run on the timer thread after a delay.

        It must not wait for anything; and a child that it forks must not come back from it, but exit or become another
        program.

        Raises: InvalidSetting: the watchdog's setting is wrong; nothing is pending then.
        """
        return self.after_s(delay.total_seconds(), callback)

    def after_s(self, delay_s: float, callback: Callable[[], None]) -> Pending:
        """`after`, in seconds."""
        with self._changed:
            if self._thread is None:
                self._know_of_forks()
                watchdog = _Watchdog.from_environment(self._last_resort)
                self._thread = threading.Thread(target=self._run, args=(watchdog,), name="tft-pg-timer", daemon=True)
                pending = self._deadlines.add(time.monotonic() + delay_s, callback)
                self._thread.start()
            else:
                pending = self._deadlines.add(time.monotonic() + delay_s, callback)
                self._changed.notify_all()
        return pending

    def cancel(self, pending: Pending) -> bool:
        """Take a callback back; False if it has run, runs, or was taken back before. Never waits for one that runs."""
        with self._changed:
            taken = self._deadlines.cancel(pending)
            if taken and not self._deadlines:
                self._changed.notify_all()
            return taken

    def _know_of_forks(self) -> None:
        if not self._knows_of_forks:
            self._knows_of_forks = True
            os.register_at_fork(
                before=lambda: self._last_resort.pause(),
                after_in_parent=lambda: self._last_resort.resume(),
                after_in_child=self._begin_anew,  # whoever held a lock, or was in the middle of the list, is not here
            )

    def _run(self, watchdog: _Watchdog | None) -> None:
        while True:
            with self._changed:
                due = self._next(watchdog)
                if due is None:
                    self._thread = None
                    if watchdog is not None:  # before another thread's begins: they share faulthandler's clock
                        watchdog.end()
                    return
            if watchdog is not None:
                watchdog.begins(due.callback)
            try:
                due.callback()
            except Exception as error:  # there is nobody to raise it to
                _report(error)
            except BaseException as error:  # SystemExit, which would be ignored in silence, and KeyboardInterrupt
                told = RuntimeError(
                    f"the timer's callback {_named(due.callback)} raised {type(error).__name__}, which ends neither "
                    "the process nor the timer; let the main thread end the process"
                )
                told.__cause__ = error
                _report(told)
            if watchdog is not None:
                watchdog.begins(None)
            del due  # what it holds on to must not live until the next one

    def _next(self, watchdog: _Watchdog | None) -> Pending | None:
        """The next callback whose time has come; None when none is pending any more."""
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
class _LastResort:
    """`faulthandler`'s clock, which ends the process unless it is set again in time; taken off while forks happen.

    Its thread is one that Python does not know: a child would wait for it for ever, even in order to exit.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may fork wherever it comes
        self._delay_s: float | None = None

    def set(self, delay_s: float) -> None:
        with self._lock:
            self._delay_s = delay_s
            faulthandler.dump_traceback_later(delay_s, exit=True, file=_stderr())

    def take_off(self) -> None:
        with self._lock:
            self._delay_s = None
            faulthandler.cancel_dump_traceback_later()

    def pause(self) -> None:
        """Before a fork; whoever wants to set it waits."""
        self._lock.acquire()
        if self._delay_s is not None:
            faulthandler.cancel_dump_traceback_later()

    def resume(self) -> None:
        """After a fork, in the parent."""
        try:
            if self._delay_s is not None:
                self.set(self._delay_s)
        finally:
            self._lock.release()


@final
class _Watchdog:
    """Ends the process when the timer thread has not beaten for too long.

    Args:
        limit_s: how long is too long.
        last_resort: ends it where no Python can run.
    """

    def __init__(self, limit_s: float, last_resort: _LastResort) -> None:
        self._limit_s = limit_s
        self._last_resort = last_resort
        self.beat_s = limit_s / 4
        self._beaten_s = time.monotonic()
        self._armed_s = -math.inf
        self._running: Callable[[], None] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tft-pg-watchdog", daemon=True)
        self.beat()
        self._thread.start()

    @classmethod
    def from_environment(cls, last_resort: _LastResort) -> _Watchdog | None:
        limit = watchdog_timeout()
        return None if limit is None else cls(limit.total_seconds(), last_resort)

    def beat(self) -> None:
        """The timer thread is alive."""
        now_s = time.monotonic()
        self._beaten_s = now_s
        if now_s - self._armed_s >= self.beat_s / 2:
            self._armed_s = now_s
            self._last_resort.set(self._limit_s + _FAULTHANDLER_GRACE_S)

    def begins(self, callback: Callable[[], None] | None) -> None:
        """The timer thread goes into a callback, or (None) has come out."""
        self._running = callback
        self.beat()

    def end(self) -> None:
        """The timer thread ends, in good order."""
        self._last_resort.take_off()
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self.beat_s):
            stuck_s = time.monotonic() - self._beaten_s
            if stuck_s > self._limit_s:
                self._exit(stuck_s)

    def _exit(self, stuck_s: float) -> None:
        running = self._running
        what = "between two callbacks" if running is None else f"in the callback {_named(running)}"
        sentence = (
            f"tft-pg: the timer thread has been stuck for {stuck_s:.1f} s {what}, so no time-out works any more; "
            f"this process ends now, as {WATCHDOG_ENVS[0]} asks for\n"
        )
        os.write(_stderr(), sentence.encode())
        os._exit(_EXIT_STATUS)


def _stderr() -> int:
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # replaced by something without a descriptor
        return 2


def _named(callback: Callable[[], None]) -> str:
    name = getattr(callback, "__qualname__", None) or repr(callback)
    return f"{getattr(callback, '__module__', None) or 'unknown'}.{name}"


_timer = Timer()


def timer() -> Timer:
    """The one timer of this process."""
    return _timer


# --- what uses it --------------------------------------------------------------------------------------------------


@contextmanager
def context_timeout(callback: Callable[[], None], timeout: timedelta) -> Iterator[None]:
    """Run a callback if the block is not left in time, for example an abort of what the block waits for.

    Args:
        callback: run on the timer thread, at most once; must return at once. Not run once the block was left, by
            whatever way; one that has begun by then is not waited for.
        timeout: from entering the block on.
    """
    pending = _timer.after(timeout, callback)
    try:
        yield
    finally:
        _timer.cancel(pending)


def future_timeout(fut: Future[_T], timeout: timedelta) -> Future[_T]:
    """A future that is done when another one is, or fails when that takes too long.

    Args:
        fut: the other one. If it holds tensors of a device, the new future is done only when the device has written
            them, so that they may be used from any stream.
        timeout: from now on; zero or less gives what is there by now.
    Returns: a future of the same value or error, or of a DeadlinePassed, which is a TimeoutError. The other future is
        left alone.
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

    # An error is set, not raised in a callback, because torch makes a RuntimeError of what a callback raises.
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

    # The future first: one that is done is in time, whatever the limit.
    fut.add_done_callback(lambda finished: _when_written(finished, lambda: give(finished)))
    if not settled.is_set():
        pending = _timer.after_s(delay_s, too_late)
        if settled.is_set():  # in between, by one that did not find anything to take back
            _timer.cancel(pending)
    return limited


def future_wait(fut: Future[_T], timeout: timedelta) -> _T:
    """Wait for a future.

    Args:
        fut: the future.
        timeout: how long at most.
    Returns: its value; tensors of a device are ready on the current stream, as after `fut.wait()`.
    Raises: its error; DeadlinePassed, which is a TimeoutError: it was not done in time.
    """
    done = threading.Event()
    fut.add_done_callback(lambda _: done.set())
    if not done.wait(min(timeout.total_seconds(), threading.TIMEOUT_MAX)):
        raise _future_deadline_passed(timeout)
    return fut.wait()


def stream_timeout(callback: Callable[[], None], timeout: timedelta) -> None:
    """Run a callback if what the current stream of the accelerator holds by now is not done in time.

    Where there is no accelerator nothing is ever pending, and the callback never runs.

    Args:
        callback: run on the timer thread, at most once; must return at once.
        timeout: from now on.
    """
    finished = _end_of_current_stream(None)
    if finished is not None:
        _Look(finished, then=_nothing, within=timeout, too_late=callback)


def _nothing() -> None:
    return None


def _future_deadline_passed(timeout: timedelta) -> DeadlinePassed:
    return DeadlinePassed(
        f"a future was not done within {timeout.total_seconds():g} s; abort what it waits for, or allow more time"
    )


@final
class _Look:
    """Looks again and again, each time later, until something holds, so that what has come true leaves nothing pending.

    Args:
        holds: what is looked at; must be quick.
        then: called once, on the timer thread, when it holds.
        within: how long it may take; None: as long as it does.
        too_late: called once, on the timer thread, when it takes longer.
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
    """Whether the current stream has done what it holds now; None where there is no accelerator."""
    if not torch.accelerator.is_available():
        return None
    event = torch.Event(device=device or torch.accelerator.current_accelerator())
    event.record(torch.accelerator.current_stream(device))
    query: Callable[[], bool] = event.query
    return query


def _when_written(finished: Future[_T], then: Callable[[], None]) -> None:
    """Call when the tensors of a future have been written; to be called from a callback of that future.

    There the current streams are those that wait for its tensors, so their events tell.
    """
    try:
        devices = _devices(finished.value())
    except Exception:  # its error is the outcome, and has no tensors
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
