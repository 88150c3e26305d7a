"""Where in its step a Manager says that it is, as a look once a beat sees it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from tft_algos.manager.recovery.healing import state_key
from tft_algos.manager.reduce.reduction import Reduction
from tft_algos.testing import ManualClock, plan_of
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.stalls import TrainerReport
from tft_coord.core.types import Plan, QuorumKey, RankRequest, Verdict
from tft_coord.errors import RequestTimeoutError

LIMIT_MS = 2_000


def look(rig: Any) -> Progress:
    progress = rig.coordinator.progress()
    assert isinstance(progress, Progress)
    return progress


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make(rigs: Any, clock: ManualClock) -> Any:
    def start(*answers: Any, **settings: Any) -> Any:
        limit = timedelta(milliseconds=LIMIT_MS)
        return rigs(*answers, **{"clock": clock, "slowest_step": limit, **settings})

    return start


def test_between_two_steps_it_is_outside(make: Any, clock: ManualClock) -> None:
    rig = make(plan_of(size=2))
    assert look(rig) == Progress(0, Phase.OUTSIDE, 0, True, LIMIT_MS, report=TrainerReport())
    rig.step()
    clock.now_s += 300
    assert look(rig).phase is Phase.OUTSIDE
    assert look(rig).step == rig.manager.current_step() == 1
    clock.now_s += 1
    assert look(rig).since_ms == 1_000
    assert not look(rig).is_hung


def test_while_what_was_committed_is_applied_it_is_on_its_own(make: Any, clock: ManualClock) -> None:
    rig = make(plan_of(size=2), QuorumKey(1, 1))
    rig.step()
    rig.step()
    assert look(rig).phase is Phase.OUTSIDE
    with rig.manager.strategy.applying():
        assert (look(rig).phase, look(rig).excused) == (Phase.OWN, False)
        clock.now_s += LIMIT_MS / 1_000
        assert look(rig).is_hung
    assert look(rig).phase is Phase.OUTSIDE
    with pytest.raises(ValueError, match="singular"), rig.manager.strategy.applying():
        raise ValueError("a matrix is singular")
    assert look(rig).phase is Phase.OUTSIDE


def test_from_the_plan_on_it_is_on_its_own_unless_it_reduces(make: Any, clock: ManualClock) -> None:
    rig = make(plan_of(size=2), QuorumKey(1, 1))
    rig.step()
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    assert (look(rig).phase, look(rig).step) == (Phase.OWN, 1)
    clock.now_s += 1.5
    assert look(rig).since_ms == 1_500
    assert not look(rig).is_hung
    clock.now_s += 0.5
    assert look(rig).is_hung
    rig.manager.allreduce(torch.ones(2)).wait()
    assert (look(rig).phase, look(rig).since_ms) == (Phase.OWN, 0), "a reduction is progress"


def test_a_reduction_that_is_under_way_is_waited_for(
    make: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell whether the training thread waits in it; if it did not, the others would have ended it."""
    rig = make(plan_of(size=2))
    rig.manager.start_quorum()
    rig.manager.allreduce(torch.ones(2))
    monkeypatch.setattr(Reduction, "is_completed", lambda _: False)
    assert look(rig).phase is Phase.REDUCING
    clock.now_s += 3
    assert look(rig).is_stuck
    rig.manager.allreduce(torch.ones(2))
    assert (look(rig).phase, look(rig).since_ms) == (Phase.REDUCING, 0)


@pytest.mark.parametrize(
    ("answers", "excused"),
    [
        ((plan_of(size=2),), [True]),
        ((plan_of(size=2), QuorumKey(1, 1), QuorumKey(1, 1)), [True, False, False]),
        ((plan_of(size=2), QuorumKey(1, 1), plan_of(2, size=3, step=2)), [True, False, True]),
    ],
    ids=["a start", "a quorum that stands", "a new quorum"],
)
def test_the_first_step_of_a_quorum_is_excused(make: Any, answers: Any, excused: list[bool]) -> None:
    rig = make(*answers)
    seen = []
    for _ in answers:
        rig.manager.start_quorum()
        rig.manager.wait_quorum()
        seen.append(look(rig).excused)
        rig.manager.allreduce(torch.ones(2)).wait()
        rig.manager.should_commit()
    assert seen == excused


def test_so_are_those_of_a_healing_and_the_one_after(make: Any) -> None:
    healing = plan_of(size=2, rank=1, healing=(1,), step=5)
    rig = make(healing, QuorumKey(1, 1), QuorumKey(1, 1), init_sync=False)
    source = {"user": {"default": {"tensor": torch.full((2,), 3.0)}}, "tft": {}}
    source["tft"] = {"step": 5, "batches_committed": 5, "lineage": f"{healing.lineage:016x}"}
    rig.transport.shelf[state_key(healing)] = source
    seen = []
    for _ in range(3):
        rig.manager.start_quorum()
        rig.manager.wait_quorum()
        seen.append(look(rig).excused)
        rig.manager.allreduce(torch.ones(2)).wait()
        assert rig.manager.should_commit()
    assert seen == [True, True, False]


class _Gate:
    """Answers a quorum request, or a vote, when the test opens it."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside
        self.open = threading.Event()
        self.reached = threading.Event()

    def quorum(self, request: RankRequest, timeout: timedelta) -> Plan | QuorumKey:
        self.reached.set()
        assert self.open.wait(10)
        raise RequestTimeoutError("nobody came")


@pytest.fixture
def gate(make: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, _Gate]]:
    rig = make()
    gate = _Gate(rig.coordinator)
    monkeypatch.setattr(rig.coordinator, "quorum", gate.quorum)
    yield rig, gate
    gate.open.set()


def test_it_waits_for_its_quorum(gate: tuple[Any, _Gate]) -> None:
    rig, closed = gate
    rig.manager.start_quorum()
    assert closed.reached.wait(10)
    assert (look(rig).phase, look(rig).excused) == (Phase.WAITING, True)
    closed.open.set()
    with pytest.raises(RequestTimeoutError):
        rig.manager.wait_quorum()
    assert (look(rig).phase, look(rig).excused) == (Phase.OWN, True)


def test_it_waits_in_the_vote(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(plan_of(size=2))
    seen: list[Progress] = []

    def vote(*_: Any, **__: Any) -> Verdict:
        seen.append(look(rig))
        return Verdict(True)

    monkeypatch.setattr(rig.coordinator, "vote", vote)
    rig.step()
    assert [progress.phase for progress in seen] == [Phase.WAITING]


def test_zero_says_that_a_step_may_take_any_time(make: Any) -> None:
    rig = make(plan_of(size=2), slowest_step=timedelta())
    assert look(rig).slowest_step_ms == 0


def test_the_end_of_a_step_that_was_excused_is_reported_at_once_and_no_other(make: Any) -> None:
    rig = make(plan_of(size=2), QuorumKey(1, 1), plan_of(2, step=2, size=2))
    beats = []
    for _ in range(3):
        rig.step()
        beats.append(rig.coordinator.beats)
    assert beats == [1, 1, 2]
