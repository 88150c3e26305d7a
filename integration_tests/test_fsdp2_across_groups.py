"""FSDP2 and tensor parallelism across replica groups: what torch's own hybrid sharding computes, bit for bit.

A mesh of one replica group is extended by a dimension across the groups, over a Manager's participants. The reference
is torch's own mesh of all processes; where a replica group dies, the reference goes on as plain FSDP2.
"""

from __future__ import annotations

import io
import multiprocessing.connection
import os
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed import PrefixStore, ReduceOp, TCPStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from integration_tests.conftest import Spawn
from tft_algos import Manager, Optimizer
from tft_algos.manager.reduction import Reduction
from tft_algos.testing import digest
from tft_lighthouse import LighthouseServer
from tft_pg import DummyWork, ManagedProcessGroup, ProcessGroup, ProcessGroupGloo, extend_device_mesh
from tft_pg.testing import Bench

PATIENCE_S = 50.0
STEPS = 20
STEPS_ALONE = 5
EXCHANGE_AT = 3  # at this step of both they do what is no training
FOR_EVER = 10_000
NAMES = ("shard", "tp")


@dataclass(frozen=True)
class Place:
    """One process.

    Args:
        replica: of the replica groups, which.
        rank: inside it.
        shape: of its mesh: shards, tensor parallel.
        port: of the store of its processes.
        lighthouse: address.
    """

    replica: int
    rank: int
    shape: tuple[int, int]
    port: int
    lighthouse: str = ""

    @property
    def world_size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def shard(self) -> int:
        return self.rank // self.shape[1]


@dataclass(frozen=True)
class Event:
    """What a process told.

    Args:
        kind: "step", "state" or "end".
        step: number of committed steps.
        digest: of the process's part of parameters and optimizer.
        participants: of the step.
        state: of the model, saved by torch.
    """

    kind: str
    step: int = 0
    digest: str = ""
    participants: int = 0
    state: bytes = b""


# --- what a process does ---


def initialize(port: int, rank: int, world_size: int) -> None:
    """Torch's default group."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=PrefixStore("world", store), rank=rank, world_size=world_size)


def unsharded_model() -> nn.Sequential:
    """With the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 12))


def make_model(mesh: DeviceMesh, *, data_parallel: tuple[str, ...], **options: Any) -> nn.Module:
    """Sharded over `data_parallel`, tensor parallel over "tp" if that is more than one; options are FSDP2's."""
    model = unsharded_model()
    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh[data_parallel], **options)
    fully_shard(model, mesh=mesh[data_parallel], **options)
    return model


def batch(step: int, place: Place) -> torch.Tensor:
    """What the process trains on in this step; the ranks of tensor parallelism share it."""
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + 10 * place.replica + place.shard))


def local(value: Any) -> Any:
    """A state with each DTensor replaced by this process's part."""
    if isinstance(value, DTensor):
        return value.to_local()
    return {key: local(item) for key, item in value.items()} if isinstance(value, dict) else value


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
        """This process's part of parameters and optimizer."""
        return {
            name: {"weight": local(parameter.data), "optimizer": local(dict(self.optimizer.state[parameter]))}
            for name, parameter in self.model.named_parameters()
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become what another process at this place has taken."""
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


def train_as_torch_does(place: Place, connection: Connection, participants: list[int]) -> None:
    """The reference: where two take part, torch's own mesh of two replicas; where one does, plain FSDP2 in each."""
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


def train_managed(place: Place, connection: Connection) -> None:
    """One process of a replica group, for as many steps as it is told, or until it has outlived the other group.

    The second of two groups dies in the middle of a step, when it has committed STEPS together with the first.
    """
    os.environ |= {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.port),
    }
    initialize(place.port, place.rank, place.world_size)
    with Manager(
        ProcessGroupGloo(),
        min_replica_size=1,
        replica_id=f"replica{place.replica}",
        lighthouse_addr=place.lighthouse,
        timeout=timedelta(seconds=20),
        hostname="localhost",
    ) as manager:
        pg = ManagedProcessGroup(manager)
        mesh = extend_device_mesh(init_device_mesh("cpu", place.shape, mesh_dim_names=NAMES), pg)
        training = Training(mesh, data_parallel=("dp", "shard"))
        manager.register_state_dict_fn("training", training.load, training.take)
        optimizer = Optimizer(manager, training.optimizer)
        connection.send(Event("ready"))
        steps = connection.recv()
        told: list[int] = []  # participants of each step
        while manager.current_step() < steps and not (2 in told and told[-STEPS_ALONE:] == [1] * STEPS_ALONE):
            before = manager.current_step()
            optimizer.zero_grad()
            manager.wait_quorum()
            if place.replica == 1 and told.count(2) == STEPS:
                os.kill(os.getpid(), signal.SIGKILL)  # the other group is in this step, and waits for a gradient
            training.backward(manager.current_step(), place)
            optimizer.step()
            step, participants = manager.current_step(), manager.num_participants()
            if step == before:
                continue
            connection.send(Event("step", step, digest(training.take()), participants))
            told.append(participants)
            if told.count(2) == EXCHANGE_AT == told[-EXCHANGE_AT:].count(2):
                exchange(place, connection, mesh, training)
    pg.unregister()
    dist.destroy_process_group()
    connection.send(Event("end"))


def exchange(place: Place, connection: Connection, mesh: DeviceMesh, training: Training) -> None:
    """After a commit: reduce whole numbers over the participants; load one group's state on the other."""
    pg = mesh.get_group("dp")
    tokens = torch.tensor([place.replica + 1, 10 * (place.replica + 1)])
    assert funcol.all_reduce(tokens, "sum", pg).tolist() == [3, 30]
    assert funcol.all_reduce(tokens, "max", (mesh, 0)).tolist() == [2, 20]
    assert funcol.all_reduce(-tokens, "max", mesh["dp"]).tolist() == [-1, -10]
    loss = torch.tensor(float(place.replica))
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
    loaded = torch.load(io.BytesIO(connection.recv()), weights_only=True)
    other = make_model(mesh, data_parallel=("dp", "shard"))
    assert digest(local(get_model_state_dict(other))) != digest(local(state))
    set_model_state_dict(other, loaded)
    assert digest(local(get_model_state_dict(other))) == digest(local(state))


# --- the test's view of them ---


class Processes:
    """Processes by their place, and what they have told."""

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        self._stores: list[TCPStore] = []
        self._connections: dict[Place, Connection] = {}
        self.events: dict[Place, list[Event]] = {}

    def start(
        self, target: Any, *arguments: object, shape: tuple[int, int], replicas: tuple[int, ...], lighthouse: str = ""
    ) -> list[Place]:
        """Start all processes of some replica groups; they share a store."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stores.append(store)
        size = shape[0] * shape[1]
        places = [Place(i, rank, shape, store.port, lighthouse) for i in replicas for rank in range(size)]
        for place in places:
            ours, theirs = multiprocessing.connection.Pipe()
            self._spawn(target, place, theirs, *arguments)
            theirs.close()
            self._connections[place] = ours
            self.events[place] = []
        return places

    def tell(self, places: list[Place], message: object) -> None:
        for place in places:
            self._connections[place].send(message)

    def until(self, condition: Any, places: list[Place], what: str) -> None:
        """Take in events until the condition holds for each of these."""
        deadline = time.monotonic() + PATIENCE_S
        while missing := [place for place in places if not condition(self.events[place])]:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"not within {PATIENCE_S:g} s: {what}"
            for place in missing:
                assert not self._connections[place].closed, f"{place} has ended: {what}"
            self._take_in(left_s)

    def _take_in(self, left_s: float) -> None:
        by_connection = {connection: place for place, connection in self._connections.items() if not connection.closed}
        for connection in multiprocessing.connection.wait(list(by_connection), left_s):
            assert isinstance(connection, Connection)
            place = by_connection[connection]
            try:
                event = connection.recv()
            except EOFError:
                connection.close()
                continue
            self.events[place].append(event)
            if event.kind == "state":
                other = next(each for each in self.events if (each.replica, each.rank) == (1, place.rank))
                self.tell([other], event.state)

    def steps(self, place: Place) -> dict[int, Event]:
        return {event.step: event for event in self.events[place] if event.kind == "step"}

    def close(self) -> None:
        """Let go of the stores."""
        self._stores.clear()

    def finish(self, places: list[Place]) -> None:
        self.until(lambda events: events and events[-1].kind == "end", places, "they end")


@pytest.fixture
def processes(spawn: Spawn) -> Iterator[Processes]:
    processes = Processes(spawn)
    yield processes
    processes.close()


@pytest.fixture
def lighthouse() -> Iterator[str]:
    with LighthouseServer("127.0.0.1:0", join_timeout_ms=10_000, heartbeat_timeout_ms=5_000) as server:
        yield str(server.address)


def start_managed(
    processes: Processes, lighthouse: str, *, shape: tuple[int, int], replicas: tuple[int, ...]
) -> list[Place]:
    """Start replica groups, and have them begin their first step when all of them are known to the lighthouse."""
    places = [
        place
        for i in replicas
        for place in processes.start(train_managed, shape=shape, replicas=(i,), lighthouse=lighthouse)
    ]
    processes.until(lambda events: events, places, "all are ready")
    return places


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=["2 shards", "2 shards and tensor parallel"])
def test_two_replica_groups_are_torchs_hybrid_sharding_bit_for_bit_and_one_that_is_left_goes_on(
    processes: Processes, lighthouse: str, shape: tuple[int, int]
) -> None:
    places = start_managed(processes, lighthouse, shape=shape, replicas=(0, 1))
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


def count(events: list[Event], participants: int) -> int:
    """How many steps had that many participants."""
    return sum(event.participants == participants for event in events)


class Participants:
    """A Manager whose participants all give the same."""

    def __init__(self, number: int) -> None:
        self._number = number

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: dist.ReduceOp.RedOpType) -> dist.Work:
        if reduce_op == ReduceOp.SUM:
            tensor.mul_(self._number)
        return DummyWork([tensor])

    def num_participants(self) -> int:
        return self._number


def compare_gradients(place: Place, connection: Connection, shape: tuple[int, int]) -> None:
    """Compare what FSDP2 makes of several shards' gradients with their mean, in each dtype."""
    initialize(place.port, place.rank, place.world_size)
    place = replace(place, shape=shape)
    pg = ManagedProcessGroup(Participants(3))
    mesh = extend_device_mesh(init_device_mesh("cpu", shape, mesh_dim_names=NAMES), pg)
    alone = unsharded_model().double()
    for shard in range(shape[0]):
        x = batch(0, replace(place, rank=shard * shape[1])).double()
        (alone(x).square().mean() / shape[0]).backward()
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        for factor in (None, shape[0] * pg.size()):
            policy = MixedPrecisionPolicy(reduce_dtype=dtype)
            model = make_model(mesh, data_parallel=("dp", "shard"), mp_policy=policy)
            for module in model.modules():
                if factor is not None and isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(factor)
                    module.set_force_sum_reduction_for_comms(True)  # Gloo has no PREMUL_SUM
            model(batch(0, place)).square().mean().backward()
            for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
                gradient = parameter.grad.full_tensor().double()  # type: ignore[union-attr]
                torch.testing.assert_close(gradient, expected.grad, atol=tolerance, rtol=tolerance)
    dist.destroy_process_group()
    connection.send(Event("end"))


@pytest.mark.parametrize("shape", [(4, 1), (2, 2)], ids=["4 shards", "2 shards and tensor parallel"])
def test_the_gradient_is_the_mean_over_shards_and_participants(processes: Processes, shape: tuple[int, int]) -> None:
    processes.finish(processes.start(compare_gradients, shape, shape=(4, 1), replicas=(0,)))


def train_as_fsdp2_does(place: Place, connection: Connection, steps: int) -> None:
    """The reference for one replica group alone: torch's own FSDP2 over its mesh."""
    initialize(place.port, place.rank, place.world_size)
    mesh = init_device_mesh("cpu", place.shape, mesh_dim_names=NAMES)
    training = Training(mesh, data_parallel=("shard",))
    for step in range(steps):
        training.optimizer.zero_grad()
        training.backward(step, place)
        training.optimizer.step()
        connection.send(Event("step", step + 1, digest(training.take()), 1))
    dist.destroy_process_group()
    connection.send(Event("end"))


def test_one_replica_group_is_plain_fsdp2_bit_for_bit(processes: Processes, lighthouse: str) -> None:
    places = start_managed(processes, lighthouse, shape=(2, 1), replicas=(0,))
    processes.tell(places, STEPS)
    reference = processes.start(train_as_fsdp2_does, STEPS, shape=(2, 1), replicas=(0,))
    processes.finish(places + reference)
    for place, same in zip(places, reference, strict=True):
        assert processes.steps(place) == processes.steps(same)
        assert len(processes.steps(place)) == STEPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mean_of_three_is_torchs_own_bit_for_bit(dtype: torch.dtype) -> None:
    """No power of two, so that dividing in another way would round in another way."""

    def failed(error: Exception) -> None:
        raise error

    def reduce(rank: int, pg: ProcessGroup) -> bool:
        mean = torch.randn(10_000, generator=torch.Generator().manual_seed(rank)).to(dtype)
        total = mean.clone()
        pg.allreduce([mean], ReduceOp.AVG).wait()
        Reduction(pg.allreduce([total], ReduceOp.SUM), total, divide_by=3, report=failed).wait()
        return torch.equal(mean, total)

    with Bench(ProcessGroupGloo) as bench:
        assert bench.all(bench.configured(3), reduce) == [True, True, True]
