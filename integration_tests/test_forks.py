"""Trainers that fork, as every script with a DataLoader does, in each phase of a step, in every way, for many epochs.

Whatever the children hold, a death is detected at once, and no process waits for a child.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, final

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from integration_tests.conftest import Kill, Launch, Spawn
from integration_tests.training import Event, Job, Launcher, Trainer
from tft_algos import DistributedDataParallel, Manager, Optimizer
from tft_algos.testing import Action, Fault, Place
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo
from tft_pg.testing import WAYS, end_children
from tft_pg.testing.forking import FORKS

# bound on the news of a death, on a busy machine, because without news heartbeat_timeout detects it after 5 s
NEWS_S: Final = 2.5
AT_ONCE: Final = timedelta(milliseconds=1)
# Each phase of a step. The two ends of a healing come on two replicas.
OF_A_STEP: Final = tuple(place for place in Place if place is not Place.SERVING)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer(bind="127.0.0.1:0", hostname="localhost", min_replicas=1, join_timeout_ms=10_000) as server:
        yield server


@pytest.fixture
def job(spawn: Spawn, lighthouse: LighthouseServer) -> Iterator[Job]:
    made = Job(spawn, lighthouse)
    yield made
    for trainer in made.trainers:
        end_children(children_of(trainer))


def forks_at(name: str, *places: Place, rank: int = 0) -> tuple[Fault, ...]:
    """Return a pause of a millisecond at each place, on the rank's first arrival there. The rank forks before it."""
    return tuple(Fault(action=Action.HANG, place=place, replica=name, rank=rank, hang_for=AT_ONCE) for place in places)


def children_of(trainer: Trainer) -> list[int]:
    return [int(pid) for event in trainer.of_kind("forked") for pid in event.text.split()]


def listening_ports(*processes: psutil.Process) -> set[int]:
    return {
        each.laddr.port
        for process in processes
        for each in process.net_connections(kind="tcp")
        if each.status == psutil.CONN_LISTEN
    }


def check_that_the_death_is_known(job: Job, survivor: Trainer, victim: Trainer, kill: Kill) -> None:
    """Kill a trainer whose children live on, and check that the other commits alone before a beat could be missed."""
    children = children_of(victim)
    assert children
    killed_s = time.time()
    kill(victim.process.pid or 0)
    job.until(lambda: survivor.committed_with(1, times=1, since_s=killed_s), "the survivor goes on alone")
    alone_s = min(e.at_s for e in survivor.of_kind("commit") if e.at_s > killed_s and e.participants == 1)
    assert all(psutil.pid_exists(child) for child in children), "a child has ended by itself"
    assert alone_s - killed_s < NEWS_S, alone_s - killed_s


@pytest.mark.in_parts(always=["http"])
@pytest.mark.parametrize("over_group", [False, True], ids=["http", "group"])
def test_a_trainer_forks_in_every_phase_of_a_step(job: Job, kill: Kill, over_group: bool) -> None:
    a = job.start("a", faults=forks_at("a", Place.SERVING), forks=FORKS, over_group=over_group)
    job.until(lambda: a.step > 2, "a has a state to give")
    b = job.start("b", faults=forks_at("b", *OF_A_STEP), forks=FORKS, over_group=over_group)
    job.until(lambda: len(b.of_kind("forked")) == len(OF_A_STEP), "b has forked everywhere")
    job.until(lambda: a.committed_with(2) and b.committed_with(2), "both go on")
    assert len(a.of_kind("forked")) == 1
    server = b.manager_server()
    ports = listening_ports(psutil.Process(b.process.pid), server)
    assert len(ports) >= (3 if over_group else 4)  # of the group, the store, the manager server, the state server
    check_that_the_death_is_known(job, a, b, kill)
    server.wait(NEWS_S)
    for port in ports:
        socket.create_server(("", port)).close()
    again = job.start("b", faults=(), over_group=over_group)
    job.until(lambda: a.committed_with(2) and again.committed_with(2), "b is back, though a has children")
    job.finish([a, again])


@pytest.mark.in_parts
def test_the_death_of_a_rank_with_children_ends_its_group(job: Job, kill: Kill) -> None:
    """Only the rank's stream to the manager server shows its end, because it is another process's child."""
    of_a, of_b = Launcher(job, "a"), Launcher(job, "b")
    a = of_a.start()
    job.until(lambda: a[0].step > 2, "a has begun")
    forking = {"faults": forks_at("b", Place.FORWARD, rank=1), "forks": WAYS}
    first, second = of_b.start_each([{}, forking])
    job.until(lambda: a[0].committed_with(2) and bool(second.of_kind("forked")), "b joined, and its rank 1 forked")
    check_that_the_death_is_known(job, a[0], second, kill)
    end_children(children_of(second))  # torch's own group inside the replica waits for them
    job.until(lambda: first.ended is not None, "rank 0 is told that its group is lost")
    job.finish(a)


# --- a loop with a loader ------------------------------------------------------------------------------------------


@dataclass
class Loader:
    """The settings of a trainer with a loader.

    Args:
        lighthouse: address.
        name: of the replica.
        log: file for standard output and standard error, with the output of C libraries.
        method: start method of the workers.
        persistent: the workers stay from one epoch to the next.
    """

    lighthouse: str
    name: str
    log: str
    method: str
    persistent: bool


def train_with_workers(loader: Loader, connection: Connection) -> None:
    """Train epoch after epoch with two forked workers until a message comes. Report each epoch and each stall."""
    descriptor = os.open(loader.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s %(message)s", force=True)
    torch.set_num_threads(1)
    torch.manual_seed(sum(loader.name.encode()))
    net = torch.nn.Linear(8, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(64, 8))
    manager = Manager(
        ProcessGroupGloo(),
        net.load_state_dict,
        net.state_dict,
        replica_id=loader.name,
        lighthouse_addr=loader.lighthouse,
        hostname="localhost",
        timeout=timedelta(seconds=30),
    )
    with manager:
        model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, sgd)
        batches = DataLoader(
            data, 16, num_workers=2, multiprocessing_context=loader.method, persistent_workers=loader.persistent
        )
        epoch, last_s = 0, time.time()
        while not connection.poll():
            for (batch,) in batches:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                now_s = time.time()
                if now_s - last_s > 1.0:
                    connection.send(Event("stall", manager.current_step(), text=f"{now_s - last_s:.3f}", at_s=now_s))
                last_s = now_s
            epoch += 1
            connection.send(Event("epoch", epoch, participants=manager.num_participants()))
        step = manager.current_step()
    connection.send(Event("end", step))


def run_epochs(job: Job, start: Callable[[str], Trainer], kill: Kill, *, epochs: int, every: int) -> dict[str, Any]:
    """Let one replica train that many epochs, and kill and restart the other every few of them. Returns: figures."""
    began_s = time.time()
    a, b = start("a"), start("b")
    faults: list[float] = [began_s]
    left: list[psutil.Process] = []

    def trains_together() -> bool:
        """Return whether both have trained since the last fault, and together."""
        own = [event for event in b.events if event.kind == "epoch" and event.participants == 2]
        return bool(own) and a.of_kind("epoch")[-1].participants == 2

    for turn in range(1, epochs + 1):
        job.until(lambda turn=turn: len(a.of_kind("epoch")) >= turn, f"epoch {turn} of a")  # type: ignore[misc]
        if turn % every:
            continue
        job.until(trains_together, "b trains too")
        # A worker that is forked at the moment of the kill takes its new parent for its own, and would stay.
        victim = psutil.Process(b.process.pid)
        victim.suspend()
        while victim.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)  # no event reports the stop, and the others wait for it
        workers = victim.children(recursive=True)
        faults.append(time.time())
        kill(b.process.pid or 0)
        b = start("b")
        left += workers
    job.until(trains_together, "b is back for the last time")
    for each in (a, b):
        each.connection.send("stop")
    job.until(lambda: all(each.ended for each in (a, b)), "both end")
    for worker in left:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    stalls = [(event.at_s - float(event.text), event.at_s, float(event.text)) for event in a.of_kind("stall")]
    unexplained = [each for each in stalls if not any(each[0] - 6.0 < fault < each[1] for fault in faults)]
    return {
        "epochs": len(a.of_kind("epoch")),
        "kills and joins": len(faults) - 1,
        "seconds": round(time.time() - began_s, 1),
        "stalls above 1 s": [round(each[2], 2) for each in stalls],
        "that no fault explains": [round(each[2], 2) for each in unexplained],
        "load": os.getloadavg()[1],
    }


@final
class Check:
    """The common part of all loops: their fixtures, and their requirements."""

    def __init__(self, job: Job, lighthouse: LighthouseServer, kill: Kill, folder: Path) -> None:
        self._job = job
        self._address = str(lighthouse.address)
        self._kill = kill
        self._folder = folder

    def __call__(
        self, *, epochs: int, every: int, stall_s: float = 10.0, method: str = "fork", persistent: bool = False
    ) -> None:
        def start(name: str) -> Trainer:
            log = self._folder / f"{name}.{len(self._job.trainers)}.log"
            return self._job.add(name, train_with_workers, Loader(self._address, name, str(log), method, persistent))

        figures = run_epochs(self._job, start, self._kill, epochs=epochs, every=every)
        check_figures(figures, self._folder, stall_s)


@pytest.fixture
def check_epochs(job: Job, lighthouse: LighthouseServer, kill: Kill, tmp_path: Path) -> Check:
    return Check(job, lighthouse, kill, tmp_path)


def check_figures(figures: dict[str, Any], folder: Path, stall_s: float) -> None:
    """Check the figures. A step on a busy machine may take a second, but a wait for a child would take minutes."""
    print(figures)
    assert max(figures["that no fault explains"], default=0.0) < stall_s, figures
    said = {log.name: without_lost_askers(log.read_text(errors="replace")) for log in sorted(folder.glob("*.log"))}
    assert {name: text for name, text in said.items() if text} == {}


# Python's thread that hands out descriptors prints this when a worker ends during a request for one.
LOST_ASKER: Final = re.compile(
    r"Traceback \(most recent call last\):\n"
    r'  File "[^"]*/multiprocessing/resource_sharer\.py", line \d+, in _serve\n(?:    .*\n)+'
    r'(?:  File "[^"]*/multiprocessing/connection\.py", line \d+, in \w+\n(?:    .*\n)+)+'
    r"(?:EOFError|BrokenPipeError: .*|ConnectionResetError: .*)\n"
)


def without_lost_askers(text: str) -> str:
    """Return the rest of the text. All frames of the removed tracebacks are in Python's multiprocessing."""
    return LOST_ASKER.sub("", text)


_LOSES_AN_ASKER = """
import socket, sys, threading
from multiprocessing import resource_sharer
said = threading.Event()
hook = sys.excepthook
sys.excepthook = lambda *error: (hook(*error), said.set())
address, _ = resource_sharer.DupFd(0)._id
asker = socket.socket(socket.AF_UNIX)
asker.connect(address)
if sys.argv[1] == "before it is asked who it is":
    asker.close()
else:
    asker.shutdown(socket.SHUT_WR)
assert said.wait(30)
sys.stderr.write(sys.argv[2])
"""


@pytest.mark.parametrize("besides", ["", "a line of somebody else's\n"])
@pytest.mark.parametrize("ends", ["before it is asked who it is", "after"])
def test_no_more_is_passed_over_than_what_python_says_of_a_lost_asker(ends: str, besides: str) -> None:
    command = [sys.executable, "-c", _LOSES_AN_ASKER, ends, besides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "resource_sharer.py" in done.stderr
    assert without_lost_askers(done.stderr) == besides


@pytest.mark.in_parts
@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_with_workers_and_a_kill_now_and_then(check_epochs: Check, persistent: bool) -> None:
    check_epochs(epochs=8, every=4, persistent=persistent)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_loop_whose_workers_are_programs(check_epochs: Check, method: str) -> None:
    check_epochs(epochs=8, every=4, method=method, persistent=True)


@pytest.mark.soak
@pytest.mark.timeout(1_800)
def test_a_thousand_epochs_with_workers_and_a_kill_every_twenty(check_epochs: Check) -> None:
    check_epochs(epochs=1_000, every=20, stall_s=1.0)


# --- grpc ----------------------------------------------------------------------------------------------------------

_GRPC_FIRST = """
import os, sys
if sys.argv[1] == "grpc first":
    import grpc
before = dict(os.environ)
from tft_lighthouse import LighthouseServer
from tft_coord import LighthouseClient
with LighthouseServer(bind="127.0.0.1:0", hostname="127.0.0.1") as server, LighthouseClient(server.address) as client:
    client.describe()
    assert dict(os.environ) == before
    for _ in range(2):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    client.describe()
"""


@pytest.mark.parametrize("which", ["grpc first", "tft first"])
def test_grpc_is_silent_at_a_fork_unless_it_was_there_before(launch: Launch, which: str) -> None:
    process = launch([sys.executable, "-c", _GRPC_FIRST, which])
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 0, said
    lines = [line for line in said.splitlines() if "no shared secret" not in line]
    told = [line for line in lines if "set GRPC_ENABLE_FORK_SUPPORT=0" in line]
    assert len(told) == (which == "grpc first"), said
    if which == "tft first":
        assert lines == []
