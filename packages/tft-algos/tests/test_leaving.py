"""Leaving: the running step ends, the vote carries the wish, and who heals is served to the end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest

from tft_algos import ConfigError, ManagerClosedError, UsageError
from tft_algos.errors import LeftJob
from tft_algos.testing import ManualClock, plan_of
from tft_coord.core.stragglers import PaceKind, StragglerNotice
from tft_coord.core.types import DrainComplete, KillOrder, LeaveRequest, Plan, QuorumKey, RankRequest, Verdict, WaitsFor
from tft_coord.core.waits import left_out_wait
from tft_coord.errors import RefusedError, RequestTimeoutError

TWO = {"rank": 0, "world_size": 2, "store_addr": "nowhere"}
SERVES_LONG = timedelta(seconds=600)


def test_the_running_step_ends_and_then_the_replica_has_left(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), QuorumKey(7, 7))
    assert rig.step()
    rig.manager.start_quorum()
    rig.manager.leave(reason="it is preempted")
    assert (rig.manager.status().is_leaving, rig.manager.left) == (True, False)
    assert rig.manager.should_commit()
    assert (rig.manager.current_step(), rig.manager.left) == (2, True)
    assert rig.coordinator.left == [("it is preempted", timedelta())]  # nobody heals, so nothing is served
    with pytest.raises(LeftJob, match=r"has left the job \(it is preempted\)") as ends:
        rig.manager.start_quorum()
    assert isinstance(ends.value, SystemExit)  # a loop that ends by its count ends well, and no trainer catches it
    assert ends.value.code == 0


def test_a_step_that_failed_is_left_as_well(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), verdicts=[Verdict(yes=False, leaves=True)])
    rig.manager.start_quorum()
    rig.manager.leave()
    assert not rig.manager.should_commit()
    assert rig.manager.left


def test_another_ranks_wish_is_enough(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), verdicts=[Verdict(yes=True, leaves=True)])
    assert rig.step()
    assert rig.manager.left
    assert rig.coordinator.left == [("another rank of the group leaves", timedelta())]


def test_the_last_holder_of_the_state_stays_until_others_hold_it(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2, healing=[1]), plan_of(8, step=1, size=2))
    rig.manager.leave()
    assert rig.step()
    assert not rig.manager.left
    assert rig.step()
    assert rig.manager.left


def test_the_last_holder_leaves_when_its_time_is_over(rigs: Any) -> None:
    clock = ManualClock()
    rig = rigs(plan_of(7, size=2, healing=[1]), clock=clock)
    rig.manager.leave(timedelta(seconds=5))
    clock.pass_s(5)
    assert rig.step()
    assert rig.manager.left


def test_a_step_without_a_quorum_is_left_too(rigs: Any) -> None:
    rig = rigs(RequestTimeoutError("late"))
    rig.manager.leave()
    assert not rig.step()
    assert rig.manager.left


def test_who_was_left_by_another_rank_of_its_group_has_left(rigs: Any) -> None:
    rig = rigs(RefusedError("replica_0 has left the job", code="left"))
    assert not rig.step()
    assert rig.manager.left


def test_without_a_running_step_shutdown_leaves_at_once(rigs: Any) -> None:
    rig = rigs()
    rig.manager.leave(reason="never mind")
    rig.manager.shutdown()
    assert rig.coordinator.left == [("never mind", timedelta())]
    with pytest.raises(ManagerClosedError):
        rig.manager.start_quorum()


def test_a_loop_that_ends_by_its_count_has_finished_at_its_last_step(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), QuorumKey(7, 7))
    while rig.manager.current_step() < 2:
        rig.step()
    rig.manager.shutdown()
    rig.manager.shutdown()
    assert rig.coordinator.left == [("finished at step 2", timedelta())]
    assert rig.coordinator.finished_steps == [2]


def raised_in_a_handler(rig: Any) -> None:
    with contextlib.suppress(ZeroDivisionError):
        try:
            raise ZeroDivisionError
        finally:
            rig.manager.shutdown()


def raised_in_the_context(rig: Any) -> None:
    with contextlib.suppress(ZeroDivisionError), rig.manager:
        raise ZeroDivisionError


def start_that_raises(rig: Any) -> None:
    """A handler of the caller's takes what start_quorum raises before the step has begun."""
    with contextlib.suppress(ConfigError):
        rig.manager.start_quorum(timeout=timedelta())


def defer_two(rig: Any) -> None:
    for _ in range(2):
        rig.manager.start_quorum()
        step = rig.manager.strategy.defer()
        rig.first = getattr(rig, "first", step)


@pytest.mark.parametrize(
    ("script", "verdicts", "end"),
    [
        (lambda rig: None, (), lambda rig: rig.manager.shutdown()),
        (lambda rig: rig.step(), (False,), lambda rig: rig.manager.shutdown()),
        (lambda rig: (rig.step(), rig.manager.start_quorum()), (), lambda rig: rig.manager.shutdown()),
        (lambda rig: (rig.step(), rig.manager.strategy.report_torn(OSError())), (), lambda rig: rig.manager.shutdown()),
        (lambda rig: (rig.step(), start_that_raises(rig)), (), lambda rig: rig.manager.shutdown()),
        (lambda rig: (rig.step(), rig.manager.report_error(OSError())), (), lambda rig: rig.manager.shutdown()),
        (lambda rig: (defer_two(rig), rig.first.should_commit()), (), lambda rig: rig.manager.shutdown()),
        (lambda rig: rig.step(), (), lambda rig: rig.manager.shutdown(finished=False)),
        (lambda rig: rig.step(), (), raised_in_a_handler),
        (lambda rig: rig.step(), (), raised_in_the_context),
        (lambda rig: rig.step(), (), lambda rig: rig.manager._life.end_at_exit()),
    ],
    ids=[
        "no step",
        "no commit",
        "in a step",
        "torn",
        "start raised",
        "reported between steps",
        "a step in flight",
        "said so",
        "in finally",
        "in with",
        "at exit",
    ],
)
def test_a_loop_that_ends_otherwise_has_not_finished(rigs: Any, script: Any, verdicts: Any, end: Any) -> None:
    rig = rigs(plan_of(7, size=2), QuorumKey(7, 7), verdicts=verdicts)
    script(rig)
    end(rig)
    assert (rig.coordinator.left, rig.coordinator.closed) == ([], True)


def test_a_step_that_commits_after_an_error_between_steps_is_a_finish(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), QuorumKey(7, 7), QuorumKey(7, 7))
    assert rig.step()
    start_that_raises(rig)
    assert rig.step()
    rig.manager.report_error(OSError())
    assert rig.step()
    rig.manager.shutdown()
    assert rig.coordinator.finished_steps == [3]


def test_a_replica_that_was_told_to_leave_has_not_finished(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.manager.leave(reason="it is preempted")
    assert rig.manager.should_commit()
    rig.manager.shutdown()
    assert rig.coordinator.finished_steps == [None]


@pytest.mark.parametrize("healing", [[], [1]], ids=["nobody heals", "one heals"])
def test_ranks_of_a_group_that_has_finished_wait_for_one_another_only_where_somebody_heals(
    rigs: Any, healing: list[int]
) -> None:
    rig = rigs(plan_of(7, size=2, healing=healing), world_size=2, rank=0, store_addr="store", store_port=1)
    assert rig.step()
    rig.manager.shutdown()
    assert rig.coordinator.finished_steps == [1]
    assert [name for name, _ in rig.coordinator.gathered if name == "left"] == ["left"] * len(healing)


def test_shutdown_serves_until_nobody_heals(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=3, healing=[2]))
    rig.manager.start_quorum()
    rig.manager.leave(SERVES_LONG)
    assert rig.manager.should_commit()
    assert rig.manager.left
    ends = threading.Thread(target=rig.manager.shutdown)
    ends.start()
    assert not rig.coordinator.closed
    rig.coordinator.listener(DrainComplete())
    ends.join(20)
    assert rig.coordinator.closed


def test_shutdown_serves_no_longer_than_the_deadline(rigs: Any) -> None:
    clock = ManualClock()
    rig = rigs(plan_of(7, size=3, healing=[2]), clock=clock)
    rig.manager.start_quorum()
    rig.manager.leave(timedelta(seconds=30))
    assert rig.manager.should_commit()
    rig.manager.shutdown()
    assert clock.waited_s == [30.0]


def test_a_kill_ends_the_process_with_1_and_logs_who_asked(
    rigs: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []
    rig = rigs()
    monkeypatch.setattr(os, "_exit", ends.append)
    rig.coordinator.listener(KillOrder("it hogs the host (asked by 10.0.0.1:5)"))
    assert ends == [1]
    assert "ending this process: it hogs the host (asked by 10.0.0.1:5)" in caplog.text


def test_a_drain_is_a_wish(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.coordinator.listener(LeaveRequest("its host goes down (asked by 10.0.0.1:5)", 9_000))
    assert "received a request to leave the job: its host goes down (asked by 10.0.0.1:5)" in caplog.text
    assert rig.manager.should_commit()
    assert rig.manager.left


@pytest.mark.parametrize("deadline", [5, timedelta(), timedelta(seconds=-1), timedelta(days=8), timedelta.max])
def test_a_deadline_is_a_time_above_zero_and_of_at_most_a_week(rigs: Any, deadline: Any) -> None:
    manager = rigs().manager
    for leave in (lambda: manager.leave(deadline), lambda: manager.leave_on_signal(deadline=deadline)):
        with pytest.raises(ConfigError, match=r"deadline is .*; give a timedelta (above zero|of at most a week)"):
            leave()
    assert not manager.status().is_leaving


def test_a_signal_is_a_wish_and_shutdown_gives_its_handler_back(rigs: Any) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        rig = rigs(plan_of(7, size=2))
        rig.manager.leave_on_signal(signal.SIGUSR1)
        rig.manager.start_quorum()
        signal.raise_signal(signal.SIGUSR1)
        assert (rig.manager.status().is_leaving, heard) == (True, [])
        assert rig.manager.should_commit()
        assert rig.coordinator.left == [("it was sent SIGUSR1", timedelta())]
        rig.manager.shutdown()
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_only_the_main_thread_handles_signals(rigs: Any) -> None:
    manager = rigs().manager
    raised: list[Exception] = []

    def call() -> None:
        try:
            manager.leave_on_signal()
        except UsageError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(10)
    assert "outside the main thread" in str(raised[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, 0, 999, "SIGTERM", timedelta(seconds=5)])
def test_what_is_no_signal_is_refused_and_changes_nothing(rigs: Any, number: Any) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ConfigError, match="is not a signal that can be handled; give a signal such as"):
        rigs().manager.leave_on_signal(signal.SIGUSR1, number)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_signal_without_a_name_is_a_wish(rigs: Any) -> None:
    rig = rigs()
    nameless = signal.SIGRTMIN + 3
    before = signal.getsignal(nameless)
    rig.manager.leave_on_signal(nameless)
    signal.raise_signal(nameless)
    rig.manager.shutdown()
    assert rig.coordinator.left == [(f"it was sent signal {nameless}", timedelta())]
    assert signal.getsignal(nameless) is before


def test_who_says_twice_on_which_signal_it_leaves_gets_the_first_handler_back(rigs: Any) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    manager = rigs().manager
    manager.leave_on_signal(signal.SIGUSR1)
    manager.leave_on_signal(signal.SIGUSR1, deadline=timedelta(seconds=5))
    manager.shutdown()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_reason_is_a_text(rigs: Any) -> None:
    manager = rigs().manager
    with pytest.raises(ConfigError, match="reason is a int; give a text"):
        manager.leave(reason=5)
    assert not manager.status().is_leaving


def test_who_wants_to_leave_waits_for_no_quorum_beyond_its_deadline(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    rig = rigs(clock=clock)
    told = threading.Event()

    def quorum(_request: RankRequest, _timeout: timedelta) -> Plan:
        assert told.wait(20)
        raise RefusedError("replica_0 has left the job", code="left")

    def leave(_reason: str, serve: timedelta, _timeout: timedelta, *, finished_step: int | None) -> None:
        assert finished_step is None
        assert serve == timedelta()
        told.set()

    monkeypatch.setattr(rig.coordinator, "quorum", quorum)
    monkeypatch.setattr(rig.coordinator, "leave", leave)
    rig.manager.start_quorum()
    rig.manager.leave(timedelta(seconds=30))
    rig.coordinator.progress()  # a beat
    assert not any(thread.name == "tft-leave" for thread in threading.enumerate())
    clock.pass_s(30)
    rig.coordinator.progress()
    assert not rig.manager.should_commit()
    assert rig.manager.left


@pytest.mark.parametrize("is_straggler", [False, True])
def test_who_is_left_out_and_is_asked_to_leave_does_not_wait_for_a_quorum(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, is_straggler: bool
) -> None:
    clock = ManualClock()
    rig = rigs(clock=clock)
    asked, told = threading.Event(), threading.Event()

    def quorum(_request: RankRequest, _timeout: timedelta) -> Plan:
        asked.set()
        assert told.wait(20)
        raise RefusedError("replica_0 has left the job", code="left")

    monkeypatch.setattr(rig.coordinator, "quorum", quorum)
    monkeypatch.setattr(rig.coordinator, "leave", lambda *_, **__: told.set())
    rig.manager.start_quorum()
    assert asked.wait(20)
    rig.coordinator.listener(LeaveRequest("drained", 0))
    rig.coordinator.listener(WaitsFor("b is waited for; ends when it asks or is lost"))
    clock.pass_s(2)
    rig.coordinator.progress()  # a beat
    assert not any(thread.name == "tft-leave" for thread in threading.enumerate())
    if is_straggler:
        rig.coordinator.listener(StragglerNotice("replica_0", PaceKind.LEFT_OUT, sentence="left out as a straggler"))
    else:
        rig.coordinator.listener(WaitsFor(left_out_wait("b can't reach it")))
    clock.pass_s(2)
    rig.coordinator.progress()
    assert not rig.manager.should_commit()
    assert rig.manager.left


def test_a_second_signal_does_not_cut_the_end_short(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        rig = rigs(plan_of(7, size=2))
        rig.manager.leave_on_signal(signal.SIGUSR1)
        monkeypatch.setattr(rig.coordinator, "close", lambda: signal.raise_signal(signal.SIGUSR1))
        rig.manager.shutdown()
        assert heard == []
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
