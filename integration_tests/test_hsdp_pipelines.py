"""Pipeline parallelism inside replica groups, with torch's own schedules: equal with and without fault tolerance.

There are two replica groups of two stages each. A stage is a plain module, whose gradients are reduced after the
schedule. Or it is sharded, and FSDP2 reduces it in the schedule. The reference is reduced over a group of torch's own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from integration_tests.conftest import Spawn
from integration_tests.sharded import (
    Event,
    Place,
    Processes,
    count,
    initialize,
    listening,
    local,
    make_manager,
    telling,
    unsharded_model,
)
from tft_algos import Manager, extend_mesh, reduce_across
from tft_lighthouse import LighthouseServer

STEPS = 3  # of both groups, for each schedule
STEPS_ALONE = 3
MICROBATCHES = 4
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}

pytestmark = pytest.mark.timeout(150)  # on a busy machine


class Stage:
    """One way to train this process's stage of a pipeline.

    Args:
        schedule: torch's class.
        place: its rank is the stage.
        stages: the mesh dimension of the stages of this replica group.
        shards: the mesh that the stage is sharded over. None: the stage is a plain module.
    """

    def __init__(self, schedule: Any, place: Place, stages: DeviceMesh, shards: DeviceMesh | None) -> None:
        model = unsharded_model()
        self.module = nn.Sequential(model[0], nn.ReLU()) if place.rank == 0 else nn.Sequential(model[2])
        if shards is not None:
            fully_shard(self.module[0], mesh=shards)
            fully_shard(self.module, mesh=shards)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        stage = PipelineStage(self.module, place.rank, place.world_size, torch.device("cpu"), group=stages.get_group())
        self._schedule = schedule(stage, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
        self._place = place

    def run(self, step: int) -> None:
        """Run forward and backward of all microbatches."""
        seed = torch.Generator().manual_seed(10 * step + self._place.replica)
        x, target = torch.randn(8, 16, generator=seed), torch.randn(8, 12, generator=seed)
        self.optimizer.zero_grad()
        if self._place.rank == 0:
            self._schedule.step(x)
        else:
            self._schedule.step(target=target)

    def gradients(self) -> list[torch.Tensor]:
        gradients = [local(parameter.grad) for parameter in self.module.parameters()]
        assert gradients
        return gradients

    def state(self) -> list[torch.Tensor]:
        state = self.optimizer.state
        return [
            local(each.detach())
            for parameter in self.module.parameters()
            for each in (parameter, *state[parameter].values())
        ]


def reduce_plainly(manager: Manager, stage: Stage) -> None:
    """Reduce the gradients after the schedule."""
    works = [manager.allreduce(gradient) for gradient in stage.gradients()]
    for work in works:
        work.wait()


def train(place: Place, connection: Connection, world_port: int) -> None:
    """Run one process: train in each way side by side, with each schedule. Then one group dies, and the other goes
    on."""
    initialize(world_port, 2 * place.replica + place.rank, 4)
    with telling(connection), make_manager(place, min_replica_size=1, init_sync=False) as manager:
        world = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "stage", "shard"))
        inner = world["stage", "shard"]
        extended = extend_mesh(manager, inner)
        meet(manager)
        for name, schedule in SCHEDULES.items():
            over: dict[str, DeviceMesh | None] = {
                "hook": inner["shard"],
                "mesh": extended["dp", "shard"],
                "plain": None,
                "torch": None,
            }
            stages = {way: Stage(schedule, place, inner["stage"], shards) for way, shards in over.items()}
            reduce_across(manager, stages["hook"].module)
            for step in range(STEPS):
                take_step(manager, stages, step, world["dp"].get_group())
            connection.send(Event("passed", text=name))
        if place.replica == 1:
            die_in(stages["hook"])
        step, alone = STEPS, 0
        while alone < STEPS_ALONE:
            if take_step(manager, stages, step, None):
                assert manager.num_participants() == 1
                step, alone = step + 1, alone + 1
                connection.send(Event("step", manager.current_step(), participants=1))
    connection.send(Event("end"))
    dist.destroy_process_group()


def meet(manager: Manager) -> None:
    """Fail steps until one has both groups in it."""
    participants = 0
    while participants < 2:
        manager.start_quorum()
        participants = manager.num_participants()
        manager.report_error(RuntimeError("the training begins in the next step, if both groups are here"))
        manager.should_commit()


def take_step(manager: Manager, stages: dict[str, Stage], step: int, group: dist.ProcessGroup | None) -> bool:
    """Run one step in each way, and compare them bit for bit. Returns: whether it was committed.

    Args:
        manager: reduces all ways except the reference.
        stages: by way. They differ only in their reduction.
        step: number of the batch.
        group: for the reduction of the reference. None: the replica group is alone, or about to be.
    """
    manager.start_quorum()
    for way, stage in stages.items():
        stage.run(step)
        if way == "plain":
            reduce_plainly(manager, stage)
    committed = manager.should_commit()
    if not committed:
        return False
    if group is not None:
        assert manager.num_participants() == 2
        for gradient in stages["torch"].gradients():
            dist.all_reduce(gradient, op=ReduceOp.AVG, group=group)
    for way, stage in stages.items():
        for one, expected in zip(stage.gradients(), stages["torch"].gradients(), strict=True):
            assert torch.equal(one, expected), f"the gradients of {way} differ in step {step}"
    for stage in stages.values():
        stage.optimizer.step()
    for way, stage in stages.items():
        for one, expected in zip(stage.state(), stages["torch"].state(), strict=True):
            assert torch.equal(one, expected), f"{way} differs after step {step}"
    return True


def die_in(stage: Stage) -> None:
    """Kill this process when it is about to reduce across the groups."""

    def end(_: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for module in stage.module.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(end)


@pytest.fixture
def processes(spawn: Spawn) -> Iterator[Processes]:
    with listening(spawn) as processes:
        yield processes


@pytest.mark.in_parts
def test_replica_groups_of_stages_train_as_without_fault_tolerance_and_one_goes_on_when_the_other_dies(
    processes: Processes,
) -> None:
    with LighthouseServer("127.0.0.1:0", join_timeout_ms=10_000, heartbeat_timeout_ms=5_000) as server:
        world_port, address = processes.store(), str(server.address)
        survivors, victims = (
            processes.start(train, world_port, shape=(2, 1), replicas=(replica,), lighthouse=address)
            for replica in (0, 1)
        )
        processes.finish(survivors)
    assert processes.passed(survivors + victims) == set(SCHEDULES)
    for place in survivors:
        assert count(processes.events[place], 1) == STEPS_ALONE
    assert not any(count(processes.events[place], 1) for place in victims)
