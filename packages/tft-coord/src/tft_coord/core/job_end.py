"""The end of a job: the step at which its replicas finished, and the replicas that come too late.

A replica whose training loop has ended reports that when it leaves, with its last step. The job has ended at that step
when no member of the newest quorum can go on and one of them has finished. A replica of the same run that is behind
that step has no source to heal from. If it trained on alone, the job would get a second result.

Time tells a run from the next one. A replica belongs to the ended run if the lighthouse knew it when the first of them
finished. So does the successor of a known replica that did not finish, and so does a state that was committed in this
job. The time is that of the first finish, not that of the end. A finished replica may start the next run while another
one still saves its result. When the next run has begun, only the old run's states are late: a replica without one heals
from the new run.

Law of this file: one job's end; the caller says which replicas are members, and which can go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tft_coord.core.types import Member, QuorumKey


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a job.

    Args:
        step: the last finished step.
        replica_ids: of the replicas that finished, sorted.
        key: of the last quorum.
        since_ms: when the first of them finished, on the lighthouse's clock.
    """

    step: int
    replica_ids: tuple[str, ...]
    key: QuorumKey
    since_ms: int


class JobEnd:
    """The knowledge about one job's end.

    Attributes:
        ended: the last end of this job, until the job trains on from that step or a later one; None before.
    """

    def __init__(self) -> None:
        self.ended: Ended | None = None
        self._finished: dict[str, int] = {}  # replica id -> step, since the newest quorum formed
        self._since_ms = 0  # when the first of those finished

    def finished(self, replica_id: str, step: int, now_ms: int) -> None:
        """Record that a replica's training is over."""
        if not self._finished:
            self._since_ms = now_ms
        self._finished[replica_id] = step

    def trains_on(self, step: int) -> None:
        """Note that a quorum forms, here or at another lighthouse, whose newest member is at that step."""
        self._finished.clear()
        if self.ended is not None and step >= self.ended.step:
            self.ended = None  # a newer result exists or is on its way

    def look(self, key: QuorumKey, member_ids: Iterable[str], able_ids: Iterable[str]) -> Ended | None:
        """Return the end if the job has just ended. The call is cheap while no replica has finished.

        Args:
            key: of the newest quorum.
            member_ids: its members.
            able_ids: those of them that can go on.
        Returns: the end, once.
        """
        if not self._finished or (self.ended is not None and self.ended.key == key) or any(True for _ in able_ids):
            return None
        finished = tuple(sorted(name for name in member_ids if name in self._finished))
        if not finished:
            return None
        self.ended = Ended(max(self._finished[name] for name in finished), finished, key, self._since_ms)
        return self.ended

    def is_late(self, member: Member, since_ms: int, newest: QuorumKey | None) -> bool:
        """Return whether a replica that asks belongs to the run that has ended, and is behind its end.

        Args:
            member: as it asks.
            since_ms: since when this lighthouse has known the replica, or its predecessor.
            newest: key of the newest quorum.
        """
        ended = self.ended
        if ended is None or member.step >= ended.step:
            return False
        is_newest, is_known = newest == ended.key, since_ms <= ended.since_ms
        return is_known or is_newest if member.live else is_known and is_newest
