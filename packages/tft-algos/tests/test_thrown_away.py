"""A batch that is thrown away at any point leaves the gradients of the step right, and its reductions in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tft_algos import (
    DiLoCo,
    DistributedDataParallel,
    LocalSGD,
    Optimizer,
    PureDistributedDataParallel,
    UsageError,
    extend_mesh,
    reduce_across,
)
from tft_algos.testing import plan_of
from tft_coord.core.types import QuorumKey

STEPS = 4
KINDS: dict[str, Callable[..., Any]] = {
    "buckets": lambda *args: DistributedDataParallel(*args, bucket_cap_mb=0.0001),
    "copies": lambda *args: DistributedDataParallel(*args, bucket_cap_mb=0.0001, gradient_as_bucket_view=False),
    "find unused": lambda *args: DistributedDataParallel(*args, bucket_cap_mb=0.0001, find_unused_parameters=True),
    "static graph": lambda *args: DistributedDataParallel(*args, bucket_cap_mb=0.0001, static_graph=True),
    "pure": PureDistributedDataParallel,
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (torch.nn.Linear(8, 8) for _ in range(3))
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(torch.tanh(self.a(x)))
        if self.raises:
            raise MemoryError("no room")
        result: torch.Tensor = self.c(torch.tanh(x))
        return result


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x).square().sum()
    return result


def raising_backward(model: Any, net: Net, *, where: str) -> None:
    """A backward pass that raises before it reaches the model, or the gradient of one layer."""

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no room")

    loss = loss_of(model, batch(99))
    handle = loss.register_hook(fail) if where == "loss" else getattr(net, where).weight.register_hook(fail)
    with pytest.raises(MemoryError):
        loss.backward()
    handle.remove()


def nothing(model: Any, net: Net) -> None:
    pass


def outside(model: Any, net: Net) -> None:
    loss_of(model, batch(99))


def twice(model: Any, net: Net) -> None:
    for _ in range(2):
        loss_of(model, batch(99))


def under_no_sync(model: Any, net: Net) -> None:
    with model.no_sync():
        loss_of(model, batch(99))


def then_evaluated(model: Any, net: Net) -> None:
    loss_of(model, batch(99))
    model.eval()
    with torch.no_grad():
        loss_of(model, batch(98))
    model.train()


def evaluated_with_gradients(model: Any, net: Net) -> None:
    model.eval()
    loss_of(model, batch(99))
    model.train()


def output_lives_on(model: Any, net: Net) -> None:
    net.kept = model(batch(99))  # type: ignore[assignment]


def forward_raises(model: Any, net: Net) -> None:
    net.raises = True
    with pytest.raises(MemoryError):
        loss_of(model, batch(99))
    net.raises = False


def backward_raises_at_once(model: Any, net: Net) -> None:
    raising_backward(model, net, where="loss")


def loss_lives_while_others_accumulate(model: Any, net: Net) -> None:
    """A loop that leaves a batch out, whose loss is assigned anew only after the forward pass of the next one."""
    gradients = [parameter.grad if parameter.grad is None else parameter.grad.clone() for parameter in net.parameters()]
    loss = loss_of(model, batch(99))
    with model.no_sync():
        loss_of(model, batch(98)).backward()
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    del loss


def gradient_of_the_input(model: Any, net: Net) -> None:
    """A pass that reaches no parameter: a look at what the model is sensitive to."""
    x = batch(99).requires_grad_()
    torch.autograd.grad(loss_of(model, x), x)


def backward_raises_in_the_model(model: Any, net: Net) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    handle = net.c.register_full_backward_pre_hook(fail)
    loss = loss_of(model, batch(99))
    with pytest.raises(MemoryError):
        loss.backward()
    handle.remove()


SCENARIOS = [
    nothing,
    outside,
    twice,
    under_no_sync,
    then_evaluated,
    evaluated_with_gradients,
    output_lives_on,
    forward_raises,
    backward_raises_at_once,
    backward_raises_in_the_model,
    loss_lives_while_others_accumulate,
    gradient_of_the_input,
]


class Replica:
    """One of two replicas, the other of which gives zeros."""

    def __init__(self, rigs: Any, kind: str, *answers: Any) -> None:
        self.rig = rigs(plan_of(7, size=2), *(answers or [QuorumKey(7, 7)] * STEPS), others=0)
        self.net, self.kind = Net(), kind
        self.model = KINDS[kind](self.rig.manager, self.net)
        self.optimizer = Optimizer(self.rig.manager, torch.optim.SGD(self.net.parameters(), lr=0.0))

    def accumulate(self, *, between: Callable[[Any, Net], None] = nothing) -> None:
        """Two passes, of which the second reduces."""
        with self.model.no_sync():
            loss_of(self.model, batch(1)).backward()
        between(self.model, self.net)
        loss_of(self.model, batch(2)).backward()

    def check(self, *, batches: tuple[int, ...] = (1, 2)) -> None:
        """Gradients are half of those of one process, and were given to one reduction each."""
        alone = Net()
        for number in batches:
            loss_of(alone, batch(number)).backward()
        for parameter, plain in zip(self.net.parameters(), alone.parameters(), strict=True):
            assert parameter.grad is not None
            assert plain.grad is not None
            torch.testing.assert_close(parameter.grad, plain.grad / 2)
        parameters = list(self.net.parameters())
        given = [call.numel() for call in self.rig.group.calls if call.is_floating_point()]
        assert sum(given) == sum(parameter.numel() for parameter in parameters)
        maps = [(call.dtype, call.numel()) for call in self.rig.group.calls if not call.is_floating_point()]
        assert maps == ([(torch.int32, len(parameters))] if self.kind in ("find unused", "pure") else [])
        self.rig.group.calls.clear()

    def first_step(self) -> None:
        """With a static graph it can't accumulate."""
        self.optimizer.zero_grad()
        loss_of(self.model, batch(1)).backward()
        self.check(batches=(1,))
        assert self.optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("zeroes", [True, False], ids=["zero_grad", ""])
def test_before_a_step_that_accumulates(
    rigs: Any, kind: str, scenario: Callable[[Any, Net], None], zeroes: bool
) -> None:
    replica = Replica(rigs, kind)
    replica.first_step()
    for before in (scenario, nothing, scenario):
        replica.optimizer.zero_grad()
        before(replica.model, replica.net)
        if zeroes:
            replica.optimizer.zero_grad()
        replica.accumulate()
        replica.check()
        assert replica.optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_between_the_passes_and_after_the_step(rigs: Any, kind: str, scenario: Callable[[Any, Net], None]) -> None:
    replica = Replica(rigs, kind)
    replica.first_step()
    for _ in range(2):
        replica.optimizer.zero_grad()
        replica.accumulate(between=scenario)
        replica.check()
        assert replica.optimizer.step()
        scenario(replica.model, replica.net)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["a", "b", "c"])
def test_a_pass_that_raises_half_way_under_no_sync_costs_nothing(rigs: Any, kind: str, where: str) -> None:
    replica = Replica(rigs, kind)
    replica.first_step()
    for _ in range(2):
        replica.optimizer.zero_grad()
        outside(replica.model, replica.net)
        with replica.model.no_sync():
            raising_backward(replica.model, replica.net, where=where)
        replica.optimizer.zero_grad()
        replica.accumulate()
        replica.check()
        assert replica.optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["a", "b"])
def test_a_pass_that_raises_half_way_ends_its_step_and_no_other(rigs: Any, kind: str, where: str) -> None:
    replica = Replica(rigs, kind, QuorumKey(7, 7), plan_of(8, size=2, step=1), QuorumKey(8, 8))
    replica.first_step()
    replica.optimizer.zero_grad()
    outside(replica.model, replica.net)
    raising_backward(replica.model, replica.net, where=where)
    outside_attempt = replica.rig.manager.strategy.attempt
    replica.optimizer.zero_grad()
    assert replica.rig.manager.strategy.attempt == outside_attempt + 1
    replica.rig.group.calls.clear()
    outside(replica.model, replica.net)
    replica.accumulate()
    replica.check()
    assert replica.optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_two_models_throws_its_batch_away(rigs: Any, kind: str) -> None:
    replica = Replica(rigs, kind)
    second = Net()
    other = KINDS[kind](replica.rig.manager, second)
    replica.optimizer.zero_grad()
    for model in (replica.model, other):
        loss_of(model, batch(1)).backward()
    assert replica.optimizer.step()
    replica.optimizer.zero_grad()
    second.zero_grad()
    replica.rig.group.calls.clear()
    outside(other, second)
    replica.accumulate()
    replica.check()
    with other.no_sync():
        loss_of(other, batch(1)).backward()
    assert replica.rig.group.calls == []
    loss_of(other, batch(2)).backward()
    for parameter, same in zip(second.parameters(), replica.net.parameters(), strict=True):
        assert parameter.grad is not None
        assert same.grad is not None
        torch.testing.assert_close(parameter.grad, same.grad)
    assert replica.optimizer.step()


def test_the_pass_of_a_batch_given_up_by_a_later_one_is_not_committed_unreduced(rigs: Any) -> None:
    """The backward pass of the first comes after all, when torch no longer expects it."""
    replica = Replica(rigs, "buckets")
    replica.optimizer.zero_grad()
    late = loss_of(replica.model, batch(1))
    with replica.model.no_sync():
        loss_of(replica.model, batch(2)).backward()
    late.backward()
    with pytest.raises(UsageError, match="in which no gradient was reduced"):
        replica.optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("looks_only", [False, True])
def test_a_forward_under_no_sync_between_a_forward_and_its_backward(rigs: Any, kind: str, looks_only: bool) -> None:
    """Two views with one backward pass, or a look at other data: nothing was thrown away."""
    replica = Replica(rigs, kind)
    replica.first_step()
    for _ in range(2):
        replica.optimizer.zero_grad()
        loss = loss_of(replica.model, batch(1))
        with replica.model.no_sync():
            other = loss_of(replica.model, batch(2))
        total = loss if looks_only else loss + other
        total.backward()
        replica.check(batches=(1,) if looks_only else (1, 2))
        assert replica.optimizer.step()


def test_another_memory_format_after_wrapping_is_refused_where_buckets_are_made_anew(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), others=0)
    net = torch.nn.Conv2d(3, 4, 3)
    model = DistributedDataParallel(rig.manager, net)
    rig.manager.start_quorum()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model(torch.ones(1, 3, 5, 5))
    with model.no_sync(), pytest.raises(UsageError, match="memory format of parameter weight was changed after"):
        model(torch.ones(1, 3, 5, 5))


@pytest.fixture
def world() -> Iterator[None]:
    """Torch's default group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("extended", [True, False], ids=["extended mesh", "hook"])
@pytest.mark.parametrize("scenario", [nothing, outside, twice, then_evaluated, forward_raises, backward_raises_at_once])
def test_a_sharded_model(rigs: Any, scenario: Callable[[Any, Net], None], extended: bool) -> None:
    rig, net = rigs(plan_of(7, size=2), QuorumKey(7, 7), others=0), Net()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    if extended:
        mesh = extend_mesh(rig.manager, mesh)["dp", "shard"]
    model: Any = fully_shard(net, mesh=mesh)
    if not extended:
        reduce_across(rig.manager, model)
    optimizer = Optimizer(rig.manager, torch.optim.SGD(model.parameters(), lr=0.0))
    alone = Net()
    for number in (1, 2):
        loss_of(alone, batch(number)).backward()
    for _ in range(2):
        optimizer.zero_grad()
        scenario(model, net)
        model.set_requires_gradient_sync(False)
        loss_of(model, batch(1)).backward()
        model.set_requires_gradient_sync(True)
        assert rig.group.calls == []
        loss_of(model, batch(2)).backward()
        assert optimizer.step()
        for parameter, plain in zip(model.parameters(), alone.parameters(), strict=True):
            assert plain.grad is not None
            torch.testing.assert_close(parameter.grad.to_local(), plain.grad / 2)
        rig.group.calls.clear()


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco"])
def test_between_synchronizations_it_changes_nothing(rigs: Any, strategy: str) -> None:
    results = []
    for throws_away in (True, False):
        rig, net = rigs(plan_of(7, size=2), QuorumKey(7, 7), others=0), Net()
        inner, outer = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
        made: Any = (
            LocalSGD(rig.manager, net, inner, 2)
            if strategy == "local_sgd"
            else DiLoCo(rig.manager, [net], inner, outer, 2)
        )
        with made:
            for step in range(2):
                if throws_away:
                    outside(net, net)
                    raising_backward(net, net, where="b")
                inner.zero_grad()
                loss_of(net, batch(step)).backward()
                inner.step()
            results.append([call.clone() for call in rig.group.calls])
    assert results[0]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
