"""How a Manager measures its own part of a step, and what it makes of what it hears of its pace."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from tft_algos import ConfigError, TooManyFailuresError
from tft_algos.manager.reduce.reduction import Reduction
from tft_algos.manager.step.own_time import OwnTime
from tft_algos.testing import ManualClock, plan_of
from tft_coord import PaceKind, StragglerNotice
from tft_coord.core.types import QuorumKey
from tft_coord.errors import RequestTimeoutError

STANDS = QuorumKey(1, 1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def own_time(clock: ManualClock) -> OwnTime:
    return OwnTime(clock.monotonic)


def own_ms(rig: Any) -> int:
    return int(rig.coordinator.progress().own_ms)


# --- measuring --------------------------------------------------------------------------------------------------


def test_before_the_first_step_nothing_is_known(own_time: OwnTime) -> None:
    assert own_time.median_ms == 0


def test_the_own_part_ends_with_the_last_contribution(own_time: OwnTime, clock: ManualClock) -> None:
    clock.now_s += 0.3
    own_time.mark()
    clock.now_s += 0.1
    own_time.mark()
    clock.now_s += 5  # for the others
    own_time.finishes()
    own_time.step_ended(counts=True)
    assert own_time.median_ms == 400


def test_waits_do_not_count_however_they_are_nested(own_time: OwnTime, clock: ManualClock) -> None:
    clock.now_s += 0.1
    with own_time:
        clock.now_s += 1
        with own_time:
            clock.now_s += 1
        clock.now_s += 1
    clock.now_s += 0.2
    own_time.mark()
    own_time.step_ended(counts=True)
    assert own_time.median_ms == 300


def test_a_mark_within_a_wait_counts_what_was_before_it(own_time: OwnTime, clock: ManualClock) -> None:
    """A hook of a backward pass reduces while the training thread waits."""
    clock.now_s += 0.1
    with own_time:
        clock.now_s += 1
        own_time.mark()
    own_time.step_ended(counts=True)
    assert own_time.median_ms == 100


def test_a_wait_across_a_verdict_counts_for_neither_step(own_time: OwnTime, clock: ManualClock) -> None:
    with own_time:
        clock.now_s += 1
        own_time.step_ended(counts=True)
        clock.now_s += 1
    clock.now_s += 0.25
    own_time.mark()
    own_time.step_ended(counts=True)
    assert own_time.median_ms == 250


def test_a_step_without_a_reduction_is_all_its_own(own_time: OwnTime, clock: ManualClock) -> None:
    clock.now_s += 0.5
    own_time.finishes()
    clock.now_s += 1
    own_time.step_ended(counts=True)
    assert own_time.median_ms == 500


def test_what_does_not_count_is_not_told_and_one_slow_step_says_nothing(own_time: OwnTime, clock: ManualClock) -> None:
    for taken_s, counts in ((9, False), (0.2, True), (0.3, True), (7, True), (0.2, True)):
        clock.now_s += taken_s
        own_time.finishes()
        own_time.step_ended(counts=counts)
    assert own_time.median_ms == 300
    own_time.forget()
    assert own_time.median_ms == 0


def test_the_shortest_step_is_a_millisecond(own_time: OwnTime) -> None:
    own_time.finishes()
    own_time.step_ended(counts=True)
    assert own_time.median_ms == 1


# --- in a Manager ---------------------------------------------------------------------------------------------------


def test_beats_tell_the_own_part_of_committed_steps(rigs: Any, clock: ManualClock) -> None:
    rig = rigs(plan_of(size=2), STANDS, STANDS, clock=clock)
    clock.now_s += 30
    rig.step()
    assert own_ms(rig) == 0, "the first step is excused"
    clock.now_s += 0.2  # loads data
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    clock.now_s += 0.4  # forward
    work = rig.manager.allreduce(torch.ones(2))
    clock.now_s += 3
    work.wait()
    rig.manager.should_commit()
    assert own_ms(rig) == 600
    rig.step()
    assert own_ms(rig) in (1, 600)


def test_a_reduction_that_is_waited_for_is_no_own_part(
    rigs: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(plan_of(size=2), STANDS, clock=clock)
    rig.step()
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    clock.now_s += 0.1
    first = rig.manager.allreduce(torch.ones(2))
    assert isinstance(first, Reduction)
    wait = first._works[0].wait

    def slow_wait() -> Any:
        clock.now_s += 2
        return wait()

    monkeypatch.setattr(first._works[0], "wait", slow_wait)
    first.wait()
    clock.now_s += 0.1
    rig.manager.allreduce(torch.ones(2)).wait()
    rig.manager.should_commit()
    assert own_ms(rig) == 200


def test_a_step_that_failed_does_not_count(rigs: Any, clock: ManualClock) -> None:
    rig = rigs(plan_of(size=2), STANDS, clock=clock, verdicts=(True, False))
    rig.step()
    clock.now_s += 5
    rig.step()
    assert own_ms(rig) == 0


def test_another_quorum_measures_anew(rigs: Any, clock: ManualClock) -> None:
    rig = rigs(plan_of(size=2), STANDS, plan_of(2, size=3, step=2), clock=clock)
    rig.step()
    clock.now_s += 5
    rig.step()
    assert own_ms(rig) == 5_000
    rig.step()
    assert own_ms(rig) == 0


# --- what it hears ----------------------------------------------------------------------------------------------------

SLOW = StragglerNotice("r", PaceKind.SLOW, 900, 200, sentence="replica r is a straggler")
OUT = StragglerNotice("r", PaceKind.LEFT_OUT, 900, 200, pause_ms=5_000, sentence="replica r is left out")
BACK = StragglerNotice("r", PaceKind.LET_BACK, sentence="replica r may join again")
QUARTER = StragglerNotice("r", PaceKind.SHARE, 900, 200, 0.25, sentence="replica r is to take 0.25 of its batch")
WHOLE = StragglerNotice("r", PaceKind.KEEPS_UP, 50, 200, 1.0, sentence="replica r is to take its whole batch")


def test_each_change_is_logged_and_told_once(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    told: list[StragglerNotice] = []
    rig = rigs(plan_of(size=2), on_straggler=told.append)
    with caplog.at_level(logging.INFO):
        for news in (SLOW, SLOW, QUARTER, QUARTER, WHOLE):
            rig.coordinator.listener(news)
    assert told == [SLOW, QUARTER, WHOLE]
    lines = [(record.levelname, record.message.split("] ")[1]) for record in caplog.records]
    assert lines == [
        ("WARNING", SLOW.sentence),
        ("WARNING", QUARTER.sentence),
        ("INFO", WHOLE.sentence),
    ]


def test_the_share_is_what_was_told_last(rigs: Any) -> None:
    rig = rigs(plan_of(size=2))
    assert rig.manager.status().share == 1.0
    rig.coordinator.listener(QUARTER)
    assert rig.manager.status().share == 0.25
    rig.coordinator.listener(SLOW)
    assert rig.manager.status().share == 0.25, "it is still to take a quarter"
    rig.coordinator.listener(WHOLE)
    assert rig.manager.status().share == 1.0


def test_a_lighthouse_that_knows_of_no_straggler_ends_the_smaller_share(
    rigs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[StragglerNotice] = []
    rig = rigs(plan_of(size=2), on_straggler=told.append)
    with caplog.at_level(logging.INFO):
        rig.coordinator.listener(QUARTER)
        rig.coordinator.listener(StragglerNotice("r", PaceKind.SHARE))
        rig.coordinator.listener(StragglerNotice("r", PaceKind.SHARE))
    assert rig.manager.status().share == 1.0
    assert [news.kind for news in told] == [PaceKind.SHARE, PaceKind.KEEPS_UP]
    assert caplog.records[-1].message.endswith(
        "replica r takes its whole batch, because this lighthouse requests no smaller share"
    )


def test_a_lighthouse_that_says_the_same_share_says_nothing_new(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(plan_of(size=2))
    with caplog.at_level(logging.INFO):
        rig.coordinator.listener(StragglerNotice("r", PaceKind.SHARE))
    assert caplog.records == []


def test_a_function_that_raises_is_named_and_fails_no_step(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    def raises(_: StragglerNotice) -> None:
        raise ValueError("no such dashboard")

    rig = rigs(plan_of(size=2), on_straggler=raises)
    rig.coordinator.listener(SLOW)
    assert rig.step()
    assert "a function given to on_straggler raised at: replica r is a straggler" in caplog.text
    assert "no such dashboard" in caplog.text


def test_what_is_no_function_is_refused(rigs: Any) -> None:
    with pytest.raises(ConfigError, match="on_straggler is a str; give a function of one argument"):
        rigs(plan_of(size=2), on_straggler="warn")


def test_steps_without_a_quorum_are_no_failures_while_it_is_left_out(rigs: Any) -> None:
    missing = [RequestTimeoutError("no quorum came in time") for _ in range(4)]
    rig = rigs(*missing, max_retries=1)
    rig.coordinator.listener(OUT)
    for _ in range(3):
        assert not rig.step()
    rig.coordinator.listener(BACK)
    assert not rig.step()


def test_a_quorum_that_comes_ends_that(rigs: Any) -> None:
    """The lighthouse that left it out may have ended meanwhile."""
    rig = rigs(plan_of(size=2), RequestTimeoutError("no quorum came in time"), max_retries=0)
    rig.coordinator.listener(OUT)
    assert rig.step()
    with pytest.raises(TooManyFailuresError, match="failed to commit 1 times in a row"):
        rig.step()


def test_news_may_come_on_any_thread(rigs: Any) -> None:
    rig = rigs(plan_of(size=2))
    thread = threading.Thread(target=rig.coordinator.listener, args=[QUARTER])
    thread.start()
    thread.join()
    assert rig.manager.status().share == 0.25
