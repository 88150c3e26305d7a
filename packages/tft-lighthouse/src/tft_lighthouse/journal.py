"""The journal of a lighthouse: its counters, its history and its timeline, fed by the core's decisions and by time.

Law of this file: who gives what to which; the records themselves are made in `history` and `counters`.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Final, final

from tft_coord import LossNotice
from tft_coord.lighthouse import (
    TORCHFT_JOB,
    JobEnded,
    LighthouseCore,
    PaceChanged,
    Quorum,
    QuorumFormed,
    ReplicaLeft,
    ReplicaLost,
    ReplicaState,
    TorchftCore,
    TrainerReport,
    WaitNoticed,
    effects,
    events,
)
from tft_lighthouse import log
from tft_lighthouse.counters import Counters
from tft_lighthouse.goodput import Goodput
from tft_lighthouse.history import History, Incident
from tft_lighthouse.timeline import Timeline

LOOK_AT_HEALING_MS: Final = 1_000  # a look at thousands of replicas takes milliseconds
LOOK_AT_JOBS_MS: Final = 250  # for the timeline,
LOOK_TIMES: Final = 100  # and not before so many times the time that the last look took
REFUSALS: Final = frozenset({effects.RefuseSession, effects.RefuseRequest, effects.RefuseUnary})
NOTED: Final = REFUSALS | {
    QuorumFormed,
    ReplicaLost,
    ReplicaLeft,
    JobEnded,
    PaceChanged,
    WaitNoticed,
    effects.NotifyLoss,
}


@final
class Journal:
    """The journal of one lighthouse. It runs on the lighthouse's loop only.

    Args:
        core, torchft: the cores.
        now_ms: returns the time of a monotonic clock.
        wall_ms: returns milliseconds since 1970.

    Attributes:
        counters: what has happened since the start.
        goodput: what the replicas' time went to.
        history: the incidents.
        timeline: what the replicas did in the last 30 minutes.
        on_change: called when a record is new or has changed.
        on_closed: called with each incident that has ended.
    """

    def __init__(
        self, core: LighthouseCore, torchft: TorchftCore, *, now_ms: Callable[[], int], wall_ms: Callable[[], int]
    ) -> None:
        self._core = core
        self._torchft = torchft
        self._now_ms = now_ms
        self._wall_ms = wall_ms
        self._healing: dict[str, Set[str]] = {}  # of the last look
        self._next_look_ms = 0
        self._last_notice: LossNotice | None = None
        self.counters = Counters(lambda stream: self._core.job_of(stream))
        self.goodput = Goodput()
        self.history = History(
            job_of=lambda stream: self._core.job_of(stream),
            step_of=self._step_of,
            healing_of=self._healing_of,
            closed=self._closed,
        )
        self.timeline = Timeline()
        self._next_look_at_jobs_ms = 0
        self.on_change: Callable[[], None] = lambda: None
        self.on_closed: Callable[[Incident], None] = lambda _: None

    def renew(self, core: LighthouseCore, torchft: TorchftCore) -> None:
        """Follow other cores from now on: this lighthouse begins again, without memory. The records stay."""
        self._core, self._torchft = core, torchft
        self._healing, self._next_look_ms = {}, 0
        self.goodput.begin_again()
        self.history.begin_again()

    def note(self, decision: object) -> None:
        """Count and record a decision of the cores, before it is performed."""
        if type(decision) not in NOTED:  # thousands of answers come at once
            return
        if isinstance(decision, effects.NotifyLoss):
            if decision.notice is self._last_notice:  # all members get the same
                return
            self._last_notice = decision.notice
        elif isinstance(decision, QuorumFormed):
            self.timeline.heals(decision.job, decision.recovering, self._wall_ms())
        before = self.history.last_change
        self.counters.count(decision)
        self.history.note(decision, self._now_ms(), self._wall_ms())
        if self.history.last_change != before:
            self.on_change()

    def resumed(self, job: str, quorum: Quorum, replica_id: str) -> None:
        """Record that a quorum was taken over, which formed before this lighthouse knew the job."""
        before = self.history.last_change
        self.history.resumed(job, quorum, replica_id, self._wall_ms())
        if self.history.last_change != before:
            self.on_change()

    def heard(self, beat: events.BeatReceived) -> None:
        """Record what the trainer of a beat's stream reports, if the beat has a report."""
        report = beat.progress.report if beat.progress is not None else None
        if report is not None:
            self.reported(beat.stream, report)

    def reported(self, stream: int, report: TrainerReport) -> None:
        """Record what the trainer of a stream reports."""
        job, replica_id = self._core.job_of(stream), self._core.replica_of(stream)
        if job is None or replica_id is None:
            return
        before = self.history.last_change
        now_ms = self._now_ms()
        self.goodput.reported(job, replica_id, report, now_ms)
        self.history.reported(job, replica_id, report.stalls, now_ms)
        if self.history.last_change != before:
            self.on_change()

    def tick(self) -> None:
        """Find the incidents that have ended, and look at the jobs if it is time. Call it every quorum_tick_ms."""
        if self._now_ms() >= self._next_look_at_jobs_ms:
            self._look_at_jobs()
        if not self.history.is_any_open:
            return
        before = self.history.last_change
        self.history.look(self._now_ms())
        if self.history.last_change != before:
            self.on_change()

    def _look_at_jobs(self) -> None:
        began_ms = self._now_ms()
        theirs = self._torchft.status(TORCHFT_JOB, began_ms)
        jobs = (*self._core.status(began_ms), *((theirs,) if theirs is not None else ()))
        self.timeline.look(jobs, self._wall_ms())
        took_ms = self._now_ms() - began_ms
        self._next_look_at_jobs_ms = began_ms + max(LOOK_AT_JOBS_MS, LOOK_TIMES * took_ms)

    def _closed(self, incident: Incident) -> None:
        log.incident(incident)
        self.on_closed(incident)

    def _step_of(self, job: str) -> int | None:
        step = self._core.newest_step(job)
        if step is None and job == TORCHFT_JOB and self._torchft.previous is not None:
            return max(member.step for member in self._torchft.previous.members)
        return step

    def _healing_of(self, job: str) -> Set[str]:
        now_ms = self._now_ms()
        if now_ms >= self._next_look_ms:
            self._next_look_ms = now_ms + LOOK_AT_HEALING_MS
            self._healing = {
                each.name: {one.replica_id for one in each.replicas if one.state is ReplicaState.HEALING}
                for each in self._core.status(now_ms)
            }
        return self._healing.get(job, frozenset())
