"""One reduction a parameter, in one order, waited for at the end of the backward pass."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from tft_algos import PureDistributedDataParallel, UsageError
from tft_algos.testing import plan_of
from tft_coord.core.types import QuorumKey


class Two(torch.nn.Module):
    """Two layers, used in the order that the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(3, 3, bias=False)
        self.b = torch.nn.Linear(3, 3, bias=False)

    def forward(self, x: torch.Tensor, order: str = "ab") -> torch.Tensor:
        for name in order:
            x = getattr(self, name)(x)
        return x


def begun(rigs: Any, *, size: int = 2, steps: int = 1) -> Any:
    """A Manager of two replicas, of which the other gives zeros and uses nothing; a step has begun."""
    rig = rigs(plan_of(7, size=size), *[QuorumKey(7, 7)] * (steps - 1), others=0)
    rig.manager.start_quorum()
    return rig


def sizes(rig: Any) -> list[int]:
    return [tensor.numel() for tensor in rig.group.calls]


def test_fault_2_after_backward_the_gradients_are_the_mean_and_clipping_sees_it(rigs: Any) -> None:
    rig = begun(rigs)
    module = torch.nn.Linear(4, 1, bias=False)
    model = PureDistributedDataParallel(rig.manager, module)
    model(torch.full((1, 4), 4.0)).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[2.0] * 4]
    assert torch.nn.utils.clip_grad_norm_(module.parameters(), 100.0).item() == 4.0
    assert rig.manager.should_commit()


@pytest.mark.parametrize("order", ["ab", "ba", "a", "b"])
def test_the_order_is_that_of_the_definition_whatever_is_used(rigs: Any, order: str) -> None:
    rig = begun(rigs)
    module = Two()
    module.a.weight.requires_grad_(False)
    module.a = torch.nn.Linear(3, 3)  # of other sizes than b, so that the order shows
    model = PureDistributedDataParallel(rig.manager, module)
    model(torch.ones(1, 3), order).sum().backward()
    assert sizes(rig) == [9, 3, 9, 3]  # b.weight, a.bias, a.weight, the map
    for name in "ab":
        assert (getattr(module, name).weight.grad is not None) == (name in order)


def test_reductions_overlap_the_backward_pass(rigs: Any) -> None:
    rig = begun(rigs)
    module = Two()
    handed_over: list[int] = []
    module.a.weight.register_hook(lambda _: handed_over.append(len(rig.group.calls)))
    PureDistributedDataParallel(rig.manager, module)(torch.ones(1, 3)).sum().backward()
    assert handed_over == [1]  # b's gradient was on its way when a's came


def test_without_synchronization_gradients_add_up_and_are_reduced_once(rigs: Any) -> None:
    rig = begun(rigs)
    module = torch.nn.Linear(2, 1, bias=False)
    model = PureDistributedDataParallel(rig.manager, module)
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    assert rig.group.calls == []
    model(torch.ones(1, 2)).sum().backward()
    assert rig.group.calls[0].tolist() == [[1.0, 1.0]], "half of the sum, for a mean of two"
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[1.0, 1.0]]


def test_alone_it_is_bit_equal_to_plain_torch(rigs: Any) -> None:
    torch.manual_seed(0)
    rig = begun(rigs, size=1)
    module = Two()
    plain = copy.deepcopy(module)
    x = torch.randn(4, 3)
    PureDistributedDataParallel(rig.manager, module)(x, "b").square().sum().backward()
    plain(x, "b").square().sum().backward()
    assert module.a.weight.grad is None
    assert module.b.weight.grad is not None
    assert plain.b.weight.grad is not None
    assert torch.equal(module.b.weight.grad, plain.b.weight.grad)


def test_a_reduction_that_fails_ends_in_a_no(rigs: Any) -> None:
    rig = begun(rigs)
    model = PureDistributedDataParallel(rig.manager, Two())
    rig.group.failing_wait = RuntimeError("Connection closed by peer")
    model(torch.ones(1, 3)).sum().backward()
    assert not rig.manager.should_commit()


def test_after_a_pass_that_raised_the_next_step_is_like_every_other(rigs: Any) -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no room")

    rig = begun(rigs, steps=2)
    module = Two()
    model = PureDistributedDataParallel(rig.manager, module)
    handle = module.a.weight.register_hook(fail)
    with pytest.raises(MemoryError):
        model(torch.ones(1, 3)).sum().backward()
    handle.remove()
    rig.manager.start_quorum()
    rig.group.calls.clear()
    module.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    assert sizes(rig) == [9, 9, 2]
    assert rig.manager.should_commit()


def test_gradients_twice_in_one_pass_are_refused_with_a_sentence(rigs: Any) -> None:
    class Twice(Two):
        def forward(self, x: torch.Tensor, order: str = "") -> torch.Tensor:
            result: torch.Tensor = self.b(torch.utils.checkpoint.checkpoint(self.b, x, use_reentrant=True))
            return result

    model = PureDistributedDataParallel(begun(rigs).manager, Twice())
    with pytest.raises(UsageError, match=r"got gradients twice in one backward pass.*use_reentrant=False"):
        model(torch.ones(1, 3, requires_grad=True)).sum().backward()


def test_a_backward_pass_after_the_vote_is_refused(rigs: Any) -> None:
    rig = begun(rigs)
    model = PureDistributedDataParallel(rig.manager, Two())
    assert rig.manager.should_commit()
    with pytest.raises(UsageError, match=r"after the vote on step 1; call zero_grad\(\) before"):
        model(torch.ones(1, 3)).sum().backward()


def test_it_is_neither_copied_nor_pickled(rigs: Any) -> None:
    model = PureDistributedDataParallel(rigs(plan_of(7)).manager, Two())
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"save the module's state_dict\(\)"):
            copied(model)
