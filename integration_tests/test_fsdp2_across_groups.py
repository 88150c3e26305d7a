"""FSDP2 and tensor parallelism across replica groups: equal to torch's own hybrid sharding, bit for bit.

A mesh of one replica group is extended by a dimension across the groups, over a Manager's participants. The reference
is torch's own mesh of all processes. After the death of a replica group, the reference continues as plain FSDP2.
"""

from __future__ import annotations

import functools
import io
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from integration_tests.conftest import Spawn
from integration_tests.sharded import (
    NAMES,
    Event,
    Place,
    Processes,
    batch,
    count,
    initialize,
    listening,
    local,
    make_manager,
    make_model,
    telling,
    unsharded_model,
)
from tft_algos import extend_mesh, reduce_across
from tft_algos.manager.clock import SystemClock
from tft_algos.manager.reduce.reduction import Reduction
from tft_algos.testing import digest
from tft_coord.core.step.reducing import mean_factors
from tft_lighthouse import LighthouseServer
from tft_pg import DummyWork, ManagedProcessGroup, ProcessGroup, ProcessGroupGloo, extend_device_mesh
from tft_pg.testing import Bench

STEPS = 12
STEPS_ALONE = 4
EXCHANGE_AT = 3  # at this step of both they exchange data outside the training
FOR_EVER = 10_000

pytestmark = pytest.mark.timeout(150)  # on a busy machine


# --- what a process does ---


class Training:
    """A sharded model with its optimizer, in one process.

    Args:
        mesh: has the dimensions "shard" and "tp".
        data_parallel: its dimensions over which the data differ.
    """

    def __init__(self, mesh: DeviceMesh, *, data_parallel: tuple[str, ...]) -> None:
        self.model = make_model(mesh, data_parallel=data_parallel)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def take(self) -> dict[str, Any]:
        """Return this process's part of parameters and optimizer."""
        return {
            name: {"weight": local(parameter.data), "optimizer": local(dict(self.optimizer.state[parameter]))}
            for name, parameter in self.model.named_parameters()
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load the state that another process at this place has taken."""
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter, DTensor)
            part, mesh, placements = parameter.to_local(), parameter.device_mesh, parameter.placements
            part.data.copy_(state[name]["weight"])
            self.optimizer.state[parameter] = {
                key: value.clone()
                if value.shape != part.shape
                else DTensor.from_local(
                    value.clone(), mesh, placements, shape=parameter.shape, stride=parameter.stride()
                )
                for key, value in state[name]["optimizer"].items()
            }

    def backward(self, step: int, place: Place) -> None:
        self.model(batch(step, place)).square().mean().backward()

    def die_in_backward(self) -> None:
        """Kill this process in the next backward pass, after the last layer's gradients and before the first's."""

        def end(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))

        self.model[0].register_forward_hook(end)


def train_as_torch_does(place: Place, connection: Connection, participants: list[int]) -> None:
    """Train the reference: torch's own mesh of two replicas, or plain FSDP2 in each when one takes part."""
    initialize(place.port, place.replica * place.world_size + place.rank, 2 * place.world_size)
    mesh = init_device_mesh("cpu", (2, *place.shape), mesh_dim_names=("dp", *NAMES))
    trainings = {
        1: Training(mesh, data_parallel=("shard",)),
        2: Training(mesh, data_parallel=("dp", "shard")),
    }
    current = trainings[participants[0]]
    for step, number in enumerate(participants):
        if trainings[number] is not current:
            trainings[number].load(current.take())
            current = trainings[number]
        current.optimizer.zero_grad()
        current.backward(step, place if number == 2 else replace(place, replica=0))
        current.optimizer.step()
        connection.send(Event("step", step + 1, digest(current.take()), number))
    dist.destroy_process_group()
    connection.send(Event("end"))


def train_managed(place: Place, connection: Connection, hook_first: bool) -> None:
    """Run one process of a replica group, for the given number of steps, or until it has outlived the other group.

    The process trains two models side by side, one for each way to reduce across. They stay equal. The second of two
    groups dies in the middle of a backward pass, after STEPS commits together with the first.
    """
    initialize(place.port, place.rank, place.world_size)
    with telling(connection), make_manager(place, min_replica_size=1) as manager:
        inner = init_device_mesh("cpu", place.shape, mesh_dim_names=NAMES)
        mesh = extend_mesh(manager, inner)
        extended = Training(mesh, data_parallel=("dp", "shard"))
        hooked = Training(inner, data_parallel=("shard",))
        reduce_across(manager, hooked.model)
        trainings = [hooked, extended] if hook_first else [extended, hooked]
        for key, training in zip(("first", "second"), trainings, strict=True):
            manager.register_state_dict_fn(key, training.load, training.take)
        connection.send(Event("ready"))
        steps = connection.recv()
        told: list[int] = []  # participants of each step
        while manager.current_step() < steps and not (2 in told and told[-STEPS_ALONE:] == [1] * STEPS_ALONE):
            manager.start_quorum()
            manager.wait_quorum()
            if place.replica == 1 and told.count(2) == STEPS:
                trainings[0].die_in_backward()  # the other group is in this step, and waits for a gradient
            for training in trainings:
                training.optimizer.zero_grad()
                training.backward(manager.current_step(), place)
            if not manager.should_commit():
                continue
            for training in trainings:
                training.optimizer.step()
            step, participants, same = manager.current_step(), manager.num_participants(), digest(extended.take())
            assert digest(hooked.take()) == same, f"the two ways differ after step {step}"
            connection.send(Event("step", step, same, participants))
            told.append(participants)
            if told.count(2) == EXCHANGE_AT == told[-EXCHANGE_AT:].count(2):
                exchange(place, connection, mesh, extended)
        pg = mesh.get_group("dp")
        assert isinstance(pg, ManagedProcessGroup)
        pg.unregister()
    dist.destroy_process_group()
    connection.send(Event("end"))


def exchange(place: Place, connection: Connection, mesh: DeviceMesh, training: Training) -> None:
    """Reduce integers over the participants after a commit, and load one group's state on the other."""
    pg = mesh.get_group("dp")
    tokens = torch.tensor([place.replica + 1, 10 * (place.replica + 1)])
    assert funcol.all_reduce(tokens, "sum", pg).tolist() == [3, 30]
    assert funcol.all_reduce(tokens, "max", (mesh, 0)).tolist() == [2, 20]
    assert funcol.all_reduce(-tokens, "max", mesh["dp"]).tolist() == [-1, -10]
    loss = torch.tensor(float(place.replica))
    assert funcol.all_reduce(loss, "sum", pg).item() == funcol.all_reduce(loss, "max", (mesh, 0)).item() == 1.0
    dist.all_reduce(loss, op=ReduceOp.AVG, group=pg)
    assert loss.item() == 0.5
    dist.all_reduce(loss, group=pg)
    assert loss.item() == 1.0
    state = get_model_state_dict(training.model)
    if place.replica == 0:
        saved = io.BytesIO()
        torch.save(state, saved)
        connection.send(Event("state", state=saved.getvalue()))
        return
    # torch 2.11 does not include its own class in the safe list
    with torch.serialization.safe_globals([_StridedShard]):
        loaded = torch.load(io.BytesIO(connection.recv()), weights_only=True)
    other = make_model(mesh, data_parallel=("dp", "shard"))
    assert digest(local(get_model_state_dict(other))) != digest(local(state))
    set_model_state_dict(other, loaded)
    assert digest(local(get_model_state_dict(other))) == digest(local(state))


# --- what must hold ---


@pytest.fixture
def processes(spawn: Spawn) -> Iterator[Processes]:
    with listening(spawn) as processes:
        yield processes


@pytest.fixture
def lighthouse() -> Iterator[str]:
    with LighthouseServer("127.0.0.1:0", join_timeout_ms=10_000, heartbeat_timeout_ms=5_000) as server:
        yield str(server.address)


def start_managed(
    processes: Processes, lighthouse: str, *, shape: tuple[int, int], replicas: tuple[int, ...], hook_first: bool
) -> list[Place]:
    """Start replica groups, and let them begin their first step when the lighthouse knows all of them."""
    places = [
        place
        for i in replicas
        for place in processes.start(train_managed, hook_first, shape=shape, replicas=(i,), lighthouse=lighthouse)
    ]
    processes.until(bool, places, "all are ready")
    return places


@pytest.mark.in_parts
@pytest.mark.parametrize(
    ("shape", "hook_first"),
    [((2, 1), True), ((2, 2), False)],
    ids=["2 shards, dies in the hook", "2 shards and tensor parallel, dies in the mesh"],
)
def test_two_replica_groups_are_torchs_hybrid_sharding_bit_for_bit_and_one_that_is_left_goes_on(
    processes: Processes, lighthouse: str, shape: tuple[int, int], hook_first: bool
) -> None:
    places = start_managed(processes, lighthouse, shape=shape, replicas=(0, 1), hook_first=hook_first)
    survivors, victims = places[: len(places) // 2], places[len(places) // 2 :]
    processes.tell(survivors, FOR_EVER)
    processes.until(lambda events: events[-1].step >= 2, survivors, "one group trains alone")
    processes.tell(victims, FOR_EVER)
    processes.finish(survivors)
    processes.until(lambda events: count(events, 2) == STEPS, victims, "all that the victims told is heard")
    told = [event.participants for event in processes.steps(survivors[0]).values()]
    reference = processes.start(train_as_torch_does, told, shape=shape, replicas=(0, 1))
    processes.finish(reference)
    for place, same in zip(places, reference, strict=True):
        steps, expected = processes.steps(place), processes.steps(same)
        assert steps == expected if place in survivors else steps.items() <= expected.items()
        assert count([*steps.values()], 2) == STEPS


class Participants:
    """A replacement for a Manager whose participants all give the same."""

    def __init__(self, number: int) -> None:
        self.strategy = SimpleNamespace(attempt=1, verdict=None)
        self._number = number

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: dist.ReduceOp.RedOpType) -> dist.Work:
        if reduce_op == ReduceOp.SUM:
            tensor.mul_(self._number)
        return DummyWork([tensor])

    def num_participants(self) -> int:
        return self._number


def summing(model: nn.Sequential, factor: float) -> nn.Sequential:
    """Configure FSDP2 to sum, and to divide by a factor of the user's."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no PREMUL_SUM
    return model


def compare_gradients(place: Place, connection: Connection, shape: tuple[int, int]) -> None:
    """Compare FSDP2's gradient of several shards with their mean, in each dtype."""
    initialize(place.port, place.rank, place.world_size)
    place = replace(place, shape=shape)
    manager: Any = Participants(3)
    pg = ManagedProcessGroup(manager)
    inner = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    mesh = extend_device_mesh(inner, pg)
    alone = unsharded_model().double()
    for shard in range(shape[0]):
        x = batch(0, replace(place, rank=shard * shape[1])).double()
        (alone(x).square().mean() / shape[0]).backward()
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        extended = functools.partial(make_model, mesh, data_parallel=("dp", "shard"), mp_policy=policy)
        hooked = functools.partial(make_model, inner, data_parallel=("shard",), mp_policy=policy)
        over_mesh = [extended(), summing(extended(), shape[0] * pg.size())]
        by_hook = [hooked(), summing(hooked(), shape[0])]
        if shape[0] > 2 and dtype == torch.float32:
            over_mesh.append(extended(reshard_after_forward=2))
            by_hook.append(hooked(reshard_after_forward=2))
        reduce_across(manager, *by_hook)
        for model in over_mesh + by_hook:
            model(batch(0, place)).square().mean().backward()
            for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
                gradient = parameter.grad.full_tensor().double()  # type: ignore[union-attr]
                torch.testing.assert_close(gradient, expected.grad, atol=tolerance, rtol=tolerance)
    dist.destroy_process_group()
    connection.send(Event("end"))


@pytest.mark.in_parts(always=["4 shards"])
@pytest.mark.parametrize("shape", [(4, 1), (2, 2)], ids=["4 shards", "2 shards and tensor parallel"])
def test_the_gradient_is_the_mean_over_shards_and_participants(processes: Processes, shape: tuple[int, int]) -> None:
    processes.finish(processes.start(compare_gradients, shape, shape=(4, 1), replicas=(0,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # float16 is reduced in float32
def test_the_mean_of_three_is_torchs_own_bit_for_bit(dtype: torch.dtype) -> None:
    """Three is no power of two, so another way to divide would round differently."""

    def failed(error: Exception) -> None:
        raise error

    def reduce(rank: int, pg: ProcessGroup) -> bool:
        mean = torch.randn(10_000, generator=torch.Generator().manual_seed(rank)).to(dtype)
        total = mean.clone()
        pg.allreduce([mean], ReduceOp.AVG).wait()
        factor, divide_by = mean_factors(3)
        work = pg.allreduce([total.mul_(factor)], ReduceOp.SUM)
        Reduction(work, total, divide_by=divide_by, report=failed, abort=pg.abort, clock=SystemClock()).wait()
        return torch.equal(mean, total)

    with Bench(ProcessGroupGloo) as bench:
        assert bench.all(bench.configured(3), reduce) == [True, True, True]
