"""The end of a job: at which step its replicas finished, and who comes too late.

A replica whose training loop has ended says so when it leaves, with its last step. When none of the newest quorum's
members can go on any more and one of them has finished, the job has ended at that step. A replica of the same run that
is behind that step can heal from nobody. Training on alone, it would make a second result of the job.

A run is told from the next one by time: whoever the lighthouse knew when the first of them finished, or takes the place
of such a replica that did not finish, belongs to the run that ended. So does a state that was committed in this job.
The time is that of the first finish and not that of the end, because who has finished may start the next run while
another one still saves its result. When the next run has begun, only the old run's states are late: a replica without
one heals from the new run.

Law of this file: one job's end; who is a member, and who can go on, is told by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tft_coord.core.types import Member, QuorumKey


@dataclass(frozen=True, slots=True)
class Ended:
    """A job has ended.

    Args:
        step: the last that was finished.
        replica_ids: of the replicas that finished, sorted.
        key: of its last quorum.
        since_ms: when the first of them finished, of the lighthouse's clock.
    """

    step: int
    replica_ids: tuple[str, ...]
    key: QuorumKey
    since_ms: int


class JobEnd:
    """What is known of one job's end.

    Attributes:
        ended: the last end of this job, until the job trains on from that step or a later one; None before.
    """

    def __init__(self) -> None:
        self.ended: Ended | None = None
        self._finished: dict[str, int] = {}  # steps, by replica id, since the newest quorum formed
        self._since_ms = 0  # when the first of those did

    def finished(self, replica_id: str, step: int, now_ms: int) -> None:
        """A replica says that its training is over."""
        if not self._finished:
            self._since_ms = now_ms
        self._finished[replica_id] = step

    def trains_on(self, step: int) -> None:
        """A quorum forms, here or at another lighthouse, whose newest member is at that step."""
        self._finished.clear()
        if self.ended is not None and step >= self.ended.step:
            self.ended = None  # there is a newer result to heal from, or to wait for

    def look(self, key: QuorumKey, member_ids: Iterable[str], able_ids: Iterable[str]) -> Ended | None:
        """Whether the job has just ended. Costs nothing while no replica has finished.

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
        """Whether a replica that asks belongs to the run that has ended, and is behind its end.

        Args:
            member: as it asks.
            since_ms: since when this lighthouse has known the replica, or the one whose place it takes.
            newest: key of the newest quorum.
        """
        ended = self.ended
        if ended is None or member.step >= ended.step:
            return False
        is_newest, is_known = newest == ended.key, since_ms <= ended.since_ms
        return is_known or is_newest if member.live else is_known and is_newest
