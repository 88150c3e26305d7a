"""Virtual time: a test of a minute takes as long as its events.

Whoever wants something to happen later puts it into a queue; the clock jumps from one entry to the next. Entries of
one millisecond happen in the order in which they were put in, so that a run is the same every time.

Law of this file: time and order; nothing here knows what happens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass


class EventBudgetExceeded(AssertionError):
    """More happened than the budget allows: somebody goes round in circles (a livelock)."""


@dataclass(slots=True)
class Timer:
    """Something that will happen at `at_ms`; `cancel` takes it back."""

    at_ms: int
    action: Callable[[], None] | None

    def cancel(self) -> None:
        """Let it not happen; a second time does nothing."""
        self.action = None


class VirtualClock:
    """Milliseconds that pass only when the test says so.

    Args:
        start_ms: the first now.
        budget_events: how many entries may happen in all.
    """

    def __init__(self, *, start_ms: int = 0, budget_events: int = 1_000_000) -> None:
        self.now_ms = start_ms
        self.num_events = 0
        self._budget_events = budget_events
        self._queue: list[tuple[int, int, Timer]] = []
        self._number = 0

    def at(self, at_ms: int, action: Callable[[], None]) -> Timer:
        """Let `action` happen at `at_ms`, or now if that has passed."""
        self._number += 1
        timer = Timer(max(at_ms, self.now_ms), action)
        heapq.heappush(self._queue, (timer.at_ms, self._number, timer))
        return timer

    def after(self, delay_ms: int, action: Callable[[], None]) -> Timer:
        """Let `action` happen `delay_ms` from now."""
        return self.at(self.now_ms + delay_ms, action)

    def run_until(self, at_ms: int, stop: Callable[[], bool] | None = None) -> bool:
        """Let everything up to and including `at_ms` happen.

        Args:
            at_ms: what now is afterwards, unless `stop` ended it before.
            stop: looked at after every event; True ends the run there.
        Returns: whether `stop` ended it.
        Raises: EventBudgetExceeded.
        """
        while self._queue and self._queue[0][0] <= at_ms:
            timer = heapq.heappop(self._queue)[2]
            if timer.action is None:
                continue
            self.now_ms = timer.at_ms
            self.num_events += 1
            if self.num_events > self._budget_events:
                raise EventBudgetExceeded(
                    f"{self._budget_events} events have happened by {self.now_ms} ms; look for a loop in the last ones"
                )
            timer.action()
            if stop is not None and stop():
                return True
        self.now_ms = max(self.now_ms, at_ms)
        return False
