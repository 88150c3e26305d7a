"""The durations for which a condition held without a break.

Law of this file: record times.
"""

from __future__ import annotations

from collections import deque

INTERVALS_KEPT = 16
# a judgement may come this much later, after a delayed message or a stopped manager server or lighthouse
LATE_MS = 4_000


class Intervals:
    """The last few intervals in which a condition held without a break, and the current one."""

    def __init__(self) -> None:
        self._since_ms: int | None = None
        self._ended: deque[tuple[int, int]] = deque(maxlen=INTERVALS_KEPT)

    def record(self, holds: bool, now_ms: int, *, restart: bool = False) -> None:
        """Record whether the condition holds. `restart`: a new interval begins."""
        if self._since_ms is not None and (restart or not holds):
            self._ended.append((self._since_ms, now_ms))
            self._since_ms = None
        if holds and self._since_ms is None:
            self._since_ms = now_ms

    def longest_ms(self, now_ms: int) -> int:
        """Return the length of the longest interval that is current or ended recently."""
        return max((until_ms - since_ms for since_ms, until_ms in self._recent(now_ms)), default=0)

    def observed_ms(self, now_ms: int, *, silent_since_ms: int, heard_ms: int) -> int:
        """Return for how long the condition seems to have held, for an observer with gaps.

        The observer heard that it held at `heard_ms` or later, and heard nothing from `silent_since_ms` on. It does not
        learn of a break between the two.
        """
        recent = self._recent(now_ms)
        silent = [each for each in recent if each[0] <= silent_since_ms < each[1]]
        before = [each for each in recent if each[0] <= silent_since_ms and each[1] >= heard_ms]
        return silent[0][1] - before[0][0] if silent else 0

    def _recent(self, now_ms: int) -> list[tuple[int, int]]:
        intervals = [(since_ms, until_ms) for since_ms, until_ms in self._ended if until_ms >= now_ms - LATE_MS]
        if self._since_ms is not None:
            intervals.append((self._since_ms, now_ms))
        return intervals
