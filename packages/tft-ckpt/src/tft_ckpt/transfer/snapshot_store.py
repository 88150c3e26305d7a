"""The published state of a source, and the readers of its previous states.

One state at a time is published. A request for it succeeds, a request for a later state waits, and any other request is
refused. The next state replaces the previous one at once. But current readers can finish the previous state, and its
memory is reused only after its last reader has left. Slow readers could keep any number of old states that way. So with
more than two old states, the readers of the oldest are disconnected.

Law of this file: pure decisions about keys and counts; no I/O, no clock, no thread. The owner locks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from tft_ckpt.key import StateKey
from tft_ckpt.state.buffers import Buffer, BufferPool
from tft_ckpt.state.snapshot import Snapshot

__all__ = ["Found", "NotYet", "Refused", "SnapshotStore"]

MAX_RETIRED = 2
REQUESTERS_MAX = 1024  # names of readers of one state
KEYS_REQUESTED_MAX = 4


@dataclass(frozen=True, slots=True)
class Found:
    """The answer that the state is available."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class NotYet:
    """The answer that the state may still come."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer that the state will not come.

    Fields:
        offered: the state that this source has or makes instead. It equals the requested one if making that failed.
        sentence: the reason, for the reader.
    """

    offered: StateKey
    sentence: str


@final
class SnapshotStore:
    """One published state, and the previous ones that still have readers.

    Args:
        keep_buffers: whether to keep the memory of an unused state for the next one.
    """

    def __init__(self, *, keep_buffers: bool = True) -> None:
        self._keep_buffers = keep_buffers
        self._pool = BufferPool()
        self._latest: StateKey | None = None
        self._failure: str | None = None
        self._current: Snapshot | None = None
        self._readers: dict[Snapshot, int] = {}
        self._requesters: dict[StateKey, set[str]] = {}
        self._cleared = False

    def begin(self, key: StateKey) -> list[Snapshot]:
        """Prepare for a new state with this key, and remove the published one.

        Returns: the oldest snapshots beyond two that still have readers; disconnect those readers.
        """
        self._latest, self._failure = key, None
        for requested in [requested for requested in self._requesters if key.comes_after(requested)]:
            del self._requesters[requested]
        self._retire()
        return list(self._readers)[:-MAX_RETIRED]

    def retire_unread(self) -> None:
        """Prepare for a new state with an unknown key, and remove the published one if it has no reader."""
        if self._current is not None and self._current not in self._readers:
            self._failure = "its memory was needed for the next state; recover from that one"
            self._retire()

    def recycle(self, buffer: Buffer | None) -> None:
        """Keep the buffer of a state that is no longer used, or was never published."""
        if buffer is not None and self._keep_buffers and not self._cleared:
            self._pool.give(buffer)

    def withdraw(self) -> None:
        """Release the published state after a long time without requests, unless it has readers or buffers are kept."""
        if self._current is not None and self._current not in self._readers and not self._keep_buffers:
            self._failure = "no replica requested it for long, so its memory was freed; recover from the next state"
            self._retire()

    def _retire(self) -> None:
        retired, self._current = self._current, None
        if retired is not None and retired not in self._readers:
            self.recycle(retired.buffer)

    def retract(self, snapshot: Snapshot, sentence: str) -> None:
        """Withdraw a live state from new readers and from present ones."""
        if self._current is snapshot:
            self._failure = sentence
            self._retire()

    def record_request(self, key: StateKey, reader: str) -> None:
        """Record a named reader's request for this state, available or not. The number of records is bounded."""
        if self._latest is not None and self._latest.comes_after(key):
            return
        readers = self._requesters.setdefault(key, set())
        if len(readers) < REQUESTERS_MAX:
            readers.add(reader)
        if len(self._requesters) > KEYS_REQUESTED_MAX:
            del self._requesters[next(iter(self._requesters))]

    def num_requested(self, key: StateKey) -> int:
        """Return how many readers have requested this state."""
        return len(self._requesters.get(key, ()))

    def num_holding(self, snapshot: Snapshot) -> int:
        """Return the number of leases of this snapshot."""
        return self._readers.get(snapshot, 0)

    def fresh_bytes(self, num_bytes: int) -> int:
        """Return how much memory `allocate` would request from the system beyond the kept memory."""
        return self._pool.fresh_bytes(num_bytes)

    def allocate(self, num_bytes: int) -> Buffer:
        """Return a buffer for the next state."""
        return self._pool.take(num_bytes)

    @property
    def keys(self) -> frozenset[StateKey]:
        """Return the keys of the available states: the published one, and the previous ones that still have readers."""
        offered = () if self._current is None else (self._current,)
        return frozenset(snapshot.key for snapshot in (*offered, *self._readers))

    def wants_memory(self, num_bytes: int) -> bool:
        """Return whether the pool lacks a used buffer for a state of this size and would keep one."""
        if not self._keep_buffers or self._cleared:
            return False
        return not self._pool.has(num_bytes) and not (
            self._current is not None and self._current.buffer is not None and self._current.buffer.fits(num_bytes)
        )

    def keep(self, buffer: Buffer) -> None:
        """Keep a buffer for a future state, if one is wanted."""
        if self.wants_memory(buffer.capacity_bytes):
            self._pool.give(buffer)

    def publish(self, snapshot: Snapshot) -> None:
        """Publish the state that `begin` announced."""
        self._current = snapshot

    def fail(self, sentence: str) -> None:
        """Record that the state announced by `begin` could not be taken."""
        self._failure = sentence

    def clear(self) -> list[Snapshot]:
        """Publish nothing any more, and release all memory without readers. Returns: the snapshots with readers."""
        self._current = None
        self._cleared = True
        self._pool.clear()
        return list(self._readers)

    def look_up(self, wanted: StateKey) -> Found | NotYet | Refused:
        """Return the answer to a request for this key."""
        latest = self._latest
        if latest is None or wanted.comes_after(latest):
            return NotYet()
        if wanted == latest:
            if self._failure is not None:
                return Refused(latest, f"state {wanted} is not available here: {self._failure}")
            return NotYet() if self._current is None else Found(self._current)
        for snapshot in self._readers:
            if snapshot.key == wanted:
                return Found(snapshot)
        if latest.comes_after(wanted):
            return Refused(latest, f"state {wanted} was replaced here by {latest}; request the newer one")
        return Refused(latest, f"this process has state {latest}, of another quorum or lineage than {wanted}")

    def is_wanted(self, snapshot: Snapshot) -> bool:
        """Return whether the snapshot is published, or leased more than once."""
        return snapshot is self._current or self._readers.get(snapshot, 0) > 1

    def lease(self, snapshot: Snapshot) -> bool:
        """Add a reader. The snapshot's buffer stays unchanged until as many releases have come.

        Returns: False if the snapshot was removed and has no reader. Then there is nothing to release.
        """
        if snapshot is not self._current and snapshot not in self._readers:
            return False
        self._readers[snapshot] = self._readers.get(snapshot, 0) + 1
        return True

    def release(self, snapshot: Snapshot) -> None:
        """Remove a reader."""
        self._readers[snapshot] -= 1
        if self._readers[snapshot] == 0:
            del self._readers[snapshot]
            if snapshot is not self._current:
                self.recycle(snapshot.buffer)
