"""What the replicas' time goes to, summed over each job, from the trainers' own reports.

A report has sums since its trainer's start. Only what it adds counts, and no replica adds more time than has passed
since this lighthouse first heard of it: a wrong clock, or a hostile client, can't spoil the sums.

Law of this file: sums from reports, bounded in number; the caller gives the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, final

from tft_coord.lighthouse import Spent, TrainerReport

JOBS_MOST: Final = 1_000  # the oldest is dropped
REPLICAS_MOST: Final = 20_000  # of all jobs; that with the oldest report is dropped
STARTED_BEFORE_MS: Final = 10_000  # a trainer is this much older than its first message, at most


@dataclass(slots=True)
class _Replica:
    """A replica: when it was heard first, how much of its time has counted, and its last sums."""

    heard_ms: int
    counted_ms: int = 0
    last_ms: Mapping[Spent, int] = field(default_factory=dict)


@final
class Goodput:
    """The sums of all jobs.

    Attributes:
        jobs: milliseconds by job and cause.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, dict[Spent, int]] = {}
        self._replicas: dict[tuple[str, str], _Replica] = {}

    def reported(self, job: str, replica_id: str, report: TrainerReport, now_ms: int) -> None:
        """Add what a report has more than the replica's last one."""
        key = job, replica_id
        replica = self._replicas.pop(key, None) or _Replica(now_ms)
        self._replicas[key] = replica
        if len(self._replicas) > REPLICAS_MOST:
            del self._replicas[next(iter(self._replicas))]
        last_ms, replica.last_ms = replica.last_ms, report.total_ms
        if sum(report.total_ms.values()) < sum(last_ms.values()):
            last_ms = {}  # another process of that id
        more = {each: max(0, ms - last_ms.get(each, 0)) for each, ms in report.total_ms.items()}
        most_ms = max(0, now_ms - replica.heard_ms + STARTED_BEFORE_MS - replica.counted_ms)
        asked_ms = sum(more.values())
        sums = self._sums_of(job)
        for each, ms in more.items():
            counts_ms = ms if asked_ms <= most_ms else ms * most_ms // asked_ms
            replica.counted_ms += counts_ms
            sums[each] = sums.get(each, 0) + counts_ms

    def _sums_of(self, job: str) -> dict[Spent, int]:
        sums = self.jobs.get(job)
        if sums is None:
            sums = self.jobs[job] = {}
            if len(self.jobs) > JOBS_MOST:
                del self.jobs[next(iter(self.jobs))]
        return sums
