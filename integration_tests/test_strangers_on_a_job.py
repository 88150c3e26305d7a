"""The cost of strangers without the secret for a job that trains: next to no steps, and no memory.

Two replicas train. Each attack runs twice in turn: on decoys, servers of the same kinds without a job, and on the job's
own servers. The machine has the same load both times, so the difference is the cost to the job's servers.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import torch

from integration_tests.attacks import ATTACKS, Ports, attack
from integration_tests.conftest import Spawn
from integration_tests.hostile import lighthouse_program, manager_server_program, serving, state_server_program
from tft_algos import DistributedDataParallel, Manager, Optimizer
from tft_ckpt import HTTPTransport
from tft_pg import ProcessGroupGloo

SECRET: Final = "of-this-job"
REPLICAS: Final = 2
WINDOW_S: Final = 5.0
ROUNDS: Final = 5
LEAST_SHARE: Final = 0.9  # of the steps
MOST_BYTES: Final = 100 << 20
WAIT_S: Final = 120.0


def train(name: str, lighthouse: str, counter: Path, connection: Connection) -> None:
    """Train until a message comes. A file counts the steps committed by two."""
    os.environ["TFT_TOKEN"] = SECRET
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    transport = HTTPTransport[Any](bind="127.0.0.1", token=SECRET)
    with (
        Manager(
            ProcessGroupGloo(),
            model.load_state_dict,
            model.state_dict,
            replica_id=name,
            lighthouse_addr=lighthouse,
            hostname="localhost",
            timeout=timedelta(seconds=20),
            checkpoint_transport=transport,
        ) as manager,
        counter.open("r+b", buffering=0) as file,
    ):
        ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
        connection.send(transport.metadata())
        steps = 0
        while not connection.poll():
            time.sleep(0.01)  # the duration of a device's work
            optimizer.zero_grad()
            ddp(torch.randn(4, 64)).square().mean().backward()
            if optimizer.step() and manager.num_participants() == REPLICAS:
                steps += 1
                os.pwrite(file.fileno(), struct.pack("q", steps), 0)


class RunningJob:
    """A lighthouse and the trainers of a job, seen from outside."""

    def __init__(self, spawn: Spawn, folder: Path, lighthouse: psutil.Process, port: int) -> None:
        self._counters: list[Path] = []
        self._connections: list[Connection] = []
        self.processes = {"lighthouse": lighthouse}
        state = []
        for number in range(REPLICAS):
            counter = folder / f"steps_{number}"
            counter.write_bytes(bytes(8))
            ours, theirs = Pipe()
            process = spawn(train, f"replica_{number}", f"127.0.0.1:{port}", counter, theirs)
            assert ours.poll(WAIT_S), "a trainer has not begun"
            state.append(int(ours.recv().rpartition(":")[2]))
            self._counters.append(counter)
            self._connections.append(ours)
            trainer = psutil.Process(process.pid)
            (manager_server,) = trainer.children()
            self.processes |= {f"trainer {number}": trainer, f"manager server {number}": manager_server}
        servers = [each for name, each in self.processes.items() if not name.startswith("trainer")]
        self.ports = Ports(tuple(port for each in servers for port in listening(each)), tuple(state))

    @property
    def steps(self) -> int:
        """Return the smallest number of committed steps of a replica."""
        return min(int.from_bytes(counter.read_bytes(), sys.byteorder) for counter in self._counters)

    def resident_bytes(self) -> dict[str, int]:
        return {name: process.memory_info().rss for name, process in self.processes.items()}

    def until(self, steps: int) -> None:
        give_up_at = time.monotonic() + WAIT_S
        while self.steps < steps:
            assert time.monotonic() < give_up_at, f"{self.steps} steps so far"
            time.sleep(0.1)

    def end(self) -> None:
        for connection in self._connections:
            connection.send("end")


def listening(process: psutil.Process) -> list[int]:
    found = process.net_connections(kind="tcp")
    return sorted({each.laddr.port for each in found if each.status == psutil.CONN_LISTEN})


@contextmanager
def decoys(folder: Path) -> Iterator[Ports]:
    """Yield servers of the same kinds and number as a job's."""
    with ExitStack() as ends:

        def start(command: list[str], name: str, *, in_child: bool = False) -> list[int]:
            server = ends.enter_context(serving(command, folder / name, in_child=in_child))
            return listening(psutil.Process(server.pid))

        speak_grpc = start(lighthouse_program(SECRET), "decoy")
        state = []
        for number in range(REPLICAS):
            speak_grpc += start(manager_server_program(SECRET), f"manager {number}", in_child=True)
            state += start(state_server_program(SECRET), f"state {number}")
        yield Ports(tuple(speak_grpc), tuple(state))


def steps_under(spawn: Spawn, job: RunningJob, name: str, ports: Ports) -> int:
    """Return the job's steps in a window in which those ports are attacked."""
    ours, theirs = Pipe()
    process = spawn(attack, name, ports, theirs)
    assert ours.poll(WAIT_S), f"{name}: it has not begun"
    ours.recv()
    before = job.steps
    time.sleep(WINDOW_S)
    steps = job.steps - before
    process.kill()
    process.join()
    return steps


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ATTACKS)
def test_strangers_cost_a_job_next_to_no_steps_and_no_memory(spawn: Spawn, tmp_path: Path, name: str) -> None:
    with serving(lighthouse_program(SECRET), tmp_path / "lighthouse") as lighthouse, decoys(tmp_path) as others:
        job = RunningJob(spawn, tmp_path, psutil.Process(lighthouse.pid), lighthouse.port)
        job.until(50)
        before = job.resident_bytes()
        spared = hurt = 0
        for _ in range(ROUNDS):  # in turn, because other load of the machine changes slowly
            spared += steps_under(spawn, job, name, others)
            hurt += steps_under(spawn, job, name, job.ports)
        grown = {who: now - before[who] for who, now in job.resident_bytes().items()}
        job.end()
        lines = lighthouse.check_log(name)
    most = max(grown, key=grown.__getitem__)
    print(
        f"{name}: {hurt} steps, {spared} with decoys ({hurt / max(spared, 1):.2f}); "
        f"{most} has grown by {grown[most] / (1 << 20):.1f} MiB"
    )
    assert hurt >= LEAST_SHARE * spared
    assert grown[most] < MOST_BYTES, f"{most} has grown by {grown[most] >> 20} MiB"
    assert not any("lost replica" in line for line in lines), lines
