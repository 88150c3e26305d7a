"""The messages and frames of one rank in the exchange of one word.

In a small group each rank sends its word to every other one, so one step is enough. In a larger group the number of
messages matters, and the ranks use recursive doubling. In each step a rank sends its sum to a partner and gets the
partner's sum. The sums then cover 2, 4, 8 … ranks. If the number of ranks is no power of two, the ranks above the
largest such power first send their words to a lower rank. They receive the sum from that rank at the end.

An intermediate sum may be larger than the final one. So a frame with values beyond 64 bits has 128 bits for each value.

Law of this file: numbers and bytes only; no clock, no connections.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Final, final

__all__ = ["DIRECT_MOST", "BadFrameError", "Step", "WordRound", "steps_of"]

DIRECT_MOST: Final = 7
"""The largest group in which each rank sends its word to every other one; measured, see `benchmarks/word_exchange`."""

_NARROW: Final = 0x57
_WIDE: Final = 0x58
_DIRECT: Final = 0
_FOLD_IN: Final = 1
_DOUBLE: Final = 2  # and the numbers after it, one for each step
_FOLD_OUT: Final = 255
_HEADER: Final = struct.Struct("!BBHQ")  # kind, step, number of values, round
_LOW_BITS: Final = 64
_LOW_MASK: Final = (1 << _LOW_BITS) - 1


class BadFrameError(Exception):
    """A frame of a peer that is not the expected one. The text describes it, as the end of a sentence."""


@dataclass(frozen=True)
class Step:
    """One step of one rank: it sends first, then it receives.

    Args:
        number: of the step, the same on both sides.
        sends_to: the ranks that get the sum as it is before the step.
        receives_from: the ranks whose sums arrive.
        replaces: whether the received value is the whole sum; otherwise it is added.
    """

    number: int
    sends_to: tuple[int, ...]
    receives_from: tuple[int, ...]
    replaces: bool = False


def steps_of(rank: int, world_size: int, *, direct_most: int = DIRECT_MOST) -> tuple[Step, ...]:
    """Return the steps of a rank, in order. The result is empty in a group of one.

    Args:
        rank, world_size: its place.
        direct_most: the largest group in which each rank sends its word to every other one.
    """
    if world_size == 1:
        return ()
    if world_size <= direct_most:
        # Each rank begins with the next rank, so that the first messages go to different ranks.
        others = tuple((rank + distance) % world_size for distance in range(1, world_size))
        return (Step(_DIRECT, others, others),)
    num_doubling = 1 << (world_size.bit_length() - 1)
    if rank >= num_doubling:
        partner = (rank - num_doubling,)
        return (Step(_FOLD_IN, partner, ()), Step(_FOLD_OUT, (), partner, replaces=True))
    steps = []
    folded = (rank + num_doubling,) if rank + num_doubling < world_size else ()
    if folded:
        steps.append(Step(_FOLD_IN, (), folded))
    for bit in range(num_doubling.bit_length() - 1):
        partner = (rank ^ (1 << bit),)
        steps.append(Step(_DOUBLE + bit, partner, partner))
    if folded:
        steps.append(Step(_FOLD_OUT, folded, ()))
    return tuple(steps)


@functools.cache
def _formats(num_values: int) -> tuple[struct.Struct, struct.Struct]:
    """Return the formats of the values in a narrow frame and in a wide one."""
    return struct.Struct(f"!{num_values}q"), struct.Struct("!" + "qQ" * num_values)


@final
class WordRound:
    """The state of one exchange on one rank.

    The caller sends `frame` to `recipients` and then reads from the `missing` ranks, until `advance` returns False.

    Args:
        steps: of this rank, at least one.
        round_number: of the round.
        values: of this rank's word.
    """

    def __init__(self, steps: tuple[Step, ...], round_number: int, values: tuple[int, ...]) -> None:
        self._steps = steps
        self._at = 0
        self._round_number = round_number
        self._sums = values
        self._narrow, self._wide = _formats(len(values))
        self._partial: dict[int, bytes] = {}  # the first bytes of an incomplete frame
        self._begin(steps[0])

    def _begin(self, step: Step) -> None:
        self._step = step
        self._head = _HEADER.pack(_NARROW, step.number, len(self._sums), self._round_number)
        self.missing = set(step.receives_from)

    @property
    def recipients(self) -> tuple[int, ...]:
        """Return the ranks that get a frame in this step."""
        return self._step.sends_to

    def frame(self) -> bytes:
        """Return the frame for the recipients. Call this before any data of the step is received."""
        try:
            return self._head + self._narrow.pack(*self._sums)
        except struct.error:  # an intermediate sum is too large; the final one may fit again
            head = _HEADER.pack(_WIDE, self._step.number, len(self._sums), self._round_number)
            halves = [half for value in self._sums for half in (value >> _LOW_BITS, value & _LOW_MASK)]
            return head + self._wide.pack(*halves)

    def due_bytes(self, rank: int) -> int:
        """Return the largest number of bytes to read from a missing rank. It never exceeds the rest of its frame."""
        begun = self._partial.get(rank, b"") if self._partial else b""
        length = _HEADER.size + self._narrow.size if len(begun) < _HEADER.size else self._length(begun)
        return length - len(begun)

    def receive(self, rank: int, data: bytes) -> bool:
        """Process bytes of a missing rank's frame. Returns: whether the frame is complete.

        Raises: BadFrameError: the frame is not the expected one. A frame that is too long is refused before its rest is
            read.
        """
        if self._partial:
            data = self._partial.pop(rank, b"") + data
        if len(data) < _HEADER.size or len(data) < self._length(data):
            self._partial[rank] = data
            return False
        values: tuple[int, ...]
        if data[0] == _NARROW:
            values = self._narrow.unpack_from(data, _HEADER.size)
        else:
            halves = self._wide.unpack_from(data, _HEADER.size)
            values = tuple((high << _LOW_BITS) | low for high, low in zip(halves[::2], halves[1::2], strict=True))
        self._sums = values if self._step.replaces else tuple(map(int.__add__, self._sums, values))
        self.missing.remove(rank)
        return True

    def _length(self, frame: bytes) -> int:
        """Return the length of the frame with this beginning. Raises: BadFrameError: the frame is not the expected
        one."""
        if frame.startswith(self._head):
            return _HEADER.size + self._narrow.size
        kind, step, num_values, round_number = _HEADER.unpack_from(frame)
        if kind not in (_NARROW, _WIDE):
            raise BadFrameError(f"sent an unknown frame (first byte {kind:#04x})")
        if round_number != self._round_number:
            raise BadFrameError(
                f"sent the word of round {round_number}, but this rank is in round {self._round_number}"
            )
        if num_values != len(self._sums):
            raise BadFrameError(f"sent a word of {num_values} values, but this rank's has {len(self._sums)}")
        if step != self._step.number:
            raise BadFrameError(f"sent step {step} of the word, but this rank is at step {self._step.number}")
        return _HEADER.size + self._wide.size

    def advance(self) -> bool:
        """Go on to the next step when no rank is missing. Returns: whether there is one."""
        assert not self.missing, "a step ends when all of it has been received"
        self._at += 1
        if self._at == len(self._steps):
            return False
        self._begin(self._steps[self._at])
        return True

    @property
    def sums(self) -> tuple[int, ...]:
        """Return the sum of each value. During the exchange, it covers only the ranks received so far."""
        return self._sums
