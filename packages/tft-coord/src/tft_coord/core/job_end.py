"""The end of a job: at which step its replicas finished, and who comes too late.

A replica whose training loop has ended says so when it leaves, with its last step. When none of the newest quorum's
members is healthy any more and one of them has finished, the job has ended at that step. A replica of the same run that
is behind that step can heal from nobody. Training on alone, it would make a second result of the job.

A run is told from the next one by time: whoever the lighthouse knew when the job ended, or takes the place of such a
replica, belongs to the run that ended. So does a state that was committed in this job, until another run begins.

Law of this file: one job's end; who is a member, and who is healthy, is told by the caller.
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
        at_ms: of the lighthouse's clock.
    """

    step: int
    replica_ids: tuple[str, ...]
    key: QuorumKey
    at_ms: int


class JobEnd:
    """What is known of one job's end.

    Attributes:
        ended: the last end of this job, also while its next run trains; None before.
    """

    def __init__(self) -> None:
        self.ended: Ended | None = None
        self._finished: dict[str, int] = {}  # steps, by replica id, since the newest quorum formed

    def finished(self, replica_id: str, step: int) -> None:
        """A replica says that its training is over."""
        self._finished[replica_id] = step

    def quorum_formed(self) -> None:
        """Others train on, or again."""
        self._finished.clear()

    def look(self, key: QuorumKey, member_ids: Iterable[str], healthy_ids: Iterable[str], now_ms: int) -> Ended | None:
        """Whether the job has just ended. Costs nothing while no replica has finished.

        Args:
            key: of the newest quorum.
            member_ids: its members.
            healthy_ids: those of them that are healthy.
        Returns: the end, once.
        """
        if not self._finished or (self.ended is not None and self.ended.key == key) or any(True for _ in healthy_ids):
            return None
        finished = tuple(sorted(name for name in member_ids if name in self._finished))
        if not finished:
            return None
        self.ended = Ended(max(self._finished[name] for name in finished), finished, key, now_ms)
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
        return since_ms <= ended.at_ms or (member.live and newest == ended.key)
