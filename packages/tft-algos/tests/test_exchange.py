"""State that is given and taken at the start of a step, by a strategy whose state does not change until its end."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from tft_algos import ManagerClosedError, UsageError, UserStateError
from tft_algos.manager.recovery.healing import state_key
from tft_algos.testing import MemoryTransport, plan_of
from tft_ckpt import StateKey, StateUnavailableError
from tft_coord.core.progress import Phase
from tft_coord.core.types import NewcomerAsks, Plan, QuorumKey, RankRequest
from tft_coord.errors import RequestTimeoutError

HEALING = plan_of(7, step=5, lineage=9, size=2, rank=1, healing=[1])
SERVING = plan_of(7, size=2, healing=[1])


def shelf(plan: Plan, value: float) -> dict[StateKey | None, Any]:
    own = {"step": plan.step, "batches_committed": 10, "lineage": f"{plan.lineage:016x}"}
    return {state_key(plan): {"user": {"default": {"tensor": torch.full((2,), value)}}, "tft": own}}


@pytest.mark.parametrize("configured", [True, False], ids=["async", "sync"])
def test_a_step_may_say_itself_that_its_quorum_is_asynchronous(rigs: Any, configured: bool) -> None:
    rig = rigs(plan_of(7), QuorumKey(7, 7), use_async_quorum=configured)
    rig.manager.start_quorum(use_async_quorum=not configured)
    assert rig.manager.should_commit()
    assert rig.step()
    assert [request.use_async_quorum for request in rig.coordinator.requests] == [not configured, configured]


def test_who_heals_in_an_asynchronous_step_of_a_synchronous_manager_gives_zeros(rigs: Any) -> None:
    """And a healing that fails ends no reduction of the others."""
    rig = rigs(HEALING, use_async_quorum=False, others=4.0)
    rig.manager.start_quorum(use_async_quorum=True)
    rig.manager.allreduce(torch.ones(2)).wait()
    assert rig.group.calls[0].tolist() == [0.0, 0.0]
    assert not rig.manager.should_commit()
    assert (rig.group.num_aborts, rig.manager.status().is_torn) == (0, False)


def test_who_heals_takes_the_state_before_the_step_ends(rigs: Any) -> None:
    rig = rigs(HEALING, checkpoint_transport=MemoryTransport(shelf(HEALING, 3.0)))
    rig.manager.start_quorum(use_async_quorum=True)
    reduced = rig.manager.allreduce(torch.ones(2))
    assert rig.manager.strategy.exchange_state()
    assert rig.weights.tensor.tolist() == [3.0, 3.0]
    assert rig.weights.threads == [threading.current_thread().name] * 2, "loaded, and taken to be compared"
    assert rig.manager.current_step() == 5
    assert not rig.manager.is_participating(), "it gives zeros in the whole of this step"
    assert reduced.wait()
    assert rig.manager.should_commit()
    assert rig.manager.current_step() == 6
    assert len(rig.transport.received_from) == 1


def test_who_serves_offers_its_state_at_once_and_only_once(rigs: Any) -> None:
    rig = rigs(SERVING)
    rig.manager.start_quorum()
    assert not rig.manager.strategy.exchange_state()
    offered = rig.transport.shelf[state_key(SERVING)]
    rig.weights.tensor.fill_(9.0)
    assert not rig.manager.strategy.exchange_state()
    assert rig.manager.should_commit()
    assert (rig.transport.sent_to, len(rig.weights.threads)) == ([[1]], 1)
    assert offered["user"]["default"]["tensor"].tolist() == [1.0, 1.0]


def test_the_next_step_exchanges_again(rigs: Any) -> None:
    again = plan_of(8, step=1, size=2, healing=[1])
    rig = rigs(SERVING, again)
    for _ in range(2):
        rig.manager.start_quorum()
        rig.manager.strategy.exchange_state()
        rig.manager.should_commit()
    assert list(rig.transport.shelf) == [state_key(SERVING), state_key(again)]


def test_who_waits_for_the_state_of_a_step_that_was_given_up_is_told(rigs: Any) -> None:
    """The forward pass has raised, say, and the loop begins the next step."""
    rig = rigs(SERVING, plan_of(8, step=0, size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.manager.start_quorum()
    told = rig.transport.shelf[state_key(SERVING)]
    assert isinstance(told, StateUnavailableError)
    assert "its step 0 ended before the snapshot of its state" in str(told)


def test_a_healing_that_failed_fails_the_step(rigs: Any) -> None:
    rig = rigs(HEALING, QuorumKey(7, 7))
    rig.manager.start_quorum(use_async_quorum=True)
    assert not rig.manager.strategy.exchange_state()
    assert "could not fetch step 5" in str(rig.manager.errored())
    assert not rig.manager.should_commit()
    assert rig.weights.threads == []


def test_without_a_plan_there_is_nothing_to_exchange(rigs: Any) -> None:
    rig = rigs(RequestTimeoutError("nobody came"))
    rig.manager.start_quorum(use_async_quorum=True)
    assert not rig.manager.strategy.exchange_state()
    assert not rig.manager.should_commit()


def test_a_synchronous_quorum_has_exchanged_already(rigs: Any) -> None:
    rig = rigs(SERVING, use_async_quorum=False)
    rig.manager.start_quorum()
    assert not rig.manager.strategy.exchange_state()
    assert rig.manager.should_commit()
    assert rig.transport.sent_to == [[1]]


def test_a_state_that_could_not_be_read_is_served_when_it_can(rigs: Any) -> None:
    rig = rigs(SERVING)
    rig.manager.disallow_state_dict_read()
    rig.manager.start_quorum()
    with pytest.raises(UserStateError, match="call allow_state_dict_read first"):
        rig.manager.strategy.exchange_state()
    rig.manager.allow_state_dict_read()
    assert rig.manager.should_commit()
    assert rig.transport.sent_to == [[1]]


def test_outside_a_step_nothing_is_exchanged(rigs: Any) -> None:
    manager = rigs().manager
    with pytest.raises(UsageError, match="exchange_state was called outside a step; call it after start_quorum"):
        manager.strategy.exchange_state()
    manager.shutdown()
    with pytest.raises(ManagerClosedError):
        manager.strategy.exchange_state()


def test_a_strategy_that_exchanges_takes_no_state_early(rigs: Any) -> None:
    """It would copy the state once more than it needs to."""
    rig = rigs(*(plan_of(7, size=2) if not step else QuorumKey(7, 7) for step in range(14)))
    for _ in range(14):
        rig.coordinator.listener(NewcomerAsks("replica_9"))
        rig.manager.start_quorum()
        rig.manager.strategy.exchange_state()
        assert rig.manager.should_commit()
    assert (rig.transport.staged, rig.weights.threads) == ([], [])


def test_whether_the_quorum_is_known_is_told_without_waiting(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs()
    with pytest.raises(UsageError, match="quorum_is_known was called before start_quorum; call start_quorum first"):
        rig.manager.strategy.quorum_is_known()
    comes = threading.Event()

    def quorum(_request: RankRequest, _timeout: timedelta) -> Plan:
        assert comes.wait(20)
        return plan_of(7, size=2)

    monkeypatch.setattr(rig.coordinator, "quorum", quorum)
    rig.manager.start_quorum()
    assert not rig.manager.strategy.quorum_is_known()
    comes.set()
    rig.manager.wait_quorum()
    assert rig.manager.strategy.quorum_is_known()
    assert len(rig.group.configured) == 1
    assert rig.manager.should_commit()


def test_a_quorum_that_failed_is_known_as_well(rigs: Any) -> None:
    rig = rigs(RequestTimeoutError("nobody came"))
    rig.manager.start_quorum()
    with pytest.raises(RequestTimeoutError):
        rig.manager.wait_quorum()
    assert rig.manager.strategy.quorum_is_known()


def test_who_exchanges_waits_and_is_on_its_own_afterwards(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs(SERVING)
    seen = []
    send = rig.transport.send_checkpoint

    def sends(*args: Any, **kwargs: Any) -> None:
        seen.append(rig.coordinator.progress().phase)
        send(*args, **kwargs)

    monkeypatch.setattr(rig.transport, "send_checkpoint", sends)
    rig.manager.start_quorum()
    rig.manager.strategy.exchange_state()
    assert [*seen, rig.coordinator.progress().phase] == [Phase.WAITING, Phase.OWN]
    assert rig.manager.should_commit()
