"""LocalSGD and DiLoCo on one member: the test is the lighthouse, the other replicas and the wire."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tft_algos import (
    ConfigError,
    DiLoCo,
    LeftJob,
    LocalSGD,
    Optimizer,
    TooManyFailuresError,
    UnsupportedFeatureError,
    UsageError,
    UserStateError,
    extract_local_tensor,
)
from tft_algos.local_sgd.buckets import FlatBuffers, bucket_bytes
from tft_algos.local_sgd.fragment import Fragment
from tft_algos.quantization import ErrorFeedback
from tft_algos.testing import MemoryTransport, digest, plan_of
from tft_coord.core.types import Purpose, QuorumKey
from tft_coord.errors import RequestTimeoutError

SAME = QuorumKey(7, 7)  # the quorum stands unchanged


class Trainer:
    """A model of two layers of one weight each, and an inner optimizer that takes one off every weight in a step.

    Args:
        rig: whose Manager.
        algorithm: "diloco", or "local_sgd".
        num_fragments: 1 or 2.
        outer_lr: the outer optimizer steps by that much of the mean pseudogradient.
    """

    def __init__(
        self,
        rig: Any,
        *,
        algorithm: str = "diloco",
        num_fragments: int = 1,
        sync_every: int = 2,
        outer_lr: float = 0.5,
        momentum: float = 0.0,
        value: float = 10.0,
        one_outer: bool = True,
        **settings: Any,
    ) -> None:
        self.rig = rig
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        fragments = [self.model] if num_fragments == 1 else list(self.model)
        modules = [self.model] if one_outer else fragments
        self.outer = [torch.optim.SGD(module.parameters(), lr=outer_lr, momentum=momentum) for module in modules]
        if algorithm == "local_sgd":
            self.strategy: Any = LocalSGD(rig.manager, self.model, self.inner, sync_every, **settings)
        else:
            outer = self.outer[0] if one_outer else self.outer
            self.strategy = DiLoCo(rig.manager, fragments, self.inner, outer, sync_every, **settings)

    def __enter__(self) -> Trainer:
        self.strategy.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.strategy.__exit__(*error)

    def train(self, inner_steps: int = 1) -> None:
        for _ in range(inner_steps):
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            self.inner.step()

    @property
    def weights(self) -> list[float]:
        return [parameter.item() for parameter in self.model.parameters()]

    @property
    def sent(self) -> list[float]:
        """What was given to the reductions, in order, without the scale of a mean over two or one."""
        if not self.rig.group.calls:
            return []
        # The number of participants waits for the quorum that was asked for last, which may be held back by a test.
        scale = self.rig.manager.num_participants() if self.rig.manager.strategy.quorum_is_known() else 2
        return [value * scale for call in self.rig.group.calls for value in call.flatten().tolist()]


def global_weights(trainer: Trainer) -> list[torch.Tensor]:
    """In the order of the fragments."""
    state = trainer.strategy.state_dict()
    parts = [state] if "original_parameters" in state else state.values()
    return [weight for part in parts for weight in part["original_parameters"].values()]


class Shelf(dict[Any, Any]):
    """Of memory transports: holds copies, as a real one sends."""

    def __setitem__(self, key: Any, state: Any) -> None:
        super().__setitem__(key, copy.deepcopy(state))


@pytest.fixture(params=["diloco", "local_sgd"])
def algorithm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- the opening ------------------------------------------------------------------------------------------------------


def test_the_opening_is_a_commit_without_a_reduction(rigs: Any, algorithm: str) -> None:
    rig = rigs(plan_of(7, size=2))
    with Trainer(rig, algorithm=algorithm):
        assert rig.coordinator.votes == [(SAME, 0, True, Purpose.COMMIT)]
        assert (rig.group.calls, rig.manager.current_step()) == ([], 1)
        assert rig.coordinator.requests[0].use_async_quorum


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_opening_that_fails_is_tried_again(rigs: Any, asynchronous: bool) -> None:
    answers = [RequestTimeoutError("nobody came"), plan_of(7, size=2), SAME]
    rig = rigs(*answers, verdicts=[False, True], use_async_quorum=asynchronous)
    with Trainer(rig):
        assert rig.manager.current_step() == 1
        assert len(rig.coordinator.votes) == 2


def test_all_begin_with_the_weights_of_the_first(rigs: Any, algorithm: str) -> None:
    shelf = Shelf()
    plans = [plan_of(7, rank=rank, size=2, healing=[1]) for rank in (0, 1)]
    first, second = (rigs(plan, checkpoint_transport=MemoryTransport(shelf)) for plan in plans)
    with Trainer(first, algorithm=algorithm, value=3.0) as one, Trainer(second, algorithm=algorithm, value=8.0) as two:
        assert one.weights == two.weights == [3.0, 3.0]
        assert second.manager.current_step() == 1


def test_who_has_loaded_a_durable_checkpoint_opens_nothing(rigs: Any, algorithm: str) -> None:
    rig = rigs(plan_of(7, step=5, lineage=9, size=2), others=0.0)
    trainer = Trainer(rig, algorithm=algorithm)
    saved = Trainer(rigs(plan_of(7)), algorithm=algorithm, value=4.0).strategy.state_dict()
    rig.manager.load_state_dict({"step": 5, "batches_committed": 10, "lineage": f"{9:016x}"})
    trainer.strategy.load_state_dict(saved)
    with trainer:
        assert trainer.weights == [4.0, 4.0]
        assert rig.coordinator.requests == []
        trainer.train(2)
        assert rig.manager.current_step() == 6


# --- who comes later --------------------------------------------------------------------------------------------------


def pair(rigs: Any, algorithm: str, *, step: int = 3, fails: bool = False, **settings: Any) -> tuple[Trainer, Trainer]:
    """A member at some step, and a newcomer whose first plan is that of the same sync."""
    shelf = Shelf()
    plans = [plan_of(7, step=step, rank=rank, size=2, healing=[1]) for rank in (0, 1)]
    verdicts = [False] if fails else []
    old = rigs(plans[0], checkpoint_transport=MemoryTransport(shelf), verdicts=verdicts)
    new = rigs(plans[1], checkpoint_transport=MemoryTransport(shelf), verdicts=verdicts)
    old.manager.load_state_dict({"step": step, "batches_committed": 4, "lineage": f"{plans[0].lineage:016x}"})
    return (
        Trainer(old, algorithm=algorithm, value=3.0, **settings),
        Trainer(new, algorithm=algorithm, value=8.0, **settings),
    )


def test_a_newcomer_adopts_at_the_next_fragment(rigs: Any, algorithm: str) -> None:
    """It gives zeros, which do not count, and holds at once what the others hold after the sync."""
    old, new = pair(rigs, algorithm)
    given = new.rig.group.others = {"diloco": 2.0, "local_sgd": 1.0}[algorithm]
    with old:
        old.train(2)
        with new:
            assert (old.sent, new.sent) == ([given, given], [0.0, 0.0])
            assert new.weights == old.weights == {"diloco": [2.0, 2.0], "local_sgd": [1.0, 1.0]}[algorithm]
            assert (new.rig.manager.current_step(), new.rig.manager.batches_committed()) == (4, 5)
            new.train(1)
            assert len(new.rig.coordinator.requests) == 1  # the next sync is that of the others


def test_a_newcomer_trains_from_the_global_weights_while_the_sync_is_under_way(rigs: Any) -> None:
    old, new = pair(rigs, "diloco", fragment_sync_delay=1)
    with old:
        old.train(1)
        old.rig.manager.wait_quorum()
        old.rig.manager.strategy.exchange_state()
        with new:
            assert (old.weights, new.weights) == ([2.0, 2.0], [3.0, 3.0])
            new.train(1)
            assert new.rig.manager.current_step() == 4


def test_a_newcomer_takes_the_outer_optimizers_state_and_holds_the_same_after_its_first_sync(rigs: Any) -> None:
    old, new = pair(rigs, "diloco", sync_every=4, fragment_sync_delay=2, momentum=0.9)
    for parameter in old.outer[0].param_groups[0]["params"]:
        old.outer[0].state[parameter]["momentum_buffer"] = torch.full((1, 1), 0.25)
    with old:
        old.train(2)
        old.rig.manager.wait_quorum()
        old.train(1)
        new.rig.group.others = 2.0  # what the other one gives
        with new:
            new.train(2)
            old.train(1)
            assert (old.rig.manager.current_step(), new.rig.manager.current_step()) == (4, 4)
            assert digest(old.strategy.state_dict()) == digest(new.strategy.state_dict())
            # 3 - 0.5 * (0.9 * 0.25 + 2), which is where both go on from
            assert old.weights == new.weights == pytest.approx([1.8875] * 2)


def test_a_newcomer_goes_on_from_the_global_weights_if_its_first_sync_fails(rigs: Any, algorithm: str) -> None:
    old, new = pair(rigs, algorithm, fails=True)
    with old:
        old.train(2)
        with new:
            assert old.weights == new.weights == [3.0, 3.0]
            assert new.rig.manager.current_step() == 3


def test_whose_healing_fails_asks_again_at_the_next_sync(rigs: Any, algorithm: str) -> None:
    plans = [plan_of(quorum, step=3, rank=1, size=2, healing=[1]) for quorum in (7, 8)]
    rig = rigs(*plans)  # nobody offers the state
    with Trainer(rig, algorithm=algorithm, value=8.0) as trainer:
        assert trainer.weights == [8.0, 8.0]
        trainer.train(2)
        assert (rig.coordinator.requests[1].step, rig.manager.current_step()) == (0, 0)
        assert [yes for _, _, yes, _ in rig.coordinator.votes] == [False, False]


# --- a sync -----------------------------------------------------------------------------------------------------------


def test_the_outer_optimizer_steps_from_the_global_weights_with_the_mean(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), SAME, others=2.0)
    with Trainer(rig) as trainer:
        trainer.train(1)
        assert trainer.weights == [9.0, 9.0]
        trainer.train(1)
        assert trainer.sent == [2.0, 2.0]
        assert trainer.weights == [10 - 0.5 * (2 + 4) / 2] * 2
        assert rig.manager.current_step() == 2


def test_local_sgd_takes_the_mean_of_the_parameters(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), SAME, others=2.0)
    with Trainer(rig, algorithm="local_sgd") as trainer:
        trainer.train(2)
        assert trainer.sent == [8.0, 8.0]
        assert trainer.weights == [6.0, 6.0]


def test_local_sgd_synchronizes_when_it_is_told(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), SAME, SAME, others=2.0)
    with Trainer(rig, algorithm="local_sgd") as trainer:
        trainer.train(1)
        trainer.strategy.sync()
        assert (trainer.weights, rig.manager.current_step()) == ([6.5, 6.5], 2)
        trainer.train(1)
        assert rig.manager.current_step() == 2
        trainer.train(1)
        assert rig.manager.current_step() == 3


def test_one_fragment_after_the_other(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), *[SAME] * 3)
    with Trainer(rig, num_fragments=2, sync_every=4) as trainer:
        trainer.train(2)
        assert (trainer.sent, trainer.weights) == ([2.0], [9.5, 8.0])
        trainer.train(2)
        assert (trainer.sent, trainer.weights) == ([2.0, 4.0], [7.5, 9.0])


def test_no_quorum_stops_training_and_what_is_sent_is_that_of_the_start(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), SAME, others=2.0)
    answered = threading.Event()
    with Trainer(rig, sync_every=4, fragment_sync_delay=3) as trainer:
        ask = rig.coordinator.quorum
        rig.coordinator.quorum = lambda *question: (answered.wait(30), ask(*question))[1]
        trainer.train(2)
        assert (trainer.sent, trainer.weights) == ([], [8.0, 8.0])
        answered.set()
        rig.manager.wait_quorum()
        trainer.train(1)
        assert trainer.sent == [1.0, 1.0]
        trainer.train(1)
        assert trainer.weights == [10 - 0.5 * (1 + 4) / 2] * 2


def test_the_end_of_a_sync_waits_for_its_quorum(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), SAME, others=2.0)
    answered = threading.Event()
    with Trainer(rig, fragment_sync_delay=1) as trainer:
        ask = rig.coordinator.quorum
        rig.coordinator.quorum = lambda *question: (answered.wait(30), ask(*question))[1]
        trainer.train(1)
        threading.Timer(0.05, answered.set).start()
        trainer.train(1)
        assert (trainer.sent, trainer.weights) == ([1.0, 1.0], [8.75, 8.75])


def test_what_was_trained_meanwhile_is_merged(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), SAME, others=2.0)
    with Trainer(rig, sync_every=4, fragment_sync_delay=1, fragment_update_alpha=0.25) as trainer:
        trainer.train(4)
        assert trainer.weights == [0.75 * (10 - 0.5 * (3 + 4) / 2) + 0.25 * 6] * 2
        (shared,) = trainer.strategy.state_dict().values()
        assert [value.item() for value in shared["original_parameters"].values()] == [8.25, 8.25]


def test_each_fragment_has_its_own_outer_optimizer_or_all_have_one(rigs: Any) -> None:
    for one_outer in (True, False):
        rig = rigs(plan_of(7, size=2), *[SAME] * 4)
        with Trainer(rig, num_fragments=2, sync_every=2, momentum=0.5, one_outer=one_outer) as trainer:
            trainer.train(4)
            assert [len(outer.state) for outer in trainer.outer] == ([2] if one_outer else [1, 1])
            states = trainer.strategy.state_dict()
            assert ["outer_optimizer" in state for state in states.values()] == [True, not one_outer]


def test_the_users_gradients_are_put_aside_and_back(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), SAME)
    with Trainer(rig, num_fragments=2) as trainer:
        trainer.train(1)
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        assert rig.manager.current_step() == 2
        assert all(gradient is not None and gradient.item() == 1.0 for gradient in gradients)


def test_the_user_may_clear_and_accumulate_gradients_in_any_way(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), SAME, SAME)
    with Trainer(rig, sync_every=1) as trainer:
        trainer.train(1)
        trainer.inner.zero_grad()
        assert [parameter.grad for parameter in trainer.model.parameters()] == [None, None]
        trainer.model[0].weight.grad = torch.ones(1, 1)
        trainer.inner.step()
        assert trainer.model[1].weight.grad is None
        assert rig.manager.current_step() == 3


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["call", "wait", "verdict", "quorum"])
def test_a_sync_that_fails_restores_the_last_global_weights_exactly(rigs: Any, algorithm: str, how: str) -> None:
    """LocalSGD, too. And no sync commits on a failed reduction."""
    answers = [RequestTimeoutError("nobody came")] if how == "quorum" else []
    verdicts = [True, False] if how == "verdict" else []
    rig = rigs(plan_of(7, size=2), *answers, plan_of(8, step=1, size=2), verdicts=verdicts)
    with Trainer(rig, algorithm=algorithm, value=0.1) as trainer:
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        if how in ("call", "wait"):
            setattr(rig.group, f"failing_{how}", RuntimeError("the cable"))
        if how == "verdict":
            rig.coordinator.quorum = lambda *_: SAME
        trainer.train(2)
        assert all(map(torch.equal, before, trainer.model.parameters()))
        assert rig.manager.current_step() == 1
        if how in ("call", "wait"):
            assert [yes for _, _, yes, _ in rig.coordinator.votes] == [True, False]
            assert rig.manager.state_dict()["step"] == 1


def test_a_failed_fragment_leaves_the_others_alone_and_is_synchronized_next(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), SAME, plan_of(8, step=1, size=2), verdicts=[True, False])
    with Trainer(rig, num_fragments=2, sync_every=4) as trainer:
        trainer.train(2)
        assert trainer.weights == [10.0, 8.0]
        trainer.train(2)
        assert (trainer.sent, trainer.weights) == ([2.0, 2.0], [9.5, 6.0])  # the next sync is about the same one


def test_a_reduction_that_fails_after_the_group_was_configured_anew_counts(rigs: Any) -> None:
    """Success is that of the reduction which was started, whatever the process group says of itself later."""
    rig = rigs(plan_of(7, size=2), SAME)
    with Trainer(rig, sync_every=2, fragment_sync_delay=1) as trainer:
        rig.group.failing_wait = RuntimeError("the cable")
        trainer.train(1)
        rig.manager.wait_quorum()
        rig.manager.strategy.exchange_state()
        if not rig.group.calls:
            trainer.strategy._loop._synchronizer._begin()
        rig.group.configure("localhost:1", 0, 2)
        assert rig.group.errored() is None
        trainer.train(1)
        assert (rig.manager.current_step(), trainer.weights) == (1, [10.0, 10.0])


def test_an_outer_optimizer_that_raises_leaves_a_state_that_heals(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), SAME)
    with Trainer(rig) as trainer:

        def raises(*_: Any) -> None:
            raise RuntimeError("the outer optimizer")

        trainer.outer[0].register_step_pre_hook(raises)
        with pytest.raises(RuntimeError, match="the outer optimizer"):
            trainer.train(2)
        assert rig.manager.status().is_torn
        assert [parameter.grad.item() for parameter in trainer.model.parameters() if parameter.grad is not None] == [
            1.0,
            1.0,
        ]


def test_too_many_failures_are_told_with_the_weights_restored(rigs: Any, algorithm: str) -> None:
    rig = rigs(plan_of(7, size=2), SAME, plan_of(8, step=1, size=2), verdicts=[True, False], max_retries=0)
    with Trainer(rig, algorithm=algorithm) as trainer:
        with pytest.raises(TooManyFailuresError, match="failed to commit 1 times in a row"):
            trainer.train(2)
        assert trainer.weights == [10.0, 10.0]
        trainer.train(2)  # who catches it may go on
        assert rig.manager.current_step() == 2


def test_the_hook_is_gone_with_the_context_and_an_exception_passes(rigs: Any, algorithm: str) -> None:
    rig = rigs(plan_of(7, size=2))
    with pytest.raises(ZeroDivisionError), Trainer(rig, algorithm=algorithm) as trainer:
        raise ZeroDivisionError
    trainer.train(10)
    assert len(rig.coordinator.requests) == 1


def test_after_leaving_nothing_more_is_synchronized(rigs: Any, algorithm: str) -> None:
    rig = rigs(plan_of(7, size=2), SAME)
    with Trainer(rig, algorithm=algorithm) as trainer:
        rig.manager.leave(reason="it is told to")
        trainer.train(2)
        assert (rig.manager.left, rig.manager.current_step()) == (True, 2)
        with pytest.raises(LeftJob, match="it is told to"):  # a loop that ends by its count would never end
            trainer.train(1)
        assert len(rig.coordinator.requests) == 2


# --- several in flight ------------------------------------------------------------------------------------------------

TWO_IN_FLIGHT: Any = {"num_fragments": 2, "sync_every": 4, "fragment_sync_delay": 3}  # S0 _ S1 E0 S0 E1 S1 E0


def test_several_fragments_are_in_flight_and_end_in_their_order(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), *[SAME] * 4)
    with Trainer(rig, **TWO_IN_FLIGHT) as trainer:
        trainer.train(3)
        rig.manager.wait_quorum()
        assert rig.manager.strategy.num_deferred == 1
        assert [request.step for request in rig.coordinator.requests] == [0, 1, 1]  # committed steps only
        trainer.train(1)
        assert (trainer.sent, trainer.weights) == ([1.0, 3.0], [9.75, 6.0])
        trainer.train(2)
        assert (trainer.sent, trainer.weights) == ([1.0, 3.0, 1.0], [7.75, 9.25])
        assert [(step, yes) for _, step, yes, _ in rig.coordinator.votes] == [(0, True), (1, True), (2, True)]


def test_a_quorum_that_changes_fails_all_in_flight_and_the_latest_goes_on(rigs: Any) -> None:
    """Without votes. The latest is then about the fragment that is next, whose weights are the global ones again."""
    rig = rigs(plan_of(7, size=2), SAME, plan_of(8, step=1, size=2), QuorumKey(8, 8))
    answered = threading.Event()
    with Trainer(rig, **TWO_IN_FLIGHT) as trainer:
        trainer.train(1)
        rig.manager.wait_quorum()
        trainer.train(1)
        ask = rig.coordinator.quorum
        rig.coordinator.quorum = lambda *question: (answered.wait(30), ask(*question))[1]
        trainer.train(1)
        assert (trainer.sent, trainer.weights) == ([1.0], [7.0, 7.0])
        answered.set()
        rig.manager.wait_quorum()
        trainer.train(1)
        assert (trainer.sent, trainer.weights) == ([1.0, 0.0], [10.0, 6.0])
        assert [key.quorum_id for key, *_ in rig.coordinator.votes] == [7]
        trainer.train(2)
        assert trainer.sent == [1.0, 0.0, 5.0]  # the end of the one waits for the quorum of the other
        assert [(key.quorum_id, step) for key, step, *_ in rig.coordinator.votes] == [(7, 0), (8, 1)]
        assert (rig.manager.current_step(), trainer.weights) == (2, [10.0, 4.0])


def test_one_that_fails_fails_all_in_flight(rigs: Any) -> None:
    """Without votes on the others; the next one begins when it would have, about the same fragment."""
    rig = rigs(plan_of(7, size=2), SAME, SAME, plan_of(8, step=1, size=2), verdicts=[True, False])
    with Trainer(rig, **TWO_IN_FLIGHT) as trainer:
        trainer.train(4)
        assert (trainer.sent, trainer.weights) == ([1.0, 3.0], [10.0, 10.0])
        assert len(rig.coordinator.votes) == 2
        trainer.train(1)
        rig.manager.wait_quorum()
        trainer.train(1)
        assert trainer.sent == [1.0, 3.0, 1.0]
        assert (trainer.weights, rig.manager.strategy.num_deferred, len(rig.coordinator.votes)) == ([8.0, 8.0], 0, 2)


def test_a_reduction_that_fails_is_voted_down_with_all_that_began_after_it(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), SAME, SAME)
    with Trainer(rig, **TWO_IN_FLIGHT) as trainer:
        rig.group.failing_wait = RuntimeError("the cable")
        trainer.train(4)
        assert [yes for _, _, yes, _ in rig.coordinator.votes] == [True, False]
        assert trainer.weights == [10.0, 10.0]


def test_a_newcomer_gets_the_state_of_before_all_that_was_in_flight(rigs: Any) -> None:
    shelf = Shelf()
    answers = [plan_of(7, size=1), SAME, plan_of(8, step=1, size=2, healing=[1])]
    rig = rigs(*answers, checkpoint_transport=MemoryTransport(shelf))
    with Trainer(rig, **TWO_IN_FLIGHT) as trainer:
        trainer.train(3)
        rig.manager.wait_quorum()
        trainer.train(1)
        plan = plan_of(8, step=1, rank=1, size=2, healing=[1], lineage=rig.manager.strategy.wait_plan().lineage)
        # The lineages of scripted plans are those of a fresh state; the one that was served names its own.
        (state,) = shelf.values()
        assert state["tft"]["step"] == plan.step
        served = state["user"]["StreamingDiLoCoFragment_0"]["original_parameters"]
        assert [weight.item() for weight in served.values()] == [10.0]


def test_what_is_in_flight_when_the_context_is_left_fails(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), SAME, SAME, plan_of(8, step=1, size=2), QuorumKey(8, 8))
    trainer = Trainer(rig, **TWO_IN_FLIGHT)
    with trainer:
        trainer.train(3)
    assert (rig.manager.strategy.num_deferred, trainer.weights) == (0, [10.0, 10.0])
    with trainer:
        assert trainer.weights == [10.0, 10.0]
        assert len(rig.coordinator.votes) == 1
        trainer.train(4)
        assert (rig.manager.current_step(), trainer.weights[0]) == (2, 9.75)


def test_who_leaves_loses_what_has_not_ended(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), SAME, SAME)
    with Trainer(rig, **TWO_IN_FLIGHT) as trainer:
        trainer.train(3)
        rig.manager.leave(reason="it is told to")
        trainer.train(1)
        assert (rig.manager.left, rig.manager.current_step()) == (True, 2)
        with pytest.raises(LeftJob, match="it is told to"):
            trainer.train(1)
        assert len(rig.coordinator.requests) == 3


# --- what is reduced --------------------------------------------------------------------------------------------------

SIZES = [(60, 60, 60), (150, 10), (1,), (101, 99, 100, 7, 1)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("cap", [100, 7, 1, None])
def test_every_tensor_is_averaged_whatever_the_buckets(rigs: Any, sizes: tuple[int, ...], cap: int | None) -> None:
    """Buckets that tensors do not tile, and tensors that do not fit a bucket: nothing is skipped, nothing lost."""
    rig = rigs(plan_of(7, size=2), SAME, others=2.0)
    model = torch.nn.Module()
    for index, size in enumerate(sizes):
        model.register_parameter(f"p{index}", torch.nn.Parameter(torch.arange(size, dtype=torch.float32)))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = torch.optim.SGD(model.parameters(), lr=0.5)
    strategy = DiLoCo(
        rig.manager,
        [model],
        inner,
        outer,
        1,
        use_bucketization=cap is not None,
        bucket_cap_mb=(cap or 1) * 4 / 2**20,
    )
    with strategy:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        inner.step()
    for parameter in model.parameters():
        assert torch.equal(parameter, torch.arange(parameter.numel()) - 0.5 * (1 + 4) / 2)
    counts = [call.numel() for call in rig.group.calls]
    total = sum(sizes)
    if cap is None:
        assert counts == list(sizes)
    else:
        assert counts == [cap] * (total // cap) + ([total % cap] if total % cap else [])


def test_dtypes_do_not_share_a_reduction() -> None:
    like = [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, 2), torch.zeros(0)]
    buffers = FlatBuffers(like)
    assert [(flat.dtype, flat.numel()) for flat in buffers.flats] == [(torch.float32, 7), (torch.bfloat16, 2)]
    assert [view.shape for view in buffers.views] == [one.shape for one in like]
    assert [part.numel() for part in buffers.slices(16)] == [4, 3, 2]
    assert [part.numel() for part in buffers.slices(None)] == [3, 2, 4]
    for number, view in enumerate(buffers.views):
        view.fill_(number)
    assert buffers.flats[0].tolist() == [0, 0, 0, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("uses", "environ", "expected"),
    [
        (None, {}, None),
        (True, {}, 3 << 20),
        (None, {"TORCHFT_USE_BUCKETIZATION": "True"}, 3 << 20),
        (None, {"TFT_USE_BUCKETIZATION": "false", "TORCHFT_USE_BUCKETIZATION": "True"}, None),
        (False, {"TFT_USE_BUCKETIZATION": "1"}, None),
    ],
)
def test_an_argument_beats_the_environment(uses: bool | None, environ: dict[str, str], expected: int | None) -> None:
    assert bucket_bytes(uses, 3, environ) == expected


def test_settings_of_buckets_that_can_not_be_are_refused() -> None:
    assert bucket_bytes(True, None, {}) == 2**30
    with pytest.raises(ConfigError, match="bucket_cap_mb is 0; give the size of a bucket in MiB, above zero"):
        bucket_bytes(True, 0, {})
    with pytest.raises(ConfigError, match="TFT_USE_BUCKETIZATION is 'perhaps'; give True or False"):
        bucket_bytes(None, None, {"TFT_USE_BUCKETIZATION": "perhaps"})


@pytest.mark.parametrize(("delay", "shares"), [(0, True), (2, True), (3, False)])
def test_fragments_that_are_not_in_flight_together_share_memory(rigs: Any, delay: int, shares: bool) -> None:
    rig = rigs()
    model = torch.nn.ModuleList([torch.nn.Linear(2, 3), torch.nn.Linear(4, 5)])
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    settings: Any = {"fragment_sync_delay": delay, "fragment_update_alpha": 0.5}
    strategy = DiLoCo(rig.manager, list(model), inner, torch.optim.SGD(model.parameters()), 4, **settings)
    sent = [fragment._sent.flats[0] for fragment in strategy._loop._fragments]
    kept = [fragment._kept.flats[0] for fragment in strategy._loop._fragments if fragment._kept is not None]
    assert [flat.numel() for flat in sent] == [flat.numel() for flat in kept] == [9, 25]
    assert (sent[0].data_ptr() == sent[1].data_ptr()) is shares
    assert kept[0].data_ptr() == kept[1].data_ptr() != sent[0].data_ptr()
    shared = [fragment._global.flats[0].data_ptr() for fragment in strategy._loop._fragments]
    assert len({*shared}) == 2


class Allocations(TorchDispatchMode):
    """Counts what is allocated inside: outputs that are in nobody's memory."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, list | tuple) else [result]:
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in self._known:
                self.made.append(str(func))
        return result


def test_a_sync_allocates_nothing() -> None:
    model = torch.nn.Linear(3, 4)
    fragment = Fragment(dict(model.named_parameters()), what="the model", keeps_local=True)
    assert fragment._kept is not None
    known = [*model.parameters(), *fragment.slices, *fragment._global.flats, *fragment._kept.flats]
    with Allocations(known) as allocations:
        fragment.capture_difference()
        fragment.capture_parameters()
        fragment.keep_local()
        fragment.restore()
        fragment.gradients()
        fragment.adopt()
        fragment.save()
        fragment.merge(0.5)
    assert allocations.made == []


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """Torch's own default group, of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_sharded_parameters_are_synchronized_as_whole_ones_are(rigs: Any, algorithm: str) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    found = []
    for sharded in (False, True):
        rig = rigs(plan_of(7, size=2), *[SAME] * 3, others=2.0)
        trainer = Trainer.__new__(Trainer)
        trainer.rig = rig
        trainer.model = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False))
        whole = torch.arange(6.0).view(3, 2)
        weight = distribute_tensor(whole, mesh, [Shard(0)]) if sharded else whole
        trainer.model[0].weight = torch.nn.Parameter(weight)
        trainer.inner = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        if algorithm == "local_sgd":
            trainer.strategy = LocalSGD(rig.manager, trainer.model, trainer.inner, 2)
        else:
            outer = torch.optim.SGD(trainer.model.parameters(), lr=0.5, momentum=0.9)
            trainer.strategy = DiLoCo(
                rig.manager,
                [trainer.model],
                trainer.inner,
                outer,
                2,
                fragment_sync_delay=1,
                fragment_update_alpha=0.25,
            )
        with trainer:
            trainer.train(4)
        parameter = trainer.model[0].weight
        assert isinstance(parameter.data, DTensor) is sharded
        found.append(extract_local_tensor(parameter))
        state = next(iter(trainer.strategy.state_dict().values()))
        saved = next(iter(state.get("original_parameters", state).values()))
        assert isinstance(saved, DTensor) is sharded
        before = extract_local_tensor(saved)
        trainer.strategy.load_state_dict(trainer.strategy.state_dict())
        assert torch.equal(extract_local_tensor(trainer.model[0].weight), before)
    assert torch.equal(*found)


def test_a_local_copy_has_no_gradient_and_its_own_memory() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    copy = extract_local_tensor(parameter)
    assert (copy.requires_grad, copy.grad) == (False, None)
    copy.zero_()
    assert parameter.tolist() == [1.0, 1.0]


def test_strategies_can_be_put_on_a_wrapped_optimizer(rigs: Any, algorithm: str) -> None:
    """Its hooks run when it steps, so a sync comes after so many committed steps of the Manager inside."""
    outside = rigs(plan_of(7, size=2), SAME, others=2.0)
    inside = rigs(plan_of(7), *[SAME] * 3, verdicts=[True, False, True])
    trainer = Trainer(outside, algorithm=algorithm)
    wrapped = Optimizer(inside.manager, trainer.inner)
    if algorithm == "local_sgd":
        with pytest.raises(ConfigError, match="that already runs the syncs of a LocalSGD"):
            LocalSGD(outside.manager, trainer.model, wrapped, 2)
    outside = rigs(plan_of(7, size=2), SAME, others=2.0)
    strategy: Any = (
        LocalSGD(outside.manager, trainer.model, wrapped, 2)
        if algorithm == "local_sgd"
        else DiLoCo(outside.manager, [trainer.model], wrapped, trainer.outer[0], 2)
    )
    with strategy:
        for steps in (1, 1, 2):
            wrapped.zero_grad()
            for parameter in trainer.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            wrapped.step()
            assert outside.manager.current_step() == steps
    assert wrapped.defaults["lr"] == 1.0


def test_frozen_parameters_are_not_sent_but_newcomers_get_them() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    fragment = Fragment(dict(model.named_parameters()), what="the model")
    assert [part.numel() for part in fragment.slices] == [2]
    other = torch.nn.Linear(2, 2)
    fragment.load_state_dict({name: value.detach() for name, value in other.named_parameters()})
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


def test_a_state_of_another_model_is_refused_and_changes_nothing() -> None:
    model = torch.nn.Linear(2, 2)
    fragment = Fragment(dict(model.named_parameters()), what="fragment 1")
    before = digest(dict(model.named_parameters()))
    with pytest.raises(UserStateError, match="the state of fragment 1 has the parameters"):
        fragment.load_state_dict({"weight": torch.zeros(2, 2)})
    with pytest.raises(UserStateError, match="bias of fragment 1 has the shape"):
        fragment.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(1)})
    assert digest(dict(model.named_parameters())) == before


def test_a_shared_parameter_belongs_to_the_first_fragment(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), *[SAME] * 2)
    first, second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2)
    second.weight = first.weight
    parameters = list({*first.parameters(), *second.parameters()})
    inner = torch.optim.SGD(parameters, lr=1.0)
    outer = torch.optim.SGD(parameters, lr=1.0)
    with DiLoCo(rig.manager, [first, second], inner, outer, 2) as strategy:
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            inner.step()
    names = [list(state["original_parameters"]) for state in strategy.state_dict().values()]
    assert names == [["weight"], ["bias"]]
    assert [call.numel() for call in rig.group.calls] == [4, 2]


def test_an_outer_optimizer_is_loaded_in_the_dtypes_that_came(rigs: Any) -> None:
    """Torch casts what an optimizer keeps to the dtype of the parameter: here a float32 product to bfloat16."""
    strategies, outers = [], []
    for _ in range(2):
        model = torch.nn.Linear(2, 2).to(torch.bfloat16)
        outers.append(torch.optim.NAdam(model.parameters()))
        inner = torch.optim.SGD(model.parameters())
        strategies.append(DiLoCo(rigs().manager, [model], inner, outers[-1], 2))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    for _ in range(3):
        outers[0].step()
    strategies[1].load_state_dict(copy.deepcopy(strategies[0].state_dict()))
    came, here = (list(outer.state.values()) for outer in outers)
    assert here[0]["mu_product"].dtype == torch.float32
    for entries, own in zip(came, here, strict=True):
        assert all(own[key].dtype == value.dtype and own[key].equal(value) for key, value in entries.items())


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sync_every": 3}, "sync_every is 3, which 2 fragments don't divide"),
        ({"sync_every": 1}, "sync_every is 1 and there are 2 fragments"),
        ({"sync_every": 4, "fragment_sync_delay": 4}, "fragment_sync_delay is 4 and sync_every 4"),
        ({"fragment_update_alpha": 1.5}, "fragment_update_alpha is 1.5; give a number from 0 to 1"),
        ({"fragment_update_alpha": float("nan")}, "fragment_update_alpha is nan"),
        ({"use_bucketization": "False"}, "use_bucketization is 'False'; give True or False"),
        ({"pin_memory": None}, "pin_memory is None; give True or False"),
        ({"backup_device": "cupboard"}, "backup_device is 'cupboard'; give a device of this process"),
        ({"backup_device": "vulkan"}, "backup_device is 'vulkan'; give a device of this process"),
        ({"backup_device": "hpu"}, "backup_device is 'hpu'; give a device of this process"),
        ({"backup_device": "meta"}, "backup_device is meta, which stores no data"),
    ],
)
def test_settings_that_can_not_be_are_refused(rigs: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(rigs(), num_fragments=2, **change)


def test_a_group_that_cannot_quantize_is_refused_and_nothing_is_done_in_its_place(rigs: Any) -> None:
    with pytest.raises(UnsupportedFeatureError, match="a FakeGroup has no alltoall_base"):
        Trainer(rigs(), should_quantize=True)


def test_only_a_codec_or_feedback_of_this_manager_quantizes(rigs: Any) -> None:
    with pytest.raises(ConfigError, match="should_quantize is 'int8'"):
        Trainer(rigs(), should_quantize="int8")
    with pytest.raises(ConfigError, match="another Manager"):
        Trainer(rigs(), should_quantize=ErrorFeedback(rigs().manager))


def test_optimizers_that_do_not_fit_are_refused(rigs: Any) -> None:
    rig = rigs()
    one, two = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    inner = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=1.0)
    outer = [torch.optim.SGD(module.parameters(), lr=1.0) for module in (one, two)]
    both = torch.optim.SGD([*one.parameters(), *two.parameters()])
    for arguments, message in [
        (([one], inner, outer[0], 2), "trains 2 parameters that are in none of the synchronized modules"),
        (([one, two], inner, outer[0], 2), "the outer optimizer of fragment 1 lacks 2 of its parameters, such as w"),
        (([one, two], inner, [*outer, inner], 2), "there are 3 outer optimizers and 2 fragments"),
        (([one, two], Optimizer(rig.manager, inner), outer, 2), "is an Optimizer on the same Manager"),
        (([one, two], inner, [Optimizer(rig.manager, outer[0]), outer[1]], 2), "give a torch optimizer, whose steps"),
        (([one, two], "adam", outer, 2), "the inner optimizer is a str"),
        (([one, two], inner, inner, 2), "an outer optimizer is also the inner optimizer"),
        (([one, two], Optimizer(rigs().manager, both), both, 2), "an outer optimizer is also the inner optimizer"),
        (([one, two], inner, None, 2), "outer_optimizer is None; give a torch optimizer for all"),
        (([one, two], inner, "sgd", 2), "outer_optimizer is 'sgd'; give a torch optimizer for all"),
        (([one], outer[0], torch.optim.LBFGS(one.parameters()), 2), "is a LBFGS, which computes the loss again"),
        ((one, inner, outer[0], 2), "model_fragments is not a list of modules"),
        (([], inner, outer[0], 2), "model_fragments is not a list of modules"),
        (([one, two, one], inner, both, 3), "fragment 2 has no trainable parameters of its own"),
        (([torch.nn.LazyLinear(2)], inner, outer[0], 2), "in none of the synchronized modules"),
    ]:
        with pytest.raises(ConfigError, match=message):
            DiLoCo(rig.manager, *arguments)
    with pytest.raises(ConfigError, match="manager is a str; give a Manager"):
        DiLoCo("manager", [one, two], inner, outer, 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model is a list; give a module"):
        LocalSGD(rig.manager, [one], inner, 2)  # type: ignore[arg-type]


def test_what_has_no_memory_yet_is_refused() -> None:
    lazy, meta = torch.nn.LazyLinear(2), torch.nn.Linear(2, 2, device="meta")
    for module in (lazy, meta):
        with pytest.raises(ConfigError, match="weight of fragment 0 has no memory yet; initialize the model first"):
            Fragment(dict(module.named_parameters()), what="fragment 0")


def test_replicas_that_go_by_other_rules_are_told_apart(rigs: Any) -> None:
    """By the fingerprint, so that they are refused by name before the first reduction."""
    found = []
    for settings in (
        {"algorithm": "local_sgd"},
        {},
        {"num_fragments": 2},
        {"use_bucketization": True},
        {"use_bucketization": True, "bucket_cap_mb": 32},
        {"fragment_sync_delay": 1, "fragment_update_alpha": 0.5, "sync_every": 4},  # may differ
    ):
        rig = rigs(plan_of(7, size=2))
        with Trainer(rig, **settings):  # type: ignore[arg-type]
            parts = dict(rig.coordinator.requests[0].fingerprint)
            found.append(tuple(value for name, value in sorted(parts.items()) if name.startswith("user/")))
    assert len(set(found)) == 5
    assert found[1] == found[5]


# --- mistakes of users: none commits what was not reduced, or loses a layer ------------------------------------------

IN_FLIGHT: Any = {"sync_every": 4, "fragment_sync_delay": 2}  # _ S _ E


def interrupt(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The next call of this method of the Manager's steps is Ctrl-C."""

    def strikes(*_: Any, **__: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.rig.manager._runner, where, strikes)


@pytest.mark.parametrize("where", ["start", "plan", "exchange_state", "end"])
def test_a_sync_that_was_broken_off_does_not_commit(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, algorithm: str, where: str
) -> None:
    """The one who catches Ctrl-C, as a notebook does, goes on from the last global weights."""
    rig = rigs(plan_of(7, size=2), *[SAME] * 5)
    with Trainer(rig, algorithm=algorithm) as trainer:
        trainer.train(1)
        interrupt(trainer, monkeypatch, where)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(1)
        begun = where != "start"
        assert trainer.weights == ([10.0, 10.0] if begun else [8.0, 8.0])
        trainer.train(1)
        assert (rig.manager.current_step(), len(rig.coordinator.votes)) == (1, 1)
        assert trainer.weights == ([9.0, 9.0] if begun else [7.0, 7.0])
        trainer.train(1)
        assert (rig.manager.current_step(), len(rig.group.calls) >= 2) == (2, True)
        assert rig.coordinator.requests[-1].needs_configure is begun  # the others may wait in the old one's reductions


@pytest.mark.parametrize("where", ["start", "defer", "plan", "_vote"])
def test_all_in_flight_fail_with_one_that_was_broken_off(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    rig = rigs(plan_of(7, size=2), *[SAME] * 9)
    with Trainer(rig, **TWO_IN_FLIGHT) as trainer:
        trainer.train(1)
        rig.manager.wait_quorum()
        trainer.train(1)
        interrupt(trainer, monkeypatch, where)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(2)
        assert (rig.manager.strategy.num_deferred, rig.manager.current_step()) == (0, 1)
        trainer.train(1)
        assert rig.manager.current_step() == 1
        trainer.train(8)
        assert rig.manager.current_step() > 2


@pytest.mark.parametrize("raised", [KeyboardInterrupt, None])
def test_after_leaving_what_was_in_flight_is_global_and_the_rest_as_it_was_trained(rigs: Any, raised: Any) -> None:
    """However it is left. What the user does with the weights then is not undone when he goes on."""
    rig = rigs(plan_of(7, size=2), SAME, plan_of(8, step=1, size=2), QuorumKey(8, 8))
    trainer = Trainer(rig, num_fragments=2, sync_every=4, fragment_sync_delay=1)  # S0 E0 S1 E1
    with contextlib.suppress(KeyboardInterrupt), trainer:
        trainer.train(1)
        rig.manager.wait_quorum()
        if raised is not None:
            raise raised
    assert trainer.weights == [10.0, 9.0]
    assert [weight.item() for weight in global_weights(trainer)] == [10.0, 10.0]
    with torch.no_grad():
        trainer.model[0].weight.fill_(4.0)
    with trainer:
        assert trainer.weights == [4.0, 9.0]
        trainer.train(1)
        rig.manager.wait_quorum()
        assert trainer.weights == [3.0, 8.0]
        trainer.train(1)
        assert (rig.manager.current_step(), trainer.sent[-1], trainer.weights[1]) == (2, 7.0, 7.0)


def test_between_syncs_it_is_left_with_the_weights_as_they_are_trained(rigs: Any, algorithm: str) -> None:
    rig = rigs(plan_of(7, size=2), SAME)
    with contextlib.suppress(KeyboardInterrupt), Trainer(rig, algorithm=algorithm) as trainer:
        trainer.train(1)
        raise KeyboardInterrupt
    assert trainer.weights == [9.0, 9.0]
    assert [weight.item() for weight in global_weights(trainer)] == [10.0, 10.0]
    with trainer:
        trainer.train(2)
        assert (rig.manager.current_step(), trainer.sent) == (
            2,
            {"diloco": [3.0] * 2, "local_sgd": [7.0] * 2}[algorithm],
        )


def another_optimizer(trainer: Trainer, *, of: Any = None, kind: Any = torch.optim.SGD) -> torch.optim.Optimizer:
    """As a script makes it that wants another learning rate."""
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer: torch.optim.Optimizer = kind(of or trainer.model.parameters(), lr=1.0)
    return optimizer


@pytest.mark.parametrize("kind", [torch.optim.SGD, functools.partial(torch.optim.AdamW, fused=True)])
def test_an_inner_optimizer_that_was_replaced_is_noticed(rigs: Any, algorithm: str, kind: Any) -> None:
    """When the first sync would have been."""
    rig = rigs(plan_of(7, size=2), *[SAME] * 3)
    with Trainer(rig, algorithm=algorithm, sync_every=3) as trainer:
        new = another_optimizer(trainer, kind=kind)
        for _ in range(3):
            new.step()
        with pytest.raises(
            UsageError,
            match=r"another \w+ has stepped 4 times with parameters of the inner optimizer, but the inner optimizer "
            r"\(a SGD\) has not stepped, so nothing is synchronized",
        ):
            new.step()
        trainer.train(3)
        assert rig.manager.current_step() == 2
    for _ in range(10):
        new.step()  # outside it may do as it likes


def test_optimizers_beside_the_inner_one_are_none_of_its_business(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), *[SAME] * 4)
    trainer = Trainer(rig, sync_every=1)
    trainer.inner = torch.optim.SGD(trainer.model[0].parameters(), lr=1.0)  # as where half is trained by another one
    with DiLoCo(rigs(plan_of(8), *[QuorumKey(8, 8)] * 3).manager, [trainer.model], trainer.inner, trainer.outer[0], 1):
        half = another_optimizer(trainer, of=trainer.model[1].parameters())
        stranger = another_optimizer(trainer, of=[torch.nn.Parameter(torch.ones(1))])
        same = another_optimizer(trainer)  # as a wrapper's, around each of its steps
        for _ in range(3):
            for _ in range(5):
                half.step()
                stranger.step()
            for _ in range(2):
                same.step()
            trainer.inner.step()


def test_nothing_hears_of_steps_when_all_are_left(rigs: Any) -> None:
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
    before = len(hooks)
    one, two = (Trainer(rigs(plan_of(number, size=2)), algorithm="local_sgd") for number in (7, 8))
    with one, two:
        assert len(hooks) == before + 1
    assert len(hooks) == before


def test_it_is_entered_once(rigs: Any, algorithm: str) -> None:
    rig = rigs(plan_of(7, size=2), *[SAME] * 3)
    with Trainer(rig, algorithm=algorithm) as trainer:
        with pytest.raises(
            UsageError, match="already entered, so it would count each step of the inner optimizer twice"
        ):
            trainer.strategy.__enter__()
        trainer.train(2)
        assert rig.manager.current_step() == 2
    with trainer:
        trainer.train(2)
        assert rig.manager.current_step() == 3


def test_a_manager_has_one_strategy(rigs: Any, algorithm: str) -> None:
    rig = rigs()
    Trainer(rig, algorithm=algorithm)
    for other in ("diloco", "local_sgd"):
        with pytest.raises(ConfigError, match="was given a Manager that already runs the syncs of a"):
            Trainer(rig, algorithm=other)


def test_what_is_unfrozen_or_added_later_is_not_left_out_silently(rigs: Any, algorithm: str) -> None:
    for how in ("unfrozen", "added", "given"):
        rig = rigs(plan_of(7, size=2), *[SAME] * 3)
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        model[0].requires_grad_(False)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        if algorithm == "local_sgd":
            strategy: Any = LocalSGD(rig.manager, model, inner, 1)
        else:
            strategy = DiLoCo(rig.manager, [model], inner, torch.optim.SGD(model.parameters()), 1)
        with strategy:
            inner.step()
            if how == "unfrozen":
                model[0].requires_grad_(True)
            elif how == "added":
                model.append(torch.nn.Linear(1, 1))
            else:
                inner.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
            with pytest.raises(ConfigError, match=r"is trained but not synchronized|was given 1 parameters"):
                inner.step()
            assert rig.manager.current_step() == 2


def test_a_model_that_is_converted_later_is_refused_before_anything_is_sent(rigs: Any, algorithm: str) -> None:
    for convert in (torch.nn.Module.bfloat16, lambda model: setattr(model[0].weight, "data", torch.ones(2, 1))):
        rig = rigs(plan_of(7, size=2), *[SAME] * 3)
        with Trainer(rig, algorithm=algorithm) as trainer:
            convert(trainer.model)
            trainer.train()
            with pytest.raises(ConfigError, match=r"0\.weight of .* was torch.float32 of shape \(1, 1\) when this"):
                trainer.train()
            assert (rig.manager.current_step(), rig.group.calls) == (1, [])


def test_a_state_that_is_loaded_by_hand_fails_what_is_in_flight(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), *[SAME] * 5)
    with Trainer(rig, **IN_FLIGHT) as trainer:
        state = copy.deepcopy(trainer.strategy.state_dict())
        for weight in state["StreamingDiLoCoFragment_0"]["original_parameters"].values():
            weight.fill_(100.0)
        trainer.train(3)
        trainer.strategy.load_state_dict(state)
        assert trainer.weights == [100.0, 100.0]
        trainer.train(1)
        assert (rig.manager.current_step(), trainer.weights) == (1, [100.0, 100.0])
        trainer.train(4)
        assert rig.manager.current_step() == 2


def test_a_state_that_does_not_fit_changes_nothing(rigs: Any) -> None:
    trainer = Trainer(rigs(), num_fragments=2, one_outer=False)
    good = copy.deepcopy(trainer.strategy.state_dict())
    for part in good.values():
        for weight in part["original_parameters"].values():
            weight.fill_(1.0)
    first, second = good
    groups = good[second]["outer_optimizer"]["param_groups"]
    no_states: list[dict[str, Any]] = [
        {"state": {}, "param_groups": []},
        {"state": {}, "param_groups": 3},
        {"state": {}, "param_groups": [3]},
        {"state": {}, "param_groups": [{}]},
        {"state": {}, "param_groups": [{"params": 0}]},
        {"state": 3, "param_groups": groups},
        {"state": {0: 3}, "param_groups": groups},
    ]
    for bad in (
        None,
        {},
        good | {second: None},
        good | {second: {}},
        good | {second: {"original_parameters": good[second]["original_parameters"]}},
        good | {second: good[second] | {"original_parameters": {"weight": 1.0}}},
        good | {second: good[second] | {"outer_optimizer": {}}},
        *(good | {second: good[second] | {"outer_optimizer": outer}} for outer in no_states),
        {first: good[first]},
    ):
        with pytest.raises(UserStateError):
            trainer.strategy.load_state_dict(bad)
        assert trainer.weights == [10.0, 10.0]
    other = Trainer(rigs(), algorithm="local_sgd")
    for nothing in (None, {}, {"original_parameters": None}):
        with pytest.raises(UserStateError):
            other.strategy.load_state_dict(nothing)


def test_losses_are_reduced_between_syncs_and_not_beside_one(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), *[SAME] * 3, others=0.5)
    with Trainer(rig, **IN_FLIGHT) as trainer:
        trainer.train(2)
        with pytest.raises(UsageError, match="allreduce was called while a sync of DiLoCo is in flight"):
            rig.manager.allreduce(torch.ones(1))
        trainer.train(2)
        assert rig.manager.current_step() == 2
        loss = torch.full((1,), 2.0)
        assert rig.manager.allreduce(loss).wait()
        assert loss.item() == 1.5  # the one of the others weighs as much


def test_replicas_with_other_outer_optimizers_are_told_apart(rigs: Any) -> None:
    found = set()
    for one_outer in (True, False):
        rig = rigs(plan_of(7, size=2))
        with Trainer(rig, num_fragments=2, one_outer=one_outer):
            found.add(dict(rig.coordinator.requests[0].fingerprint)["user/outer optimizers"])
    assert len(found) == 2
