"""torchft's lighthouse without its network: its view of a member, and its quorum rule, with its faults.

It drops the fields that torchft does not know, and passes on `data`. It counts its quorums from 1, and keeps a
disconnected caller as a participant of the next quorum.

Law of this file: torchft's rule (wire.md section 12), as plainly as possible; no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import final

from tft_coord.core.types import Member, Quorum, QuorumKey
from tft_coord.timeouts import Timeouts


def stripped(member: Member) -> Member:
    """Return the part of a member that arrives at a lighthouse with torchft's fields only."""
    return Member(
        member.replica_id,
        address=member.address,
        store_address=member.store_address,
        step=member.step,
        world_size=member.world_size,
        shrink_only=member.shrink_only,
        commit_failures=member.commit_failures,
        data=member.data,
        reconfigure_handles=member.reconfigure_handles,
    )


@final
class TorchftLike:
    """torchft's quorum rule.

    Args:
        min_replicas: smallest quorum, except on the fast path.
        timeouts: join and heartbeat timeouts.
    """

    def __init__(self, min_replicas: int, timeouts: Timeouts) -> None:
        self.waiting_for = "nobody has asked"
        self._min_replicas = min_replicas
        self._timeouts = timeouts
        self._beats: dict[str, int] = {}
        self._participants: dict[str, tuple[Member, int]] = {}
        self._previous: tuple[str, ...] | None = None
        self._last_id = 0

    def beat(self, replica_id: str, now_ms: int) -> None:
        """Record a heartbeat."""
        self._beats[replica_id] = now_ms

    def ask(self, member: Member, now_ms: int) -> None:
        """Record a request; a replica's newest one counts, whether or not its caller is still connected."""
        self._beats[member.replica_id] = now_ms
        self._participants[member.replica_id] = (member, now_ms)

    def tick(self, now_ms: int, wall_ms: int, *, callers: Collection[str]) -> Quorum | None:
        """Return a quorum if it is time for one; it goes to all its members. An empty one counts, and reaches no
        member.

        Args:
            callers: replicas whose calls are still open: they ask anew when they are not in the quorum.
        """
        healthy = {name for name, at in self._beats.items() if now_ms - at < self._timeouts.heartbeat_timeout_ms}
        waiting = {name: each for name, each in self._participants.items() if name in healthy}
        if not self._is_time(waiting, healthy, now_ms):
            return None
        shrinks = any(member.shrink_only for member, _ in waiting.values())
        kept = waiting if self._previous is None or not shrinks else set(self._previous) & set(waiting)
        members = tuple(waiting[name][0] for name in sorted(kept))
        ids = tuple(member.replica_id for member in members)
        if ids != self._previous or any(member.commit_failures > 0 for member in members):
            self._last_id += 1
        self._previous = ids
        self._participants = {
            name: (member, now_ms)
            for name, (member, _) in self._participants.items()
            if name not in ids and name in callers
        }
        self.waiting_for = "nobody has asked"
        return Quorum(QuorumKey(self._last_id, 0), members, wall_ms) if members else None

    def _is_time(self, waiting: dict[str, tuple[Member, int]], healthy: set[str], now_ms: int) -> bool:
        if self._previous is not None and set(self._previous) <= set(waiting):
            return True
        if len(waiting) < self._min_replicas or 2 * len(waiting) <= len(healthy):
            self.waiting_for = f"{len(waiting)} of {len(healthy)} have asked"
            return False
        first_ms = min(at_ms for _, at_ms in waiting.values())
        if healthy - set(waiting) and now_ms - first_ms < self._timeouts.join_timeout_ms:
            self.waiting_for = f"{', '.join(sorted(healthy - set(waiting)))} have not asked"
            return False
        return True
