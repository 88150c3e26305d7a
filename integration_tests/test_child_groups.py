"""Jobs over Gloo in child processes: one loses its child in a reduction, one is killed with its child."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from integration_tests.conftest import Kill, Spawn
from integration_tests.training import Job, Trainer
from tft_lighthouse import LighthouseServer


@pytest.fixture
def lighthouse(request: pytest.FixtureRequest) -> Iterator[LighthouseServer]:
    server = LighthouseServer(
        "127.0.0.1:0", min_replicas=request.param, join_timeout_ms=10_000, heartbeat_timeout_ms=3_000
    )
    yield server
    server.shutdown()


@pytest.fixture
def job(spawn: Spawn, lighthouse: LighthouseServer) -> Job:
    return Job(spawn, lighthouse)


def together(*trainers: Trainer) -> bool:
    return all(trainer.committed_with(len(trainers)) for trainer in trainers)


@pytest.mark.parametrize("lighthouse", [2], indirect=True)
def test_a_trainer_that_loses_its_child_in_a_reduction_goes_on(job: Job) -> None:
    """The step is committed by nobody, and done again with a new child."""
    unlucky = job.start("a", child_group=True, loses_child_at=10)
    other = job.start("b", child_group=True)
    job.until(lambda: unlucky.step > 20 and together(unlucky, other), "both commit together again")
    job.finish()
    assert len(unlucky.of_kind("struck")) == 1
    failed = unlucky.of_kind("failed")
    assert [event.step for event in failed if "child process" in event.text] == [10], failed
    assert all(event.step == 10 for event in failed), failed
    assert 11 in unlucky.commits
    assert unlucky.of_kind("healed") == []


@pytest.mark.parametrize("lighthouse", [1], indirect=True)
def test_a_replica_that_is_killed_with_its_child_comes_back(job: Job, kill: Kill) -> None:
    survivor, victim = (job.start(name, child_group=True) for name in ("a", "b"))
    job.until(lambda: together(survivor, victim), "both commit together")
    started = psutil.Process(victim.process.pid).children(recursive=True)
    nurseries = [process for process in started if "tft_pg.child.nursery" in " ".join(process.cmdline())]
    assert len(nurseries) >= 2  # the nursery and a child of it
    kill(victim.process.pid or 0)
    job.until(lambda: survivor.committed_with(1), "the survivor goes on")
    psutil.wait_procs(nurseries, timeout=20)
    assert [process for process in nurseries if process.is_running()] == []
    again = job.start("b", child_group=True)
    job.until(lambda: together(survivor, again), "both commit together again")
    job.finish()
    assert len(again.of_kind("healed")) == 1
