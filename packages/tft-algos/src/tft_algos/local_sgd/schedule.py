"""The start and the end of each sync, counted in inner steps.

A period is `sync_every / num_fragments` inner steps, and one sync begins in each period. A sync ends
`fragment_sync_delay` inner steps after it began, at the end of a period. Its reductions run during this delay. With a
delay of more than a period, the next sync begins before this one has ended, so several are in flight.

    4 inner steps, 2 fragments, no delay        _ S0E0 _ S1E1 _ S0E0 _ S1E1
    4 inner steps, 2 fragments, a delay of 1    S0 E0 S1 E1 S0 E0 S1 E1
    4 inner steps, 2 fragments, a delay of 3    S0 _ S1 E0 S0 E1 S1 E0

Law of this file: whole numbers. What is sent and merged is decided elsewhere.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import final

from tft_algos.errors import ConfigError


class Due(enum.Enum):
    """An event that an inner step triggers."""

    START = "start"  # a sync begins
    END = "end"  # the oldest sync in flight ends


def fragment_of(step: int, num_in_flight: int, num_fragments: int) -> int:
    """Return the fragment of a sync, the same on every member of its quorum.

    Args:
        step: the step of the plan, at least 1. The first commit is the opening, which has no fragment.
        num_in_flight: syncs that began before this one, and have neither ended nor failed.
        num_fragments: at least 1.
    """
    return (step - 1 + num_in_flight) % num_fragments


@final
class Schedule:
    """A counter of one member's inner steps and its syncs in flight.

    Args:
        num_fragments: at least 1.
        sync_every: inner steps in which each fragment is synchronized once. A multiple of num_fragments.
        fragment_sync_delay: inner steps from the start of a sync to its end, less than sync_every.
    Raises: ConfigError: the values are invalid.
    Source: Streaming DiLoCo, arXiv 2501.18512, algorithm 2. Its tau is the delay.
    """

    def __init__(self, num_fragments: int, sync_every: int, fragment_sync_delay: int = 0) -> None:
        for name, value, least in (("sync_every", sync_every, 1), ("fragment_sync_delay", fragment_sync_delay, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; give a whole number of inner steps, at least {least}")
        if sync_every < num_fragments:
            raise ConfigError(
                f"sync_every is {sync_every} and there are {num_fragments} fragments, and each fragment begins its "
                "sync in an inner step of its own; give at least as many inner steps as fragments"
            )
        if sync_every % num_fragments:
            raise ConfigError(
                f"sync_every is {sync_every}, which {num_fragments} fragments don't divide; give a multiple of "
                f"{num_fragments}"
            )
        if fragment_sync_delay >= sync_every:
            raise ConfigError(
                f"fragment_sync_delay is {fragment_sync_delay} and sync_every {sync_every}; a fragment's sync has to "
                "end before its next one begins, so give fewer inner steps than sync_every"
            )
        self._period = sync_every // num_fragments
        self._delay = fragment_sync_delay
        self._first = self._period - fragment_sync_delay % self._period
        self._now = 0
        self._ends: deque[int] = deque()  # the ends of the syncs in flight, oldest first

    @property
    def period(self) -> int:
        """Return the number of inner steps from the start of one sync to the start of the next."""
        return self._period

    @property
    def num_overlapping(self) -> int:
        """Return the number of syncs that begin between another sync's start and its end.

        All members share this number.
        """
        return max(-(-self._delay // self._period) - 1, 0)

    @property
    def num_in_flight(self) -> int:
        """Return the number of syncs that have begun and not ended."""
        return len(self._ends)

    @property
    def delay(self) -> int:
        """Return the number of inner steps from the start of a sync to its end."""
        return self._delay

    def inner_step(self) -> tuple[Due, ...]:
        """Count an inner step.

        Returns: what is due, in order. The caller reports the outcome with `started`, `ended` or `failed`.
        """
        self._now += 1
        due: list[Due] = []
        if self._ends and self._ends[0] <= self._now:
            due.append(Due.END)
        if self._now % self._period == self._first % self._period:
            due.append(Due.START)
            if not self._delay:
                due.append(Due.END)
        return tuple(due)

    def started(self) -> None:
        """Record that a sync has begun."""
        self._ends.append(self._now + self._delay)

    def ended(self) -> None:
        """Record that the oldest sync has ended with a commit."""
        self._ends.popleft()

    def failed(self, *, latest_succeeded: bool = False) -> None:
        """Record that a sync has failed, which fails all syncs in flight.

        Args:
            latest_succeeded: the latest sync has not failed.
        """
        kept = [self._ends[-1]] if latest_succeeded and self._ends else []
        self._ends = deque(kept)

    def joined(self) -> None:
        """Record that this member joins at the start of a sync of the others. Its count continues from that point."""
        self._now = self._first
        self.started()

    def begin_period(self) -> None:
        """Restart the count from here. Only allowed while no sync is in flight."""
        self._now = 0
