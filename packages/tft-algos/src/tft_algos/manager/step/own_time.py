"""The duration of this rank's own part of a step, which separates a straggler from replicas that wait for it.

The wall time of a step is the same on every member, because all wait for the slowest. So waits are left out. The own
part begins with the last verdict, and ends when this rank has given its last contribution to a reduction. Waits of the
training thread for a quorum, a reduction or live state do not count.

Law of this file: reading the clock at existing points of the Manager, and adding up. Nothing is decided.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, final

STEPS_KEPT: Final = 5  # the median of these is reported, so that one slow step has no effect


@final
class OwnTime:
    """The own part of one rank's steps.

    Any thread may set marks, because hooks of a backward pass run on other threads.

    Args:
        monotonic: returns the time in seconds.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._began_s = monotonic()
        self._num_waiting = 0
        self._waits_since_s = 0.0
        self._waited_s = 0.0  # in this step
        self._mark_s: float | None = None  # the own part up to the last mark
        self._last_s: deque[float] = deque(maxlen=STEPS_KEPT)

    def __enter__(self) -> None:
        """Begin to wait for other members. Waits may be nested."""
        with self._lock:
            self._num_waiting += 1
            if self._num_waiting == 1:
                self._waits_since_s = self._monotonic()

    def __exit__(self, *_: object) -> None:
        """End a wait."""
        with self._lock:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                # A step that ended during the wait has restarted the count.
                self._waited_s += self._monotonic() - max(self._waits_since_s, self._began_s)

    def mark(self) -> None:
        """Record that the own part lasts at least until now: a reduction begins, or an inner step has ended."""
        with self._lock:
            self._mark_s = self._own_s()

    def finishes(self) -> None:
        """Record that the training thread is at the end of a step. Without a reduction, all of it was its own part."""
        with self._lock:
            if self._mark_s is None:
                self._mark_s = self._own_s()

    def step_ended(self, *, counts: bool) -> None:
        """Record a verdict. The next step's own part begins.

        Args:
            counts: the step was committed, and is not the first one after a start, a healing or a reconfiguration.
        """
        with self._lock:
            if counts and self._mark_s is not None:
                self._last_s.append(self._mark_s)
            self._began_s = self._monotonic()
            self._waited_s = 0.0
            self._mark_s = None

    def forget(self) -> None:
        """Discard the measured steps, because another quorum or a trial begins."""
        with self._lock:
            self._last_s.clear()

    @property
    def median_ms(self) -> int:
        """Return the median of the last few steps, at least 1. 0: nothing was measured yet."""
        with self._lock:
            last_s = sorted(self._last_s)
        return max(1, round(last_s[len(last_s) // 2] * 1_000)) if last_s else 0

    def _own_s(self) -> float:
        now_s = self._monotonic()
        waits_s = now_s - max(self._waits_since_s, self._began_s) if self._num_waiting else 0.0
        return now_s - self._began_s - self._waited_s - waits_s
