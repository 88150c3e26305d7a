"""The last 30 minutes of each job: what each replica did, how many took part, and the steps.

A replica has a lane of runs: a run is a state and the time that it began. A job has points: a time, the participants,
and the committed steps. Both come from looks at the status of the jobs, several times a second. A healing can be
shorter than the time between two looks, so it is told when it begins.

Law of this file: runs and points from statuses, bounded in number; the caller gives the time.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, KeysView
from dataclasses import dataclass, field
from typing import Final, TypeAlias, final

from tft_coord.lighthouse import JobState, JobStatus, ReplicaState, ReplicaStatus

SPAN_MS: Final = 30 * 60 * 1_000
POINT_MS: Final = 5_000  # between two points, if the participants stay the same
POINTS_MOST: Final = 720  # of one job; twice as many as a span has if the participants stay the same
JOBS_MOST: Final = 1_000
LANES_MOST: Final = 5_000  # of all jobs together
RUNS_MOST: Final = 40_000  # of all lanes together
RUNS_OF_A_LANE: Final = RUNS_MOST // LANES_MOST  # that each lane keeps at least
_NUMBERS: Final = 3  # of a point

Run: TypeAlias = "tuple[int, Lane]"  # since when, in milliseconds since 1970
Point: TypeAlias = tuple[int, int, int]  # when, participants, committed steps


class Lane(enum.Enum):
    """What a replica does, as its lane shows it."""

    TRAINING = "training"
    HEALING = "healing"
    WAITING = "waiting"  # for a quorum, or as a member for others for 2 s or more
    GONE = "gone"


_LANE_OF: Final = {
    ReplicaState.TRAINING: Lane.TRAINING,
    ReplicaState.HEALING: Lane.HEALING,
    ReplicaState.LOST: Lane.GONE,
    ReplicaState.LEFT: Lane.GONE,
    ReplicaState.FINISHED: Lane.GONE,
}
_TAKES_PART: Final = (ReplicaState.TRAINING, ReplicaState.WAITING)
_WAITS: Final = ("WAITING", "REDUCING")  # phases of a step
_WAIT_MS: Final = 2_000  # a shorter wait for other members is a part of training


def lane_of(replica: ReplicaStatus, job: JobStatus) -> Lane:
    """Return what the lane of a replica shows now.

    Members wait for one another for a moment in each step. That counts as training until it has lasted 2 s.
    """
    if replica.rank is not None and replica.state in _TAKES_PART:
        waits = replica.phase is not None and replica.phase.name in _WAITS and replica.phase_ms >= _WAIT_MS
        waits = waits or replica.state is ReplicaState.WAITING
        return Lane.WAITING if waits and job.state is JobState.WAITING else Lane.TRAINING
    return _LANE_OF.get(replica.state, Lane.WAITING)


@dataclass(slots=True)
class _Job:
    """The record of one job: its points, flat, and its lanes by replica id, the oldest first."""

    seen_ms: int = 0
    points: array[int] = field(default_factory=lambda: array("q"))
    lanes: dict[str, list[Run]] = field(default_factory=dict)


@final
class Timeline:
    """The last 30 minutes of all jobs.

    Attributes:
        now_ms: the time of the last look, in milliseconds since 1970; it rises with each look.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._num_lanes = 0
        self._num_runs = 0
        self._next_prune_ms = 0
        self.now_ms = 0

    @property
    def jobs(self) -> KeysView[str]:
        """Return the jobs that have a record."""
        return self._jobs.keys()

    def points(self, job: str, after_ms: int = 0) -> list[Point]:
        """Return the points of a job after that time, the oldest first."""
        flat = self._jobs[job].points if job in self._jobs else array("q")
        found = zip(flat[0::_NUMBERS], flat[1::_NUMBERS], flat[2::_NUMBERS], strict=True)
        return [point for point in found if point[0] > after_ms]

    def lanes(self, job: str, after_ms: int = 0) -> dict[str, list[Run]]:
        """Return the runs of a job that began after that time, by replica id, without the lanes that have none."""
        lanes = self._jobs[job].lanes if job in self._jobs else {}
        found = {each: runs for each, runs in lanes.items() if runs[-1][0] > after_ms}
        return {each: [run for run in runs if run[0] > after_ms] for each, runs in found.items()}

    def look(self, jobs: Iterable[JobStatus], at_ms: int) -> None:
        """Record what the jobs do now.

        Args:
            jobs: all known jobs.
            at_ms: milliseconds since 1970. A clock that was set back counts on from the last look.
        """
        self.now_ms = now_ms = max(at_ms, self.now_ms + 1)
        for status in jobs:
            job = self._jobs.get(status.name)
            if job is None:
                job = self._jobs[status.name] = _Job()
            job.seen_ms = now_ms
            self._look_at(job, status)
        for job in self._jobs.values():
            if job.seen_ms != now_ms:
                self._end_lanes(job, job.lanes)
        if now_ms >= self._next_prune_ms:
            self._next_prune_ms = now_ms + POINT_MS
            self._prune()
        if self._num_runs > RUNS_MOST:
            self._shorten()

    def heals(self, job: str, replica_ids: Iterable[str], at_ms: int) -> None:
        """Record that replicas of a job begin to heal now. The next look tells whether they still do.

        Args:
            job: the name of the job.
            replica_ids: who heals.
            at_ms: milliseconds since 1970, as in `look`.
        """
        self.now_ms = max(at_ms, self.now_ms + 1)
        for each in replica_ids:
            self._extend(self._jobs.setdefault(job, _Job()), each, Lane.HEALING)

    def _look_at(self, job: _Job, status: JobStatus) -> None:
        participants = 0
        for replica in status.replicas:
            participants += replica.rank is not None and replica.state in _TAKES_PART
            self._extend(job, replica.replica_id, lane_of(replica, status))
        if len(job.lanes) > len(status.replicas):
            self._end_lanes(job, job.lanes.keys() - {each.replica_id for each in status.replicas})
        points = job.points
        is_new = not points or participants != points[-2] or self.now_ms - points[-_NUMBERS] >= POINT_MS
        if is_new:
            points.extend((self.now_ms, participants, status.step))
            del points[: -_NUMBERS * POINTS_MOST]

    def _extend(self, job: _Job, replica_id: str, lane: Lane) -> None:
        runs = job.lanes.get(replica_id)
        if runs is None:
            if lane is Lane.GONE or (self._num_lanes >= LANES_MOST and not self._drop_a_gone_lane()):
                return
            runs = job.lanes[replica_id] = []
            self._num_lanes += 1
        if not runs or runs[-1][1] is not lane:
            runs.append((self.now_ms, lane))
            self._num_runs += 1

    def _end_lanes(self, job: _Job, replica_ids: Iterable[str]) -> None:
        """End the lanes of replicas that the lighthouse has forgotten."""
        for each in replica_ids:
            self._extend(job, each, Lane.GONE)

    # --- bounds -------------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Drop what is older than the span, and the jobs that nothing is left of."""
        oldest_ms = self.now_ms - SPAN_MS
        for name, job in list(self._jobs.items()):
            while job.points and job.points[0] < oldest_ms:
                del job.points[:_NUMBERS]
            for replica_id, runs in list(job.lanes.items()):
                if runs[-1][1] is Lane.GONE and runs[-1][0] < oldest_ms:
                    self._drop_lane(job, replica_id)
                    continue
                while len(runs) > 1 and runs[1][0] < oldest_ms:
                    del runs[0]
                    self._num_runs -= 1
            if not job.lanes and job.seen_ms != self.now_ms:
                del self._jobs[name]
        while len(self._jobs) > JOBS_MOST:
            name = min(self._jobs, key=lambda each: self._jobs[each].seen_ms)
            for replica_id in list(self._jobs[name].lanes):
                self._drop_lane(self._jobs[name], replica_id)
            del self._jobs[name]

    def _drop_a_gone_lane(self) -> bool:
        """Drop the lane of the replica that has been gone for longest. Returns: whether there was one."""
        gone = [
            (runs[-1][0], name, replica_id)
            for name, job in self._jobs.items()
            for replica_id, runs in job.lanes.items()
            if runs[-1][1] is Lane.GONE
        ]
        if gone:
            _, name, replica_id = min(gone)
            self._drop_lane(self._jobs[name], replica_id)
        return bool(gone)

    def _drop_lane(self, job: _Job, replica_id: str) -> None:
        self._num_runs -= len(job.lanes.pop(replica_id))
        self._num_lanes -= 1

    def _shorten(self) -> None:
        """Drop the older half of the longer lanes, because some replicas come and go all the time."""
        for job in self._jobs.values():
            for runs in job.lanes.values():
                if len(runs) > RUNS_OF_A_LANE:
                    num_dropped = len(runs) // 2
                    del runs[:num_dropped]
                    self._num_runs -= num_dropped
