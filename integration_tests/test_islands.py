"""Replica groups of different sizes that synchronize through their group rank 0: they train, die, heal, stay equal.

Each rank reports with a commit the digest of all global weights and of the outer optimizer, as whole tensors. So the
digest is equal on every rank of every island, with any number of ranks and any sharding.
"""

from __future__ import annotations

import gc
import itertools
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from integration_tests.conftest import Spawn
from integration_tests.language_model import (
    FOR_EVER,
    JOIN_TIMEOUT_MS,
    PATIENCE_S,
    QUORUM_TIMEOUT_MS,
    TIMEOUT,
    TIMEOUTS,
    TINY,
    Cluster,
    Event,
    ReplicaGroup,
    Spec,
    Trainer,
    join_own_group,
    live,
    manager_with_faults,
    training_together,
)
from tft_algos import DiLoCo, LocalSGD
from tft_algos.dtensors import shard_like
from tft_algos.manager.quorum.rank0_groups import whole
from tft_algos.testing import Action, Fault, Place, digest
from tft_algos.testing.trajectory import Recipe, reference
from tft_lighthouse import LighthouseServer

WIDTHS: Final = (6, 8, 5, 1)


@dataclass(frozen=True)
class Way:
    """The settings of the islands.

    Args:
        sharded: by FSDP2 inside an island of several ranks. False: data parallel.
        fragments, delay, alpha, sync_every: of DiLoCo. No fragments: LocalSGD.
        on_cpu, buckets: of DiLoCo.
        is_followed: nothing is random, and each inner step's weights are reported.
        islands: number of islands needed before the training starts.
        tensor_parallel: number of ranks that share each layer, beside the shards. Such a model uses generated
            gradients, because the sums of its forward pass round differently.
        through_rank_zero: False: each rank synchronizes its own part.
    """

    sharded: bool
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    on_cpu: bool = False
    buckets: bool = False
    is_followed: bool = False
    islands: int = 1
    sync_every: int = 4
    tensor_parallel: int = 1
    through_rank_zero: bool = True

    @property
    def inner_steps(self) -> int:
        return 3 * self.sync_every

    def recipe(self) -> Recipe:
        return Recipe(
            algorithm="diloco" if self.fragments else "local_sgd",
            fragments=lambda model: split(model, self.fragments),
            inner=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True),
            sync_every=self.sync_every,
            delay=self.delay,
            alpha=self.alpha,
        )


def make_model() -> nn.Sequential:
    """Return a model with rows that two or three shards divide unevenly, with empty shards."""
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(WIDTHS)))


def split(model: nn.Module, num_fragments: int) -> list[nn.Module]:
    layers = list(model.children())
    return [model] if num_fragments < 2 else [nn.Sequential(*layers[:1]), nn.Sequential(*layers[1:])]


def batch(replica: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTHS[0], generator=torch.Generator().manual_seed(1_000 * replica + step))


def loss_of(model: nn.Module, way: Way, replica: int, step: int) -> torch.Tensor:
    """Return the loss of a whole model."""
    if way.tensor_parallel == 1:
        loss: torch.Tensor = model(batch(replica, step)).square().mean()
        return loss
    pairs = zip(model.parameters(), made_gradients(model, replica, step), strict=True)
    return torch.stack([(parameter * gradient).sum() for parameter, gradient in pairs]).sum()


def made_gradients(model: nn.Module, replica: int, step: int) -> list[torch.Tensor]:
    """Return generated gradients, each sharded as its parameter is."""
    generator = torch.Generator().manual_seed(1_000 * replica + step)
    gradients: list[torch.Tensor] = []
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=generator)
        gradients.append(shard_like(whole, parameter.data) if isinstance(parameter.data, DTensor) else whole)
    return gradients


def full(parameters: Any) -> list[torch.Tensor]:
    return [
        parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach().clone()
        for parameter in parameters
    ]


def train(spec: Spec, connection: Connection) -> None:
    """Run the life of a trainer, in its own process."""
    os.environ.update(spec.environment)
    live(lambda tell: _train(spec, connection, tell), connection)


def _train(spec: Spec, connection: Connection, tell: Callable[[Event], None]) -> None:
    way: Way = spec.details
    _, ranks = join_own_group()
    # Where every sync must succeed, the timeout leaves time for a busy machine.
    quorum_timeout_ms = 5 * QUORUM_TIMEOUT_MS if way.is_followed else QUORUM_TIMEOUT_MS
    manager, injector = manager_with_faults(
        spec,
        tell,
        timeout=5 * TIMEOUT,
        timeouts=replace(TIMEOUTS, quorum_timeout_ms=quorum_timeout_ms, heal_timeout_ms=15_000),
        min_replica_size=way.islands,
        rank0_synchronization_only=way.through_rank_zero,
    )
    with manager:
        seeds = [0 if way.is_followed else os.getpid()]
        dist.broadcast_object_list(seeds)
        torch.manual_seed(seeds[0])
        model = make_model()
        forward: nn.Module = model
        if ranks > 1 and way.sharded:
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            shape = (ranks // way.tensor_parallel, way.tensor_parallel)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "tp"))
            if way.tensor_parallel > 1:
                parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            for layer in model:
                fully_shard(layer, mesh=mesh["shard"])
            fully_shard(model, mesh=mesh["shard"])
        elif ranks > 1:
            forward = nn.parallel.DistributedDataParallel(model)
        recipe = way.recipe()
        inner = recipe.inner(list(model.parameters()))
        strategy: Any
        if recipe.algorithm == "local_sgd":
            strategy = LocalSGD(manager, model, inner, way.sync_every)
        else:
            strategy = DiLoCo(
                manager,
                list(recipe.fragments(model)),
                inner,
                recipe.outer(list(model.parameters())),
                way.sync_every,
                fragment_sync_delay=way.delay,
                fragment_update_alpha=way.alpha,
                copy_pseudogradients_to_cpu=way.on_cpu,
                use_bucketization=way.buckets,
                bucket_cap_mb=1e-4,
            )
        tell(Event("ready"))
        last: int | None = None
        committed = step = 0
        with strategy:
            while manager.current_step() < (last or FOR_EVER) and not (way.is_followed and step == way.inner_steps):
                while connection.poll():
                    match connection.recv():
                        case Fault() as fault:
                            injector.inject(fault)
                        case int(number):
                            last = number
                inner.zero_grad()
                replica = ord(spec.name) - ord("a")
                if not way.is_followed:
                    forward(torch.randn(4, WIDTHS[0])).square().mean().backward()
                elif way.tensor_parallel == 1:
                    loss_of(forward, way, replica, step).backward()
                else:
                    for parameter, gradient in zip(
                        model.parameters(), made_gradients(model, replica, step), strict=True
                    ):
                        parameter.grad = gradient
                inner.step()
                step += 1
                if way.is_followed:
                    tell(Event("weights", step, digest=digest(full(model.parameters()))))
                    continue
                if manager.current_step() != committed:  # or healed to what others have committed
                    committed = manager.current_step()
                    lineage = manager.state_dict()["lineage"]
                    told = digest(whole(strategy.state_dict()))
                    tell(Event("commit", committed, lineage, told, manager.num_participants()))
        tell(Event("loss", manager.current_step()))
    # If torch's DDP held the last reference to a Gloo group, this thread could wait for a thread that waits for the
    # GIL.
    del forward
    gc.collect()  # it may be in a cycle
    dist.destroy_process_group()


# --- nothing fails ----------------------------------------------------------------------------------------------------


MESH: Final = Way(sharded=True, fragments=2, delay=7, alpha=0.4, is_followed=True, islands=2, sync_every=12)


@pytest.mark.in_parts(always=["local SGD, sharded"])
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("sizes", "way"),
    [
        ((1, 2), Way(sharded=True, fragments=2, delay=7, is_followed=True, islands=2, buckets=True, sync_every=12)),
        ((1, 2), Way(sharded=False, fragments=1, alpha=0.5, is_followed=True, islands=2, on_cpu=True)),
        ((1, 2), Way(sharded=True, fragments=0, is_followed=True, islands=2)),
        ((1, 4), replace(MESH, tensor_parallel=2)),
        ((4, 4), replace(MESH, tensor_parallel=2, through_rank_zero=False)),
    ],
    ids=[
        "two in flight, sharded, buckets",
        "data parallel, on the CPU",
        "local SGD, sharded",
        "on a mesh of two by two",
        "groups on meshes of two by two, each rank for itself",
    ],
)
def test_islands_follow_the_reference_to_the_last_bit(spawn: Spawn, sizes: tuple[int, int], way: Way) -> None:
    """The ranks of an island receive one batch, so that it is one replica, whose mean over two ranks is exact."""
    torch.manual_seed(0)
    wanted = reference(
        [make_model(), make_model()],
        way.recipe(),
        lambda model, replica, step: loss_of(model, way, replica, step),
        way.inner_steps,
    )
    with LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=JOIN_TIMEOUT_MS) as lighthouse:
        islands = [
            ReplicaGroup(spawn, Spec(str(lighthouse.address), name, TINY, details=way), size, train)
            for name, size in zip("ab", sizes, strict=True)
        ]
        for island in islands:
            island.start()
        for replica, island in enumerate(islands):
            for trainer in island.trainers:
                with suppress(EOFError):
                    while trainer.connection.poll(PATIENCE_S):
                        trainer.events.append(trainer.connection.recv())
                assert trainer.events[-1:] == [Event("end")]
                digests = [event.digest for event in trainer.events if event.kind == "weights"]
                assert digests == [digest(weights[replica]) for weights in wanted.weights]
            island.close()


# --- everything does --------------------------------------------------------------------------------------------------


def check_healed(cluster: Cluster, group: ReplicaGroup, starts: list[int]) -> None:
    """Check that only that group was restarted, and that all are equal."""
    cluster.until(lambda: group.starts > starts[cluster.groups.index(group)], "the whole group is started again")
    cluster.until_together(after=cluster.step)
    check_equal(cluster)
    wanted = [number + (each is group) for each, number in zip(cluster.groups, starts, strict=True)]
    assert [each.starts for each in cluster.groups] == wanted, cluster.history()


def check_equal(cluster: Cluster) -> None:
    """Check that equal commits have equal global weights and outer state, on every rank."""
    told: dict[tuple[int, int], set[str]] = {}
    for group in cluster.groups:
        for _, trainer in group.all_trainers:
            for event in trainer.commits.values():
                told.setdefault((event.step, event.lineage), set()).add(event.digest)
    assert told
    assert not [where for where, digests in told.items() if len(digests) > 1], cluster.history()


def strike(group: ReplicaGroup, rank: int, action: Action, place: Place) -> Fault:
    """Let a fault strike one rank when it reaches that place."""
    fault = Fault(action=action, place=place, replica=group.name, rank=rank)
    group.trainers[rank].connection.send(fault)
    return fault


def has_struck(trainer: Trainer, fault: Fault) -> bool:
    return any(event.kind == "struck" and event.text == fault.describe() for event in trainer.events)


@pytest.mark.in_parts
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("sizes", "way"),
    [
        ((1, 2), Way(sharded=True, fragments=2, delay=1)),
        ((2, 3), Way(sharded=False, fragments=1, alpha=0.5, on_cpu=True, buckets=True)),
        pytest.param((1, 4), Way(sharded=True, fragments=2, delay=1, tensor_parallel=2), marks=pytest.mark.soak),
    ],
    ids=["1 + 2, streaming, sharded", "2 + 3, data parallel, on the CPU, buckets", "1 + 4, on a mesh of two by two"],
)
def test_islands_of_different_sizes_are_killed_and_heal_equal(spawn: Spawn, sizes: tuple[int, int], way: Way) -> None:
    with training_together(spawn, groups=2, ranks=sizes, trainer=train, details=way) as cluster:
        small, large = cluster.groups
        starts = [1, 1]
        # Each rank's death ends its island, which heals from the other, with fewer ranks or with more.
        for group, rank in ((large, sizes[1] - 1), (small, 0)):
            group.trainers[rank].process.kill()
            check_healed(cluster, group, starts)
            starts[cluster.groups.index(group)] += 1
        cluster.strike(large, 0, Action.KILL, Place.REDUCTION)
        check_healed(cluster, large, starts)
        cluster.finish()
        check_equal(cluster)


@pytest.mark.in_parts
@pytest.mark.timeout(150)
def test_where_the_source_dies_as_it_serves_an_island_heals_from_another(spawn: Spawn) -> None:
    way = Way(sharded=True, fragments=2)
    with training_together(spawn, groups=3, ranks=(1, 2, 2), trainer=train, details=way) as cluster:
        source, newcomer = cluster.groups[0], cluster.groups[2]
        dies = source.trainers[0]
        strike(source, 0, Action.KILL, Place.SERVING)
        cluster.kill(newcomer.trainers[1])
        cluster.until(lambda: source.starts == 2, "the source has died as it served")
        assert dies.events[-1].kind == "struck"
        cluster.until_together(after=cluster.step)
        check_equal(cluster)
        assert [group.starts for group in cluster.groups] == [2, 1, 2], cluster.history()
        cluster.finish()


@pytest.mark.in_parts
@pytest.mark.timeout(150)
def test_where_rank_zero_can_not_fetch_all_ranks_wait_for_the_next_quorum(spawn: Spawn) -> None:
    way = Way(sharded=True)
    with training_together(spawn, groups=2, ranks=(1, 2), trainer=train, details=way) as cluster:
        source, newcomer = cluster.groups
        refuses = source.trainers[0]
        fault = strike(source, 0, Action.FAIL, Place.SERVING)
        cluster.kill(newcomer.trainers[0])
        check_healed(cluster, newcomer, [1, 1])
        assert has_struck(refuses, fault)
        cluster.finish()
        check_equal(cluster)
