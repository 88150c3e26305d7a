"""The words of rounds, as the process groups of the simulation carry them.

Each member sends its word to all others, so a failing link takes the word from its two ends alone. A member with the
words of all others learns the sum a little later. A member that is cut off in between takes the sum from those that
have not learned it yet.

Law of this file: one group's words. `group.Group` reports the members that left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, final

from tft_sim.clock import VirtualClock
from tft_sim.links import FAILS_AFTER_MS

if TYPE_CHECKING:
    from tft_sim.waiting import Waiter


@dataclass(slots=True)
class _Word:
    sent: dict[str, Sequence[int]] = field(default_factory=dict)
    waiting: dict[str, Waiter] = field(default_factory=dict)
    in_transit: set[str] = field(default_factory=set)


@final
class ControlWords:
    """The words of one process group, by the step of the round.

    Args:
        members: replica ids of the group.
        clock: of the simulation.
        spread_ms: returns the time after which a member learns the sum.
        reaches: whether messages between two members come through, in both directions.
        fails: called with a member and a peer when that member notices after a while that the peer does not hear it.
            Returns whether the word fails.
    """

    def __init__(
        self,
        members: tuple[str, ...],
        clock: VirtualClock,
        spread_ms: Callable[[], int],
        reaches: Callable[[str, str], bool],
        fails: Callable[[str, str], bool],
    ) -> None:
        self._members = members
        self._clock = clock
        self._spread_ms = spread_ms
        self._reaches = reaches
        self._fails = fails
        self._words: dict[int, _Word] = {}

    def exchange(self, step: int, replica_id: str, values: Sequence[int], waiter: Waiter) -> None:
        """Send a member's word of a round. `waiter` resolves to the sum, or to None if it fails."""
        for over in [each for each, word in self._words.items() if self._is_over(word)]:
            del self._words[over]
        word = self._words.setdefault(step, _Word())
        word.sent[replica_id] = values
        word.waiting[replica_id] = waiter
        self._send_sums(step, word)
        for other in self._members:
            if other != replica_id and not self._reaches(replica_id, other):
                self._clock.after(FAILS_AFTER_MS, partial(self._time_out, step, replica_id, other))

    def _is_over(self, word: _Word) -> bool:
        return len(word.sent) == len(self._members) and all(waiter.done for waiter in word.waiting.values())

    def is_delivered(self) -> bool:
        """Return whether every member that waits for a word has it."""
        return all(waiter.done for word in self._words.values() for waiter in word.waiting.values())

    def update(self, misses: Callable[[str], bool]) -> None:
        """Update after a member came, left or can be reached again. `misses`: whether a member sees that another
        left."""
        for step, word in list(self._words.items()):
            for replica_id, waiter in list(word.waiting.items()):
                if not waiter.done and misses(replica_id):
                    waiter.resolve(None)
            self._send_sums(step, word)

    def abort(self, replica_id: str) -> None:
        """End the member's own waits."""
        for word in list(self._words.values()):
            waiter = word.waiting.get(replica_id)
            if waiter is not None:
                waiter.resolve(None)

    def _send_sums(self, step: int, word: _Word) -> None:
        if len(word.sent) < len(self._members):
            return
        total = tuple(sum(each) for each in zip(*word.sent.values(), strict=True))
        for replica_id, waiter in word.waiting.items():
            if waiter.done or replica_id in word.in_transit:
                continue
            if all(self._reaches(replica_id, other) for other in self._members if other != replica_id):
                word.in_transit.add(replica_id)
                self._clock.after(self._spread_ms(), partial(waiter.resolve, total))

    def _time_out(self, step: int, replica_id: str, other: str) -> None:
        word = self._words.get(step)
        waiter = word.waiting.get(replica_id) if word is not None else None
        if waiter is not None and not waiter.done and self._fails(replica_id, other):
            waiter.resolve(None)
