"""Silence and sudden death, while every timeout of a reduction is an hour: the others must detect them otherwise.

After a cut cable, or a stop of a whole group or its trainer, the survivors commit their next step in time. The bound is
`heartbeat_timeout` and a second. After a kill, every survivor's reduction ends within half a second. This includes a
rank whose own partner lives. A victim that comes back, by itself or restarted, never disturbs the others.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import psutil
import pytest

from integration_tests.conftest import Spawn
from integration_tests.hosts import Hosts, hosts, why_not
from integration_tests.jobs_on_hosts import ENVIRONMENT, job_on_hosts
from integration_tests.training import Event, Job, Launcher, Trainer
from tft_algos.testing import Action, Fault, Place
from tft_coord.timeouts import Timeouts
from tft_lighthouse import LighthouseServer

Record = Callable[[str, object], None]

HEARTBEAT_TIMEOUT_S: Final = 2.0
SILENCE_S: Final = HEARTBEAT_TIMEOUT_S + 1.0
DEATH_S: Final = 0.5
GROUPS: Final = ("a", "b", "c")
TIMEOUTS: Final = Timeouts(
    timeout_ms=3_600_000, heartbeat_timeout_ms=int(HEARTBEAT_TIMEOUT_S * 1000), beat_interval_ms=500
)
SETTINGS: Final[dict[str, Any]] = {"timeouts": TIMEOUTS, "timeout": timedelta(hours=1)}
LIGHTHOUSE: Final[dict[str, Any]] = {
    "heartbeat_timeout_ms": TIMEOUTS.heartbeat_timeout_ms,
    "join_timeout_ms": 1_000,
    "min_replicas": 1,
}


# --- what all cases have in common ---------------------------------------------------------------------------------


def train_together(job: Job, trainers: Sequence[Trainer], participants: int) -> None:
    job.until(
        lambda: all(trainer.committed_with(participants) for trainer in trainers),
        f"{', '.join(trainer.name for trainer in trainers)} commit with {participants}",
    )


def first_after(trainer: Trainer, moment_s: float, of_interest: Callable[[Event], bool]) -> float | None:
    """Return the time from a moment to the trainer's first such event after it, in seconds."""
    found = (event.at_s - moment_s for event in trainer.events if event.at_s > moment_s and of_interest(event))
    return next(found, None)


def commit_in_time(job: Job, survivors: Sequence[Trainer], moment_s: float) -> list[float]:
    """Return the times of the survivors' first commits as a pair, in seconds after that moment, and check the bound."""

    def stalls() -> list[float | None]:
        return [
            first_after(trainer, moment_s, lambda event: event.kind == "commit" and event.participants == 2)
            for trainer in survivors
        ]

    job.until(lambda: None not in stalls(), "the survivors commit by themselves")
    found = [stall for stall in stalls() if stall is not None]
    assert max(found) <= SILENCE_S, found
    return found


def hang_in_reduction(name: str, hang_s: float) -> Fault:
    return Fault(action=Action.HANG, place=Place.REDUCTION, replica=name, hang_for=timedelta(seconds=hang_s))


def come_back(job: Job, victim: Trainer, restart: Callable[[], Trainer]) -> Trainer:
    """Wait until the victim trains with the others again, by itself, or restarted after an error with a text."""
    everybody = [trainer for trainer in job.trainers if not trainer.ended]

    def rejoined() -> bool:
        return all(trainer.committed_with(len(GROUPS)) for trainer in everybody)

    job.until(lambda: victim.ended is not None or rejoined(), "the victim is back, or says why not")
    if victim.ended is not None:
        assert victim.ended.text, "it ended without an error"
        victim = restart()
        train_together(job, [*(trainer for trainer in everybody if not trainer.ended), victim], len(GROUPS))
    return victim


# --- cut cables ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Hosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with hosts("lighthouse", *GROUPS) as made:
        yield made


class Network:
    """A job of one group a host, and its cables."""

    def __init__(self, cluster: Hosts, job: Job) -> None:
        self.cluster = cluster
        self.job = job

    def start(self, name: str) -> Trainer:
        return self.job.start(
            name,
            faults=(),
            environment=ENVIRONMENT,
            hostname=self.cluster.address(name),
            **SETTINGS,
        )


@pytest.fixture
def network(cluster: Hosts, spawn: Spawn) -> Iterator[Network]:
    with job_on_hosts(cluster, spawn, **LIGHTHOUSE) as job:
        yield Network(cluster, job)
        for name in GROUPS:
            cluster.mend(name)


@pytest.mark.in_parts
@pytest.mark.parametrize("victim_name", ["a", "c"])  # the first by name is the others' source, and has their store
def test_a_cable_is_cut_while_all_train(network: Network, victim_name: str, record_property: Record) -> None:
    trainers = {name: network.start(name) for name in GROUPS}
    train_together(network.job, list(trainers.values()), 3)
    victim = trainers.pop(victim_name)
    cut_s = time.time()
    network.cluster.cut(victim_name)
    record_property("stalls_s", commit_in_time(network.job, list(trainers.values()), cut_s))
    network.cluster.mend(victim_name)
    come_back(network.job, victim, lambda: network.start(victim_name))
    network.job.finish([trainer for trainer in network.job.trainers if not trainer.ended])


@pytest.mark.in_parts
def test_a_cable_is_cut_while_the_others_wait_in_a_reduction(network: Network, record_property: Record) -> None:
    trainers = {name: network.start(name) for name in GROUPS}
    train_together(network.job, list(trainers.values()), 3)
    victim = trainers.pop("c")
    victim.connection.send(hang_in_reduction("c", HEARTBEAT_TIMEOUT_S + 1))
    network.job.until(lambda: bool(victim.of_kind("struck")), "the victim hangs in its reduction")
    cut_s = time.time()
    network.cluster.cut("c")
    record_property("stalls_s", commit_in_time(network.job, list(trainers.values()), cut_s))
    network.cluster.mend("c")
    come_back(network.job, victim, lambda: network.start("c"))
    network.job.finish([trainer for trainer in network.job.trainers if not trainer.ended])


# --- stopped processes ---------------------------------------------------------------------------------------------


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Stop the processes with SIGSTOP while the block lasts."""
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            process.resume()


@pytest.fixture
def job(spawn: Spawn) -> Iterator[Job]:
    with LighthouseServer("127.0.0.1:0", **LIGHTHOUSE) as lighthouse:
        yield Job(spawn, lighthouse)


@pytest.mark.in_parts
@pytest.mark.parametrize("whole", [True, False], ids=["the whole group", "its trainer alone"])
def test_a_group_is_stopped_and_continued(job: Job, whole: bool, record_property: Record) -> None:
    trainers = {name: job.start(name, **SETTINGS) for name in GROUPS}
    train_together(job, list(trainers.values()), 3)
    victim = trainers.pop("a")
    processes = [psutil.Process(victim.process.pid)]
    if whole:
        processes.append(victim.manager_server())
    stopped_s = time.time()
    with stopped(processes):
        record_property("stalls_s", commit_in_time(job, list(trainers.values()), stopped_s))
    come_back(job, victim, lambda: job.start("a", **SETTINGS))
    job.finish([trainer for trainer in job.trainers if not trainer.ended])


# --- killed processes ----------------------------------------------------------------------------------------------


@pytest.mark.in_parts(always=["rank 0"])
@pytest.mark.parametrize("killed", ["rank 0", "rank 1", "manager server"])
def test_a_death_ends_every_survivors_reduction(job: Job, killed: str, record_property: Record) -> None:
    """Rank 0 of the struck group hangs, so rank 0 of the other group waits in its reduction for a live partner."""
    launchers = [Launcher(job, name) for name in ("a", "b")]
    survivors, victims = (launcher.start(model="small", faults=(), **SETTINGS) for launcher in launchers)
    train_together(job, [*survivors, *victims], 2)
    victims[0].connection.send(hang_in_reduction("b", 1.5))
    job.until(lambda: bool(victims[0].of_kind("struck")), "the victim hangs in its reduction")
    pid = {
        "rank 0": victims[0].process.pid,
        "rank 1": victims[1].process.pid,
        "manager server": victims[0].manager_server().pid,
    }[killed]
    assert pid is not None
    killed_s = time.time()
    os.kill(pid, signal.SIGKILL)

    def failures() -> list[float | None]:
        return [first_after(trainer, killed_s, lambda event: event.kind == "failed") for trainer in survivors]

    job.until(lambda: None not in failures(), "every survivor's step fails")
    took_s = [took for took in failures() if took is not None]
    record_property("took_s", took_s)
    assert max(took_s) <= DEATH_S, took_s
    job.until(lambda: all(trainer.committed_with(1) for trainer in survivors), "the survivors go on")
    job.until(
        lambda: all(trainer.connection.closed or trainer.ended for trainer in victims), "the struck group is no more"
    )
    for trainer in victims:
        assert trainer.ended is None or "ReplicaGroupLostError" in trainer.ended.text
    job.finish(survivors)
