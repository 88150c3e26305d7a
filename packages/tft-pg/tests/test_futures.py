"""Time-outs: what fires, what is taken back, and that neither a thread nor an entry outlives its reason."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.futures import Future

from tft_pg import (
    CollectiveTimeoutError,
    ConfigError,
    ProcessGroupError,
    context_timeout,
    future_timeout,
    future_wait,
    futures,
    stream_timeout,
)
from tft_pg.futures import Deadlines, Pending, Timer, timer, watchdog_timeout
from tft_pg.work import PendingWork

MOMENT = timedelta(milliseconds=20)
HOUR = timedelta(hours=1)
GUARD_S = 20.0


def timer_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("tft-pg-timer", "tft-pg-watchdog")]


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it never came true")


@pytest.fixture(autouse=True)
def _leaves_nothing() -> object:
    yield
    until(lambda: len(timer()) == 0 and not timer_threads())


# --- the clock's order ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["add", "cancel", "due"]), st.integers(0, 12))))
def test_deadlines_agree_with_a_sorted_list(steps: list[tuple[str, int]]) -> None:
    deadlines, dumb, made = Deadlines(), [], list[Pending]()
    for step, number in steps:
        if step == "add":
            made.append(deadlines.add(float(number), lambda: None))
            dumb.append(made[-1])
        elif step == "cancel" and made:
            pending = made[number % len(made)]
            assert deadlines.cancel(pending) == (pending in dumb)
            dumb = [other for other in dumb if other is not pending]
        elif step == "due":
            dumb.sort(key=lambda pending: (pending.at_s, pending.order))
            expected = dumb.pop(0) if dumb and dumb[0].at_s <= number else None
            assert deadlines.due(float(number)) is expected
        assert len(deadlines) == len(dumb)
        assert deadlines.next_s() == min((pending.at_s for pending in dumb), default=None)


def test_what_is_cancelled_is_gone_at_once_and_cancelling_is_not_a_search() -> None:
    deadlines = Deadlines()
    pendings = [deadlines.add(float(number), lambda: None) for number in range(50_000)]
    begun_s = time.perf_counter()
    for pending in pendings[::2]:
        assert deadlines.cancel(pending)
    assert time.perf_counter() - begun_s < 5.0  # a search through the list takes minutes
    assert len(deadlines) == 25_000
    assert not deadlines.cancel(pendings[0])


# --- the timer -----------------------------------------------------------------------------------------------------


def test_the_thread_is_there_only_while_something_is_pending() -> None:
    assert not timer_threads()
    pending = timer().after(HOUR, lambda: None)
    assert timer_threads() == ["tft-pg-timer"]
    assert timer().cancel(pending)
    until(lambda: not timer_threads())
    fired = threading.Event()
    timer().after(MOMENT, fired.set)
    assert fired.wait(GUARD_S)
    until(lambda: not timer_threads())


def test_an_earlier_callback_comes_before_a_later_one_that_was_there_first() -> None:
    came: list[str] = []
    both = threading.Event()
    later = timer().after(3 * MOMENT, lambda: (came.append("later"), both.set()))  # type: ignore[func-returns-value]
    timer().after(MOMENT, lambda: came.append("earlier"))
    assert both.wait(GUARD_S)
    assert came == ["earlier", "later"]
    assert not timer().cancel(later)


def test_a_callback_that_raises_is_reported_and_the_others_still_come(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    fired = threading.Event()

    def broken() -> None:
        raise ValueError("broken")

    timer().after(timedelta(0), broken)
    timer().after(MOMENT, fired.set)
    assert fired.wait(GUARD_S)
    assert [report.exc_type for report in reported] == [ValueError]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_callback_that_wants_to_exit_ends_no_time_outs(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    fired = threading.Event()

    def exits() -> None:
        raise kind

    timer().after(timedelta(0), exits)
    timer().after(MOMENT, fired.set)
    assert fired.wait(GUARD_S)
    assert [report.exc_type for report in reported] == [RuntimeError]  # a SystemExit would be ignored by the hook
    assert kind.__name__ in str(reported[0].exc_value)
    assert "exits" in str(reported[0].exc_value)


def test_a_callback_may_add_and_cancel() -> None:
    fired = threading.Event()
    never = timer().after(HOUR, lambda: None)
    timer().after(timedelta(0), lambda: (timer().cancel(never), timer().after(MOMENT, fired.set)))  # type: ignore[arg-type,return-value]
    assert fired.wait(GUARD_S)


# --- futures -------------------------------------------------------------------------------------------------------


def test_a_future_in_time_gives_its_value_and_one_too_late_a_timeout_error() -> None:
    done: Future[int] = Future()
    limited = future_timeout(done, HOUR)
    done.set_result(3)
    assert limited.wait() == 3
    assert future_wait(done, HOUR) == 3

    never: Future[int] = Future()
    with pytest.raises(TimeoutError, match=r"did not finish within 0\.02 s") as caught:
        future_timeout(never, MOMENT).wait()
    with pytest.raises(TimeoutError) as waited:
        future_wait(never, MOMENT)
    for error in (caught.value, waited.value):
        assert isinstance(error, CollectiveTimeoutError)
        assert isinstance(error, ProcessGroupError)
    never.set_result(4)  # what comes too late harms nobody
    assert len(timer()) == 0


def test_an_error_of_a_future_is_passed_on_at_once() -> None:
    failing: Future[int] = Future()
    limited = future_timeout(failing, HOUR)
    failing.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        limited.wait()
    with pytest.raises(ValueError, match="no"):
        future_wait(failing, HOUR)


def test_a_future_that_is_done_already_needs_no_timer() -> None:
    done: Future[int] = Future()
    done.set_result(3)
    assert future_timeout(done, HOUR).done()


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1)])
def test_a_future_that_is_done_is_in_time_whatever_the_limit(timeout: timedelta) -> None:
    for _ in range(200):
        done: Future[int] = Future()
        done.set_result(3)
        assert future_timeout(done, timeout).wait() == 3
        assert future_wait(done, timeout) == 3
    with pytest.raises(CollectiveTimeoutError):
        future_timeout(Future(), timeout).wait()
    with pytest.raises(CollectiveTimeoutError):
        future_wait(Future(), timeout)


def test_a_limit_may_be_as_long_as_can_be() -> None:
    later: Future[int] = Future()
    limited = future_timeout(later, timedelta.max)
    timer().after(MOMENT, lambda: later.set_result(3))
    assert future_wait(later, timedelta.max) == 3
    assert limited.wait() == 3
    work = PendingWork(on_timeout=lambda limit: CollectiveTimeoutError("late"), limit=timedelta.max)
    timer().after(MOMENT, lambda: work.finish([]))
    assert work.wait()


def test_what_is_no_future_leaves_nothing_pending() -> None:
    with pytest.raises(AttributeError):
        future_timeout(None, HOUR)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        future_timeout(Future(), 5)  # type: ignore[arg-type]
    assert len(timer()) == 0


def test_a_future_that_is_done_while_its_limit_is_set_leaves_nothing_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    future: Future[int] = Future()
    after_s = Timer.after_s

    def slow(own: Timer, delay_s: float, callback: Callable[[], None]) -> Pending:
        pending = after_s(own, delay_s, callback)
        future.set_result(3)  # as another thread may
        return pending

    with monkeypatch.context() as patched:
        patched.setattr(Timer, "after_s", slow)
        assert future_timeout(future, HOUR).wait() == 3
    assert len(timer()) == 0


def test_a_future_of_device_tensors_is_done_only_when_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written = threading.Event()
    monkeypatch.setattr(futures, "_end_of_current_stream", lambda device: written.is_set)
    future: Future[list[torch.Tensor]] = Future()
    limited = future_timeout(future, HOUR)
    future.set_result([torch.ones(2, device="meta")])
    assert not limited.done()
    written.set()
    assert limited.wait()[0].device.type == "meta"

    written.clear()
    with pytest.raises(TimeoutError):
        future_timeout(future, MOMENT).wait()
    written.set()


# --- blocks of code ------------------------------------------------------------------------------------------------


def test_a_block_that_takes_too_long_is_called_for() -> None:
    called = threading.Event()
    with context_timeout(called.set, MOMENT):
        assert called.wait(GUARD_S)


def test_fault_8_a_callback_is_taken_back_when_its_block_is_left_by_an_error() -> None:
    """needs.md, fault 8: an abort after the block had raised ended the next quorum's group."""
    called = threading.Event()
    with pytest.raises(ValueError, match="left"), context_timeout(called.set, MOMENT):
        raise ValueError("left")
    assert len(timer()) == 0
    fence = threading.Event()
    timer().after(2 * MOMENT, fence.set)  # comes after the callback would have
    assert fence.wait(GUARD_S)
    assert not called.is_set()


# --- streams -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here, whose stream may be busy")
def test_without_an_accelerator_no_stream_is_ever_late() -> None:
    stream_timeout(lambda: pytest.fail("nothing was pending"), timedelta(0))
    assert len(timer()) == 0


def test_a_stream_that_is_late_is_called_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "_end_of_current_stream", lambda device: lambda: False)
    called = threading.Event()
    stream_timeout(called.set, MOMENT)
    assert called.wait(GUARD_S)


def test_a_stream_that_is_done_leaves_no_entry_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = threading.Event()
    monkeypatch.setattr(futures, "_end_of_current_stream", lambda device: finished.is_set)
    stream_timeout(lambda: pytest.fail("it was in time"), HOUR)
    try:
        until(lambda: len(timer()) == 1)  # none is pending while the timer looks
    finally:
        finished.set()
    until(lambda: len(timer()) == 0)


# --- the watchdog --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", futures.WATCHDOG_ENVS)
@pytest.mark.parametrize("value", ["0", "-1", "1e-9", "0.9", "nan", "inf", "soon", "1e300"])
def test_a_watchdog_setting_that_cannot_work_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        watchdog_timeout()
    with pytest.raises(ConfigError, match=name):
        timer().after(HOUR, lambda: None)
    assert len(timer()) == 0


def test_the_watchdog_is_off_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in futures.WATCHDOG_ENVS:
        monkeypatch.delenv(name, raising=False)
    assert watchdog_timeout() is None
    monkeypatch.setenv("TORCHFT_WATCHDOG_TIMEOUT_SEC", "30")
    assert watchdog_timeout() == timedelta(seconds=30)
    monkeypatch.setenv("TFT_WATCHDOG_TIMEOUT_SEC", "1.5")
    assert watchdog_timeout() == timedelta(seconds=1.5)


def test_the_watchdog_lets_a_timer_that_works_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFT_WATCHDOG_TIMEOUT_SEC", "1")
    fired = threading.Event()
    pending = timer().after(HOUR, lambda: None)
    timer().after(timedelta(seconds=1.5), fired.set)  # longer than the watchdog's limit
    assert "tft-pg-watchdog" in timer_threads()
    assert fired.wait(GUARD_S)
    timer().cancel(pending)


_STUCK = """
import threading, time
from datetime import timedelta
from tft_pg.futures import timer

def stuck_callback():
    {stuck}

timer().after(timedelta(0), stuck_callback)
time.sleep(60)
"""


@pytest.mark.in_parts
@pytest.mark.parametrize(
    ("stuck", "sentence"),
    [
        ("threading.Event().wait()", "stuck for"),
        # A C call that keeps the interpreter's lock: no Python thread can say anything any more.
        ("import ctypes; ctypes.PyDLL(None).sleep(60)", "Timeout"),
    ],
    ids=["waits", "holds the lock"],
)
def test_fault_7_a_stuck_timer_ends_the_process(stuck: str, sentence: str) -> None:
    """needs.md, fault 7: `sys.exit` in a thread ended that thread, and the process went on without time-outs."""
    child = subprocess.run(
        [sys.executable, "-c", _STUCK.format(stuck=stuck)],
        env={**os.environ, "TFT_WATCHDOG_TIMEOUT_SEC": "1"},
        capture_output=True,
        text=True,
        timeout=GUARD_S * 2,
        check=False,
    )
    assert child.returncode == 1, child
    assert sentence in child.stderr
    assert "stuck_callback" in child.stderr


# --- forks ---------------------------------------------------------------------------------------------------------

_FORKS = """
import ctypes, os, signal, sys, threading, time
from datetime import timedelta
from torch.futures import Future
from tft_pg.futures import context_timeout, future_timeout, timer

HOUR = timedelta(hours=1)

def exit_status(child):
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        child()
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def uses_a_time_out():
    assert len(timer()) == 0, "what is pending stays with the parent"
    try:
        future_timeout(Future(), timedelta(milliseconds=20)).wait()
    except TimeoutError:
        os._exit(0)
    os._exit(1)

pending = timer().after(HOUR, lambda: None)
print("while something is pending", exit_status(uses_a_time_out), exit_status(lambda: sys.exit(0)), len(timer()))

with context_timeout(lambda: None, HOUR):
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
if pid == 0:  # it has left a block whose callback is its parent's
    os._exit(0)
print("inside a block", os.waitpid(pid, 0)[1])

forked, come = [], threading.Event()
timer().after(timedelta(0), lambda: (forked.append(exit_status(uses_a_time_out)), come.set()))
assert come.wait(20)
print("by a callback", *forked)

stop = threading.Event()

def use():
    while not stop.is_set():
        with context_timeout(lambda: None, timedelta(seconds=5)):
            pass

threads = [threading.Thread(target=use) for _ in range(2)]
for thread in threads:
    thread.start()
print("while others use it", sum(exit_status(uses_a_time_out) for _ in range(25)))
stop.set()
for thread in threads:
    thread.join()

if "stuck" in sys.argv:
    sys.stdout.flush()
    timer().after(timedelta(0), lambda: ctypes.PyDLL(None).sleep(60))
    time.sleep(60)
timer().cancel(pending)
"""


@pytest.mark.in_parts
@pytest.mark.parametrize("watched", [True, False], ids=["with a watchdog", "without"])
def test_a_process_that_was_forked_has_a_timer_of_its_own_and_its_parent_is_still_watched(watched: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in futures.WATCHDOG_ENVS}
    parent = subprocess.run(
        [sys.executable, "-c", _FORKS, *(["stuck"] if watched else [])],
        env={**environment, "TFT_WATCHDOG_TIMEOUT_SEC": "2"} if watched else environment,
        capture_output=True,
        text=True,
        timeout=GUARD_S * 3,
        check=False,
    )
    assert parent.stdout.splitlines() == [
        "while something is pending 0 0 1",
        "inside a block 0",
        "by a callback 0",
        "while others use it 0",
    ], parent.stderr[-2000:]
    assert parent.returncode == (1 if watched else 0), parent.stderr[-2000:]
    assert ("Timeout" in parent.stderr) == watched


# --- on a GPU ------------------------------------------------------------------------------------------------------

_on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
_LONG_CYCLES = 3_000_000_000  # more than a second on any GPU


@pytest.mark.gpu
@_on_gpu
def test_gpu_a_busy_stream_is_called_for_and_an_idle_one_is_not() -> None:
    called = threading.Event()
    torch.cuda._sleep(_LONG_CYCLES)
    stream_timeout(called.set, MOMENT)
    assert called.wait(GUARD_S)
    torch.cuda.current_stream().synchronize()
    stream_timeout(lambda: pytest.fail("it was in time"), HOUR)
    until(lambda: len(timer()) == 0)


@pytest.mark.gpu
@_on_gpu
def test_gpu_a_future_of_a_busy_device_is_late_though_it_counts_as_done() -> None:
    future: Future[torch.Tensor] = Future(devices=[torch.device("cuda", 0)])
    _ = (torch.ones(3, device="cuda") * 2).sum().item()  # the first use of a kernel waits for the whole device
    torch.cuda._sleep(_LONG_CYCLES)
    tensor = torch.ones(3, device="cuda") * 2
    future.set_result(tensor)
    assert future.done()
    with pytest.raises(TimeoutError):
        future_timeout(future, MOMENT).wait()
    assert future_timeout(future, HOUR).wait().tolist() == [2.0] * 3
    with torch.cuda.stream(torch.cuda.Stream()):
        assert future_wait(future, HOUR).sum().item() == 6.0
