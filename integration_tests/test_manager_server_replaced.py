"""A manager server that is stopped for good, or killed at any moment of its start, is replaced."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest

from integration_tests.conftest import Spawn
from integration_tests.training import Job, Trainer
from tft_lighthouse import LighthouseServer

LOOK_S = 0.01
PATIENCE_S = 30.0


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=4_000) as server:
        yield server


def manager_server(trainer: Trainer) -> psutil.Process:
    """Return the running manager server, as soon as there is one."""
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at:
        try:
            return trainer.manager_server()
        except (StopIteration, psutil.NoSuchProcess):
            time.sleep(LOOK_S)
    raise AssertionError("no manager server runs")


@pytest.mark.in_parts
def test_a_manager_server_that_is_stopped_for_good_is_replaced(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    """Field report D6: the trainer waited until the server was resumed."""
    job = Job(spawn, lighthouse)
    trainer = job.start("a")
    job.until(lambda: trainer.committed_with(1), "it trains")
    stopped = trainer.manager_server()
    stopped.suspend()
    since_s = time.time()
    job.until(lambda: trainer.committed_with(1, since_s=since_s) and not stopped.is_running(), "it trains on")
    assert manager_server(trainer).pid != stopped.pid
    job.finish()


@pytest.mark.in_parts
@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.25, 0.4])
def test_a_manager_server_that_is_killed_while_it_starts_is_replaced(
    spawn: Spawn, lighthouse: LighthouseServer, after_s: float
) -> None:
    """Field report D9: the trainer ended. The kill comes at any point of the start. Some servers serve already."""
    job = Job(spawn, lighthouse)
    trainer = job.start("a")
    server = manager_server(trainer)
    time.sleep(after_s)
    server.kill()
    since_s = time.time()  # it may have trained before
    job.until(lambda: trainer.committed_with(1, since_s=since_s), "it trains with another manager server")
    assert manager_server(trainer).pid != server.pid
    job.finish()
