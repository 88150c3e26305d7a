"""Failing sources: one can't offer its state, one is silent, and one hangs during the transfer."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from integration_tests.conftest import Spawn
from integration_tests.training import Event, Job, Trainer, heard_of_the_manager, steps_until_told
from tft_algos import DistributedDataParallel, Manager, Optimizer
from tft_algos.testing import digest
from tft_ckpt import HTTPTransport
from tft_ckpt.state.buffers import BufferPool
from tft_ckpt.state.memory import FreeMemory
from tft_ckpt.transfer import server
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

TIMEOUT = timedelta(seconds=20)


@dataclass(frozen=True)
class Spec:
    """The settings of a trainer.

    Args:
        lighthouse: address.
        name: of the replica group. It seeds the weights.
        fault: of its transport. "raises": the first state can't be offered. "mute": none can, and it reports nothing.
            "hole": its state server accepts connections, and sends nothing. "poor": memory for a second copy is
            missing.
    """

    lighthouse: str
    name: str
    fault: str = ""


def hurt(transport: HTTPTransport[Any], fault: str) -> None:
    """Make a transport fail as a source."""
    send = transport.send_checkpoint
    faults_left = {"raises": 1, "mute": 1_000_000}.get(fault, 0)

    def fail(*args: Any, **named: Any) -> None:
        nonlocal faults_left
        faults_left -= 1
        if faults_left >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        send(*args, **named)

    if fault == "poor":
        server.free_memory = lambda proc=None: FreeMemory(1 << 20, "a test")  # type: ignore[attr-defined]
        BufferPool.take = fail  # type: ignore[method-assign, assignment]
        faults_left = 1_000_000
        return
    if fault in ("raises", "mute"):
        transport.stages = False  # type: ignore[misc]  # no state is offered in another way
    transport.send_checkpoint = fail  # type: ignore[method-assign]
    if fault == "mute":
        transport.refuse_checkpoint = fail  # type: ignore[method-assign]


def train(spec: Spec, connection: Connection) -> None:
    """Train until told to stop. Report each commit, each healing, and log lines on healing."""
    torch.set_num_threads(1)
    told = heard_of_the_manager(logging.INFO)
    torch.manual_seed(sum(spec.name.encode()))
    model = torch.nn.Linear(64, 64)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def take() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])
        connection.send(Event("healed", digest=digest(take())))

    hole = socket.create_server(("127.0.0.1", 0))
    advertised = f"localhost:{hole.getsockname()[1]}" if spec.fault == "hole" else "localhost"
    transport = HTTPTransport[Any](timedelta(seconds=60), advertise_addr=advertised)
    hurt(transport, spec.fault)
    with (
        hole,
        Manager(
            ProcessGroupGloo(),
            load,
            take,
            replica_id=spec.name,
            lighthouse_addr=spec.lighthouse,
            hostname="localhost",
            timeout=TIMEOUT,
            checkpoint_transport=transport,
        ) as manager,
    ):
        ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adam)
        connection.send(Event("ready"))
        for before in steps_until_told(connection, manager, pause_s=0.01):
            optimizer.zero_grad()
            ddp(torch.randn(4, 64)).square().mean().backward()
            if optimizer.step():
                connection.send(Event("commit", manager.current_step(), digest(take()), manager.num_participants()))
            else:
                connection.send(Event("failed", before, text="; ".join(map(str, manager.status().errors))))
            while not told.empty():
                connection.send(Event("log", before, text=told.get().getMessage()))
    connection.send(Event("end"))


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=4_000, heartbeat_timeout_ms=2_000) as server:
        yield server


def start(job: Job, lighthouse: LighthouseServer, name: str, fault: str = "") -> Trainer:
    return job.add(name, train, Spec(str(lighthouse.address), name, fault))


@pytest.mark.in_parts
def test_a_source_that_can_not_offer_its_state_says_so_and_the_next_quorum_heals(
    spawn: Spawn, lighthouse: LighthouseServer
) -> None:
    """Field report D11: the newcomer waited for heal_timeout, ten minutes."""
    job = Job(spawn, lighthouse)
    source = start(job, lighthouse, "source", "raises")
    job.until(lambda: source.committed_with(1), "the source trains alone")
    newcomer = start(job, lighthouse, "newcomer")
    job.until(lambda: newcomer.committed_with(2), "the newcomer has healed")
    refused = [event.text for event in newcomer.of_kind("failed") if "Too many open files" in event.text]
    assert refused, job.history()
    job.finish()


@pytest.mark.in_parts
def test_a_source_without_memory_for_a_second_copy_heals_a_newcomer(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    """The source waits for the newcomer in its step, before it writes to its state."""
    job = Job(spawn, lighthouse)
    source = start(job, lighthouse, "source", "poor")
    job.until(lambda: source.committed_with(1), "the source trains alone")
    newcomer = start(job, lighthouse, "newcomer")
    job.until(lambda: newcomer.committed_with(2), "the newcomer has healed")
    (healed,) = newcomer.of_kind("healed")
    assert healed.digest in {event.digest for event in source.of_kind("commit")}
    job.finish()


@pytest.mark.in_parts
def test_a_source_that_gives_nothing_and_says_nothing_does_not_wait_for_who_heals(
    spawn: Spawn, lighthouse: LighthouseServer
) -> None:
    job = Job(spawn, lighthouse)
    source = start(job, lighthouse, "source", "mute")
    job.until(lambda: source.committed_with(1), "the source trains alone")
    newcomer = start(job, lighthouse, "newcomer")
    job.until(
        lambda: (
            any("healing from" in event.text for event in newcomer.of_kind("log"))
            or bool(newcomer.ended)
            or any("can't serve" in event.text for event in source.of_kind("log"))
        ),
        "the newcomer is to heal",
    )
    since_s = time.time()
    job.until(lambda: source.committed_with(1, since_s=since_s), "the source trains on, alone")
    assert not newcomer.of_kind("healed")
    source.connection.send(source.step + 1)
    job.until(lambda: bool(source.ended), "the source ends")
    newcomer.process.kill()


@pytest.mark.in_parts
def test_a_source_that_accepts_and_sends_nothing_costs_a_second_and_is_asked_last_from_then_on(
    spawn: Spawn, lighthouse: LighthouseServer
) -> None:
    """Field report D3: a newcomer asked only the hole for a minute, was behind by then, and asked it again."""
    job = Job(spawn, lighthouse)
    good = start(job, lighthouse, "b")
    job.until(lambda: good.committed_with(1), "the good source trains alone")
    hole = start(job, lighthouse, "a", "hole")  # asked first, by its name
    job.until(lambda: all(each.committed_with(2) for each in (hole, good)), "both train")
    newcomer = start(job, lighthouse, "c")
    job.until(lambda: newcomer.committed_with(3), "the newcomer has healed")
    (asked,) = [event for event in newcomer.of_kind("log") if "healing from" in event.text]
    assert newcomer.of_kind("healed")[0].at_s - asked.at_s < 20.0, "a source alone may be silent for a minute"
    job.finish()
