"""A trainer hangs while its process lives: the others go on without it, and it comes back when it wakes up.

No timeout helps here: reductions have a minute, and so have replicas that have not asked. Only the trainer's beats, or
their absence, show the hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from integration_tests.conftest import Spawn
from integration_tests.training import Job, Trainer
from tft_algos.testing import Action, Fault, Place
from tft_lighthouse import LighthouseServer

SLOWEST_STEP_S = 2.0
HEARTBEAT_TIMEOUT_S = 5.0
HANG_S = 8.0  # longer than it takes to find it on a busy machine
MINUTE = timedelta(minutes=1)


@pytest.fixture
def job(spawn: Spawn) -> Iterator[Job]:
    with LighthouseServer(
        "127.0.0.1:0",
        min_replicas=2,
        join_timeout_ms=60_000,
        heartbeat_timeout_ms=int(HEARTBEAT_TIMEOUT_S * 1_000),
    ) as lighthouse:
        yield Job(spawn, lighthouse)


def start(job: Job, name: str, **options: object) -> Trainer:
    settings = {"timeout": MINUTE, "slowest_step": timedelta(seconds=SLOWEST_STEP_S), **options}
    return job.start(name, faults=(), **settings)  # type: ignore[arg-type]


def sleeping(place: Place, name: str) -> Fault:
    return Fault(action=Action.HANG, place=place, replica=name, hang_for=timedelta(seconds=HANG_S))


@pytest.mark.in_parts(always=["it sleeps in its forward-Place.FORWARD"])
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("it sleeps in its forward", Place.FORWARD),
        ("it sleeps in its optimizer", Place.OPTIMIZER),
        ("it holds the interpreter's lock", None),
    ],
)
def test_the_others_go_on_and_it_comes_back(job: Job, how: str, where: Place | None) -> None:
    a, b, c = (start(job, name) for name in "abc")
    everybody = (a, b, c)
    job.until(lambda: all(trainer.committed_with(3) for trainer in everybody), "all three commit together")
    b.connection.send(HANG_S if where is None else sleeping(where, "b"))
    job.until(lambda: bool(b.of_kind("struck")), how)
    struck_s = b.of_kind("struck")[0].at_s
    job.until(lambda: a.committed_with(2, 1) and c.committed_with(2, 1), "the two others go on")
    for trainer in (a, c):
        commits = [event for event in trainer.of_kind("commit") if event.at_s > struck_s and event.participants == 2]
        assert SLOWEST_STEP_S / 2 < commits[0].at_s - struck_s < SLOWEST_STEP_S + HEARTBEAT_TIMEOUT_S, job.history()
    job.until(lambda: all(trainer.committed_with(3) for trainer in everybody), "it wakes up, heals, and all commit")
    assert b.of_kind("healed"), job.history()
    assert len([event for event in a.events if event.kind == "failed"]) <= 3, job.history()
    job.finish()


@pytest.mark.in_parts
@pytest.mark.timeout(120)
def test_a_first_step_may_take_any_time(job: Job) -> None:
    """The first step may compile. The others wait for it, as long as their reductions allow."""
    a, b = start(job, "a"), start(job, "b")
    job.until(lambda: a.committed_with(2) and b.committed_with(2), "both commit together")
    compiling = Fault(action=Action.HANG, place=Place.FORWARD, replica="c", hang_for=timedelta(seconds=4))
    c = job.start("c", faults=(compiling,), timeout=MINUTE, slowest_step=timedelta(seconds=SLOWEST_STEP_S))
    job.until(lambda: all(trainer.committed_with(3) for trainer in (a, b, c)), "all three commit together")
    assert c.of_kind("struck"), job.history()
    assert [event for trainer in (a, b) for event in trainer.of_kind("failed")] == [], job.history()
    job.finish()
