"""What the replicas' time went to, summed over a job: exact, and safe from nonsense."""

from __future__ import annotations

import pytest

from tft_coord.lighthouse import Spent, TrainerReport
from tft_lighthouse import goodput
from tft_lighthouse.goodput import STARTED_BEFORE_MS, Goodput

HUGE = 10**12


def report(**spent_ms: int) -> TrainerReport:
    return TrainerReport({Spent(name): ms for name, ms in spent_ms.items()})


def test_what_reports_add_is_summed_over_the_replicas_of_a_job() -> None:
    found = Goodput()
    for name in "ab":
        found.reported("job", name, report(start=500), 1_000)
        found.reported("job", name, report(start=500, commit=4_000), 5_000)
        found.reported("job", name, report(start=500, commit=4_000), 6_000)  # nothing is new
        found.reported("job", name, report(start=500, commit=8_000, detect=300), 10_000)
    found.reported("other", "a", report(start=7), 10_000)
    assert found.jobs["job"] == {Spent.START: 1_000, Spent.COMMIT: 16_000, Spent.DETECT: 600}
    assert found.jobs["other"] == {Spent.START: 7}


def test_a_lighthouse_that_comes_later_counts_from_then_on() -> None:
    found = Goodput()
    found.reported("job", "a", report(commit=HUGE), 0)
    assert found.jobs["job"] == {Spent.COMMIT: STARTED_BEFORE_MS}
    found.reported("job", "a", report(commit=HUGE + 5_000), 20_000)
    assert found.jobs["job"] == {Spent.COMMIT: STARTED_BEFORE_MS + 5_000}


def test_no_replica_adds_more_time_than_has_passed() -> None:
    found = Goodput()
    found.reported("job", "a", report(), 0)
    for number in range(1, 100):
        found.reported("job", "a", report(commit=number * HUGE, wait=number * HUGE), number * 10)
    sums = found.jobs["job"]
    assert sum(sums.values()) <= 990 + STARTED_BEFORE_MS
    assert sums[Spent.COMMIT] == pytest.approx(sums[Spent.WAIT], abs=100)


def test_another_process_of_the_same_id_begins_at_zero() -> None:
    found = Goodput()
    found.reported("job", "a", report(commit=9_000), 1_000)
    found.reported("job", "a", report(commit=2_000), 3_000)
    assert found.jobs["job"] == {Spent.COMMIT: 11_000}
    found.reported("job", "a", report(commit=1), 3_000)
    assert found.jobs["job"] == {Spent.COMMIT: 11_001}


def test_a_cause_that_falls_adds_nothing() -> None:
    found = Goodput()
    found.reported("job", "a", report(commit=100, wait=5), 1_000)
    found.reported("job", "a", report(commit=110, wait=4), 2_000)
    assert found.jobs["job"] == {Spent.COMMIT: 110, Spent.WAIT: 5}


def test_jobs_and_replicas_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "JOBS_MOST", 5)
    monkeypatch.setattr(goodput, "REPLICAS_MOST", 7)
    found = Goodput()
    for number in range(100):
        found.reported(f"job {number}", f"replica {number}", report(commit=1), number)
    assert list(found.jobs) == [f"job {number}" for number in range(95, 100)]
    assert len(found._replicas) == 7
