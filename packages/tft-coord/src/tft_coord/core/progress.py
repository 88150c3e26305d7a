"""A trainer's progress: where in its step it is, and when that lasts too long.

A trainer that waits for others is never the one that hangs. A trainer that is busy with its own work for longer than
any step may take hangs. Each rank therefore reports with its beats where it is and for how long. A rank that holds its
interpreter lock can't send anything. A wait releases that lock. A rank that is silent inside a step therefore counts as
busy with its own work since its last report. A rank that is silent between two steps may evaluate, and is only late.

Law of this file: the reported value, and what it means for a group and for a quorum; the caller gives the time.
Source: docs/protocol/appendix.md, "Hangs".
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

from tft_coord.core.stalls import TrainerReport
from tft_coord.core.suspicion import WAITS_MS
from tft_coord.core.types import MAX_INT64
from tft_coord.timeouts import Timeouts

REPORT_VALID_BEATS = 1.5  # a rank that waits reports it with each beat
SILENT_AFTER_BEATS = 2.5  # one beat may be missed, and the next may be late


class Phase(enum.Enum):
    """The phase of a step in which a trainer is."""

    OUTSIDE = 0  # between should_commit and start_quorum: evaluation, checkpoints, data
    OWN = 1  # forward, backward, optimizer
    WAITING = 2  # for a quorum, a configuration, a vote, a transfer
    REDUCING = 3  # for a reduction


WORDS: Final = {
    Phase.OUTSIDE: "between two steps",
    Phase.OWN: "busy with its own part of the step",
    Phase.WAITING: "waiting",
    Phase.REDUCING: "in a reduction",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """The report of a rank, or of its group, about the training thread.

    Args:
        step: committed steps: between two steps all of them, in a step those before it.
        phase: the phase in the step.
        since_ms: how long the phase has lasted without a break, in milliseconds.
        excused: the step is the first after a start, a healing or a reconfiguration, and may take any time.
        slowest_step_ms: longest time that a step may take; 0: any.
        own_ms: the median of its own part of the last few steps, without its waits for others; 0: not known.
        report: what its time went to; None: not said, or not rank 0's.
    """

    step: int
    phase: Phase
    since_ms: int
    excused: bool = False
    slowest_step_ms: int = 0
    own_ms: int = 0
    report: TrainerReport | None = None

    @property
    def _too_long(self) -> bool:
        return 0 < self.slowest_step_ms <= self.since_ms

    @property
    def waits_ms(self) -> int | None:
        """Return for how long it has waited for others; None: it does not wait."""
        return self.since_ms if self.phase in (Phase.WAITING, Phase.REDUCING) else None

    @property
    def is_hung(self) -> bool:
        """Return whether it is busy with its own work for longer than a step may take."""
        return self.phase is Phase.OWN and not self.excused and self._too_long

    @property
    def is_stuck(self) -> bool:
        """Return whether it waits in one reduction for longer than a step may take."""
        return self.phase is Phase.REDUCING and self._too_long


# --- the ranks of a group ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _RankReport:
    """The last known progress of a rank, at `at_ms`."""

    progress: Progress
    at_ms: int
    reported_ms: int = 0  # the beat's own since_ms, whatever its delay on the way
    healed: bool = False  # its plan heals it
    seen: bool = False  # an event of this rank gives the progress; otherwise a beat does
    stands: bool = False  # its next round begins without a request, and so without an event


class GroupProgress:
    """The reports of one group's ranks, merged into one.

    Args:
        world_size: ranks of the group.
        timeouts: of the job; beat_interval_ms says when a rank is silent.
    """

    def __init__(self, world_size: int, timeouts: Timeouts) -> None:
        self._world_size = world_size
        self._beat_interval_ms = timeouts.beat_interval_ms
        self._valid_ms = int(REPORT_VALID_BEATS * timeouts.beat_interval_ms)
        self._silent_after_ms = int(SILENT_AFTER_BEATS * timeouts.beat_interval_ms)
        self._reports: dict[int, _RankReport] = {}
        self._spent: TrainerReport | None = None  # the newest of rank 0

    def reported(self, rank: int, progress: Progress, now_ms: int) -> None:
        """Record the progress that a rank's beat reports."""
        if rank == 0 and progress.report is not None:
            self._spent = progress.report
        before = self._reports.get(rank)
        reported_ms = progress.since_ms
        if before is None:
            self._reports[rank] = _RankReport(progress, now_ms, reported_ms)
            return
        if self._is_overtaken(before, progress, now_ms):
            return
        if self._is_same_stay(before, progress, now_ms):
            known_ms = min(before.progress.since_ms + now_ms - before.at_ms, MAX_INT64)
            progress = replace(progress, since_ms=max(progress.since_ms, known_ms))
        self._reports[rank] = _RankReport(progress, now_ms, reported_ms, before.healed, stands=before.stands)

    def _is_overtaken(self, report: _RankReport, progress: Progress, now_ms: int) -> bool:
        """Return whether a beat was sent before a later event of its rank.

        If such a beat counted, a rank that hears its verdict and evaluates would seem to wait and to hang. The next
        beat counts in any case, because an answer may have been lost.
        """
        if not report.seen or now_ms - report.at_ms >= self._beat_interval_ms:
            return False
        waits = progress.phase in (Phase.WAITING, Phase.REDUCING)
        has_ended = report.progress.phase is Phase.OUTSIDE and waits  # it waits for nothing before it asks
        return has_ended or now_ms - progress.since_ms < report.at_ms

    def _is_same_stay(self, report: _RankReport, progress: Progress, now_ms: int) -> bool:
        """Return whether a beat is about the same stay in a phase as the last beat.

        A beat that was long on its way seems to report a later start, and a hung trainer would seem to have gone on. A
        rank that came to the same phase again has reported so within a beat, with a shorter time. A time that is a beat
        longer than before shows the same stay. So does a start of two beats before the last beat, whatever a broken
        stream has lost between them.
        """
        if (progress.step, progress.phase) != (report.progress.step, report.progress.phase):
            return False
        tells_more = progress.since_ms >= report.reported_ms + self._beat_interval_ms
        return tells_more or now_ms - progress.since_ms <= report.at_ms - 2 * self._beat_interval_ms

    def asked(self, rank: int, step: int, now_ms: int) -> None:
        """Record that a rank asks for a quorum and waits for it. The plan tells whether its step is excused.

        A rank that has never reported with a beat reports nothing by this event either, nor by the following ones.
        """
        self._set(rank, Phase.WAITING, step, now_ms, excused=True)

    def planned(
        self, rank: int, step: int | None, now_ms: int, *, excused: bool, heals: bool, lease_ms: int | None = 0
    ) -> None:
        """Record that a rank gets its plan and goes on by itself, in a step that may be excused.

        A group of one rank decides its votes by itself. With a lease its next rounds therefore come without any event.

        Args:
            rank: of the group.
            step: of the plan; None for a plan that stands: the rank goes on in the step it asked for.
            now_ms: the time.
            excused: the quorum is new.
            heals: the plan heals it.
            lease_ms: of the plan; not read for a plan that stands.
        """
        report = self._reports.get(rank)
        if report is not None:
            if step is None:
                step = report.progress.step
            elif self._world_size == 1:
                report.stands = bool(lease_ms)
            self._set(rank, Phase.OWN, step, now_ms, excused=excused or heals or report.healed)
            report.healed = heals

    def votes(self, rank: int, now_ms: int) -> None:
        """Record that a rank votes and waits for the verdict."""
        report = self._reports.get(rank)
        if report is not None:
            self._set(rank, Phase.WAITING, report.progress.step, now_ms, excused=report.progress.excused)

    def ended(self, rank: int, step: int, now_ms: int, *, stands: bool = False) -> None:
        """Record that a rank gets the verdict on its step and is between two steps. `step`: the committed steps now."""
        self._set(rank, Phase.OUTSIDE, step, now_ms, excused=False)
        report = self._reports.get(rank)
        if report is not None:
            report.stands = stands

    def _set(self, rank: int, phase: Phase, step: int, now_ms: int, *, excused: bool) -> None:
        report = self._reports.get(rank)
        if report is not None:
            before = report.progress
            report.progress = Progress(step, phase, 0, excused, before.slowest_step_ms, before.own_ms)
            report.at_ms, report.reported_ms, report.seen = now_ms, 0, True

    def now(self, now_ms: int) -> Progress | None:
        """Return the group's report; None: no rank reports anything.

        It is the report of the rank that is longest in its own work, if there is one. The group reduces when all its
        ranks do, and waits when any does. Its own part of a step takes as long as its slowest rank's.
        """
        if not self._reports:
            return None
        own_ms = max(report.progress.own_ms for report in self._reports.values())
        return replace(self._merged(now_ms), own_ms=own_ms, report=self._spent)

    def _merged(self, now_ms: int) -> Progress:
        reports = [self._now_of(report, now_ms) for report in self._reports.values()]
        own = [report for report in reports if report.phase is Phase.OWN]
        if own:
            return max(own, key=lambda report: (not report.excused, report.since_ms))
        reducing = [report for report in reports if report.phase is Phase.REDUCING]
        newest = max(reports, key=lambda report: (report.step, -report.since_ms))
        if len(reducing) == self._world_size and len({report.step for report in reports}) == 1:
            return min(reports, key=lambda report: report.since_ms)
        if reducing or any(report.phase is Phase.WAITING for report in reports):
            return replace(newest, phase=Phase.WAITING)
        return newest

    def waits_since_ms(self, now_ms: int) -> int | None:
        """Return since when all ranks wait for others, by their own recent reports.

        The result is None if one does not wait, or if the wait has not lasted for `WAITS_MS`. A beat about a wait that
        had just begun is no proof of it.
        """
        if len(self._reports) < self._world_size:
            return None
        begun_ms = 0
        for report in self._reports.values():
            waits = report.progress.phase in (Phase.WAITING, Phase.REDUCING)
            is_new = not report.seen and report.reported_ms < WAITS_MS
            if not waits or now_ms - report.at_ms > self._valid_ms or is_new:
                return None
            begun_ms = max(begun_ms, report.at_ms - report.progress.since_ms)
        return begun_ms if now_ms - begun_ms >= WAITS_MS else None

    def last_seen(self, rank: int, now_ms: int) -> str:
        """Return a phrase that names a rank and its last known progress."""
        report = self._reports.get(rank)
        if report is None:
            return f"rank {rank} (no report yet)"
        progress = self._now_of(report, now_ms)
        return f"rank {rank} (step {progress.step}, {WORDS[progress.phase]} for {progress.since_ms // 1_000} s)"

    def is_hung(self, now_ms: int) -> bool:
        """Return whether a rank of the group hangs."""
        progress = self.now(now_ms)
        return progress is not None and progress.is_hung

    def _now_of(self, report: _RankReport, now_ms: int) -> Progress:
        """Return the progress of a rank now, extended by its silence since the last report.

        A rank that is silent inside a step holds its interpreter lock, and a waiting rank does not hold it. Where the
        quorum stands, the rank's next step may have begun: the rank counts as between two steps until it would hang in
        that one. The excuse of the last step is over then, but the step after a healing is excused too.
        """
        progress, silent_ms = report.progress, min(now_ms - report.at_ms, MAX_INT64 - report.progress.since_ms)
        waits = progress.phase in (Phase.WAITING, Phase.REDUCING)
        hangs = report.stands and 0 < progress.slowest_step_ms <= silent_ms
        is_late = hangs and progress.phase is Phase.OUTSIDE
        if (waits or is_late) and silent_ms > self._silent_after_ms:
            excused = report.healed if is_late else progress.excused
            return replace(progress, phase=Phase.OWN, since_ms=silent_ms, excused=excused)
        return replace(progress, since_ms=progress.since_ms + silent_ms)


# --- the replicas of a job --------------------------------------------------------------------------------------


class HangWatch:
    """The watch for a hung replica of a job, by the beats of all replicas. `hung` and `stuck` are cheap without a
    suspicion.

    Groups whose ranks wait for one another in their own collectives seem busy behind the one that hangs. Only the
    replica that is longest in its own work is therefore lost, and the others get some time to go on.

    Args:
        timeouts: heartbeat_timeout_ms is that time.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._patience_ms = timeouts.heartbeat_timeout_ms
        self._hung: dict[str, tuple[Progress, int]] = {}  # with the time of the report
        self._stuck: dict[str, int] = {}  # replica id -> the step in which it is stuck
        self._furthest = 0  # the highest step that a member of the newest quorum has reported in it
        self._lost_ms: int | None = None

    def begin_round(self) -> None:
        """Forget how far the members came, because another quorum became the newest."""
        self._furthest = 0

    def heard(self, replica_id: str, progress: Progress | None, now_ms: int, *, keeps_pace: bool = False) -> None:
        """Record a replica's newest beat.

        Args:
            replica_id: of the replica.
            progress: the report; None: the replica has done something since.
            now_ms: the time.
            keeps_pace: it is a member of the newest quorum and does not heal. Members commit together, so a member
                that reports an excused step, two steps behind another, has ended that step: only its report is old.
        """
        self._hung.pop(replica_id, None)
        self._stuck.pop(replica_id, None)
        if progress is None:
            return
        if keeps_pace and not progress.excused:
            self._furthest = max(self._furthest, progress.step)
        elif keeps_pace and progress.step + 2 <= self._furthest:
            progress = replace(progress, excused=False)
        if progress.is_hung:
            self._hung[replica_id] = progress, now_ms
        elif progress.is_stuck:
            self._stuck[replica_id] = progress.step

    def forget(self) -> None:
        """Drop all reports, because they are too old to count."""
        self._hung.clear()
        self._stuck.clear()

    def hung(self, now_ms: int, spared: Callable[[], Collection[str]] = tuple) -> tuple[str, Progress] | None:
        """Return the replica that hangs and must be declared lost now, with its progress; each is returned once.

        Args:
            spared: returns the replicas without which no other could go on.
        """
        if not self._hung or (self._lost_ms is not None and now_ms - self._lost_ms < self._patience_ms):
            return None
        names = sorted(self._hung.keys() - set(spared()))
        if not names:
            return None
        replica_id = max(names, key=lambda name: self._hung[name][0].since_ms - self._hung[name][1])
        progress, _ = self._hung.pop(replica_id)
        self._lost_ms = now_ms
        return replica_id, progress

    def stuck(self, members: Collection[str]) -> int | None:
        """Return the step in which all of these wait in a reduction for too long, or None."""
        if len(members) < 2 or len(self._stuck) < len(members):
            return None
        steps = {self._stuck.get(replica_id) for replica_id in members}
        return steps.pop() if len(steps) == 1 else None


def hang_reason(progress: Progress) -> str:
    """Return a phrase that says why a hung replica is declared lost."""
    return (
        f"its trainer hangs: busy with step {progress.step} for {progress.since_ms} ms, longer than slowest_step "
        f"({progress.slowest_step_ms} ms)"
    )


def stuck_reason(step: int) -> str:
    """Return a phrase, about any member, that says why a quorum is broken without a culprit."""
    return f"waits in a reduction of step {step}, as all others do, for longer than slowest_step"
