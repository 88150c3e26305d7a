"""Sharded models across replica groups, in one process: when the hook waits, what is refused, what a failure does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import Shard

from tft_algos import (
    ConfigError,
    Manager,
    UnsupportedFeatureError,
    UsageError,
    extend_mesh,
    hsdp,
    reduce_across,
)
from tft_algos.backward import reductions_of
from tft_algos.testing import FakeGroup, plan_of
from tft_coord.core.step.reducing import WEIGHT_SCALE
from tft_pg import ManagedProcessGroup


class Recorder:
    """A Manager whose reductions double what they are given, when they are waited for; it notes both."""

    attempt = 1
    verdict = None

    def __init__(self) -> None:
        self.events: list[str] = []
        self.strategy = self

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: dist.ReduceOp.RedOpType) -> Any:
        recorder, number = self, sum(event.startswith("starts") for event in self.events)
        recorder.events.append(f"starts {number}")

        class Work:
            def wait(self) -> bool:
                recorder.events.append(f"ends {number}")
                tensor.mul_(2)
                return True

        return Work()


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Torch's default group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))


def two_layers(mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    """Two parts; the second's gradients come first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def hooked(recorder: Any, *models: nn.Module) -> None:
    reduce_across(recorder, *models)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.to_local() for parameter in model.parameters()]  # type: ignore[union-attr]


X = torch.ones(2, 3)


# --- when the hook waits ---


def test_reductions_run_beside_the_backward_pass_and_have_ended_when_it_returns(mesh: DeviceMesh) -> None:
    plain, model, recorder = two_layers(mesh), two_layers(mesh), Recorder()
    hooked(recorder, model)
    for each in (plain, model):
        each(X).sum().backward()
    assert recorder.events == ["starts 0", "starts 1", "ends 0", "ends 1"]
    for gradient, alone in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(gradient, 2 * alone)


def sums_only(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def watched(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)


@pytest.mark.parametrize(
    ("options", "prepare"),
    [
        ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}, None),
        ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}, None),
        ({}, sums_only),
        ({}, watched),
        ({}, lambda model: model(X).sum().backward()),
    ],
    ids=["cast", "divided", "sums only", "read by a hook", "added to a gradient"],
)
def test_the_hook_waits_where_fsdp2_goes_on_with_the_tensor_at_once(
    mesh: DeviceMesh, options: dict[str, Any], prepare: Callable[[nn.Module], None] | None
) -> None:
    model, recorder = two_layers(mesh, **options), Recorder()
    if prepare is not None:
        prepare(model)
    hooked(recorder, model)
    model(X).sum().backward()
    assert recorder.events == ["starts 0", "ends 0", "starts 1", "ends 1"]


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch can't forget a backward pass")
def test_a_backward_pass_that_raised_leaves_the_next_one_whole(mesh: DeviceMesh) -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
            raise ValueError("a mistake of the user's")

    model, recorder = two_layers(mesh), Recorder()
    hooked(recorder, model)
    hidden = model[0](X)  # the parts are roots by themselves
    with pytest.raises(ValueError, match="a mistake"):
        model[1](Raises.apply(hidden)).sum().backward()  # type: ignore[no-untyped-call]
    assert recorder.events == ["starts 0"]
    for layer in model:
        assert isinstance(layer, FSDPModule)
        layer.reset_iter_state()
    model[1](X).sum().backward()
    assert recorder.events[-1] == "ends 1"
    assert "ends 0" in recorder.events


def test_outside_of_a_backward_pass_it_waits_at_once(mesh: DeviceMesh) -> None:
    """Where a schedule of pipeline parallelism has FSDP2 reduce when its backward passes are over."""
    model, recorder = two_layers(mesh), Recorder()
    hooked(recorder, model)
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    model(X).sum().backward()
    assert recorder.events == []
    model.set_requires_gradient_sync(True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in hsdp._groups_of(module):
                group.post_backward()
    assert recorder.events == ["starts 0", "ends 0", "starts 1", "ends 1"]


@pytest.mark.skipif(not hasattr(_fsdp_common, "ShardPlacementResult"), reason="this torch has one group a module")
def test_a_module_with_several_groups_of_parameters_has_each_reduced(mesh: DeviceMesh) -> None:
    other = FSDPMeshInfo(DeviceMesh.from_group(dist.new_group([0]), "cpu", mesh_dim_names=("rest",)), 0)
    plain, model, recorder = nn.Linear(3, 3), nn.Linear(3, 3), Recorder()
    model.load_state_dict(plain.state_dict())
    expert = model.weight

    def place(parameter: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(0), other) if parameter is expert else None

    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    hooked(recorder, model)
    for each in (plain, model):
        each(X).sum().backward()
    assert recorder.events == ["starts 0", "starts 1", "ends 0", "ends 1"]
    for gradient, parameter in zip(gradients(model), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(gradient, 2 * parameter.grad)


# --- with a Manager ---


def test_gradients_are_means_over_the_participants(rigs: Any, mesh: DeviceMesh) -> None:
    rig, model, plain = rigs(plan_of(size=2), others=0.5), two_layers(mesh), two_layers(mesh)
    reduce_across(rig.manager, model)
    rig.manager.start_quorum()
    for each in (plain, model):
        each(X).sum().backward()
    for gradient, alone in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(gradient, (alone + 1) / 2)
    assert rig.manager.should_commit()


@pytest.mark.parametrize("extended", [True, False], ids=["extended mesh", "hook"])
def test_a_replica_group_alone_reduces_nothing(rigs: Any, mesh: DeviceMesh, extended: bool) -> None:
    rig = rigs(plan_of())
    model = two_layers(extend_mesh(rig.manager, mesh)["dp", "shard"] if extended else mesh)
    if not extended:
        reduce_across(rig.manager, model)
    rig.manager.start_quorum()
    model(X).sum().backward()
    assert rig.manager.should_commit()
    assert rig.group.calls == []


@pytest.mark.parametrize("extended", [True, False], ids=["extended mesh", "hook"])
@pytest.mark.parametrize("where", ["failing_call", "failing_wait"])
def test_a_failed_reduction_votes_the_step_down_and_never_raises(
    rigs: Any, mesh: DeviceMesh, where: str, extended: bool
) -> None:
    rig = rigs(plan_of(size=2))
    model = two_layers(extend_mesh(rig.manager, mesh)["dp", "shard"] if extended else mesh)
    if not extended:
        reduce_across(rig.manager, model)
    assert isinstance(rig.group, FakeGroup)
    setattr(rig.group, where, RuntimeError("the peer is gone"))
    rig.manager.start_quorum()
    model(X).sum().backward()
    assert not rig.manager.should_commit()
    assert "the peer is gone" in str(rig.manager.status().errors[0])


@pytest.mark.parametrize("extended", [True, False], ids=["extended mesh", "hook"])
def test_the_mean_is_weighted_where_the_step_is(rigs: Any, mesh: DeviceMesh, extended: bool) -> None:
    rig, plain = rigs(plan_of(size=2), others=3.0 * WEIGHT_SCALE), two_layers(mesh)
    model = two_layers(extend_mesh(rig.manager, mesh)["dp", "shard"] if extended else mesh)
    if not extended:
        reduce_across(rig.manager, model)
    rig.manager.start_quorum()
    rig.manager.set_weight(5.0)
    for each in (plain, model):
        each(X).sum().backward()
    assert rig.manager.should_commit()
    # The others weigh 3 together, and give 3 times their gradients, which is 3 too.
    for gradient, alone in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(gradient, (5 * alone + 3) / 8)


def test_an_extended_mesh_has_a_managed_group_in_the_new_dimension(rigs: Any) -> None:
    inner = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tp"))
    extended = extend_mesh(rigs(plan_of()).manager, inner, "replicas")
    assert extended.mesh_dim_names == ("replicas", "shard", "tp")
    assert extended.size(0) == 1
    assert isinstance(extended.get_group("replicas"), ManagedProcessGroup)


# --- what is refused ---


@pytest.fixture
def manager(rigs: Any) -> Manager:
    manager: Manager = rigs(plan_of()).manager
    return manager


def test_what_is_no_model_is_refused(manager: Manager, mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigError, match="was given no model"):
        reduce_across(manager)
    with pytest.raises(ConfigError, match="nothing in this Linear is sharded by fully_shard"):
        reduce_across(manager, nn.Linear(2, 2))
    wrong: Any = [two_layers(mesh)]
    with pytest.raises(ConfigError, match="was given a list; give modules"):
        reduce_across(manager, wrong)
    with pytest.raises(ConfigError, match="the manager is a FSDPSequential; give a Manager, and models"):
        reduce_across(wrong[0], manager)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the manager is a DeviceMesh; give a Manager, and models or a mesh"):
        extend_mesh(mesh, manager)  # type: ignore[arg-type]


def test_an_extended_mesh_is_not_reduced_twice(manager: Manager, mesh: DeviceMesh) -> None:
    model = two_layers(extend_mesh(manager, mesh)["dp", "shard"])
    with pytest.raises(ConfigError, match=r"is sharded over an extended mesh, .* across replica groups already"):
        reduce_across(manager, model)


def test_replicas_inside_the_replica_group_are_refused(manager: Manager) -> None:
    model: nn.Module = two_layers(init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard")))
    with pytest.raises(ConfigError, match="the part '0' of this FSDPSequential is replicated inside"):
        reduce_across(manager, model)
    model = nn.Linear(3, 3)
    replicate(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("replicate",)))
    with pytest.raises(ConfigError, match="this ReplicateLinear is replicated inside the replica group"):
        reduce_across(manager, model)


def test_a_hook_that_is_set_already_is_kept(manager: Manager, mesh: DeviceMesh) -> None:
    model, other = two_layers(mesh), two_layers(mesh)
    calls: list[torch.Tensor] = []
    layer = model[1]
    assert isinstance(layer, FSDPModule)
    layer.set_all_reduce_hook(calls.append)
    with pytest.raises(ConfigError, match="the part '1' of this FSDPSequential has an all-reduce hook already"):
        reduce_across(manager, other, model)
    model(X).sum().backward()
    assert len(calls) == 1
    reduce_across(manager, other)  # nothing had been set in it
    with pytest.raises(ConfigError, match="has an all-reduce hook already; call reduce_across once"):
        reduce_across(manager, other)


def test_parameters_that_nothing_would_reduce_are_refused_by_name(manager: Manager, mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    fully_shard(model[0], mesh=mesh)
    with pytest.raises(ConfigError, match=r"not sharded 1\.0\.weight, 1\.0\.bias, 1\.1\.weight and 1 more of this"):
        reduce_across(manager, model)
    model[1].requires_grad_(False)
    reduce_across(manager, model)


def test_a_shared_parameter_belongs_to_both_its_places(manager: Manager, mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=mesh)
    reduce_across(manager, model, model)


def test_a_torch_that_keeps_its_groups_otherwise_is_refused(
    manager: Manager, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = two_layers(mesh)
    layer = model[0]
    assert isinstance(layer, FSDPModule)
    monkeypatch.delattr(hsdp._groups_of(layer)[0], "_all_reduce_hook")
    with pytest.raises(
        UnsupportedFeatureError, match=r"stores the state of fully_shard differently from torch 2\.11 to 2\.15"
    ):
        reduce_across(manager, model)


def test_a_backward_pass_after_the_vote_is_a_mistake(rigs: Any, mesh: DeviceMesh) -> None:
    rig, model = rigs(plan_of(size=2)), two_layers(mesh)
    reduce_across(rig.manager, model)
    rig.manager.start_quorum()
    assert rig.manager.should_commit()
    with pytest.raises(UsageError, match="reduces gradients after the vote on step 1"):
        model(X).sum().backward()


class Slow:
    """A group whose reductions take until they are waited for."""

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: list[torch.Tensor], op: dist.ReduceOp.RedOpType) -> Any:
        class Work:
            def is_completed(self) -> bool:
                return False

            def wait(self) -> bool:
                return True

        return Work()


@pytest.mark.parametrize("extended", [True, False], ids=["extended mesh", "hook"])
def test_its_reductions_come_after_those_that_other_models_have_on_the_way(
    rigs: Any, mesh: DeviceMesh, extended: bool
) -> None:
    """Another model's gradients are still reduced inside the group, for who knows how long, when a part's are there."""
    rig = rigs(plan_of(size=2))
    manager = rig.manager
    model = two_layers(extend_mesh(manager, mesh)["dp", "shard"] if extended else mesh)
    if not extended:
        reduce_across(manager, model)
    slow: Any = Slow()
    out = model(X).sum()
    out.register_hook(lambda gradient: reductions_of(manager).start(manager, torch.ones(5), group=slow))
    manager.start_quorum()
    out.backward()
    assert manager.should_commit()
    assert [call.numel() for call in rig.group.calls] == [5, 12, 12]
