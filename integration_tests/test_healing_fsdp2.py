"""FSDP2 inside replica groups that are killed at any place of a step and healed: no hang, no mix-up, bit-equal.

Each group of two processes begins with its own weights, with uneven and empty shards. So equal digests come from
healing alone. The user's functions return and receive DTensors.
"""

from __future__ import annotations

import os
import random
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from integration_tests.conftest import Spawn
from integration_tests.language_model import (
    FOR_EVER,
    HEARTBEAT_TIMEOUT_MS,
    OF_RANK_ZERO,
    Cluster,
    Event,
    ReplicaGroup,
    Spec,
    join_own_group,
    live,
    local,
    manager_with_faults,
    training_together,
)
from tft_algos import Optimizer, extend_mesh, reduce_across
from tft_algos.testing import Action, Fault, Place, digest
from tft_coord.timeouts import Timeouts

SOAK_RUNS: Final = 20
SOAK_FAULTS: Final = 4


@dataclass(frozen=True)
class Way:
    """The trainers' way to shard, and to return and load their state.

    Args:
        extended: FSDP2 over the extended mesh. False: over the group's own mesh, with FSDP2's all-reduce hook.
        by_torch: the state is that of torch.distributed.checkpoint.state_dict. False: the modules' own.
        use_async_quorum: as in the Manager.
    """

    extended: bool
    by_torch: bool
    use_async_quorum: bool = True

    def __str__(self) -> str:
        return ", ".join(
            [
                "extended mesh" if self.extended else "all-reduce hook",
                "torch's state" if self.by_torch else "plain state",
                "async" if self.use_async_quorum else "sync",
            ]
        )


def train(spec: Spec, connection: Connection) -> None:
    """Run the life of a trainer, in its own process."""
    os.environ.update(spec.environment)
    live(lambda tell: _train(spec, connection, tell), connection)


def make_model() -> nn.Module:
    """Return a model with parameters of 13, 5 and 1 rows, so that the second of two shards is smaller, or empty."""
    return nn.Sequential(nn.Linear(6, 13), nn.ReLU(), nn.Linear(13, 5), nn.LayerNorm(5), nn.Linear(5, 1, bias=False))


def _train(spec: Spec, connection: Connection, tell: Callable[[Event], None]) -> None:
    way: Way = spec.details
    rank, ranks = join_own_group()
    torch.manual_seed(os.getpid())
    timeouts = Timeouts(heal_timeout_ms=3_000, heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS, beat_interval_ms=500)
    manager, injector = manager_with_faults(spec, tell, timeouts=timeouts, use_async_quorum=way.use_async_quorum)
    with manager:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
        if way.extended:
            mesh = extend_mesh(manager, mesh)["dp", "shard"]
        model = make_model()
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        for layer in (model[0], model[2]):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if not way.extended:
            reduce_across(manager, model)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        assert any(parameter.to_local().numel() == 0 for parameter in model.parameters()) == (rank == 1)  # type: ignore[attr-defined]

        dies_in_take = False

        def take() -> dict[str, Any]:
            if dies_in_take:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
            if not way.by_torch:
                return {"model": model.state_dict(), "optimizer": adam.state_dict()}
            parameters, moments = get_state_dict(model, adam)
            return {"model": parameters, "optimizer": moments}

        def load(state: dict[str, Any]) -> None:
            assert all(isinstance(each, DTensor) for each in state["model"].values())
            if way.by_torch:
                set_state_dict(model, adam, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            else:
                model.load_state_dict(state["model"])
                adam.load_state_dict(state["optimizer"])
            tell(Event("healed", manager.current_step()))

        manager.register_state_dict_fn("training", load, take)
        injector.module(model)
        optimizer = Optimizer(manager, injector.optimizer(adam))
        tell(Event("ready"))
        last: int | None = None
        while manager.current_step() < (last or FOR_EVER):
            while connection.poll():
                match connection.recv():
                    case Fault() as fault:
                        injector.inject(fault)
                    case "die in take":
                        dies_in_take = True
                    case int(step):
                        last = step
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            error = manager.errored()
            optimizer.step()
            if manager.status().committed:
                lineage = manager.state_dict()["lineage"]
                told = digest(local(model.state_dict()), local(adam.state_dict()))
                tell(Event("commit", manager.current_step(), lineage, told, manager.num_participants()))
            else:
                tell(Event("failed", manager.current_step(), text=str(error)))
        tell(Event("loss", manager.current_step()))
    dist.destroy_process_group()


def kill_at(cluster: Cluster, turn: int, place: Place) -> None:
    """Kill a process of one group at a place, and wait until all groups commit together again."""
    # The first holder of the state serves it.
    group = cluster.groups[0 if place is Place.SERVING else turn % 2]
    starts = [each.starts + (each is group) for each in cluster.groups]
    cluster.strike(group, 0 if place in OF_RANK_ZERO else 1, Action.KILL, place)
    cluster.until(lambda: group.starts == starts[cluster.groups.index(group)], "the whole group is started again")
    check_healed(cluster, group)
    assert [each.starts for each in cluster.groups] == starts, cluster.history()


def kill_in_own_state_function(cluster: Cluster) -> None:
    """Kill a rank of a healing group while the other rank waits for it in a collective of the user's."""
    group = cluster.groups[1]
    starts = [each.starts + (each is group) for each in cluster.groups]
    ended = group.trainers[0]
    group.trainers[1].connection.send("die in take")
    group.trainers[0].connection.send(Fault(action=Action.FAIL, place=Place.OPTIMIZER, replica=group.name))
    cluster.until(lambda: group.starts == starts[1], "the whole group is started again")
    check_healed(cluster, group)
    assert [each.starts for each in cluster.groups] == starts, cluster.history()
    assert ended.events[-1].kind == "end"
    assert ended.events[-1].text


def fail_to_serve(cluster: Cluster) -> None:
    """Let one rank of the only source refuse, so that no rank of the other group loads, until it has asked again."""
    starts = [each.starts for each in cluster.groups]
    cluster.strike(cluster.groups[0], 1, Action.FAIL, Place.SERVING)
    check_healed(cluster, cluster.groups[1])
    assert [each.starts for each in cluster.groups] == starts, cluster.history()


def check_healed(cluster: Cluster, group: ReplicaGroup) -> None:
    cluster.until_together(after=cluster.step)
    assert all(any(each.kind == "healed" for each in trainer.events) for trainer in group.trainers), cluster.history()
    cluster.check_digests()


def finish(cluster: Cluster) -> None:
    """End the training, and check all reports."""
    cluster.finish()
    told = [event.text for group in cluster.groups for _, trainer in group.all_trainers for event in trainer.events]
    assert not [text for text in told if "mixed torch.Tensor" in text or "is a part of" in text]


IN_CI: Final = {
    Way(extended=True, by_torch=True): (Place.REDUCTION,),
    Way(extended=False, by_torch=False, use_async_quorum=False): (Place.BACKWARD, Place.HEALING),
}
ALL_WAYS: Final = [
    Way(extended, by_torch, use_async_quorum)
    for extended in (True, False)
    for by_torch in (True, False)
    for use_async_quorum in (True, False)
]


@pytest.mark.in_parts
@pytest.mark.parametrize("way", IN_CI, ids=str)
def test_a_killed_group_heals_bit_equal(spawn: Spawn, way: Way) -> None:
    with training_together(spawn, groups=2, ranks=2, trainer=train, details=way) as cluster:
        for turn, place in enumerate(IN_CI[way]):
            kill_at(cluster, turn, place)
        if way.use_async_quorum:
            kill_in_own_state_function(cluster)
        else:
            fail_to_serve(cluster)
        finish(cluster)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", IN_CI, ids=str)
def test_where_a_source_is_killed_as_it_serves_another_group_serves_on(spawn: Spawn, way: Way) -> None:
    with training_together(spawn, groups=3, ranks=2, trainer=train, details=way) as cluster:
        for turn in range(2):
            kill_at(cluster, turn, Place.SERVING)
        finish(cluster)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(SOAK_RUNS))
def test_a_group_killed_at_random_places_heals_bit_equal(spawn: Spawn, seed: int) -> None:
    choice = random.Random(seed)
    with training_together(spawn, groups=2, ranks=2, trainer=train, details=ALL_WAYS[seed % len(ALL_WAYS)]) as cluster:
        for _ in range(SOAK_FAULTS):
            place = choice.choice([None, *Place])
            if place is None:
                kill_in_own_state_function(cluster)
            # of two groups one holds the state alone then, and its death would lose the state
            elif place is Place.SERVING:
                fail_to_serve(cluster)
            else:
                kill_at(cluster, choice.randrange(2), place)
        finish(cluster)
