"""Live state over the replicas' own process group.

The published checks run over groups that are configured repeatedly. Trainers in separate processes are killed, and heal
over the group that they train with.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final, final

import pytest
import torch

from integration_tests.conftest import Kill, Spawn
from integration_tests.training import Event, Job, Trainer
from tft_algos import DistributedDataParallel, Manager, Optimizer
from tft_algos.testing import digest
from tft_ckpt import PGTransport
from tft_ckpt.testing import CHECKS, Together
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo
from tft_pg.testing import Bench

CPU: Final = torch.device("cpu")
TIMEOUT: Final = timedelta(seconds=20)
CHUNK_BYTES: Final = 64 << 10
FEATURES: Final = 256
HEAL_TIMEOUT: Final = timedelta(minutes=10)  # far more than a test may take
# This includes an offer, a manifest, and some of the dozen chunks.
MESSAGES_BEFORE_DEATH: Final = 6


@pytest.mark.in_parts
@pytest.mark.parametrize("name", CHECKS)
def test_the_transport_passes_over_a_group_that_is_configured_again(name: str) -> None:
    with Bench(lambda: ProcessGroupGloo(TIMEOUT)) as bench:
        groups: dict[PGTransport[Any], Any] = {}

        def make(count: int, wraps: Mapping[int, Any]) -> Sequence[PGTransport[Any]]:
            made = []
            for rank, group in enumerate(bench.configured(count)):
                member: Any = wraps.get(rank, lambda group: group)(group)
                made.append(PGTransport[Any](member, TIMEOUT, CPU, chunk_bytes=1 << 20))
                groups[made[-1]] = group
            return made

        def mend(transports: Sequence[Any]) -> None:
            bench.configure([groups[transport] for transport in transports])

        CHECKS[name](Together(make, mend))


@final
class Watched:
    """A trainer's view of its group, which ends its process in the middle of the next state that it sends, or holds the
    state back.

    Args:
        group: of the trainer.
        connection: to the test.
    Fields:
        messages_left: number of messages until the end. None: the process does not end.
        holds: the next message waits until the test sends a sentence.
    """

    def __init__(self, group: ProcessGroup, connection: Connection) -> None:
        self._group = group
        self._connection = connection
        self.messages_left: int | None = None
        self.holds = False

    def send(self, *args: Any) -> Any:
        if self.holds:
            self.holds = False
            self._connection.send(Event("holds"))
            if self._connection.recv() == "go on when the quorum is broken":
                while self._group.errored() is None:
                    time.sleep(0.01)
        if self.messages_left is not None:
            self.messages_left -= 1
        if self.messages_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._group.send(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def train(lighthouse: str, name: str, in_child: bool, settings: dict[str, Any], connection: Connection) -> None:
    """Run a replica that heals over its own group, until the test gives the last step, or tells it to die."""
    torch.set_num_threads(1)
    torch.manual_seed(sum(name.encode()))
    model = torch.nn.Linear(FEATURES, FEATURES)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pg: ProcessGroup = ProcessGroupBabyGloo() if in_child else ProcessGroupGloo()
    watched = Watched(pg, connection)
    transport = PGTransport[Any](watched, TIMEOUT, CPU, chunk_bytes=CHUNK_BYTES)

    raises_once: list[Exception] = []

    def take() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    def give() -> dict[str, Any]:
        if raises_once:
            raise raises_once.pop()
        return take()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])
        connection.send(Event("healed", digest=digest(take())))

    with Manager(
        pg,
        load,
        give,
        replica_id=name,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        timeout=TIMEOUT,
        heal_timeout=HEAL_TIMEOUT,
        checkpoint_transport=transport,
        **settings,
    ) as manager:
        ddp = DistributedDataParallel(manager, model)
        optimizer = Optimizer(manager, adam)
        last = None
        while last is None or manager.current_step() < last:
            if connection.poll():
                match connection.recv():
                    case int(step):
                        last = step
                    case "raise":
                        raises_once.append(OSError("the disk is full"))
                        connection.send(Event("struck"))
                    case "hold":
                        watched.holds = True
                        connection.send(Event("struck"))
                    case _:
                        watched.messages_left = MESSAGES_BEFORE_DEATH
                        connection.send(Event("struck"))
            time.sleep(0.005)  # leaves the machine's cores to starting processes
            step = manager.current_step()
            optimizer.zero_grad()
            ddp(torch.randn(4, FEATURES)).square().mean().backward()
            optimizer.step()
            if manager.current_step() == step:
                connection.send(Event("failed", step, text="; ".join(map(str, manager.status().errors))))
            else:
                step = manager.current_step()
                connection.send(Event("commit", step, digest(take()), manager.num_participants()))
    connection.send(Event("end"))


def start(job: Job, lighthouse: LighthouseServer, name: str, *, in_child: bool = False, **settings: Any) -> Trainer:
    return job.add(name, train, str(lighthouse.address), name, in_child, settings)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=5_000, heartbeat_timeout_ms=3_000) as server:
        yield server


@pytest.mark.in_parts(always=["synchronous"])
@pytest.mark.parametrize("use_async_quorum", [True, False], ids=["asynchronous", "synchronous"])
def test_a_killed_replica_heals_over_the_process_group(
    spawn: Spawn, lighthouse: LighthouseServer, kill: Kill, use_async_quorum: bool
) -> None:
    job = Job(spawn, lighthouse)
    survivors = [start(job, lighthouse, name, use_async_quorum=use_async_quorum) for name in ("a", "b")]
    victim = start(job, lighthouse, "c", use_async_quorum=use_async_quorum)
    job.until(lambda: all(trainer.committed_with(3) for trainer in job.trainers), "three commit together")
    assert victim.process.pid is not None
    kill(victim.process.pid)
    job.until(lambda: all(trainer.committed_with(2) for trainer in survivors), "two go on")
    newcomer = start(job, lighthouse, "c", use_async_quorum=use_async_quorum)
    job.until(lambda: all(trainer.committed_with(3) for trainer in (*survivors, newcomer)), "three commit again")
    assert newcomer.of_kind("healed")
    job.finish([*survivors, newcomer])


@pytest.mark.in_parts
def test_a_source_killed_while_it_sends_is_replaced_by_another(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    job = Job(spawn, lighthouse)
    # The first by name is the source of the healing one.
    source, other = (start(job, lighthouse, name) for name in ("a", "b"))
    job.until(lambda: all(trainer.committed_with(2) for trainer in (source, other)), "two commit together")
    source.connection.send("die")
    job.until(lambda: bool(source.of_kind("struck")), "the source is ready to die")
    newcomer = start(job, lighthouse, "c")
    job.until(lambda: all(trainer.committed_with(2) for trainer in (other, newcomer)), "the newcomer trains")
    source.process.join(TIMEOUT.total_seconds())
    assert source.process.exitcode == -signal.SIGKILL
    assert newcomer.of_kind("healed")
    job.finish([other, newcomer])


@pytest.mark.in_parts
def test_who_heals_is_told_that_the_sources_state_dict_raised(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    job = Job(spawn, lighthouse)
    source, other = (start(job, lighthouse, name) for name in ("a", "b"))
    job.until(lambda: all(trainer.committed_with(2) for trainer in (source, other)), "two commit together")
    source.connection.send("raise")
    job.until(lambda: bool(source.of_kind("struck")), "the source is ready to raise")
    newcomer = start(job, lighthouse, "c")
    job.until(lambda: all(trainer.committed_with(3) for trainer in job.trainers), "three commit together")
    failed = [event.text for event in newcomer.of_kind("failed")]
    assert any(
        "the state_dict registered under 'default' raised OSError('the disk is full')" in text for text in failed
    )
    job.finish([source, other, newcomer])


def start_and_hold(job: Job, lighthouse: LighthouseServer, *, in_child: bool = False) -> tuple[Trainer, ...]:
    """Start a source, another member, and a newcomer that waits for the offer of the source.

    Returns: these three. The source sends its offer after the next sentence of the test.
    """
    source, other = (start(job, lighthouse, name, in_child=in_child) for name in ("a", "b"))
    job.until(lambda: all(trainer.committed_with(2) for trainer in (source, other)), "two commit together")
    source.connection.send("hold")
    job.until(lambda: bool(source.of_kind("struck")), "the source is ready to hold its offer back")
    newcomer = start(job, lighthouse, "c", in_child=in_child)
    job.until(lambda: bool(source.of_kind("holds")), "the source holds its offer back")
    return source, other, newcomer


@pytest.mark.in_parts(always=["in the process"])
@pytest.mark.parametrize("in_child", [False, True], ids=["in the process", "in a child"])
def test_a_newcomer_does_not_wait_for_a_source_whose_quorum_is_broken(
    spawn: Spawn, lighthouse: LighthouseServer, kill: Kill, in_child: bool
) -> None:
    job = Job(spawn, lighthouse)
    source, other, newcomer = start_and_hold(job, lighthouse, in_child=in_child)
    assert other.process.pid is not None
    kill(other.process.pid)
    job.until(lambda: bool(newcomer.of_kind("failed")), "the newcomer's step fails, although its source is silent")
    assert not newcomer.of_kind("healed")
    source.connection.send("go on")
    job.until(lambda: all(trainer.committed_with(2) for trainer in (source, newcomer)), "the newcomer trains")
    assert newcomer.of_kind("healed")
    job.finish([source, newcomer])


@pytest.mark.in_parts
def test_a_newcomer_that_was_stopped_before_the_offer_heals_in_the_next_quorum(
    spawn: Spawn, lighthouse: LighthouseServer
) -> None:
    job = Job(spawn, lighthouse)
    source, other, newcomer = start_and_hold(job, lighthouse)
    assert newcomer.process.pid is not None
    before = len(source.of_kind("commit"))
    os.kill(newcomer.process.pid, signal.SIGSTOP)
    try:
        source.connection.send("go on when the quorum is broken")
        job.until(lambda: len(source.of_kind("commit")) > before, "the others go on without the newcomer")
    finally:
        os.kill(newcomer.process.pid, signal.SIGCONT)
    job.until(lambda: all(trainer.committed_with(3) for trainer in job.trainers), "three commit together")
    assert newcomer.of_kind("healed")
    job.finish([source, other, newcomer])


@pytest.mark.in_parts
def test_a_newcomer_whose_source_dies_before_its_offer_heals_from_another(
    spawn: Spawn, lighthouse: LighthouseServer, kill: Kill
) -> None:
    job = Job(spawn, lighthouse)
    source, other, newcomer = start_and_hold(job, lighthouse)
    assert source.process.pid is not None
    kill(source.process.pid)
    job.until(lambda: all(trainer.committed_with(2) for trainer in (other, newcomer)), "the newcomer trains")
    assert newcomer.of_kind("healed")
    job.finish([other, newcomer])
