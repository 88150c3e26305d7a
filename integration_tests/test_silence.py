"""A stop of a trainer or a group is detected in about a second. A stopped manager server costs no step. All come back.

No replica is lost by a late beat: with busy loops beside the job on every core no member goes missing.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Final

import psutil
import pytest

from integration_tests.conftest import Spawn
from integration_tests.hosts import hosts, why_not
from integration_tests.jobs_on_hosts import ENVIRONMENT, job_on_hosts
from integration_tests.training import Job, Launcher, Trainer
from tft_lighthouse import LighthouseServer

HEARTBEAT_TIMEOUT_S: Final = 5.0
# The soak measures the cost of silence on an idle machine. Here the bound is only far from heartbeat_timeout.
SOON_S: Final = 3.5
MINUTE: Final = timedelta(minutes=1)
GOAL_S: Final = 1.5
TIMES: Final = 20
CALM_BETWEEN_S: Final = 2.5  # probes and checks of processes have ended by then, as in a calm job
PART_S: Final = 20.0  # less than a job waits for an event
CALM_S: Final = float(os.environ.get("SECONDS", "60"))


@pytest.fixture
def job(spawn: Spawn) -> Iterator[Job]:
    with LighthouseServer(
        "127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=int(HEARTBEAT_TIMEOUT_S * 1_000)
    ) as lighthouse:
        yield Job(spawn, lighthouse)


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[float]:
    """Stop the processes while the block lasts, and yield the time of the stop."""
    for process in processes:
        process.suspend()
    try:
        yield time.time()
    finally:
        for process in processes:
            process.resume()


def of_trainer(trainer: Trainer) -> list[psutil.Process]:
    return [psutil.Process(trainer.process.pid)]


def of_group(trainer: Trainer) -> list[psutil.Process]:
    return [*of_trainer(trainer), trainer.manager_server()]


def of_manager_server(trainer: Trainer) -> list[psutil.Process]:
    return [trainer.manager_server()]


def goes_on_after(job: Job, survivors: Sequence[Trainer], since_s: float) -> float:
    """Wait until all of these commit without the other one. Return the seconds until the last of them did."""
    number = len(survivors)

    def first(trainer: Trainer) -> float | None:
        found = (each.at_s for each in trainer.of_kind("commit") if each.at_s > since_s and each.participants == number)
        return next(found, None)

    job.until(lambda: all(first(each) is not None for each in survivors), "the others go on")
    return max(at_s for each in survivors if (at_s := first(each)) is not None) - since_s


def longest_without_a_commit(trainers: Sequence[Trainer], from_s: float, to_s: float) -> float:
    """Return the longest time without a commit of one of them, in seconds."""
    longest_s = 0.0
    for trainer in trainers:
        commits = [each.at_s for each in trainer.of_kind("commit") if from_s < each.at_s < to_s]
        longest_s = max(longest_s, *(later - earlier for earlier, later in pairwise([from_s, *commits, to_s])))
    return longest_s


@pytest.mark.in_parts(always=["trainer"])
@pytest.mark.timeout(120)
@pytest.mark.parametrize("which", [of_trainer, of_group, of_manager_server], ids=["trainer", "group", "manager_server"])
def test_whoever_is_stopped_is_lost_soon_and_comes_back(
    job: Job, which: Callable[[Trainer], list[psutil.Process]]
) -> None:
    everybody = a, b, c = [job.start(name, timeout=MINUTE) for name in "abc"]
    job.until(lambda: all(each.committed_with(3) for each in everybody), "all three commit together")
    with stopped(which(b)) as since_s:
        took_s = goes_on_after(job, (a, c), since_s)
    woken_s = time.time()
    # A steady step needs no manager server, so all three train on until the lighthouse finds it silent.
    assert took_s < (HEARTBEAT_TIMEOUT_S + SOON_S if which is of_manager_server else SOON_S), job.history()
    assert longest_without_a_commit((a, c), since_s, since_s + took_s) < SOON_S, job.history()
    job.until(lambda: all(each.committed_with(3, since_s=woken_s) for each in everybody), "all three commit together")
    job.finish()


@pytest.mark.in_parts
@pytest.mark.timeout(120)
def test_a_stopped_rank_of_a_larger_group_comes_back(job: Job) -> None:
    launchers = [Launcher(job, name) for name in ("a", "b")]  # each keeps its group's store
    first, second = (launcher.start(timeout=MINUTE) for launcher in launchers)
    everybody = [*first, *second]
    job.until(lambda: all(each.committed_with(2) for each in everybody), "both groups commit together")
    with stopped(of_trainer(second[1])) as since_s:
        took_s = goes_on_after(job, [first[0]], since_s)
    woken_s = time.time()
    assert took_s < SOON_S, job.history()
    job.until(lambda: all(each.committed_with(2, since_s=woken_s) for each in everybody), "both groups go on together")
    job.finish()


@pytest.mark.in_parts
@pytest.mark.timeout(120)
def test_one_replica_alone_goes_on_when_its_trainer_does(spawn: Spawn) -> None:
    """Its streams have broken meanwhile, because grpc's pings were not answered for longer than heartbeat_timeout."""
    with LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=1_000) as lighthouse:
        job = Job(spawn, lighthouse)
        trainer = job.start("a", heartbeat_timeout=timedelta(seconds=1))
        job.until(lambda: trainer.committed_with(1), "it commits")
        step = trainer.step
        with stopped(of_trainer(trainer)):
            time.sleep(4.0)  # a silent process causes no event to wait for
        woken_s = time.time()
        job.until(lambda: trainer.committed_with(1, since_s=woken_s), "it goes on")
        steps = [event.step for event in trainer.of_kind("commit")]
        assert steps == [*range(1, len(steps) + 1)], "no step was lost"
        assert len(steps) > step
        job.finish()


def _spin(_: object) -> None:
    while True:
        pass


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    loops = [context.Process(target=_spin, args=(None,), daemon=True) for _ in range(number)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.join()


@pytest.mark.soak
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("which", [of_trainer, of_group], ids=["trainer", "group"])
def test_survivors_commit_again_within_a_second_and_a_half(
    job: Job, which: Callable[[Trainer], list[psutil.Process]], capsys: pytest.CaptureFixture[str]
) -> None:
    everybody = a, b, c = [job.start(name, timeout=MINUTE, batch_s=0.02) for name in "abc"]
    took_s: list[float] = []
    woken_s = 0.0

    def all_train() -> bool:
        return all(each.committed_with(3, since_s=woken_s + CALM_BETWEEN_S) for each in everybody)

    for _ in range(TIMES):
        job.until(all_train, "all three commit together")
        with stopped(which(b)) as since_s:
            took_s.append(goes_on_after(job, (a, c), since_s))
        woken_s = time.time()
    with capsys.disabled():
        told = ", ".join(f"{each:.2f}" for each in sorted(took_s))
        print(
            f"\nsilence of a {which.__name__.removeprefix('of_')}: median {statistics.median(took_s):.2f} s of {told}"
        )
    assert statistics.median(took_s) < GOAL_S
    job.finish()


@pytest.mark.soak
@pytest.mark.timeout(1_200)
def test_survivors_of_a_cut_cable_commit_again_within_a_second_and_a_half(
    spawn: Spawn, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    took_s: list[float] = []
    woken_s = 0.0
    timeouts_ms = {"join_timeout_ms": 60_000, "heartbeat_timeout_ms": int(HEARTBEAT_TIMEOUT_S * 1_000)}
    with hosts("lighthouse", *"abc") as cluster, job_on_hosts(cluster, spawn, min_replicas=1, **timeouts_ms) as job:
        everybody = [
            job.start(
                name,
                faults=(),
                timeout=MINUTE,
                batch_s=0.02,
                environment=ENVIRONMENT,
                hostname=cluster.address(name),
            )
            for name in "abc"
        ]

        def all_train() -> bool:
            return all(each.committed_with(3, since_s=woken_s + CALM_BETWEEN_S) for each in everybody)

        for _ in range(TIMES):
            job.until(all_train, "all three commit together")
            since_s = time.time()
            cluster.cut("b")
            took_s.append(goes_on_after(job, (everybody[0], everybody[2]), since_s))
            cluster.mend("b")
            woken_s = time.time()
        job.finish()
    with capsys.disabled():
        told = ", ".join(f"{each:.2f}" for each in sorted(took_s))
        print(f"\nsilence of a cut cable: median {statistics.median(took_s):.2f} s of {told}")
    assert statistics.median(took_s) < GOAL_S


@pytest.mark.soak
@pytest.mark.timeout(CALM_S + 300)
def test_nobody_is_lost_beside_busy_loops(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """The test lasts for SECONDS, an environment variable."""
    everybody = [job.start(name, timeout=MINUTE, batch_s=0.3 if name == "c" else 0.0) for name in "abc"]
    job.until(lambda: all(each.committed_with(3) for each in everybody), "all three commit together")
    since_s = time.time()
    with busy_loops(3):
        while (passed_s := time.time() - since_s) < CALM_S:
            job.until(lambda: everybody[0].committed_with(3, 1, since_s=since_s + passed_s + PART_S), "a while passes")
    alarms = [event for each in everybody for event in each.of_kind("failed") if event.at_s > since_s]
    steps = sum(1 for event in everybody[0].of_kind("commit") if event.at_s > since_s)
    with capsys.disabled():
        load = os.getloadavg()[0]
        print(f"\n{steps} steps beside 3 busy loops in {CALM_S:g} s, load {load:.1f}, {len(alarms)} failed")
    assert alarms == []
    job.finish()
