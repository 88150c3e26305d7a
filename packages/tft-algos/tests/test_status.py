"""What `Manager.status` says of a rank at each moment of its steps."""

from __future__ import annotations

import dataclasses
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from tft_algos import ManagerPhase, ManagerStatus
from tft_algos.testing import ManualClock, plan_of
from tft_coord.core.types import LeaveRequest, Plan, QuorumKey, RankRequest, Verdict
from tft_coord.errors import RequestTimeoutError


def within(call: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> ManagerStatus:
    """The status that another thread sees while `owner.name` runs inside a call."""
    seen: list[ManagerStatus] = []
    before = getattr(owner, name)

    def looking(*args: Any, **settings: Any) -> Any:
        thread = threading.Thread(target=lambda: seen.append(call.__self__.status()))
        thread.start()
        thread.join(5)
        return before(*args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, looking)
        call()
    return seen[0]


def test_before_the_first_step(rigs: Any) -> None:
    rig = rigs(plan_of())
    status = rig.manager.status()
    assert (status.replica_id, status.group_rank, status.group_world_size) == (rig.manager.replica_id, 0, 1)
    assert (status.step, status.attempt, status.batches_committed, status.committed) == (0, 0, 0, None)
    assert (status.phase, status.phase.value) == (ManagerPhase.BETWEEN_STEPS, "between two steps")
    assert (status.quorum, status.plan, status.participants, status.participating_rank) == (None, None, (), None)
    assert {status.is_healing, status.is_torn, status.is_left_out, status.is_leaving, status.has_left} == {False}
    assert (status.share, status.waits_for, status.waits_s) == (1.0, "", 0.0)
    assert (status.errors, status.last_error) == ((), "")


def test_it_is_a_frozen_value(rigs: Any) -> None:
    status = rigs(plan_of()).manager.status()
    with pytest.raises(dataclasses.FrozenInstanceError):
        status.step = 1
    assert not hasattr(status, "__dict__")


def test_in_a_step_and_after_it(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=3, rank=1))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    status = rig.manager.status()
    assert (status.phase, status.attempt, status.step, status.committed) == (ManagerPhase.COMPUTING, 1, 0, None)
    assert status.plan is not None
    assert status.quorum == status.plan.key
    assert status.participants == status.plan.replica_ids
    assert status.participating_rank == 1
    rig.manager.allreduce(torch.ones(2)).wait()
    assert rig.manager.should_commit()
    after = rig.manager.status()
    assert (after.phase, after.step, after.batches_committed) == (ManagerPhase.BETWEEN_STEPS, 1, 3)
    assert (after.committed, after.plan, after.attempt) == (True, status.plan, 1)


def test_while_a_quorum_is_asked_for_it_never_waits(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs(plan_of(7, size=2))
    answers = threading.Event()
    quorum = rig.coordinator.quorum

    def late(request: RankRequest, timeout: timedelta) -> Plan | QuorumKey:
        assert answers.wait(10)
        return quorum(request, timeout)  # type: ignore[no-any-return]

    monkeypatch.setattr(rig.coordinator, "quorum", late)
    rig.manager.start_quorum()
    status = rig.manager.status()
    answers.set()
    assert (status.phase, status.plan) == (ManagerPhase.QUORUM, None)
    assert status.waits_for == "a quorum: the lighthouse has not reported the missing replicas yet"
    rig.manager.wait_quorum()


def test_while_the_group_is_built_it_says_with_whom(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs(plan_of(7, size=2))

    def step() -> None:
        rig.manager.start_quorum()
        rig.manager.wait_quorum()

    step.__self__ = rig.manager  # type: ignore[attr-defined]
    status = within(step, monkeypatch, rig.group, "configure")
    assert status.phase is ManagerPhase.CONFIGURING
    assert status.waits_for.startswith("the process group of the new quorum: the other members of quorum 7: ")


def test_in_the_vote_and_while_it_is_applied(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.manager.allreduce(torch.ones(2)).wait()
    status = within(rig.manager.should_commit, monkeypatch, rig.coordinator, "vote")
    assert status.phase is ManagerPhase.VOTING
    assert status.waits_for.startswith("the vote of its group: ")
    with rig.manager.strategy.applying():
        assert rig.manager.status().phase is ManagerPhase.APPLYING
    assert rig.manager.status().phase is ManagerPhase.BETWEEN_STEPS


def test_a_wait_has_its_seconds_by_the_beats_that_saw_it(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    rig = rigs(plan_of(7, size=2), clock=clock)
    rig.manager.start_quorum()
    found: list[float] = []
    vote = rig.coordinator.vote

    def slow(*args: Any, **settings: Any) -> Verdict:
        for _ in range(3):
            found.append(rig.manager.status().waits_s)
            rig.coordinator.progress()  # a beat
            clock.now_s += 2
        return vote(*args, **settings)  # type: ignore[no-any-return]

    monkeypatch.setattr(rig.coordinator, "vote", slow)
    assert rig.manager.should_commit()
    assert found == [0.0, 2.0, 4.0]
    assert rig.manager.status().waits_s == 0.0


def test_while_it_heals(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2, step=3, healing=[0]))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    status = rig.manager.status()
    assert status.is_healing
    assert (status.participating_rank, status.step) == (None, 0)
    assert status.plan is not None
    assert status.participants == (status.plan.replica_ids[1],)


def test_errors_are_those_of_the_step_and_the_last_one_stays(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), plan_of(8, size=2))
    rig.manager.start_quorum()
    rig.manager.report_error(ValueError("no number"))
    assert not rig.manager.should_commit()
    failed = rig.manager.status()
    assert ([str(error) for error in failed.errors], failed.committed) == (["no number"], False)
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    status = rig.manager.status()
    assert (status.errors, status.last_error) == ((), "ValueError: no number")


def test_a_quorum_that_did_not_come_leaves_no_plan(rigs: Any) -> None:
    rig = rigs(RequestTimeoutError("no quorum came in time"))
    rig.manager.start_quorum()
    assert not rig.manager.should_commit()
    status = rig.manager.status()
    assert (status.plan, status.participants, status.committed) == (None, (), False)
    assert "no quorum came in time" in status.last_error


def test_who_leaves_and_has_left(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), verdicts=[Verdict(yes=True, leaves=True)])
    rig.manager.start_quorum()
    rig.coordinator.listener(LeaveRequest("the host is needed"))
    status = rig.manager.status()
    assert (status.is_leaving, status.has_left) == (True, False)
    rig.manager.should_commit()
    status = rig.manager.status()
    assert (status.is_leaving, status.has_left, rig.manager.left) == (True, True, True)


def test_a_torn_state_is_said(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.step()
    rig.manager.strategy.report_torn(RuntimeError("the optimizer raised"))
    assert rig.manager.status().is_torn


def test_after_the_end(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.step()
    rig.manager.shutdown()
    status = rig.manager.status()
    assert (status.phase, status.step) == (ManagerPhase.CLOSED, 1)


def test_a_step_builds_none(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs(plan_of(7, size=2), QuorumKey(7, 7))
    monkeypatch.setattr("tft_algos.manager.manager.status_of", lambda _: pytest.fail("a step asked for a status"))
    assert rig.step()
    assert rig.step()


def test_it_costs_little(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.step()
    best_s = min(_timed(rig.manager.status) for _ in range(200))
    assert best_s < 1e-3


def _timed(call: Any) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
