"""What a source has on offer, and who still reads what it offered before.

One state at a time is on the shelf. A reader who comes for it gets it; one who comes for a later one is asked to wait;
one who comes for any other is told that it will not come. When the next state is put up, the one before it is taken
down at once, but while somebody reads it it can be had, and its memory is used again only when its last reader has
left. Slow readers could hold any number of old states that way, so beyond two the readers of the oldest are sent off.

Law of this file: pure decisions about keys and counts; no I/O, no clock, no thread. The owner locks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from tft_ckpt.buffers import Buffer, BufferPool
from tft_ckpt.key import StateKey
from tft_ckpt.snapshot import Snapshot

__all__ = ["Found", "NotYet", "Refused", "Shelf"]

MAX_RETIRED = 2
ASKERS_MAX = 1024  # names of readers of one state
KEYS_ASKED_MAX = 4


@dataclass(frozen=True, slots=True)
class Found:
    """The state is here."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class NotYet:
    """The state may still come."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The state will not come.

    Fields:
        offered: what this source has or makes instead; equal to what was wanted if making that failed.
        sentence: why, for the reader.
    """

    offered: StateKey
    sentence: str


@final
class Shelf:
    """One state on offer, and the ones before it that are still being read.

    Args:
        keep_buffers: keep the memory of a state that nobody needs any more, for the next one.
    """

    def __init__(self, *, keep_buffers: bool = True) -> None:
        self._keep_buffers = keep_buffers
        self._pool = BufferPool()
        self._latest: StateKey | None = None
        self._failure: str | None = None
        self._current: Snapshot | None = None
        self._readers: dict[Snapshot, int] = {}
        self._askers: dict[StateKey, set[str]] = {}
        self._cleared = False

    def begin(self, key: StateKey) -> list[Snapshot]:
        """A state with this key is about to be taken: take the one on offer down.

        Returns: snapshots that are held by readers for too long; send those off.
        """
        self._latest, self._failure = key, None
        for asked in [asked for asked in self._askers if key.comes_after(asked)]:
            del self._askers[asked]
        self._take_down()
        return list(self._readers)[:-MAX_RETIRED]

    def make_room(self) -> None:
        """A state is about to be taken whose key is not known yet: take the one on offer down if nobody reads it."""
        if self._current is not None and self._current not in self._readers:
            self._failure = "its memory was needed for the next one; heal from that"
            self._take_down()

    def put_by(self, buffer: Buffer | None) -> None:
        """Take back the buffer of a state that was never put up."""
        self._put_by(buffer)

    def withdraw(self) -> None:
        """Nobody has come for the state on offer for long: let go of it, unless it is read or buffers are kept."""
        if self._current is not None and self._current not in self._readers and not self._keep_buffers:
            self._failure = "nobody came for it for long, so its memory was given back; heal from the next one"
            self._take_down()

    def _take_down(self) -> None:
        retired, self._current = self._current, None
        if retired is not None and retired not in self._readers:
            self._put_by(retired.buffer)

    def retract(self, snapshot: Snapshot, sentence: str) -> None:
        """A live state can't be had any more, by new readers or by those that read it."""
        if self._current is snapshot:
            self._failure = sentence
            self._take_down()

    def asked(self, key: StateKey, reader: str) -> None:
        """A reader that names itself asks for this state, whether or not it is here. Bounded, whoever asks."""
        if self._latest is not None and self._latest.comes_after(key):
            return
        readers = self._askers.setdefault(key, set())
        if len(readers) < ASKERS_MAX:
            readers.add(reader)
        if len(self._askers) > KEYS_ASKED_MAX:
            del self._askers[next(iter(self._askers))]

    def num_asked(self, key: StateKey) -> int:
        """How many readers have asked for this state."""
        return len(self._askers.get(key, ()))

    def num_holding(self, snapshot: Snapshot) -> int:
        """How many leases of it there are."""
        return self._readers.get(snapshot, 0)

    def fresh_bytes(self, num_bytes: int) -> int:
        """How much more memory than is kept `allocate` would take from the system."""
        return self._pool.fresh_bytes(num_bytes)

    def allocate(self, num_bytes: int) -> Buffer:
        """A buffer for the state that is about to be taken."""
        return self._pool.take(num_bytes)

    @property
    def keys(self) -> frozenset[StateKey]:
        """Which states can be had: the one on offer, and those before it that are still being read."""
        offered = () if self._current is None else (self._current,)
        return frozenset(snapshot.key for snapshot in (*offered, *self._readers))

    def wants_memory(self, num_bytes: int) -> bool:
        """Whether a buffer would be kept for a state of so many bytes, which would else find none used before."""
        if not self._keep_buffers or self._cleared:
            return False
        return not self._pool.has(num_bytes) and not (
            self._current is not None and self._current.buffer is not None and self._current.buffer.fits(num_bytes)
        )

    def keep(self, buffer: Buffer) -> None:
        """Take a buffer for a state to come, if one is wanted."""
        if self.wants_memory(buffer.capacity_bytes):
            self._pool.give(buffer)

    def publish(self, snapshot: Snapshot) -> None:
        """Put the state on offer that begin announced."""
        self._current = snapshot

    def fail(self, sentence: str) -> None:
        """The state that begin announced could not be taken."""
        self._failure = sentence

    def clear(self) -> list[Snapshot]:
        """Offer nothing any more, and let go of all memory that no reader holds. Returns: what readers still hold."""
        self._current = None
        self._cleared = True
        self._pool.clear()
        return list(self._readers)

    def look_up(self, wanted: StateKey) -> Found | NotYet | Refused:
        """What to tell a reader who asks for this key."""
        latest = self._latest
        if latest is None or wanted.comes_after(latest):
            return NotYet()
        if wanted == latest:
            if self._failure is not None:
                return Refused(latest, f"state {wanted} is not to be had here: {self._failure}")
            return NotYet() if self._current is None else Found(self._current)
        for snapshot in self._readers:
            if snapshot.key == wanted:
                return Found(snapshot)
        if latest.comes_after(wanted):
            return Refused(latest, f"state {wanted} was replaced here by {latest}; ask for the newer one")
        return Refused(latest, f"this is state {latest}, of another quorum or lineage than {wanted}")

    def is_wanted(self, snapshot: Snapshot) -> bool:
        """Whether it is on offer, or leased more than once."""
        return snapshot is self._current or self._readers.get(snapshot, 0) > 1

    def lease(self, snapshot: Snapshot) -> bool:
        """A reader begins to read; its buffer stays as it is until as many releases have come.

        Returns: False if the snapshot has been taken down, and nobody reads it; there is nothing to release then.
        """
        if snapshot is not self._current and snapshot not in self._readers:
            return False
        self._readers[snapshot] = self._readers.get(snapshot, 0) + 1
        return True

    def release(self, snapshot: Snapshot) -> None:
        """A reader has left."""
        self._readers[snapshot] -= 1
        if self._readers[snapshot] == 0:
            del self._readers[snapshot]
            if snapshot is not self._current:
                self._put_by(snapshot.buffer)

    def _put_by(self, buffer: Buffer | None) -> None:
        if buffer is not None and self._keep_buffers and not self._cleared:
            self._pool.give(buffer)
