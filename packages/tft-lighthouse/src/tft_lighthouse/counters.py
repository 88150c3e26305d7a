"""The counts of what has happened to each job since this lighthouse started.

Law of this file: numbers from the core's decisions; it knows nothing of who reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, final

from tft_coord import QuorumKey
from tft_coord.lighthouse import TORCHFT_JOB, JobEnded, QuorumFormed, ReplicaLeft, ReplicaLost, effects

JOBS_MOST: Final = 1_000  # the oldest is dropped
QUORUMS: Final = "quorums"
LOSSES: Final = "losses"
LEAVES: Final = "leaves"
JOINS: Final = "joins"
BROKEN: Final = "broken_quorums"
FAILED: Final = "failed_rounds"
ENDS: Final = "ends"


@final
class Counters:
    """The counts of all jobs, by job and kind.

    Args:
        job_of: returns the job of a stream, or None.

    Attributes:
        refusals: refused streams, requests and calls, by the code of the refusal.
    """

    def __init__(self, job_of: Callable[[int], str | None]) -> None:
        self._job_of = job_of
        self._jobs: dict[str, Counter[str]] = {}
        self.refusals: Counter[str] = Counter()
        self._broken: dict[str, QuorumKey] = {}  # job -> the last quorum that broke

    @property
    def jobs(self) -> dict[str, Counter[str]]:
        """Return the counts of each job, by the kinds that are constants of this module."""
        return self._jobs

    def count(self, decision: object) -> None:
        """Count a decision of the core, if it is of a kind that is counted."""
        match decision:
            case QuorumFormed():
                counts = self._of(decision.job or TORCHFT_JOB)
                before = decision.previous.replica_ids if decision.previous is not None else ()
                counts[QUORUMS] += 1
                counts[JOINS] += len(set(decision.quorum.replica_ids).difference(before))
                counts[FAILED] += any(member.commit_failures for member in decision.quorum.members)
            case ReplicaLost(job):
                self._of(job)[LOSSES] += 1
            case ReplicaLeft(job):
                self._of(job)[LEAVES] += 1
            case JobEnded(job):
                self._of(job)[ENDS] += 1
            case effects.RefuseSession() | effects.RefuseRequest() | effects.RefuseUnary():
                self.refusals[decision.refusal.value] += 1
            case effects.NotifyLoss(stream, notice):
                its_job = self._job_of(stream)
                if its_job is not None and self._broken.get(its_job) != notice.key:  # all its members get a notice
                    self._of(its_job)[BROKEN] += 1
                    self._broken[its_job] = notice.key

    def _of(self, job: str) -> Counter[str]:
        counts = self._jobs.get(job)
        if counts is None:
            counts = self._jobs[job] = Counter()
            if len(self._jobs) > JOBS_MOST:
                oldest = next(iter(self._jobs))
                del self._jobs[oldest]
                self._broken.pop(oldest, None)
        return counts
