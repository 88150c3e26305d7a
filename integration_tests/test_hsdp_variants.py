"""All options of FSDP2, across replica groups: equal to torch's own hybrid sharding, bit for bit.

Two replica groups of two processes train each kind of model three times side by side. The ways are an extended mesh,
`reduce_across`, and torch's own hybrid sharding. The last is possible because all four processes are in one world of
torch's too. One start of the processes serves all kinds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as recompute

from integration_tests.conftest import spawning
from integration_tests.sharded import (
    Event,
    Place,
    batch,
    initialize,
    listening,
    local,
    make_manager,
    telling,
    unsharded_model,
)
from tft_algos import Manager, extend_mesh, reduce_across
from tft_lighthouse import LighthouseServer
from tft_pg import ManagedProcessGroup

STEPS = 3
LAYOUTS = {"dense": ((2,), ("shard",)), "parallel": ((1, 2), ("rest", "tp"))}

pytestmark = pytest.mark.timeout(240)  # for all variants together, which the first test waits for


@dataclass(frozen=True)
class Meshes:
    """The meshes of a way to train.

    Args:
        roots: by layout.
        replicated: the roots have a dimension "dp" in front.
    """

    roots: dict[str, DeviceMesh]
    replicated: bool

    def over(self, name: str, layout: str = "dense") -> DeviceMesh:
        """Return the mesh to shard over one dimension, and to replicate over "dp" if there is one."""
        return self.roots[layout][("dp", name) if self.replicated else (name,)]

    def info(self, name: str, layout: str) -> FSDPMeshInfo:
        """Return `over` in FSDP2's format for the mesh of some parameters of a module."""
        mesh = self.over(name, layout)
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0) if self.replicated else FSDPMeshInfo(mesh, 0)


def usual(model: nn.Module, step: int, place: Place) -> None:
    model(batch(step, place)).square().mean().backward()


@dataclass(frozen=True)
class Variant:
    """A kind of model, and its training.

    Args:
        build: creates the model, sharded.
        backward: runs the backward passes of a step.
        reduce: sets up the reduction across the groups, if the mesh is not extended.
    """

    build: Callable[[Meshes], nn.Module]
    backward: Callable[[nn.Module, int, Place], None] = usual
    reduce: Callable[[Manager, nn.Module], None] = reduce_across


# --- kinds of models ---


def sharded(model: nn.Module, meshes: Meshes, *layers: nn.Module, **options: Any) -> nn.Module:
    """Shard each layer separately, and then the rest."""
    for layer in layers:
        fully_shard(layer, mesh=meshes.over("shard"), **options)
    fully_shard(model, mesh=meshes.over("shard"), **options)
    return model


def perceptron(meshes: Meshes, **options: Any) -> nn.Module:
    model = unsharded_model()
    return sharded(model, meshes, model[0], model[2], **options)


def checkpoint_wrapped(meshes: Meshes) -> nn.Module:
    model = unsharded_model()
    model[0], model[2] = checkpoint_wrapper(model[0]), checkpoint_wrapper(model[2])
    return sharded(model, meshes, model[0], model[2])


def checkpointed(meshes: Meshes) -> nn.Module:
    model = unsharded_model()
    return sharded(model, meshes, checkpoint(model[0]), checkpoint(model[2]))


def recomputed(model: nn.Module, step: int, place: Place, *, use_reentrant: bool) -> None:
    x = batch(step, place).requires_grad_()
    recompute(model, x, use_reentrant=use_reentrant).square().mean().backward()


def compiled_layers(meshes: Meshes) -> nn.Module:
    model = unsharded_model()
    for layer in model:
        layer.compile(backend="aot_eager")
    return sharded(model, meshes, model[0], model[2])


def compiled(meshes: Meshes) -> nn.Module:
    model = perceptron(meshes)
    model.compile(backend="aot_eager")
    return model


def accumulate(model: nn.Module, step: int, place: Place, *, sync_each: bool) -> None:
    assert isinstance(model, FSDPModule)
    for micro, x in enumerate(batch(step, place).chunk(2)):
        model.set_is_last_backward(micro == 1)
        model.set_requires_gradient_sync(sync_each or micro == 1)
        (model(x).square().mean() / 2).backward()


class Pair(nn.Module):
    """Two models, one of which learns from the other's output, without gradients between them."""

    def __init__(self, meshes: Meshes) -> None:
        super().__init__()
        self.first, self.second = perceptron(meshes), perceptron(meshes)


def train_pair(model: nn.Module, step: int, place: Place) -> None:
    assert isinstance(model, Pair)
    x = batch(step, place)
    out = model.first(x)
    (model.second(x) - out.detach()).square().mean().backward()
    out.square().mean().backward()


class Tied(nn.Module):
    """A model with the same weight for input and output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body, self.head = nn.Embedding(10, 16), nn.Linear(16, 16), nn.Linear(16, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding((x.abs() * 4).long().clamp(max=9))))  # type: ignore[no-any-return]


def tied(meshes: Meshes) -> nn.Module:
    model = Tied()
    return sharded(model, meshes, model.body)


class Branches(nn.Module):
    """A model with a branch that is not used in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, *, with_branch: bool) -> torch.Tensor:
        out = self.first(x)
        return self.branch(out) if with_branch else out  # type: ignore[no-any-return]


def branches(meshes: Meshes, *, unused_too: bool) -> nn.Module:
    model = Branches()
    sharded(model, meshes, model.first, model.branch)
    assert isinstance(model, FSDPModule)
    if unused_too:
        model.set_reduce_scatter_unused_params(True)
        with torch.no_grad():  # torch gives zeros for parameters that have been in a forward pass
            model(torch.ones(1, 16), with_branch=True)
    return model


def train_branches(model: nn.Module, step: int, place: Place, *, replicas_differ: bool) -> None:
    with_branch = place.replica == 0 if replicas_differ else step != 1
    model(batch(step, place), with_branch=with_branch).square().mean().backward()


def partly_frozen(meshes: Meshes) -> nn.Module:
    model = unsharded_model()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return sharded(model, meshes, model[0])


def clip(model: nn.Module, step: int, place: Place) -> None:
    usual(model, step, place)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def seen_at_once(meshes: Meshes) -> nn.Module:
    """Copy each gradient as soon as it is there, as an optimizer in the backward pass reads it."""
    model = perceptron(meshes)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(see)
    return model


def see(parameter: torch.Tensor) -> None:
    parameter.seen = local(parameter.grad).clone()  # type: ignore[attr-defined]


def compare_seen(model: nn.Module, step: int, place: Place) -> None:
    usual(model, step, place)
    for parameter in model.parameters():
        assert torch.equal(parameter.seen, local(parameter.grad))  # type: ignore[attr-defined]


class Chunked(nn.Module):
    """A model whose head is called separately for each part of a batch, and reduced each time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))  # type: ignore[no-any-return]


def chunked(meshes: Meshes) -> nn.Module:
    model = Chunked()
    fully_shard([model.norm, model.head], mesh=meshes.over("shard"))
    return sharded(model, meshes, model.body)


def train_chunks(model: nn.Module, step: int, place: Place) -> None:
    assert isinstance(model, Chunked)
    out = model(batch(step, place))
    leaf = out.detach().requires_grad_()
    for chunk in leaf.chunk(2):
        (model.head(chunk).square().mean() / 2).backward()
    out.backward(leaf.grad)


def tensor_parallel(meshes: Meshes) -> nn.Module:
    model = unsharded_model()
    root = meshes.roots["parallel"]
    parallelize_module(model, root["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=meshes.over("rest", "parallel"))
    fully_shard(model, mesh=meshes.over("rest", "parallel"))
    return model


def train_tensor_parallel(model: nn.Module, step: int, place: Place) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + place.replica))
    model(x).square().mean().backward()


class Experts(nn.Module):
    """A layer of two experts, one in each process. Half of every process's tokens go to each expert."""

    def __init__(self, meshes: Meshes) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, experts = nn.Linear(16, 16), torch.randn(2, 16, 16) / 4
        self.mesh = meshes.roots["parallel"]["tp"]  # the dimension of the experts, here
        self.experts = nn.Parameter(distribute_tensor(experts, self.mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sent = funcol.all_to_all_single_autograd(self.router(x), None, None, self.mesh.get_group())
        expert = self.experts
        weight = expert.to_local() if isinstance(expert, DTensor) else expert
        return funcol.all_to_all_single_autograd(sent @ weight[0], None, None, self.mesh.get_group()) + x


class Expertise(nn.Module):
    """The experts as a separate module, between others."""

    def __init__(self, meshes: Meshes) -> None:
        super().__init__()
        self.layer, self.head = Experts(meshes), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x))  # type: ignore[no-any-return]


def experts(meshes: Meshes) -> nn.Module:
    """Return a module with experts sharded over one mesh and a router over another: two groups of parameters."""
    model = Expertise(meshes)
    of_experts = meshes.info("rest", "parallel")

    def place_shard(parameter: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(0), of_experts) if parameter is expert else None

    expert = model.layer.experts
    fully_shard(model.layer, mesh=meshes.over("shard"), shard_placement_fn=place_shard)
    fully_shard(model, mesh=meshes.over("shard"))
    return model


# --- the ways to reduce ---


def one_by_one(manager: Manager, model: nn.Module) -> None:
    """Reduce several models in one call."""
    reduce_across(manager, *model.children())


def own_hook(manager: Manager, model: nn.Module) -> None:
    """Reduce with a user's own hook, over a managed group."""
    pg = ManagedProcessGroup(manager)
    pg.register("own")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(functools.partial(dist.all_reduce, group=pg, op=ReduceOp.AVG))


def mixed(**dtypes: Any) -> Callable[[Meshes], nn.Module]:
    return functools.partial(perceptron, mp_policy=MixedPrecisionPolicy(**dtypes))


VARIANTS = {
    "as torch has it": Variant(perceptron),
    "a hook of the user's": Variant(perceptron, reduce=own_hook),
    "resharded after forward": Variant(functools.partial(perceptron, reshard_after_forward=True)),
    "not resharded after forward": Variant(functools.partial(perceptron, reshard_after_forward=False)),
    "bfloat16 inside": Variant(mixed(param_dtype=torch.bfloat16)),
    "bfloat16 inside, reduced in float32": Variant(mixed(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    "reduced in bfloat16": Variant(mixed(reduce_dtype=torch.bfloat16)),
    "reduced in float16": Variant(mixed(reduce_dtype=torch.float16)),
    "offloaded": Variant(functools.partial(perceptron, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "accumulated, reduced once": Variant(perceptron, functools.partial(accumulate, sync_each=False)),
    "accumulated, reduced each time": Variant(perceptron, functools.partial(accumulate, sync_each=True)),
    "several models": Variant(Pair, train_pair, one_by_one),
    "a shared parameter": Variant(tied),
    "partly frozen": Variant(partly_frozen),
    "no gradient in a step": Variant(
        functools.partial(branches, unused_too=False), functools.partial(train_branches, replicas_differ=False)
    ),
    "clipped": Variant(perceptron, clip),
    "gradients seen at once": Variant(seen_at_once, compare_seen),
    "checkpoint_wrapper": Variant(checkpoint_wrapped),
    "composable checkpoint": Variant(checkpointed),
    "recomputed": Variant(perceptron, functools.partial(recomputed, use_reentrant=False)),
    "recomputed, reentrant": Variant(perceptron, functools.partial(recomputed, use_reentrant=True)),
    "tensor parallel": Variant(tensor_parallel, train_tensor_parallel),
    "compiled": Variant(compiled),
    "compiled layers": Variant(compiled_layers),
}
# older versions free the head after the first part, even without the project's hook or mesh
if torch.__version__ >= "2.13":
    VARIANTS["a head called in chunks"] = Variant(chunked, train_chunks)
if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
    VARIANTS["no gradient on one replica"] = Variant(
        functools.partial(branches, unused_too=True), functools.partial(train_branches, replicas_differ=True)
    )
if hasattr(_fsdp_common, "ShardPlacementResult"):  # before torch 2.13 a module has one group of parameters
    VARIANTS["experts"] = Variant(experts)


# --- what a process does ---


class Training:
    """One way to train a variant.

    Args:
        variant: the trained variant.
        meshes: to shard over.
    """

    def __init__(self, variant: Variant, meshes: Meshes) -> None:
        self.model = variant.build(meshes)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)

    def gradients(self) -> list[torch.Tensor | None]:
        return [local(parameter.grad) for parameter in self.model.parameters()]

    def state(self) -> list[torch.Tensor]:
        """Return this process's part of parameters and optimizer."""
        state = self.optimizer.state
        return [
            local(each.detach())
            for parameter in self.model.parameters()
            for each in (parameter, *state.get(parameter, {}).values())
        ]


def same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(
        one is other is None or (one.dtype == other.dtype and torch.equal(one, other))
        for one, other in zip(first, second, strict=True)
    )


def compare(variant: Variant, manager: Manager, place: Place, ways: dict[str, Meshes]) -> None:
    """Train a variant in each way, in the same steps."""
    trainings = {name: Training(variant, meshes) for name, meshes in ways.items()}
    variant.reduce(manager, trainings["hook"].model)
    for step in range(STEPS):
        manager.start_quorum()
        for training in trainings.values():
            training.optimizer.zero_grad()
            variant.backward(training.model, step, place)
        assert manager.should_commit(), manager.status().errors
        assert manager.num_participants() == 2
        expected = trainings["torch"].gradients()
        for name, training in trainings.items():
            assert same(training.gradients(), expected), f"the gradients of {name} differ in step {step}"
            training.optimizer.step()
        for name, training in trainings.items():
            assert same(training.state(), trainings["torch"].state()), f"{name} differs after step {step}"


def train(place: Place, connection: Connection, world_port: int) -> None:
    """Run one process through all variants."""
    initialize(world_port, 2 * place.replica + place.rank, 4)
    with telling(connection), make_manager(place, min_replica_size=2, init_sync=False) as manager:
        worlds = {
            layout: init_device_mesh("cpu", (2, *shape), mesh_dim_names=("dp", *names))
            for layout, (shape, names) in LAYOUTS.items()
        }
        inner = {layout: worlds[layout][names] for layout, (_, names) in LAYOUTS.items()}
        extended = {layout: extend_mesh(manager, mesh) for layout, mesh in inner.items()}
        ways = {
            "mesh": Meshes(extended, replicated=True),
            "hook": Meshes(inner, replicated=False),
            "torch": Meshes(worlds, replicated=True),
        }
        for name, variant in VARIANTS.items():
            compare(variant, manager, place, ways)
            connection.send(Event("passed", text=name))
    dist.destroy_process_group()
    connection.send(Event("end"))


# --- what must hold ---


@pytest.fixture(scope="module")
def passed(forkserver: ForkServerContext) -> Iterator[tuple[set[str], str]]:
    """Yield the variants that all processes have passed, and the first failure or the empty string."""
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000, heartbeat_timeout_ms=20_000) as server,
        spawning(forkserver) as spawn,
        listening(spawn) as processes,
    ):
        world_port, address = processes.store(), str(server.address)
        places = [
            place
            for replica in (0, 1)
            for place in processes.start(train, world_port, shape=(2, 1), replicas=(replica,), lighthouse=address)
        ]
        failure = processes.failure_until_end(places)
        yield processes.passed(places), failure


@pytest.mark.in_parts(fixture="passed")
@pytest.mark.parametrize("name", VARIANTS)
def test_each_way_is_torchs_hybrid_sharding_bit_for_bit(passed: tuple[set[str], str], name: str) -> None:
    names, failure = passed
    assert name in names, failure
