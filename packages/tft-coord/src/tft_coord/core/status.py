"""The status of a job, for an operator: its quorum, its replicas, and what it waits for.

A status is made on request, from what the lighthouse knows anyway. No decision depends on it.

Law of this file: frozen values, and how they follow from the state of a job; nothing is changed.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tft_coord.core.job_end import Ended
from tft_coord.core.liveness import Replica
from tft_coord.core.progress import Phase
from tft_coord.core.types import Member, Quorum
from tft_coord.core.waits import TELL_AFTER_MS, JobWait


class ReplicaState(enum.Enum):
    """What a replica does, as far as the lighthouse knows."""

    TRAINING = "training"  # it is a member of the newest quorum
    HEALING = "healing"  # it is a member, and receives the live state
    WAITING = "waiting"  # it has asked for the next quorum
    JOINING = "joining"  # it is connected, in no quorum, and has not asked
    LEFT_OUT = "left_out"  # it is connected, and in no quorum as a straggler
    KEPT_OUT = "kept_out"  # it is connected, and in no quorum because others can't reach it
    UNHEARD = "unheard"  # another replica has named it, and it has not connected since this lighthouse started
    LOST = "lost"
    LEFT = "left"  # it left the job, for example because it was drained
    FINISHED = "finished"  # it left because its training was over


class JobState(enum.Enum):
    """What a job does."""

    STARTING = "starting"  # it has had no quorum yet
    TRAINING = "training"
    WAITING = "waiting"  # members have waited for others for some seconds
    STOPPED = "stopped"  # no member of its newest quorum lives
    ENDED = "ended"  # its training is over


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica.

    Args:
        replica_id: the whole id.
        state: see `ReplicaState`.
        rank: its place in the newest quorum; None: it is no member.
        address: of its manager server.
        pid: of its trainer; 0: not known.
        session: of its manager server.
        step: its newest known number of committed steps.
        phase: where in its step it was at its last beat; None: it has not said.
        phase_ms: how long that phase has lasted.
        own_ms: its own part of a step, without its waits for others; 0: not known.
        heard_ms: how long ago its last message came; None: none has come.
        healed_bytes: of live state that it has received in this session.
        reason: why it was lost or has left; "": neither.
        gone_ms: how long ago that was.
    """

    replica_id: str
    state: ReplicaState
    rank: int | None = None
    address: str = ""
    pid: int = 0
    session: int = 0
    step: int = 0
    phase: Phase | None = None
    phase_ms: int = 0
    own_ms: int = 0
    heard_ms: int | None = None
    healed_bytes: int = 0
    reason: str = ""
    gone_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitStatus:
    """The wait of some members: what they wait for, in a sentence, and how long they have waited."""

    sentence: str
    lasted_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job.

    Args:
        name: of the job.
        state: see `JobState`.
        step: the highest number of committed steps that one of its members has reported.
        quorum: the newest, or None.
        quorum_age_ms: since the id of that quorum rose.
        broken: why that quorum can't be used any more; None: it can.
        wait: which replicas wait for which; None: none waits.
        ended: the end of the job, or None.
        warnings: what is wrong now, one sentence for each problem.
        replicas: all known ones, members first, by rank, then by id.
        is_torchft: its clients are torchft's.
        min_replicas: smallest quorum.
    """

    name: str
    state: JobState
    step: int = 0
    quorum: Quorum | None = None
    quorum_age_ms: int = 0
    broken: str | None = None
    wait: WaitStatus | None = None
    ended: Ended | None = None
    warnings: tuple[str, ...] = ()
    replicas: tuple[ReplicaStatus, ...] = ()
    is_torchft: bool = False
    min_replicas: int = 1


def job_status(
    name: str,
    replicas: Iterable[Replica],
    quorum: Quorum | None,
    *,
    formed_ms: int,
    broken: str | None,
    excluded: tuple[Collection[str], Collection[str]],
    wait: JobWait | None,
    ended: Ended | None,
    warnings: tuple[str, ...],
    now_ms: int,
) -> JobStatus:
    """Return the status of a job of this project's replicas.

    Args:
        name: of the job.
        replicas: all known ones.
        quorum: the newest, or None.
        formed_ms: when the id of that quorum rose.
        broken: why the quorum can't be used any more.
        excluded: ids of the replicas that are left out as stragglers, and of those that others can't reach.
        wait: which replicas wait for which.
        ended: the end of the job.
        warnings: what is wrong now.
        now_ms: the time.
    """
    members = quorum.members if quorum is not None else ()
    places = {member.replica_id: (rank, member) for rank, member in enumerate(members)}
    found = [_replica_status(each, places.get(each.replica_id), excluded, now_ms) for each in replicas]
    found.sort(key=lambda each: (each.rank is None, each.rank or 0, each.replica_id))
    lives = any(each.rank is not None and not each.reason for each in found)
    lasted_ms = now_ms - wait.since_ms if wait is not None else 0
    return JobStatus(
        name=name,
        state=job_state(quorum, lives=lives, ended=ended is not None, waits=lasted_ms >= TELL_AFTER_MS),
        step=max((each.step for each in found if each.rank is not None), default=0),
        quorum=quorum,
        quorum_age_ms=now_ms - formed_ms if quorum is not None else 0,
        broken=broken,
        wait=WaitStatus(sentence=wait.sentence, lasted_ms=lasted_ms) if wait is not None else None,
        ended=ended,
        warnings=warnings,
        replicas=tuple(found),
    )


def job_state(quorum: Quorum | None, *, lives: bool, ended: bool, waits: bool) -> JobState:
    """Return the state of a job.

    Args:
        quorum: the newest, or None.
        lives: one of its members is neither lost nor gone.
        ended: the training is over.
        waits: members have waited for others for some seconds.
    """
    if ended and not lives:
        return JobState.ENDED
    if waits:
        return JobState.WAITING
    if quorum is None:
        return JobState.STARTING
    return JobState.TRAINING if lives else JobState.STOPPED


def _replica_status(
    replica: Replica,
    place: tuple[int, Member] | None,
    excluded: tuple[Collection[str], Collection[str]],
    now_ms: int,
) -> ReplicaStatus:
    rank, member = place if place is not None else (None, None)
    progress, said_ms = replica.where if replica.where is not None else (None, 0)
    asked = replica.request.member if replica.request is not None else None
    steps = [each.step for each in (member, asked, progress) if each is not None]
    return ReplicaStatus(
        replica_id=replica.replica_id,
        state=_replica_state(replica, excluded, is_member=member is not None),
        rank=rank,
        address=replica.address,
        pid=replica.pid,
        session=replica.session,
        step=max(steps, default=0),
        phase=progress.phase if progress is not None else None,
        phase_ms=progress.since_ms + now_ms - said_ms if progress is not None else 0,
        own_ms=progress.own_ms if progress is not None else 0,
        heard_ms=None if replica.presumed else now_ms - replica.heard_ms,
        healed_bytes=replica.healed_bytes,
        reason=replica.lost or replica.left or "",
        gone_ms=0 if replica.healthy else now_ms - replica.lost_ms,
    )


def _replica_state(
    replica: Replica, excluded: tuple[Collection[str], Collection[str]], *, is_member: bool
) -> ReplicaState:
    if replica.left is not None:
        return ReplicaState.FINISHED if replica.finished else ReplicaState.LEFT
    if replica.lost is not None:
        return ReplicaState.LOST
    if replica.presumed:
        return ReplicaState.UNHEARD
    for names, state in zip(excluded, (ReplicaState.LEFT_OUT, ReplicaState.KEPT_OUT), strict=True):
        if not is_member and replica.replica_id in names:
            return state
    if replica.healing_since_ms is not None and not replica.has_healed:
        return ReplicaState.HEALING
    if replica.request is not None:
        return ReplicaState.WAITING
    return ReplicaState.TRAINING if is_member else ReplicaState.JOINING
