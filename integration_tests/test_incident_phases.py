"""The phases of an incident sum to the stall that the survivors themselves measure between two commits."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from integration_tests.conftest import Spawn
from integration_tests.training import Event, Job, Trainer
from tft_algos.testing import Action, Fault, Place
from tft_lighthouse import LighthouseServer

HEARTBEAT_MS = 1_500
BATCH_S = 0.02
LATE_S = 40.0
BEAT_MS = 1_000
# A loop reports its commit a moment after it, whichever moment it is, and phases are whole milliseconds.
WITHIN, WITHIN_MS = 0.05, 15


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer(
        "127.0.0.1:0", min_replicas=2, heartbeat_timeout_ms=HEARTBEAT_MS, http_bind="127.0.0.1:0"
    ) as lighthouse:
        yield lighthouse


@pytest.fixture
def job(spawn: Spawn, lighthouse: LighthouseServer) -> Job:
    job = Job(spawn, lighthouse)
    for name in "abc":
        job.start(name, batch_s=BATCH_S, faults=(), heartbeat_timeout=timedelta(milliseconds=HEARTBEAT_MS))
    job.until(lambda: all(each.committed_with(3, 10) for each in job.trainers), "all train together")
    return job


def ask(lighthouse: LighthouseServer, path: str) -> str:
    with urllib.request.urlopen(f"{lighthouse.http_address}{path}", timeout=LATE_S) as answer:
        text: str = answer.read().decode()
        return text


def incidents(lighthouse: LighthouseServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ask(lighthouse, "/api/v1/incidents"))["incidents"]
    return found


def the_incident(lighthouse: LighthouseServer, job: Job, kind: str, num_reports: int) -> dict[str, Any]:
    """Return the last incident of that kind, when that many replicas have reported their stalls."""
    deadline = time.monotonic() + LATE_S
    while True:
        found = [each for each in incidents(lighthouse) if each["kind"] == kind]
        if found and not found[-1]["is_open"] and found[-1]["num_reports"] >= num_reports:
            return found[-1]
        assert time.monotonic() < deadline, incidents(lighthouse)
        job.take_in(0.1)


def stall_ms(trainer: Trainer, began_s: float) -> float:
    """Return the longest time between two commits of a trainer that ended after the fault began."""
    commits = [event for event in trainer.events if event.kind == "commit"]
    pairs: list[tuple[Event, Event]] = list(zip(commits, commits[1:], strict=False))
    return 1_000 * max(later.at_s - earlier.at_s for earlier, later in pairs if later.at_s > began_s)


def kills(victim: Trainer) -> None:
    victim.process.kill()


def stops(victim: Trainer) -> None:
    assert victim.process.pid is not None
    os.kill(victim.process.pid, signal.SIGSTOP)


def raises(victim: Trainer) -> None:
    victim.connection.send(Fault(action=Action.RAISE, place=Place.FORWARD, replica=victim.name))


def fails(victim: Trainer) -> None:
    victim.connection.send(Fault(action=Action.FAIL, place=Place.FORWARD, replica=victim.name))


@pytest.mark.in_parts
@pytest.mark.parametrize(
    ("fault", "kind"), [(kills, "loss"), (stops, "loss"), (raises, "loss"), (fails, "failed_round")]
)
def test_the_phases_sum_to_the_stall_of_the_slowest_survivor(
    lighthouse: LighthouseServer, job: Job, fault: Callable[[Trainer], None], kind: str
) -> None:
    victim, *survivors = job.trainers
    began_s = time.time()
    fault(victim)
    job.until(lambda: all(each.committed_with(2, 10, since_s=began_s) for each in survivors), "the others train on")
    incident = the_incident(lighthouse, job, kind, len(survivors))
    measured = {each.name: stall_ms(each, began_s) for each in survivors}
    slowest_ms, name = max((ms, name) for name, ms in measured.items())
    assert incident["lasted_ms"] == pytest.approx(slowest_ms, rel=WITHIN, abs=WITHIN_MS), (incident, measured)
    assert sum(incident["phases_ms"].values()) == incident["lasted_ms"]
    assert incident["slowest"].partition(":")[0] in measured, f"{name} was the slowest"
    assert incident["replica_ids"][0].startswith("a:")
    victim.process.kill()
