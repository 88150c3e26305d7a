"""How long something was so without a break.

Law of this file: noting times.
"""

from __future__ import annotations

from collections import deque

STRETCHES_KEPT = 16
LATE_MS = 4_000  # a message, a stopped manager server or lighthouse: by so much later may a stretch be judged


class Stretches:
    """When something was so without a break: the last few times, and the one that runs."""

    def __init__(self) -> None:
        self._since_ms: int | None = None
        self._over: deque[tuple[int, int]] = deque(maxlen=STRETCHES_KEPT)

    def now(self, is_so: bool, now_ms: int, *, anew: bool = False) -> None:
        """It is so, or not; `anew`: and another time than before."""
        if self._since_ms is not None and (anew or not is_so):
            self._over.append((self._since_ms, now_ms))
            self._since_ms = None
        if is_so and self._since_ms is None:
            self._since_ms = now_ms

    def longest_ms(self, now_ms: int) -> int:
        """Of those that run or have ended not long ago."""
        stretches = [(since_ms, until_ms) for since_ms, until_ms in self._over if until_ms >= now_ms - LATE_MS]
        if self._since_ms is not None:
            stretches.append((self._since_ms, now_ms))
        return max((until_ms - since_ms for since_ms, until_ms in stretches), default=0)
