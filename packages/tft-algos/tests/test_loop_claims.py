"""The claims of docs/training-loops.md and docs/evaluation.md that no other test checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tft_algos import DistributedDataParallel, Manager, Optimizer
from tft_algos.testing import digest, plan_of


def loop_of(manager: Manager) -> tuple[torch.nn.Module, DistributedDataParallel, Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, DistributedDataParallel(manager, model), Optimizer(manager, adam)


def train(ddp: DistributedDataParallel, optimizer: Optimizer, batch: torch.Tensor) -> bool:
    optimizer.zero_grad()
    ddp(batch).square().mean().backward()
    return optimizer.step()


def test_a_step_that_does_not_commit_changes_nothing_and_its_batch_can_be_repeated(rigs: Any) -> None:
    batches = torch.randn(3, 4, 3)
    plans = [plan_of(7, size=1, step=step) for step in (0, 1, 1, 2)]
    failing = rigs(*plans, verdicts=[True, False, True, True])
    model, ddp, optimizer = loop_of(failing.manager)
    inner = optimizer.optim
    assert train(ddp, optimizer, batches[0])
    before = digest(model.state_dict(), inner.state_dict())
    assert not train(ddp, optimizer, batches[1])
    assert digest(model.state_dict(), inner.state_dict()) == before
    assert failing.manager.current_step() == 1
    assert all(train(ddp, optimizer, batch) for batch in batches[1:])

    calm = rigs(*[plan_of(8, size=1, step=step) for step in range(3)])
    other, other_ddp, other_optimizer = loop_of(calm.manager)
    assert all(train(other_ddp, other_optimizer, batch) for batch in batches)
    assert digest(model.state_dict(), inner.state_dict()) == digest(
        other.state_dict(), other_optimizer.optim.state_dict()
    ), "the run without the fault"


@pytest.mark.parametrize("inside", [True, False], ids=["on the optimizer inside", "on the wrapper"])
def test_a_scheduler_counts_the_committed_steps_on_either_optimizer(rigs: Any, inside: bool) -> None:
    plans = [plan_of(7, size=1, step=step) for step in (0, 1, 1, 2)]
    rig = rigs(*plans, verdicts=[True, False, True, True])
    _, ddp, optimizer = loop_of(rig.manager)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optim if inside else optimizer, 1, gamma=0.5)
    for _ in plans:
        if train(ddp, optimizer, torch.randn(4, 3)):
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**3
    assert scheduler.state_dict()["last_epoch"] == rig.manager.current_step() == 3


def test_gradients_are_final_when_backward_returns(rigs: Any) -> None:
    # The other replica's gradients are 3 everywhere. A mean of two is the sum of halves.
    rig = rigs(plan_of(7, size=2), others=1.5)
    model, ddp, optimizer = loop_of(rig.manager)
    batch = torch.randn(4, 3)
    model(batch).square().mean().backward()
    own = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizer.zero_grad()
    ddp(batch).square().mean().backward()
    means = [parameter.grad for parameter in model.parameters()]
    for mean, mine in zip(means, own, strict=True):
        torch.testing.assert_close(mean, (mine + 3.0) / 2)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm > 0.1
    assert optimizer.step()


def test_between_two_steps_a_replica_may_take_any_time(rigs: Any) -> None:
    rig = rigs(*[plan_of(7, size=1, step=step) for step in range(3)])
    _, ddp, optimizer = loop_of(rig.manager)
    for _ in range(2):  # of the first step after a start nobody says that it hangs
        assert train(ddp, optimizer, torch.randn(4, 3))
    where = rig.manager._parts.step_progress
    assert not where.look().is_hung
    where._monotonic = lambda: 1e9
    assert not where.look().is_hung, "it evaluates, say"
    optimizer.zero_grad()
    rig.manager.wait_quorum()
    where.look()
    where._monotonic = lambda: 2e9
    assert where.look().is_hung, "in a step it is bounded by slowest_step"


def test_batches_of_the_committed_step_train_each_sample_once_though_a_replica_dies(rigs: Any) -> None:
    """Replica 1 dies in the second step. That step fails, and replica 0 does it again, alone."""
    sizes, steps, verdicts = [2, 2, 1, 1], [0, 1, 1, 2], [True, False, True, True]
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    trained: list[int] = []
    for rank in range(2):
        attempts = [at for at, size in enumerate(sizes) if rank < size]
        plans = [plan_of(6 + sizes[at], rank=rank, size=sizes[at], step=steps[at]) for at in attempts]
        manager = rigs(*plans, verdicts=[verdicts[at] for at in attempts]).manager
        model = torch.nn.Linear(1, 1)
        manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
        optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in attempts:
            optimizer.zero_grad()
            place, size = manager.participating_rank(), manager.num_participants()
            batch = order[manager.current_step() * 8 : (manager.current_step() + 1) * 8]
            share = batch[place::size]
            model(share.float().unsqueeze(1)).mean().backward()
            if optimizer.step():
                trained += share.tolist()
    assert sorted(trained) == list(range(24))
