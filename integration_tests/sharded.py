"""Sharded models in several processes, and the test's view of them: the events of each process of each replica group.

Law of this file: places, processes, small models and their parts. The tests hold the requirements.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from integration_tests.conftest import Spawn
from tft_algos import Manager
from tft_pg import ProcessGroupGloo

PATIENCE_S = 50.0
NAMES = ("shard", "tp")


@dataclass(frozen=True)
class Place:
    """The identity of one process.

    Args:
        replica: number of its replica group.
        rank: inside the group.
        shape: of its mesh: shards (or stages), tensor parallel.
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
    """An event that a process reports.

    Args:
        kind: "ready", "step", "state", "passed", "raised" or "end".
        step: number of committed steps.
        digest: of the process's part of parameters and optimizer.
        participants: of the step.
        state: of the model, saved by torch.
        text: the passed check, or the traceback.
    """

    kind: str
    step: int = 0
    digest: str = ""
    participants: int = 0
    state: bytes = b""
    text: str = ""


# --- what a process does ---


def initialize(port: int, rank: int, world_size: int) -> None:
    """Initialize torch's default group."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=PrefixStore("world", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=PATIENCE_S),
    )


def make_manager(place: Place, **settings: Any) -> Manager:
    """Return a Manager for a process of a replica group, as a launcher would have it. Its own state is empty."""
    os.environ |= {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.port),
    }
    return Manager(
        ProcessGroupGloo(),
        lambda _: None,
        dict,
        replica_id=f"replica{place.replica}",
        lighthouse_addr=place.lighthouse,
        timeout=timedelta(seconds=40),
        hostname="localhost",
        **settings,
    )


@contextmanager
def telling(connection: Connection) -> Iterator[None]:
    """Report an error inside the block to the test, and end the process with it."""
    try:
        yield
    except BaseException:
        connection.send(Event("raised", text=traceback.format_exc()[-2_000:]))
        raise


def unsharded_model() -> nn.Sequential:
    """Return the model, with equal weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 12))


def make_model(mesh: DeviceMesh, *, data_parallel: tuple[str, ...], **options: Any) -> nn.Sequential:
    """Return the model sharded over `data_parallel`, and tensor parallel over a "tp" of several. Options are
    FSDP2's."""
    model = unsharded_model()
    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh[data_parallel], **options)
    fully_shard(model, mesh=mesh[data_parallel], **options)
    return model


def batch(step: int, place: Place) -> torch.Tensor:
    """Return the process's batch of this step. The ranks of tensor parallelism share it."""
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + 10 * place.replica + place.shard))


def local(value: Any) -> Any:
    """Return a state with each DTensor replaced by this process's part."""
    if isinstance(value, DTensor):
        return value.to_local()
    return {key: local(item) for key, item in value.items()} if isinstance(value, dict) else value


# --- the test's view of them ---


class Processes:
    """Processes by their place, and their events."""

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        self._stores: list[TCPStore] = []
        self._connections: dict[Place, Connection] = {}
        self.events: dict[Place, list[Event]] = {}

    def store(self) -> int:
        """Return the port of a store that lives as long as these processes."""
        self._stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        return int(self._stores[-1].port)

    def start(
        self,
        target: Callable[..., None],
        *arguments: object,
        shape: tuple[int, int],
        replicas: tuple[int, ...],
        lighthouse: str = "",
    ) -> list[Place]:
        """Start all processes of some replica groups. They share a store."""
        port, size = self.store(), shape[0] * shape[1]
        places = [Place(i, rank, shape, port, lighthouse) for i in replicas for rank in range(size)]
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

    def until(self, condition: Callable[[list[Event]], bool], places: list[Place], what: str) -> None:
        """Receive events until the condition holds for each of these."""
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
            except (EOFError, ConnectionResetError):
                connection.close()
                continue
            self.events[place].append(event)
            assert event.kind != "raised", f"{place}: {event.text}"
            if event.kind == "state":
                other = next(each for each in self.events if (each.replica, each.rank) == (1, place.rank))
                self.tell([other], event.state)

    def steps(self, place: Place) -> dict[int, Event]:
        return {event.step: event for event in self.events[place] if event.kind == "step"}

    def close(self) -> None:
        """Release the stores."""
        self._stores.clear()

    def finish(self, places: list[Place]) -> None:
        self.until(ended, places, "they end")

    def failure_until_end(self, places: list[Place]) -> str:
        """Receive events until all of these have ended. Returns: the failure, or the empty string."""
        num_seen = -1
        try:
            while num_seen < (num_seen := min(len(self.events[place]) for place in places)):
                due = num_seen + 1
                self.until(lambda events: len(events) >= due or ended(events), places, f"event {due}")  # noqa: B023
        except AssertionError as error:
            return str(error)
        return ""

    def passed(self, places: list[Place]) -> set[str]:
        """Return the checks that all of these have passed."""
        return set.intersection(
            *({event.text for event in self.events[place] if event.kind == "passed"} for place in places)
        )


@contextmanager
def listening(spawn: Spawn) -> Iterator[Processes]:
    """Yield a Processes object without processes."""
    processes = Processes(spawn)
    yield processes
    processes.close()


def ended(events: list[Event]) -> bool:
    """Return whether a process has reported its end."""
    return bool(events) and events[-1].kind == "end"


def count(events: list[Event], participants: int) -> int:
    """Return the number of steps with that many participants."""
    return sum(event.participants == participants for event in events)
