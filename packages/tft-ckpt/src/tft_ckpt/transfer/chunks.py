"""The assignment of chunks to connections, and the reassignment of chunks from slow ones.

Connections request chunks in parts that take each about as long. So a slow source gets few chunks, and a fast source
many. A complete source is first asked for chunks that no peer has yet. Peers are receivers of the same
state that give away their chunks, so the source sends as little as possible twice.

For the same reason every receiver begins at a different place. The payload is divided among all receivers, in the order
of their addresses. Each takes its own share from the front, and then the rest from the end that its owner reaches last.

A chunk is missing, held by one connection, or good, and never held twice. If an idle connection would finish a slow
one's chunks much sooner, the slow one is disconnected first.

Law of this file: pure; the time is given. The owner locks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

from tft_ckpt.state.manifest import Manifest

__all__ = ["ChunkPlan"]

FIRST_PART_BYTES: Final = 4 << 20
"""The size of a request to a source with an unknown rate."""
PART_BYTES_MAX: Final = 32 << 20
"""Maximum size of a request. A longer one saves nothing."""
PART_S: Final = 0.2
"""The intended duration of a request. New peers join at its end, and connections may finish this far apart."""
GRACE_S: Final = 0.5
"""The minimum time of a slow connection before its chunks go to another one."""
PEERS_S: Final = 2.0
"""How long the peers may take for their chunks before the source is asked for them too."""
ASSUMED_BYTES_PER_S: Final = 16e6
"""The assumed rate of a source that has delivered nothing yet."""
STUCK_S: Final = 1.0
"""How long peers may have no new chunks for each other, if there is no source of the whole payload."""
# A translation of flags to digits, to read them as a number.
_DIGITS: Final = bytes.maketrans(b"\0\1", b"01")


@dataclass(slots=True)
class _Worker:
    """One connection.

    Fields:
        source: the address of its source.
        is_peer: whether the source is a peer receiver.
        have: bitmap of the chunks of its source.
        part: chunks that it holds, in order of arrival.
        began_s, last_active_s: the time of the claim, and of the last arrival or report of the source.
        part_bytes: received bytes of the part.
    """

    source: str
    is_peer: bool
    have: int
    part: range = range(0)
    began_s: float = 0.0
    last_active_s: float = 0.0
    part_bytes: int = 0


@final
class ChunkPlan:
    """The chunks of one receive.

    Args:
        own: this receiver's address if peers can reach it, else "".
    """

    def __init__(self, own: str = "") -> None:
        self._own = own
        self._manifest: Manifest | None = None
        self._num_chunks = 0
        self._missing = 0  # bitmaps, chunk 0 in the lowest bit
        self._good = bytearray()  # a byte for each chunk, because a single bitmap would be copied for each arrival
        self._num_good = 0
        self._good_bytes = 0
        self._workers: dict[int, _Worker] = {}
        self._num_joined = 0
        self._rates: dict[str, float] = {}
        self._known: set[str] = set()  # sources with a connection under this manifest
        self._last_progress_s = 0.0

    # ---- the payload ----

    def adopt(self, manifest: Manifest) -> bool:
        """Use this manifest from now on. No connection may hold chunks.

        Good chunks stay good if the new checksums confirm them.

        Returns: whether the payload's bytes keep their places. If not, all chunks are missing again.
        """
        assert not self._workers, "connections of the manifest before"
        before, self._manifest = self._manifest, manifest
        self._known.clear()
        layout = manifest.layout
        self._num_chunks = layout.num_chunks
        kept = before is not None and layout.fits(before.layout)
        if before is None or not kept:
            self._good = bytearray(self._num_chunks)
            self._num_good = self._good_bytes = 0
        else:
            for chunk in list(self.good()):
                if before.checksums[chunk] != manifest.checksums[chunk]:
                    self.mark_missing(chunk)
        self._missing = self._all
        if self._num_good:
            self._missing &= ~int(self._good[::-1].translate(_DIGITS), 2)
        return kept

    def mark_missing(self, chunk: int) -> None:
        """Mark a good chunk as missing again."""
        self._good[chunk] = False
        self._num_good -= 1
        self._missing |= 1 << chunk
        self._good_bytes -= self._length(chunk)

    def good(self) -> Iterator[int]:
        """Yield the received and checked chunks."""
        return (chunk for chunk in range(self._num_chunks) if self._good[chunk])

    @property
    def good_bytes(self) -> int:
        """Return the number of received and checked bytes."""
        return self._good_bytes

    @property
    def missing_bytes(self) -> int:
        """Return the number of missing bytes."""
        return (0 if self._manifest is None else self._manifest.layout.data_bytes) - self._good_bytes

    @property
    def complete(self) -> bool:
        """Return whether nothing is missing."""
        return self._manifest is not None and self._num_good == self._num_chunks

    @property
    def _all(self) -> int:
        return (1 << self._num_chunks) - 1

    def _length(self, chunk: int) -> int:
        assert self._manifest is not None
        start, end = self._manifest.layout.chunk_span(chunk)
        return end - start

    # ---- connections ----

    def join(self, source: str, now_s: float, *, has_all: bool, is_peer: bool) -> int:
        """Add a connection to a source.

        Args:
            source: the address of the source.
            now_s: the present time.
            has_all: whether the source has all chunks; otherwise it has none until `set_chunks`.
            is_peer: whether the source is a peer receiver that relays its chunks.

        Returns: the connection's number.
        """
        self._num_joined += 1
        self._workers[self._num_joined] = _Worker(source, is_peer, self._all if has_all else 0, last_active_s=now_s)
        if source not in self._known:
            # Repeated connections to a source without chunks are no progress.
            self._known.add(source)
            self._last_progress_s = now_s
        return self._num_joined

    def set_chunks(self, worker: int, have: int, now_s: float) -> None:
        """Record the source's chunks, as a bitmap."""
        each = self._workers[worker]
        have &= self._all
        if have != each.have:
            self._last_progress_s = now_s
        each.have = have
        each.last_active_s = now_s

    def num_known(self, worker: int) -> int:
        """Return the known number of chunks of the connection's source."""
        return self._workers[worker].have.bit_count()

    def has_all(self, worker: int) -> bool:
        """Return whether the connection's source has all chunks."""
        return self._workers[worker].have == self._all

    def leave(self, worker: int, now_s: float) -> None:
        """Remove a connection. Its chunks are missing again."""
        each = self._workers.pop(worker)
        self._learn_rate(each, now_s)
        self._missing |= _bits(each.part)

    def claim(self, worker: int, now_s: float, *, is_alone: bool = False) -> range | None:
        """Assign chunks to this connection, which holds them from then on. Returns None if there are none for it.

        Args:
            worker: the connection's number.
            now_s: the present time.
            is_alone: whether no other connection is wanted, so one request may cover all missing chunks in a row.
        """
        each = self._workers[worker]
        assert not each.part, "the part before is not complete"
        self._learn_rate(each, now_s)
        free = self._missing & each.have
        if not each.is_peer:
            spare = free & ~self._peer_chunks()
            if spare or self._peers_suffice(now_s):
                free = spare
        if not free:
            return None
        part = self._next_part(free, self._num_chunks if is_alone else self._part_chunks(each.source))
        each.part = part
        each.began_s = each.last_active_s = now_s
        self._missing &= ~_bits(part)
        return part

    def arrived(self, worker: int, chunk: int, now_s: float) -> int:
        """Record that the connection's next chunk has arrived and matches the present manifest. Returns: its length."""
        each = self._workers[worker]
        assert each.part[:1] == range(chunk, chunk + 1), "chunks come in order"
        each.part = each.part[1:]
        each.last_active_s = self._last_progress_s = now_s
        length = self._length(chunk)
        each.part_bytes += length
        self._good[chunk] = True
        self._num_good += 1
        self._good_bytes += length
        return length

    def _learn_rate(self, each: _Worker, now_s: float) -> None:
        if each.part_bytes and now_s > each.began_s:
            rate = each.part_bytes / (now_s - each.began_s)
            known = self._rates.get(each.source)
            self._rates[each.source] = rate if known is None else (known + rate) / 2
        each.part_bytes = 0

    # ---- assignment ----

    def _peer_chunks(self) -> int:
        """Return the bitmap of chunks that at least one peer has."""
        union = 0
        for each in self._workers.values():
            if each.is_peer:
                union |= each.have
        return union

    def _peers_suffice(self, now_s: float) -> bool:
        """Return whether the peers will deliver the chunks that only they should deliver soon enough."""
        peers = [each for each in self._workers.values() if each.is_peer and each.have & self._missing]
        # A peer that was silent for longer than a chunk should take does not count, whatever it reports.
        able = [each for each in peers if not _is_late(each, self._chunk_bytes, self._rate(each), now_s)]
        rate = sum(self._rate(each) for each in able)
        left = (self._missing & self._peer_chunks()).bit_count() * self._chunk_bytes
        return left <= rate * PEERS_S

    @property
    def _chunk_bytes(self) -> int:
        assert self._manifest is not None
        return self._manifest.layout.chunk_bytes

    def _part_chunks(self, source: str) -> int:
        rate = self._rates.get(source)
        part_bytes = FIRST_PART_BYTES if rate is None else min(rate * PART_S, PART_BYTES_MAX)
        most = max(1, int(part_bytes / self._chunk_bytes))
        if len(self._workers) > 1:
            # Several turns for each connection, so that all finish at about the same time.
            most = min(most, max(1, -(-self._missing.bit_count() // (2 * len(self._workers)))))
        return most

    def _next_part(self, free: int, most: int) -> range:
        """Return at most this many free chunks in a row: from the front of the own share, else from the end of
        others'.
        """
        start, share = self._own_share()
        turned = (free >> start) | ((free & ((1 << start) - 1)) << (self._num_chunks - start))
        if turned & ((1 << share) - 1):
            first = _lowest(turned)
            length = min(most, _lowest(~(turned >> first)), share - first)
        else:
            last = turned.bit_length() - 1
            gap = ~turned & ((1 << last) - 1)
            length = min(most, last + 1 - gap.bit_length())
            first = last + 1 - length
        first = (first + start) % self._num_chunks
        return range(first, min(first + length, self._num_chunks))

    def _own_share(self) -> tuple[int, int]:
        """Return the first chunk and the number of chunks of this receiver's own share."""
        peers = {each.source for each in self._workers.values() if each.is_peer}
        if not peers or not self._own:
            return 0, self._num_chunks
        ring = sorted({*peers, self._own})
        rank = ring.index(self._own)
        start, end = (place * self._num_chunks // len(ring) for place in (rank, rank + 1))
        return start, end - start

    # ---- slow connections, and the end ----

    def too_slow(self, now_s: float) -> list[int]:
        """Return the connections to end, because idle ones (one for each) would finish their chunks much sooner."""
        idle = [each for each in self._workers.values() if not each.part and not self._missing & each.have]
        found: list[int] = []
        for number, each in self._workers.items():
            held = _bits(each.part)
            able = next((other for other in idle if held and not held & ~other.have), None)
            if able is not None and _is_late(each, held.bit_count() * self._chunk_bytes, self._rate(able), now_s):
                idle.remove(able)
                found.append(number)
        return found

    def _rate(self, each: _Worker) -> float:
        return self._rates.get(each.source, ASSUMED_BYTES_PER_S)

    def is_stuck(self, now_s: float) -> bool:
        """Return whether the remaining sources have given all their chunks, and none has had a new one for some
        time.
        """
        busy = any(each.part or each.have == self._all for each in self._workers.values())
        return not busy and not self.complete and now_s - self._last_progress_s > STUCK_S


def _is_late(each: _Worker, left_bytes: int, other_bytes_per_s: float, now_s: float) -> bool:
    patience_s = GRACE_S + 2 * left_bytes / other_bytes_per_s
    if now_s - each.last_active_s > patience_s:
        return True
    taken_s = now_s - each.began_s
    return each.part_bytes > 0 and taken_s > GRACE_S and left_bytes * taken_s / each.part_bytes > patience_s


def _lowest(bits: int) -> int:
    """Return the position of the lowest set bit. At least one bit must be set."""
    return (bits & -bits).bit_length() - 1


def _bits(part: range) -> int:
    return ((1 << len(part)) - 1) << part.start
