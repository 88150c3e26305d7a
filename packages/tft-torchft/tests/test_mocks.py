"""Loops with a Manager of `unittest.mock`, as users test theirs: the wrappers ask for torchft's documented methods."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp

from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.ddp import PureDistributedDataParallel
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.process_group import ManagedProcessGroup, ProcessGroup, ProcessGroupWrapper
from torchft.work import _DummyWork


@pytest.fixture
def manager() -> Any:
    mock = create_autospec(Manager)
    mock.should_commit.return_value = True
    mock.errored.return_value = None
    mock.allreduce.side_effect = lambda tensor, **_: _DummyWork(tensor)
    return mock


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("commits", [True, False])
def test_an_optimizer_begins_and_ends_a_step_of_a_mock(manager: Any, commits: bool) -> None:
    model = nn.Linear(3, 4)
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=1.0))
    manager.should_commit.return_value = commits
    before = model.weight.clone()
    for attempt in (1, 2):
        step(model, optimizer)
        assert manager.start_quorum.call_count == attempt
        assert manager.should_commit.call_count == attempt
    assert torch.equal(before, model.weight) is not commits
    optimizer.step()  # a mock is asked again, as in torchft
    assert manager.should_commit.call_count == 3
    assert manager.start_quorum.call_count == 2


def test_ddp_averages_with_a_function_in_place_of_a_method(manager: Any) -> None:
    reduced: list[torch.Tensor] = []

    def allreduce(tensor: torch.Tensor) -> _DummyWork:  # as torchft's users write it
        reduced.append(tensor.clone())
        tensor.div_(2)
        return _DummyWork(tensor)

    manager.allreduce = allreduce
    inner = nn.Linear(3, 4)
    model = DistributedDataParallel(manager, inner)
    model(torch.ones(2, 3)).sum().backward()
    assert len(reduced) == 1
    assert inner.weight.grad is not None
    assert torch.equal(inner.weight.grad, torch.ones(4, 3))


def test_ddp_leaves_the_gradient_of_an_unused_parameter_out(manager: Any) -> None:
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, batch: torch.Tensor) -> Any:
            return self.layers[0](batch)

    with pytest.raises(TypeError, match="find_unused_parameters"):
        DistributedDataParallel(manager, One(), find_unused_parameters=False)
    model = DistributedDataParallel(manager, One())
    model(torch.ones(2, 3)).sum().backward()
    assert layers[0].weight.grad is not None
    assert layers[1].weight.grad is None


def test_pure_ddp_reduces_each_parameter(manager: Any) -> None:
    model = PureDistributedDataParallel(manager, nn.Linear(3, 4))
    model(torch.ones(2, 3)).sum().backward()
    shapes = [call.args[0].shape for call in manager.allreduce.call_args_list]
    assert sorted(shapes) == [torch.Size([4]), torch.Size([4, 3])]  # and nothing else, as in torchft


@pytest.mark.parametrize("wrap", [DistributedDataParallel, PureDistributedDataParallel])
def test_used_parameters_are_counted_over_an_object_that_has_participants(manager: Any, wrap: Any) -> None:
    model = wrap(manager, nn.Linear(3, 4))
    model(torch.ones(2, 3)).sum().backward()
    averages = manager.allreduce.call_count
    assert averages == {DistributedDataParallel: 1, PureDistributedDataParallel: 2}[wrap]
    manager.num_participants.return_value = 2
    model(torch.ones(2, 3)).sum().backward()
    assert manager.allreduce.call_count == 2 * averages + 1
    assert manager.allreduce.call_args.kwargs == {"reduce_op": ReduceOp.SUM}


def test_local_sgd_synchronizes_a_mock_every_second_step(manager: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSGD(manager, model, optimizer, sync_every=2) as strategy:
        assert manager.start_quorum.call_count == 0
        step(model, optimizer)
        assert manager.start_quorum.call_count == 0
        step(model, optimizer)
        assert manager.start_quorum.call_count == 1
        assert manager.should_commit.call_count == 1
        assert manager.allreduce.call_count == 4
        strategy.sync()
        assert manager.should_commit.call_count == 2
    step(model, optimizer)
    assert manager.start_quorum.call_count == 2


@pytest.mark.parametrize("fragments", [1, 2])
def test_diloco_steps_its_outer_optimizers_if_a_mock_commits(manager: Any, fragments: int) -> None:
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    model = nn.Sequential(*layers)
    parts: list[nn.Module] = [model] if fragments == 1 else [*layers]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = [torch.optim.SGD(part.parameters(), lr=0.5) for part in parts]
    keys = []
    manager.register_state_dict_fn.side_effect = lambda key, load, take: keys.append(key)
    manager.current_step.side_effect = lambda: manager.should_commit.call_count
    before = [layer.weight.clone() for layer in layers]
    with DiLoCo(manager, parts, inner, outer, sync_every=4):
        for _ in range(4):
            step(model, inner)
    assert manager.should_commit.call_count == fragments
    assert keys == [f"StreamingDiLoCoFragment_{index}" for index in range(fragments)]
    assert not any(torch.equal(old, layer.weight) for old, layer in zip(before, layers, strict=True))


def test_a_sync_that_a_mock_does_not_commit_restores_the_global_weights(manager: Any) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.should_commit.return_value = False
    before = model.weight.clone()
    with DiLoCo(manager, [model], optimizer, torch.optim.SGD(model.parameters(), lr=0.5), sync_every=2):
        step(model, optimizer)
        assert not torch.equal(before, model.weight)
        step(model, optimizer)
    assert torch.equal(before, model.weight)


def test_wrong_arguments_are_assertion_errors_and_value_errors(manager: Any) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.5)
    for kind in (AssertionError, ValueError):
        with pytest.raises(kind, match="sync_every"):
            LocalSGD(manager, model, optimizer, sync_every=0)
        with pytest.raises(kind, match="outer optimizers"):
            DiLoCo(manager, [model], optimizer, [outer, outer], sync_every=2)
        both = nn.ModuleList([model, nn.Linear(2, 2)])
        of_both = torch.optim.SGD(both.parameters(), lr=0.5)
        with pytest.raises(kind, match="don't divide"):
            DiLoCo(manager, [*both], optimizer, of_both, sync_every=3)
        with pytest.raises(kind, match="fragment_update_alpha"):
            DiLoCo(manager, [model], optimizer, outer, sync_every=2, fragment_update_alpha=2.0)
    with pytest.raises(AssertionError, match="closure"):
        Optimizer(manager, optimizer).step(lambda: 0.0)


def test_a_managed_group_reduces_with_a_mock_and_has_its_size(manager: Any) -> None:
    manager._pg = MagicMock()
    manager._pg.getBackendName.return_value = "torchft-gloo"
    manager.num_participants.return_value = 123
    group = ManagedProcessGroup(manager)
    assert isinstance(group, ProcessGroupWrapper)
    assert group.size() == 123
    assert group.getBackendName() == "torchft-gloo"
    tensor = torch.ones(2)
    assert group.allreduce([tensor], ReduceOp.SUM).wait()
    assert manager.allreduce.call_args.args[0] is tensor
    assert manager.allreduce.call_args.kwargs == {"reduce_op": ReduceOp.SUM}
    with pytest.raises(AssertionError, match="one tensor"):
        group.allreduce([tensor, tensor], ReduceOp.SUM)


def test_a_wrapper_forwards_to_a_mock_of_a_group() -> None:
    inner = create_autospec(ProcessGroup)
    inner.errored.return_value = None
    group = ProcessGroupWrapper(pg=inner)
    tensor = torch.ones(2)
    group.allreduce([tensor], ReduceOp.SUM)
    inner.allreduce.assert_called_once()
    group.configure("host:1/p", "replica_0", 0, 1, quorum_id=5)
    assert inner.configure.call_args.kwargs["quorum_id"] == 5
    assert group.errored() is None
    group.abort()
    inner.abort.assert_called_once_with()
