"""States for newcomers: taken at the step boundary when somebody asks, and offered when the plan says that it heals."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from tft_algos.manager.recovery import speculative
from tft_algos.manager.recovery.speculative import LOOKED_AT_BYTES, ROOM_BYTES, bytes_of, leaf_digests
from tft_algos.testing import MemoryTransport, plan_of
from tft_coord.core.lineage import fold_lineage, initial_lineage
from tft_coord.core.types import LossNotice, NewcomerAsks, Plan, QuorumKey

KEY = QuorumKey(7, 7)


def lineage_at(step: int) -> int:
    """After so many commits, all in quorum 7."""
    lineage = initial_lineage("default")
    for each in range(1, step + 1):
        lineage = fold_lineage(lineage, KEY, each)
    return lineage


def heals(step: int, **facts: Any) -> Plan:
    """The plan of a quorum in which this replica serves that step to another one."""
    return plan_of(7, **{"size": 2, "healing": [1], "step": step, "lineage": lineage_at(step), **facts})


def ask(rig: Any) -> None:
    """Somebody asks who will heal."""
    rig.coordinator.listener(NewcomerAsks("replica_1"))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "LOOK_AFTER_ATTEMPTS", 1)


def rig_that_has_looked(rigs: Any, *answers: Any, **settings: Any) -> Any:
    """It has served step 0, and in step 1 it has seen that a step leaves its state alone."""
    rig = rigs(heals(0), plan_of(7, size=2, step=1, lineage=lineage_at(1)), *answers, **settings)
    assert rig.step()
    assert rig.step()
    assert rig.transport.staged == []
    assert len(rig.transport.shelf) == 1
    return rig


def test_a_state_that_was_taken_at_the_boundary_is_there_before_the_forward(rigs: Any) -> None:
    rig = rig_that_has_looked(rigs, heals(2))
    ask(rig)
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    offered = {(key.quorum_id, key.step, key.lineage): state for key, state in rig.transport.shelf.items()}
    state = offered[7, 2, lineage_at(2)]
    assert state["user"]["default"]["tensor"].tolist() == [1.0, 1.0]
    assert state["tft"] == {"step": 2, "batches_committed": 3, "lineage": f"{lineage_at(2):016x}"}
    assert rig.manager.should_commit()
    assert rig.transport.sent_to == [[1], [1]], "it is not sent again after the reductions"
    assert set(rig.weights.threads) == {threading.current_thread().name}


@pytest.mark.parametrize("plan_first", [True, False])
def test_the_plan_may_come_before_the_copy_or_after_it(
    rigs: Any, plan_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_that_has_looked(rigs, heals(2))
    other = threading.Event()
    take, quorum = rig.manager._parts.speculative.take, rig.coordinator.quorum

    def take_late(own: Any) -> None:
        rig.manager.wait_quorum()
        take(own)

    def take_first(own: Any) -> None:
        take(own)
        other.set()

    def answer_late(*asked: Any) -> Any:
        assert other.wait(20)
        return quorum(*asked)

    monkeypatch.setattr(rig.manager._parts.speculative, "take", take_late if plan_first else take_first)
    if not plan_first:
        monkeypatch.setattr(rig.coordinator, "quorum", answer_late)
    ask(rig)
    assert rig.step()
    assert [each.end for each in rig.transport.staged] == ["offered"]
    assert len(rig.transport.sent_to) == 2


@pytest.mark.parametrize(
    "answer",
    [
        QuorumKey(7, 7),
        heals(2, healing=[0], rank=0),
        plan_of(7, size=2, healing=[1], step=2, lineage=5),
        plan_of(7, size=2, healing=[1], step=3, lineage=lineage_at(2)),
        RuntimeError("no quorum"),
    ],
    ids=["nobody heals", "it heals itself", "another lineage", "another step", "no quorum"],
)
def test_what_was_taken_in_vain_is_dropped(rigs: Any, answer: Any) -> None:
    rig = rig_that_has_looked(rigs, answer, plan_of(7, size=2, step=2, lineage=lineage_at(2)))
    ask(rig)
    rig.manager.start_quorum()
    rig.manager.should_commit()
    rig.manager.start_quorum()
    assert [each.end for each in rig.transport.staged] == ["dropped"]


def test_one_hint_is_good_for_one_copy(rigs: Any) -> None:
    rig = rig_that_has_looked(rigs, KEY, KEY)
    ask(rig)
    assert rig.step()
    assert rig.step()
    assert [each.end for each in rig.transport.staged] == ["dropped"]


def test_without_a_hint_nothing_is_taken(rigs: Any) -> None:
    rig = rig_that_has_looked(rigs, KEY, KEY)
    taken = len(rig.weights.threads)
    assert rig.step()
    assert rig.step()
    assert len(rig.weights.threads) == taken


def test_who_never_served_has_looked_before_the_first_newcomer_comes(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), heals(1))
    assert rig.step()
    ask(rig)
    assert rig.step()
    assert [each.end for each in rig.transport.staged] == ["offered"]


def test_before_it_has_looked_it_serves_after_the_reductions(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "LOOK_AFTER_ATTEMPTS", 2)
    rig = rigs(plan_of(7, size=2), heals(1))
    assert rig.step()
    ask(rig)
    assert rig.step()
    assert (rig.transport.staged, len(rig.transport.shelf)) == ([], 1)


def test_in_the_step_after_a_serving_one_its_memory_is_not_taken_away(rigs: Any) -> None:
    rig = rig_that_has_looked(rigs, heals(2), heals(3))
    ask(rig)
    assert rig.step()
    ask(rig)
    assert rig.step()
    assert [each.end for each in rig.transport.staged] == ["offered"]
    assert len(rig.transport.shelf) == 3


@pytest.mark.parametrize(
    "settings",
    [{"use_async_quorum": False}, {"world_size": 2, "rank": 0, "store_addr": "localhost", "store_port": 1}],
    ids=["synchronous", "two ranks"],
)
def test_the_synchronous_and_larger_groups_take_nothing_early(rigs: Any, settings: Any) -> None:
    rig = rigs(heals(0), plan_of(7, size=2, step=1, lineage=lineage_at(1)), heals(2), **settings)
    for _ in range(3):
        ask(rig)
        assert rig.step()
    assert (rig.transport.staged, len(rig.transport.shelf)) == ([], 2)


class Statistics:
    """State that a forward pass changes."""

    def __init__(self, rig: Any) -> None:
        self.mean = torch.zeros(3)
        self.changes = True
        rig.manager.register_state_dict_fn("statistics", lambda _: None, lambda: {"mean": self.mean})
        reduce = rig.group.allreduce
        rig.group.allreduce = lambda *args: self.forward() or reduce(*args)

    def forward(self) -> None:
        if self.changes:
            self.mean.numpy()[1] += 1.0  # torch knows nothing of it


def test_what_the_forward_changes_is_taken_after_it(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = rigs(heals(0), plan_of(7, size=2, step=1, lineage=lineage_at(1)), heals(2))
    Statistics(rig)
    assert rig.step()
    assert rig.step()
    assert "because statistics.mean changes during the forward pass" in caplog.text
    ask(rig)
    assert rig.step()
    assert (rig.transport.staged, len(rig.transport.shelf)) == ([], 2)


def test_what_is_taken_away_in_a_step_has_changed(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = rigs(heals(0), plan_of(7, size=2, step=1, lineage=lineage_at(1)), heals(2))
    pending = [torch.ones(2), torch.ones(2)]
    rig.manager.register_state_dict_fn("data", lambda _: None, lambda: {"pending": list(pending)})
    reduce = rig.group.allreduce
    rig.group.allreduce = lambda *args: pending.pop() is None or reduce(*args)
    assert rig.step()
    rig.group.allreduce = reduce
    assert rig.step()
    assert "data.pending.1 changes during the forward pass" in caplog.text
    ask(rig)
    assert rig.step()
    assert rig.transport.staged == []


def test_state_that_is_registered_later_is_looked_at_too(rigs: Any) -> None:
    rig = rig_that_has_looked(rigs, plan_of(7, size=2, step=2, lineage=lineage_at(2)), heals(3), verdicts=[True] * 4)
    Statistics(rig)
    ask(rig)
    assert rig.step()
    ask(rig)
    assert rig.step()
    assert rig.transport.staged == [], "nobody was given statistics as they were before the forward"


def test_what_begins_to_change_later_is_told_and_taken_late_from_then_on(
    rigs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs(
        heals(0), plan_of(7, size=2, step=1, lineage=lineage_at(1)), heals(2), KEY, heals(4), verdicts=[True] * 5
    )
    statistics = Statistics(rig)
    statistics.changes = False
    assert rig.step()
    assert rig.step()
    statistics.changes = True
    ask(rig)
    assert rig.step()
    assert [each.end for each in rig.transport.staged] == ["offered"]
    assert "statistics.mean changed during the step, after a joining replica had received it" in caplog.text
    assert rig.step()
    ask(rig)
    assert rig.step()
    assert len(rig.transport.staged) == 1
    assert len(rig.transport.shelf) == 3


def test_a_state_that_can_not_be_taken_early_costs_nothing(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_that_has_looked(rigs, heals(2))
    stage = rig.transport.stage_checkpoint

    def fail(*_: Any) -> Any:
        monkeypatch.setattr(rig.transport, "stage_checkpoint", stage)
        raise MemoryError("no room")

    monkeypatch.setattr(rig.transport, "stage_checkpoint", fail)
    ask(rig)
    assert rig.step()
    assert len(rig.transport.shelf) == 2


def test_a_state_that_was_declared_half_written_is_not_taken_early(rigs: Any) -> None:
    rig = rig_that_has_looked(rigs, KEY)
    rig.manager.disallow_state_dict_read()
    ask(rig)
    assert rig.step()
    assert rig.transport.staged == []


def test_what_is_offered_is_looked_at_after_it_is_offered(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who heals waits for the offer, and nobody for the look; the forward pass comes after both."""
    rig = rig_that_has_looked(rigs, heals(2))
    seen: list[list[str]] = []

    def look(state: Any) -> dict[str, bytes]:
        seen.append([each.end for each in rig.transport.staged])
        return leaf_digests(state)

    monkeypatch.setattr(speculative, "leaf_digests", look)
    take = rig.manager._parts.speculative.take
    monkeypatch.setattr(rig.manager._parts.speculative, "take", lambda own: rig.manager.wait_quorum() or take(own))
    ask(rig)
    rig.manager.start_quorum()
    assert seen == [["offered"]]


def test_after_a_loss_memory_is_made_ready_for_who_comes_back(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(MemoryTransport, "prepare_to_send", lambda _, num_bytes=0: prepared.append(num_bytes))
    rig = rigs(plan_of(7, size=2), KEY, KEY, KEY, KEY)
    rig.step()
    rig.step()
    rig.coordinator.listener(LossNotice(KEY, "replica_1", 1, "asks for a new process group", lives=True))
    rig.step()
    assert prepared == [], "who lives needs no state"
    rig.coordinator.listener(LossNotice(KEY, "replica_1", 1, "its stream broke"))
    rig.step()
    assert prepared == [bytes_of({"tensor": torch.zeros(2)})]
    rig.step()
    # One loss is one hint; the one without a size is that of who began with the job.
    assert len([num_bytes for num_bytes in prepared if num_bytes]) == 1


def test_how_large_a_state_is() -> None:
    state = {"a": torch.zeros(3), "b": [torch.zeros(2, 2, dtype=torch.float64), "text"], "c": 4}
    assert bytes_of(state) == 12 + 32 + 2 * ROOM_BYTES


def test_a_look_sees_what_a_forward_may_change() -> None:
    state = {
        "small": torch.zeros(4),
        "long": torch.zeros(LOOKED_AT_BYTES),
        "long at its beginning": torch.zeros(LOOKED_AT_BYTES),
        "as long as is looked at": torch.zeros(LOOKED_AT_BYTES, dtype=torch.uint8),
        "strided": torch.zeros(4, 4).t(),
        "whole": torch.zeros(2, dtype=torch.int64),
        "plain": {"seen": 3, "name": "x"},
        "empty": torch.zeros(0),
    }
    before = leaf_digests(state)
    assert leaf_digests(state) == before
    state["small"].numpy()[2] = 1.0
    state["long"][-1] = 1.0  # not at the beginning, and torch counts it
    state["long at its beginning"].numpy()[1] = 1.0
    state["as long as is looked at"].numpy()[-1] = 1
    state["strided"].numpy()[1, 2] = 1.0
    state["plain"]["seen"] = 4  # type: ignore[index]
    after = leaf_digests(state)
    assert {path for path in after if after[path] != before[path]} == {
        "as long as is looked at",
        "long",
        "long at its beginning",
        "plain.seen",
        "small",
        "strided",
    }


def test_a_look_takes_any_tensor() -> None:
    with torch.inference_mode():
        inferred = torch.zeros(3)
    state = {"a": inferred, "b": torch.tensor(1.0, dtype=torch.bfloat16), "c": torch.zeros(3, requires_grad=True)}
    assert leaf_digests(state) == leaf_digests(state)
