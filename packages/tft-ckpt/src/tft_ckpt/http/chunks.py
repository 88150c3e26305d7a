"""Which connection fetches which chunks, and when one is too slow to keep them.

The chunks of a run are shared out among the connections as they ask, in parts that take each about as long, so that a
slow source gets few and a quick one many. A source that has the whole is asked first for what no fellow has yet: the
fellows (newcomers that fetch the same state) give away what they have, and the source sends as little as possible
twice. For the same reason every newcomer begins somewhere else: the run is divided among all of them as their addresses
sort, each takes its own share from the front, and then the rest from the end that its owner reaches last.

A chunk is missing, held by one connection, or good. It is never held twice: when an idle connection would be done with
the chunks of a slow one long before it, the slow one is broken off first.

Law of this file: pure; the time is given. The owner locks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

from tft_ckpt.manifest import Manifest

__all__ = ["ChunkPlan"]

FIRST_PART_BYTES: Final = 4 << 20
"""What is asked of a source whose rate is not known yet."""
PART_BYTES_MAX: Final = 32 << 20
"""A longer request saves nothing."""
PART_S: Final = 0.2
"""A part should take about as long: its end is when new fellows are drawn in, and how uneven the end may be."""
GRACE_S: Final = 0.5
"""What a slow connection is allowed in any case before its chunks go to another one."""
FELLOWS_S: Final = 2.0
"""How long the fellows may take for what they have before the source is asked for it a second time."""
ASSUMED_BYTES_PER_S: Final = 16e6
"""Taken for the rate of a source that has delivered nothing yet."""
STUCK_S: Final = 1.0
"""How long those that have only parts of the run may have nothing new for each other, with no source of the whole."""
# Of flags, to read them as a number.
_DIGITS: Final = bytes.maketrans(b"\0\1", b"01")


@dataclass(slots=True)
class _Worker:
    """One connection.

    Fields:
        source: whom it asks.
        is_fellow: whether that is a newcomer itself.
        have: bitmap of the chunks that are there.
        part: chunks that it holds, in the order in which they come.
        began_s, heard_s: when it took them, and when the last of them arrived, or its source last said what it has.
        part_bytes: of them, arrived.
    """

    source: str
    is_fellow: bool
    have: int
    part: range = range(0)
    began_s: float = 0.0
    heard_s: float = 0.0
    part_bytes: int = 0


@final
class ChunkPlan:
    """One receive's chunks.

    Args:
        own: this receiver's address if fellows can reach it, else "".
    """

    def __init__(self, own: str = "") -> None:
        self._own = own
        self._manifest: Manifest | None = None
        self._num_chunks = 0
        self._missing = 0  # bitmaps, chunk 0 in the lowest bit
        self._good = bytearray()  # a byte for each chunk: one bitmap of all would be copied for each that comes
        self._num_good = 0
        self._good_bytes = 0
        self._workers: dict[int, _Worker] = {}
        self._num_joined = 0
        self._rates: dict[str, float] = {}
        self._known: set[str] = set()  # whose connections there were under this manifest
        self._news_s = 0.0

    # ---- the run ----

    def adopt(self, manifest: Manifest) -> bool:
        """Go by this manifest from now on; no connection may hold chunks.

        Of the chunks that are good, those stay so whose checksums it confirms.

        Returns: whether the run's bytes keep their places; if not, all of them are missing again.
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
                if before.sums[chunk] != manifest.sums[chunk]:
                    self.lose(chunk)
        self._missing = self._all
        if self._num_good:
            self._missing &= ~int(self._good[::-1].translate(_DIGITS), 2)
        return kept

    def lose(self, chunk: int) -> None:
        """A good chunk is missing after all."""
        self._good[chunk] = False
        self._num_good -= 1
        self._missing |= 1 << chunk
        self._good_bytes -= self._length(chunk)

    def good(self) -> Iterator[int]:
        """The chunks that are here and checked."""
        return (chunk for chunk in range(self._num_chunks) if self._good[chunk])

    @property
    def good_bytes(self) -> int:
        """Bytes that are here and checked."""
        return self._good_bytes

    @property
    def missing_bytes(self) -> int:
        """Bytes that are not."""
        return (0 if self._manifest is None else self._manifest.layout.data_bytes) - self._good_bytes

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return self._manifest is not None and self._num_good == self._num_chunks

    @property
    def _all(self) -> int:
        return (1 << self._num_chunks) - 1

    def _length(self, chunk: int) -> int:
        assert self._manifest is not None
        start, end = self._manifest.layout.chunk_span(chunk)
        return end - start

    # ---- connections ----

    def join(self, source: str, now_s: float, *, has_all: bool, is_fellow: bool) -> int:
        """A connection to a source.

        Args:
            has_all: it has all chunks; else it has none until `told`.
            is_fellow: it is a newcomer that relays what it has.
        Returns: its number.
        """
        self._num_joined += 1
        self._workers[self._num_joined] = _Worker(source, is_fellow, self._all if has_all else 0, heard_s=now_s)
        if source not in self._known:
            # Who comes again and again, and has nothing, is no news.
            self._known.add(source)
            self._news_s = now_s
        return self._num_joined

    def told(self, worker: int, have: int, now_s: float) -> None:
        """The connection's source says what it has, as a bitmap."""
        each = self._workers[worker]
        have &= self._all
        if have != each.have:
            self._news_s = now_s
        each.have = have
        each.heard_s = now_s

    def num_known(self, worker: int) -> int:
        """How many chunks its source is known to have."""
        return self._workers[worker].have.bit_count()

    def has_all(self, worker: int) -> bool:
        """Whether its source will never have more."""
        return self._workers[worker].have == self._all

    def leave(self, worker: int, now_s: float) -> None:
        """The connection has ended: what it holds is missing again."""
        each = self._workers.pop(worker)
        self._learn_rate(each, now_s)
        self._missing |= _bits(each.part)

    def claim(self, worker: int, now_s: float, *, is_alone: bool = False) -> range | None:
        """Chunks that this connection is to fetch now, which it holds from then on; None if there are none for it.

        Args:
            is_alone: no other connection is wanted, so that all that is missing in a row may be asked for at once.
        """
        each = self._workers[worker]
        assert not each.part, "the part before is not complete"
        self._learn_rate(each, now_s)
        free = self._missing & each.have
        if not each.is_fellow:
            spare = free & ~self._with_fellows()
            if spare or self._fellows_suffice(now_s):
                free = spare
        if not free:
            return None
        part = self._cut(free, self._num_chunks if is_alone else self._part_chunks(each.source))
        each.part = part
        each.began_s = each.heard_s = now_s
        self._missing &= ~_bits(part)
        return part

    def arrived(self, worker: int, chunk: int, now_s: float) -> None:
        """The first chunk of those that the connection holds is here and checked against the manifest in force."""
        each = self._workers[worker]
        assert each.part[:1] == range(chunk, chunk + 1), "chunks come in order"
        each.part = each.part[1:]
        each.heard_s = self._news_s = now_s
        each.part_bytes += self._length(chunk)
        self._good[chunk] = True
        self._num_good += 1
        self._good_bytes += self._length(chunk)

    def _learn_rate(self, each: _Worker, now_s: float) -> None:
        if each.part_bytes and now_s > each.began_s:
            rate = each.part_bytes / (now_s - each.began_s)
            known = self._rates.get(each.source)
            self._rates[each.source] = rate if known is None else (known + rate) / 2
        each.part_bytes = 0

    # ---- who fetches what ----

    def _with_fellows(self) -> int:
        """Bitmap of what at least one of them has."""
        union = 0
        for each in self._workers.values():
            if each.is_fellow:
                union |= each.have
        return union

    def _fellows_suffice(self, now_s: float) -> bool:
        """Whether what only the fellows should be asked for comes from them soon enough."""
        fellows = [each for each in self._workers.values() if each.is_fellow and each.have & self._missing]
        # Who was not heard of for longer than a chunk should take is not waited for, whatever he says that he has.
        able = [each for each in fellows if not _is_late(each, self._chunk_bytes, self._rate(each), now_s)]
        rate = sum(self._rate(each) for each in able)
        left = (self._missing & self._with_fellows()).bit_count() * self._chunk_bytes
        return left <= rate * FELLOWS_S

    @property
    def _chunk_bytes(self) -> int:
        assert self._manifest is not None
        return self._manifest.layout.chunk_bytes

    def _part_chunks(self, source: str) -> int:
        rate = self._rates.get(source)
        part_bytes = FIRST_PART_BYTES if rate is None else min(rate * PART_S, PART_BYTES_MAX)
        most = max(1, int(part_bytes / self._chunk_bytes))
        if len(self._workers) > 1:
            # Several turns for each, so that at the end all are done at about the same time.
            most = min(most, max(1, -(-self._missing.bit_count() // (2 * len(self._workers)))))
        return most

    def _cut(self, free: int, most: int) -> range:
        """At most so many of these chunks in a row: from the front of the own share, else from the end of others'."""
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
        """First chunk and number of chunks of what is this receiver's to fetch first."""
        fellows = {each.source for each in self._workers.values() if each.is_fellow}
        if not fellows or not self._own:
            return 0, self._num_chunks
        ring = sorted({*fellows, self._own})
        rank = ring.index(self._own)
        start, end = (place * self._num_chunks // len(ring) for place in (rank, rank + 1))
        return start, end - start

    # ---- the slow, and the end ----

    def too_slow(self, now_s: float) -> list[int]:
        """Connections to break off, because idle ones, one for each, would have their chunks much sooner."""
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
        """Whether those that are left have given what they have, and none of them has had more for some time."""
        busy = any(each.part or each.have == self._all for each in self._workers.values())
        return not busy and not self.complete and now_s - self._news_s > STUCK_S


def _is_late(each: _Worker, left_bytes: int, other_bytes_per_s: float, now_s: float) -> bool:
    patience_s = GRACE_S + 2 * left_bytes / other_bytes_per_s
    if now_s - each.heard_s > patience_s:
        return True
    taken_s = now_s - each.began_s
    return each.part_bytes > 0 and taken_s > GRACE_S and left_bytes * taken_s / each.part_bytes > patience_s


def _lowest(bits: int) -> int:
    """Place of the lowest bit that is set; there is one."""
    return (bits & -bits).bit_length() - 1


def _bits(part: range) -> int:
    return ((1 << len(part)) - 1) << part.start
