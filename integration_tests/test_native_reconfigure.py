"""Jobs over torch groups that reconfigure by handles: torch's own from 2.14 on, and a stand-in before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from integration_tests.conftest import Kill, Spawn
from integration_tests.training import Job, Trainer
from tft_lighthouse import LighthouseServer


@pytest.fixture
def job(spawn: Spawn) -> Iterator[Job]:
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=5_000, heartbeat_timeout_ms=3_000)
    yield Job(spawn, lighthouse)
    lighthouse.shutdown()


@pytest.fixture(name="port")
def handle_store() -> Iterator[int]:
    """Host the store that all groups share, as torch's Gloo requires, and yield its port. It outlives the replicas."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def together(*trainers: Trainer) -> bool:
    return all(trainer.committed_with(len(trainers)) for trainer in trainers)


def test_a_killed_replica_comes_back_over_a_group_that_reconfigures(job: Job, port: int, kill: Kill) -> None:
    survivor, victim = (job.start(name, handle_store=port) for name in ("a", "b"))
    job.until(lambda: together(survivor, victim), "both commit together")
    kill(victim.process.pid or 0)
    job.until(lambda: survivor.committed_with(1), "the survivor goes on")
    again = job.start("b", handle_store=port)
    job.until(lambda: together(survivor, again), "both commit together again")
    job.finish()
    assert len(again.of_kind("healed")) == 1
    assert len(survivor.of_kind("failed")) <= 2
