"""Virtual time: a test of one simulated minute takes as long as its events.

Callers put future actions into a queue, and the clock jumps from one entry to the next. Entries of one millisecond
happen in the order of their insertion, so a run is the same every time.

Law of this file: time and order. Nothing here knows what the actions do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass


class EventBudgetError(AssertionError):
    """An exceeded event budget: a process runs in circles (a livelock)."""


@dataclass(slots=True)
class Timer:
    """An action that will happen at `at_ms`. `cancel` withdraws it."""

    at_ms: int
    action: Callable[[], object] | None

    def cancel(self) -> None:
        """Cancel the action. A second call has no effect."""
        self.action = None


class VirtualClock:
    """Milliseconds that pass only on the test's command.

    Args:
        start_ms: initial time.
        budget_events: maximum number of events in total.
    """

    def __init__(self, *, start_ms: int = 0, budget_events: int = 1_000_000) -> None:
        self.now_ms = start_ms
        self.num_events = 0
        self._budget_events = budget_events
        self._queue: list[tuple[int, int, Timer]] = []
        self._number = 0

    def at(self, at_ms: int, action: Callable[[], object]) -> Timer:
        """Schedule `action` for `at_ms`, or for now if that has passed."""
        self._number += 1
        timer = Timer(max(at_ms, self.now_ms), action)
        heapq.heappush(self._queue, (timer.at_ms, self._number, timer))
        return timer

    def after(self, delay_ms: int, action: Callable[[], object]) -> Timer:
        """Schedule `action` for `delay_ms` from now."""
        return self.at(self.now_ms + delay_ms, action)

    def run_until(self, at_ms: int, stop: Callable[[], bool] | None = None) -> bool:
        """Run all events up to and including `at_ms`.

        Args:
            at_ms: the time afterwards, unless `stop` ended the run before.
            stop: called after every event. True ends the run there.
        Returns: whether `stop` ended the run.
        Raises: EventBudgetError.
        """
        while self._queue and self._queue[0][0] <= at_ms:
            timer = heapq.heappop(self._queue)[2]
            if timer.action is None:
                continue
            self.now_ms = timer.at_ms
            self.num_events += 1
            if self.num_events > self._budget_events:
                raise EventBudgetError(
                    f"{self._budget_events} events have happened by {self.now_ms} ms; look for a loop in the last ones"
                )
            timer.action()
            if stop is not None and stop():
                return True
        self.now_ms = max(self.now_ms, at_ms)
        return False
