"""The phases of an incident sum to the stall that the survivors themselves measure between two commits."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from integration_tests.conftest import Spawn
from integration_tests.training import PATIENCE_S, Event, Job, Trainer
from tft_algos.testing import Action, Fault, Place
from tft_coord.manager_server.report_gate import REPORT_EVERY_MS
from tft_lighthouse import LighthouseServer

HEARTBEAT_MS = 1_500
BATCH_S = 0.02
LATE_S = 40.0
REPORTS_S = REPORT_EVERY_MS / 1_000
SLACK_S = 3.0  # until a beat, and a step
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
    together = "all train together"
    job.until(lambda: all(each.committed_with(3, 10) for each in job.trainers), together, within_s=3 * PATIENCE_S)
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


@dataclass(frozen=True)
class Gap:
    """The time between two commits of a trainer, and the failed rounds in it."""

    lasted_ms: float
    failed_rounds: int


def gap_of(trainer: Trainer, began_s: float) -> Gap:
    """Return the first gap of a trainer after a fault with a failed round, or with other participants after it."""
    commit: Event | None = None
    failed_rounds = 0
    for event in trainer.events:
        if event.kind == "failed":
            failed_rounds += 1
        elif event.kind == "commit":
            is_changed = commit is not None and (failed_rounds or event.participants != commit.participants)
            if commit is not None and is_changed and event.at_s > began_s:
                return Gap(1_000 * (event.at_s - commit.at_s), failed_rounds)
            commit, failed_rounds = event, 0
    raise AssertionError(f"{trainer.name} saw no fault: {trainer.events[-5:]}")


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
@pytest.mark.parametrize("fault", [kills, stops, raises, fails])
def test_the_phases_sum_to_the_stall_of_the_slowest_survivor(
    lighthouse: LighthouseServer, job: Job, fault: Callable[[Trainer], None]
) -> None:
    victim, *others = job.trainers
    goes_on, kind = ([victim, *others], "broken_quorum") if fault is fails else (others, "loss")
    began_s = time.time()
    fault(victim)
    job.until(
        lambda: all(each.committed_with(len(goes_on), 10, since_s=began_s) for each in goes_on),
        "the others train on",
    )
    incident = the_incident(lighthouse, job, kind, len(goes_on))
    measured = {each.name: gap_of(each, began_s) for each in goes_on}
    slowest_ms = max(gap.lasted_ms for gap in measured.values())
    assert incident["lasted_ms"] == pytest.approx(slowest_ms, rel=WITHIN, abs=WITHIN_MS), (incident, measured)
    assert sum(incident["phases_ms"].values()) == incident["lasted_ms"]
    assert incident["failed_rounds"] == measured[incident["slowest"].partition(":")[0]].failed_rounds
    if fault is not fails:
        assert incident["replica_ids"][0].startswith("a:")
    if fault is stops:
        phases: dict[str, int] = incident["phases_ms"]
        assert max(phases, key=phases.__getitem__) == "detect", "a stopped process is seen late"
    victim.process.kill()


def test_a_join_says_what_it_cost_the_others_and_how_long_the_newcomer_took(
    lighthouse: LighthouseServer, job: Job
) -> None:
    began_s = time.time()
    newcomer = job.start("d", batch_s=BATCH_S, heartbeat_timeout=timedelta(milliseconds=HEARTBEAT_MS))
    before = job.trainers[:3]
    job.until(lambda: newcomer.committed_with(4, 10), "the newcomer trains")
    incident = the_incident(lighthouse, job, "join", len(before))
    # The newcomer counts from the step after the one in which it heals, so participants do not tell which gap it is.
    commits = [[event.at_s for event in each.of_kind("commit") if event.at_s > began_s] for each in before]
    longest_ms = 1_000 * max(later - earlier for times in commits for earlier, later in itertools.pairwise(times))
    assert 0 < incident["lasted_ms"] <= (1 + WITHIN) * longest_ms + WITHIN_MS, incident
    phases = incident["phases_ms"]
    assert sum(ms for name, ms in phases.items() if name != "heal") == incident["lasted_ms"]
    assert {"commit", "heal"} <= set(phases)
    assert incident["slowest"].partition(":")[0] in "abc"


def test_goodput_and_badput_sum_to_the_replicas_wall_time(lighthouse: LighthouseServer, job: Job) -> None:
    kills(job.trainers[0])
    survivors = job.trainers[1:]
    began_s = time.time()
    job.until(lambda: all(each.committed_with(2, 10, since_s=began_s) for each in survivors), "the others train on")
    before, before_s = spent_s(lighthouse), time.monotonic()
    while time.monotonic() - before_s < 2 * REPORTS_S + 1:
        job.take_in(0.2)
    after, passed_s = spent_s(lighthouse), time.monotonic() - before_s
    assert after["commit"] > before["commit"]
    assert before["start"] > 0
    total_s = sum(after.values()) - sum(before.values())
    # Two replicas; each has reported up to its last step, between 0 and REPORTS_S ago, before and after.
    assert 2 * (passed_s - REPORTS_S - SLACK_S) <= total_s <= 2 * (passed_s + REPORTS_S + SLACK_S)


def spent_s(lighthouse: LighthouseServer) -> dict[str, float]:
    """Return what the replicas' time went to, as the lighthouse's metrics say."""
    found = {}
    for family in text_string_to_metric_families(ask(lighthouse, "/metrics")):
        for sample in family.samples:
            if sample.name == "tft_goodput_seconds_total":
                found["commit"] = sample.value
            elif sample.name == "tft_badput_seconds_total":
                found[sample.labels["cause"]] = sample.value
    return found
