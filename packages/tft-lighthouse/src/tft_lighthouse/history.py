"""What has happened to the jobs: one record for each incident, with its phases.

An incident is a start, a loss, a leave, a join, a failed round, a broken quorum, another change of members, or the end
of a job. It begins with a decision of the core, and ends when the members commit a step again.

| phase | from | to |
|---|---|---|
| detect | the last message of a silent replica, or the break of its stream | its loss; 0 where its end is reported |
| quorum | the loss, the leave or the break | the next quorum with a new id |
| resume | that quorum | the first report of a member that has committed a step in it |
| heal | that quorum | the first look that finds the newcomer healed; beside resume, not after it |

In a standing quorum the lighthouse learns of steps by beats, so resume is known to within a beat (one second), and heal
to within a beat and a look.

The survivors know better. Each one reports its own stall after its first commit, and the slowest one's parts replace
these phases, but for heal. A newcomer reports how long it waited for the state, which replaces heal.

Law of this file: records from decisions, reports and looks, bounded in number; the caller gives the time and logs.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final, final

from tft_coord import LossNotice
from tft_coord.lighthouse import (
    TORCHFT_JOB,
    JobEnded,
    Quorum,
    QuorumFormed,
    ReplicaLeft,
    ReplicaLost,
    Spent,
    Stall,
    WaitNoticed,
    effects,
)

INCIDENTS_MOST: Final = 1_000  # the oldest is dropped
JOBS_MOST: Final = 1_000
REPLICAS_NAMED_MOST: Final = 50  # of one incident; a thousand may join together
REASON_MOST: Final = 1_000  # characters
REPORTERS_MOST: Final = 20_000  # replicas of all jobs; that with the oldest report is forgotten
REPORTS_WITHIN_MS: Final = 3_000  # of the first commit: by then the survivors' beats have brought their reports
KNOWN_BEFORE_MS: Final = (
    10_000  # a trainer is this much older than its first report, at most; a longer stall is nonsense
)
JOINED_MOST: Final = 50  # newest records of all jobs, to which a report may belong


class IncidentKind(enum.Enum):
    """What an incident is."""

    START = "start"  # the first quorum of a job, as far as this lighthouse knows
    LOSS = "loss"
    LEAVE = "leave"  # a replica left before its training was over, for example because it was drained
    FINISH = "finish"  # a replica left because its training was over
    JOIN = "join"
    FAILED_ROUND = "failed_round"  # members asked again because a round did not commit
    BROKEN_QUORUM = "broken_quorum"  # a quorum could not go on, although no member of it was lost
    CHANGE = "change"  # the members changed for another reason, such as a straggler that is left out
    END = "end"  # the job has ended


class Phase(enum.Enum):
    """A part of an incident."""

    DETECT = "detect"
    ABORT = "abort"
    QUORUM = "quorum"
    RECONFIGURE = "reconfigure"
    TRANSFER = "transfer"  # the survivor gives live state, or takes it
    REDO = "redo"
    WAIT = "wait"
    COMMIT = "commit"
    RESUME = "resume"
    HEAL = "heal"


OF_OTHERS: Final = (IncidentKind.LOSS, IncidentKind.LEAVE, IncidentKind.FINISH, IncidentKind.JOIN)  # than who goes on
_PHASE_OF: Final[Mapping[Spent, Phase]] = {
    each: Phase.TRANSFER if each in (Spent.HEAL, Spent.SERVE) else Phase(each.value)
    for each in Spent
    if each is not Spent.START
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One incident.

    Args:
        number: of the record; rises by one with each.
        change: rises by one with each new record and each change of one, over all records.
        job: of the incident.
        kind: see `IncidentKind`.
        replica_ids: which replicas it is about, sorted; at most `REPLICAS_NAMED_MOST` of them.
        num_replicas: how many it is about.
        reason: why, in words.
        began_ms: milliseconds since 1970.
        step: the committed steps of the job when it began, as far as the lighthouse knew.
        quorum_before, quorum_after: the ids; None: there is none (yet).
        members_before, members_after: the numbers of members.
        waited_for: the last sentence about a wait of more than 5 s in it; "": there was none.
        phases: how long each phase took, in milliseconds.
        slowest: the replica that reported them, of those that went on; "": the lighthouse has measured them.
        failed_rounds: rounds in it that did not commit, as that replica reports.
        num_reports: how many replicas have reported their stalls.
        is_open: it goes on.
    """

    number: int
    change: int
    job: str
    kind: IncidentKind
    replica_ids: tuple[str, ...]
    num_replicas: int
    reason: str
    began_ms: int
    step: int = 0
    quorum_before: int | None = None
    quorum_after: int | None = None
    members_before: int = 0
    members_after: int = 0
    waited_for: str = ""
    phases: Mapping[Phase, int] = field(default_factory=dict)
    slowest: str = ""
    failed_rounds: int = 0
    num_reports: int = 0
    is_open: bool = True

    @property
    def lasted_ms(self) -> int:
        """Return the time of its phases that follow one another."""
        return sum(ms for phase, ms in self.phases.items() if phase is not Phase.HEAL)


@dataclass(slots=True)
class _Open:
    """An incident that goes on: when its current phase began, and the step that its quorum began from.

    `awaited`: the replicas that will report their stalls. `resumed_ms`: when a member had committed again.
    """

    incident: Incident
    since_ms: int
    from_step: int | None = None  # None: it waits for a quorum
    awaited: set[str] = field(default_factory=set)
    resumed_ms: int | None = None


@dataclass(frozen=True, slots=True)
class _Reporter:
    """A replica that reports: since when, and the number of its newest stall."""

    since_ms: int
    newest: int = 0


@final
class History:
    """The incidents of all jobs.

    Args:
        job_of: returns the job of a stream.
        step_of: returns the highest step that a member of a job has reported; None: there is no such job.
        healing_of: returns the ids of the replicas of a job that heal.
        closed: called with each incident that has ended.
    """

    def __init__(
        self,
        *,
        job_of: Callable[[int], str | None],
        step_of: Callable[[str], int | None],
        healing_of: Callable[[str], Set[str]],
        closed: Callable[[Incident], None],
    ) -> None:
        self._job_of = job_of
        self._step_of = step_of
        self._healing_of = healing_of
        self._closed = closed
        self._quorums: dict[str, Quorum] = {}  # the newest of each job; the core is ahead of its decisions
        self._kept: deque[int] = deque()  # the numbers of the kept records, the oldest first
        self._records: dict[int, Incident] = {}
        self._open: dict[int, _Open] = {}
        self._number = 0
        self._reporters: dict[tuple[str, str], _Reporter] = {}  # by job and replica
        self._survivors: dict[int, Set[str]] = {}  # of the newest records: the replicas that went on
        self.last_change = 0

    @property
    def is_any_open(self) -> bool:
        """Return whether an incident goes on, so that `look` may find its end."""
        return bool(self._open)

    def incidents(self, after_change: int = 0) -> list[Incident]:
        """Return the kept records that are new or have changed since that change, in the order of their changes."""
        if after_change >= self.last_change:
            return []
        found = [each for each in self._records.values() if each.change > after_change]
        return sorted(found, key=lambda each: each.change)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def note(self, decision: object, now_ms: int, wall_ms: int) -> None:
        """Record a decision of the core, if it belongs to an incident."""
        match decision:
            case ReplicaLost(job, replica_id, _, reason, detect_ms):
                phases = {Phase.DETECT: detect_ms}
                self._gone(job, IncidentKind.LOSS, replica_id, reason, phases, now_ms, wall_ms - detect_ms)
            case ReplicaLeft(job, replica_id, _, reason, _, finished):
                kind = IncidentKind.FINISH if finished else IncidentKind.LEAVE
                self._gone(job, kind, replica_id, reason, {}, now_ms, wall_ms)
            case effects.NotifyLoss(stream, notice) if notice.lives:
                its_job = self._job_of(stream)
                if its_job is not None:
                    self._broken(its_job, notice, now_ms, wall_ms)
            case QuorumFormed():
                self._formed(decision, now_ms, wall_ms)
            case WaitNoticed(job, _, False, sentence):
                for each in self._open.values():
                    if each.incident.job == job:
                        each.incident = self._changed(replace(each.incident, waited_for=sentence[:REASON_MOST]))
            case JobEnded(job, step, replica_ids):
                self._close_all(job)
                incident = self._new(job, IncidentKind.END, replica_ids, f"ended at step {step}", wall_ms)
                self._close(replace(incident, step=step))

    def _gone(
        self,
        job: str,
        kind: IncidentKind,
        replica_id: str,
        reason: str,
        phases: dict[Phase, int],
        now_ms: int,
        began_ms: int,
    ) -> None:
        quorum = self._quorums.get(job)
        incident = replace(self._new(job, kind, (replica_id,), reason, began_ms), phases=phases)
        if quorum is not None and replica_id not in quorum.replica_ids:
            self._close(incident)  # no member waits for it, and no quorum changes
        else:
            self._begin(incident, now_ms)

    def _broken(self, job: str, notice: LossNotice, now_ms: int, wall_ms: int) -> None:
        of_job = (each for each in self._open.values() if each.incident.job == job)
        if not any(each.from_step is None for each in of_job):  # a loss breaks it too, and all members get a notice
            incident = self._new(job, IncidentKind.BROKEN_QUORUM, (notice.replica_id,), notice.reason, wall_ms)
            self._begin(incident, now_ms)

    def _formed(self, formed: QuorumFormed, now_ms: int, wall_ms: int) -> None:
        job, quorum, previous = formed.job or TORCHFT_JOB, formed.quorum, formed.previous
        if previous is not None:
            self._note_quorum(job, previous)
        waiting = [each for each in self._open.values() if each.incident.job == job and each.from_step is None]
        for each in waiting:
            each.incident = self._timed(each.incident, Phase.QUORUM, now_ms - each.since_ms)
        for kind, replica_ids in _begun(quorum, previous, is_explained=bool(waiting)):
            incident = self._new(job, kind, replica_ids, formed.reason, wall_ms)
            waiting.append(self._begin(incident, now_ms))
        stayed = set(quorum.replica_ids)
        if previous is not None:
            stayed.intersection_update(previous.replica_ids)
        awaited = {each for each in stayed if (job, each) in self._reporters}
        for each in waiting:
            each.since_ms, each.from_step = now_ms, max(member.step for member in quorum.members)
            others = each.incident.replica_ids if each.incident.kind in OF_OTHERS else ()
            is_all = stayed.isdisjoint(others)  # as a rule; hundreds that are lost together then share the two sets
            each.awaited = awaited if is_all else awaited.difference(others)
            self._survivors[each.incident.number] = stayed if is_all else stayed.difference(others)
            if len(self._survivors) > JOINED_MOST:
                del self._survivors[next(iter(self._survivors))]
            each.incident = self._changed(
                replace(each.incident, quorum_after=quorum.key.quorum_id, members_after=len(quorum.members))
            )
        self._note_quorum(job, quorum)

    # --- reports ------------------------------------------------------------------------------------------------------

    def reported(self, job: str, replica_id: str, stalls: Sequence[Stall], now_ms: int) -> None:
        """Join the stalls that a replica reports to the incidents that they belong to. It repeats the newest ones."""
        key = job, replica_id
        known = self._reporters.pop(key, None) or _Reporter(now_ms)
        newest = stalls[-1].number if stalls else 0
        self._reporters[key] = replace(known, newest=newest)
        longest_ms = now_ms - known.since_ms + KNOWN_BEFORE_MS
        if len(self._reporters) > REPORTERS_MOST:
            del self._reporters[next(iter(self._reporters))]
        for stall in stalls:
            is_new = stall.number > known.newest or newest < known.newest  # below: another process of that id
            if is_new and stall.lasted_ms <= longest_ms:
                self._join(job, replica_id, stall)

    def _join(self, job: str, replica_id: str, stall: Stall) -> None:
        for number, survivors in self._survivors.items():
            incident = self._records.get(number)
            after = incident.quorum_after if incident is not None and incident.job == job else None
            if incident is None or after is None or not (stall.quorum_before or 0) < after <= stall.quorum_after:
                continue
            if replica_id in survivors:
                before, incident = incident, _with_stall(incident, replica_id, stall)
                if incident.slowest != before.slowest:  # of a thousand reports few are news for who follows the events
                    incident = self._changed(incident)
                self._records[number] = incident
            elif (
                incident.kind is IncidentKind.JOIN
                and replica_id in incident.replica_ids
                and Spent.HEAL in stall.spent_ms
            ):
                incident = self._timed(incident, Phase.HEAL, stall.spent_ms[Spent.HEAL])
            if number in self._open:
                self._open[number].incident = incident
                self._open[number].awaited.discard(replica_id)

    # --- looks --------------------------------------------------------------------------------------------------------

    def look(self, now_ms: int) -> None:
        """Find the incidents that have ended; call it often while `is_any_open`."""
        for each in list(self._open.values()):
            incident, step = each.incident, self._step_of(each.incident.job)
            if step is None:  # no replica of the job is remembered any more
                self._close(incident)
                continue
            if each.from_step is None:
                continue
            if each.resumed_ms is None and step > each.from_step:
                each.resumed_ms = now_ms
                if not incident.slowest:
                    incident = each.incident = self._timed(incident, Phase.RESUME, now_ms - each.since_ms)
            if incident.kind is IncidentKind.JOIN and Phase.HEAL not in incident.phases:
                if not self._healing_of(incident.job).isdisjoint(incident.replica_ids):
                    continue
                incident = each.incident = self._timed(incident, Phase.HEAL, now_ms - each.since_ms)
            if each.resumed_ms is not None and (not each.awaited or now_ms - each.resumed_ms >= REPORTS_WITHIN_MS):
                self._close(incident)

    # --- records ------------------------------------------------------------------------------------------------------

    def _new(self, job: str, kind: IncidentKind, replica_ids: tuple[str, ...], reason: str, began_ms: int) -> Incident:
        before = self._quorums.get(job)
        step = max((member.step for member in before.members), default=0) if before is not None else 0
        self._number += 1
        return Incident(
            number=self._number,
            change=0,
            job=job,
            kind=kind,
            replica_ids=replica_ids[:REPLICAS_NAMED_MOST],
            num_replicas=len(replica_ids),
            reason=reason[:REASON_MOST],
            began_ms=began_ms,
            step=max(step, self._step_of(job) or 0),
            quorum_before=before.key.quorum_id if before is not None else None,
            members_before=len(before.members) if before is not None else 0,
        )

    def _begin(self, incident: Incident, now_ms: int) -> _Open:
        found = self._open[incident.number] = _Open(self._changed(incident), now_ms)
        return found

    def _timed(self, incident: Incident, phase: Phase, lasted_ms: int) -> Incident:
        return self._changed(replace(incident, phases={**incident.phases, phase: lasted_ms}))

    def _changed(self, incident: Incident) -> Incident:
        """Keep the newest form of a record."""
        self.last_change += 1
        incident = replace(incident, change=self.last_change)
        if incident.number not in self._records:
            self._kept.append(incident.number)
            if len(self._kept) > INCIDENTS_MOST:
                oldest = self._kept.popleft()
                del self._records[oldest]
                self._open.pop(oldest, None)
        self._records[incident.number] = incident
        return incident

    def _close(self, incident: Incident) -> None:
        self._open.pop(incident.number, None)
        self._closed(self._changed(replace(incident, is_open=False)))

    def _note_quorum(self, job: str, quorum: Quorum) -> None:
        self._quorums.pop(job, None)
        self._quorums[job] = quorum
        if len(self._quorums) > JOBS_MOST:
            del self._quorums[next(iter(self._quorums))]

    def _close_all(self, job: str) -> None:
        """Close the incidents of a job that ends: its members commit no further step."""
        for each in [each for each in self._open.values() if each.incident.job == job]:
            self._close(each.incident)


def _with_stall(incident: Incident, replica_id: str, stall: Stall) -> Incident:
    """Return an incident with what a replica that went on reports of its stall."""
    incident = replace(incident, num_reports=incident.num_reports + 1)
    if incident.slowest and incident.lasted_ms >= stall.lasted_ms:
        return incident
    phases = {Phase.HEAL: incident.phases[Phase.HEAL]} if Phase.HEAL in incident.phases else {}
    for spent, ms in stall.spent_ms.items():
        phase = _PHASE_OF.get(spent)
        if phase is not None:
            phases[phase] = phases.get(phase, 0) + ms
    return replace(incident, phases=phases, slowest=replica_id, failed_rounds=stall.failed_rounds)


def _begun(
    quorum: Quorum, previous: Quorum | None, *, is_explained: bool
) -> Iterator[tuple[IncidentKind, tuple[str, ...]]]:
    """Yield the incidents that a new quorum itself shows, each with the replicas that it is about.

    Args:
        quorum: the new one.
        previous: the one before, or None.
        is_explained: an earlier incident has led to it; failed rounds and missing members are its consequences.
    """
    before = set(previous.replica_ids) if previous is not None else set()
    joined = tuple(sorted(set(quorum.replica_ids).difference(before)))
    if joined:
        yield IncidentKind.START if previous is None else IncidentKind.JOIN, joined
    failed = tuple(member.replica_id for member in quorum.members if member.commit_failures)
    if is_explained:
        return
    if failed:
        yield IncidentKind.FAILED_ROUND, failed
    elif not joined:
        changed = before.symmetric_difference(quorum.replica_ids) or before
        yield IncidentKind.CHANGE, tuple(sorted(changed))
