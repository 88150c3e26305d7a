"""Replica groups that train together: they join, fail, die and come back, and stay bit-equal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final

import pytest

from integration_tests.conftest import Kill, Spawn
from integration_tests.training import Job, Trainer
from tft_algos import WorldSizeMode
from tft_lighthouse import LighthouseServer

NewJob = Callable[..., Job]

LOSS_IS_TOLD_WITHIN_S: Final = 1.5  # after reconnect_grace, of 0.3 s, on a busy machine


@pytest.fixture
def new_job(spawn: Spawn) -> Iterator[NewJob]:
    """Return `new_job(min_replicas=2)`, which creates a job with its own lighthouse."""
    lighthouses: list[LighthouseServer] = []

    def start(*, min_replicas: int = 1) -> Job:
        lighthouses.append(
            LighthouseServer(
                "127.0.0.1:0", min_replicas=min_replicas, join_timeout_ms=5_000, heartbeat_timeout_ms=3_000
            )
        )
        return Job(spawn, lighthouses[-1])

    yield start
    for lighthouse in lighthouses:
        lighthouse.shutdown()


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def use_async_quorum(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def together(*trainers: Trainer) -> Callable[[], bool]:
    return lambda: all(trainer.committed_with(len(trainers)) for trainer in trainers)


@pytest.mark.in_parts
def test_two_replicas_with_other_weights_agree_from_the_first_step_on(new_job: NewJob, use_async_quorum: bool) -> None:
    job = new_job(min_replicas=2)
    trainers = [job.start(name, use_async_quorum=use_async_quorum) for name in ("a", "b")]
    job.until(together(*trainers), "both commit together")
    job.finish()
    assert job.check_digests() == trainers[0].step
    assert all(trainer.of_kind("failed") == [] for trainer in trainers)


@pytest.mark.in_parts
def test_a_newcomer_heals_and_its_snapshot_is_not_torn_by_the_sources_optimizer(
    new_job: NewJob, use_async_quorum: bool
) -> None:
    """The job has long rebuilt its buckets, with modules used in another order than defined."""
    job = new_job()
    first = job.start("a", model="buckets", use_async_quorum=use_async_quorum)
    job.until(lambda: first.step >= 20, "the first trains alone")
    second = job.start("b", model="buckets", use_async_quorum=use_async_quorum)
    job.until(together(first, second), "both commit together")
    job.finish()
    healed = second.of_kind("healed")
    assert len(healed) == 1
    # The loaded state is the source's state at the step before the newcomer's first commit, bit for bit.
    assert healed[0].digest == first.commits[min(second.commits) - 1].digest
    assert min(second.commits) > 20
    assert first.of_kind("failed") == []


def test_a_killed_replica_comes_back_and_heals_while_the_survivors_go_on(new_job: NewJob, kill: Kill) -> None:
    job = new_job()
    survivors = [job.start(name) for name in ("a", "b")]
    victim = job.start("c")
    job.until(together(*survivors, victim), "all three commit together")
    kill(victim.process.pid or 0)
    job.until(lambda: all(trainer.committed_with(2) for trainer in survivors), "the survivors go on")
    again = job.start("c")
    job.until(together(*survivors, again), "all three commit together again")
    job.finish()
    assert again.of_kind("healed")


@pytest.mark.in_parts
def test_a_step_that_one_replica_lost_is_committed_by_nobody(new_job: NewJob) -> None:
    job = new_job(min_replicas=2)
    lucky, unlucky = job.start("a"), job.start("b", fail_at=10)
    job.until(lambda: unlucky.step > 20 and together(lucky, unlucky)(), "both commit together again")
    job.finish()
    assert "injected" in unlucky.of_kind("failed")[0].text
    # Each tells the other by the word of the round, and they repeat the step together.
    assert [[event.step for event in each.of_kind("failed")] for each in (lucky, unlucky)] == [[10], [10]]
    assert [each.commits[11].participants for each in (lucky, unlucky)] == [2, 2]
    assert lucky.commits[11].digest == unlucky.commits[11].digest


@pytest.mark.in_parts
def test_a_spare_steps_in_when_a_participant_dies(new_job: NewJob, kill: Kill) -> None:
    job = new_job()
    trainers = [
        job.start(name, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES, min_replica_size=2) for name in ("a", "b", "c")
    ]
    job.until(lambda: all(trainer.step >= 10 for trainer in trainers), "all three train")
    kill(trainers[0].process.pid or 0)
    before = max(trainer.step for trainer in trainers)
    job.until(lambda: all(trainer.step > before + 5 for trainer in trainers[1:]), "the spare has stepped in")
    job.finish(trainers[1:])
    # At step 0 all but one heal and contribute zeros. From then on two of the three count.
    counts = {event.participants for trainer in trainers for event in trainer.commits.values() if event.step > 1}
    assert counts == {2}


@pytest.mark.in_parts
def test_after_failed_quorums_a_replica_trains_when_there_is_one(new_job: NewJob) -> None:
    job = new_job(min_replicas=2)
    first = job.start("a", quorum_timeout=timedelta(milliseconds=200))
    job.until(lambda: len(first.of_kind("failed")) >= 2, "the first gets no quorum")
    second = job.start("b")
    job.until(together(first, second), "both commit together")
    job.finish()


@pytest.mark.in_parts
def test_a_group_of_one_goes_on_when_its_manager_server_dies(new_job: NewJob) -> None:
    job = new_job()
    first, second = job.start("a"), job.start("b")
    job.until(together(first, second), "both commit together")
    server = first.manager_server()
    server.kill()
    server.wait()
    # A standing quorum needs no manager server. The steps go on until the lighthouse reports the loss, some 0.3 s
    # later. Until then the quorum is valid, and a replica that ends would end without the other.
    told_s = time.time() + LOSS_IS_TOLD_WITHIN_S
    job.until(lambda: first.has_manager_server, "a new one serves")
    job.until(
        lambda: all(trainer.committed_with(2, since_s=told_s) for trainer in (first, second)),
        "both commit together again",
    )
    assert first.manager_server().pid != server.pid
    job.finish()


@pytest.mark.in_parts
def test_two_runs_at_the_same_time_share_no_port(new_job: NewJob) -> None:
    jobs = [new_job(min_replicas=2) for _ in range(2)]
    for job in jobs:
        for name in ("a", "b"):
            job.start(name)
    for job in jobs:
        job.until(together(*job.trainers), "both commit together")
    for job in jobs:
        job.finish()
