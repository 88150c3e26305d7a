"""The duration of a trainer's own part of each step, as it happens.

Law of this file: record times; `pace_truth.py` compares them with what the lighthouse says.
"""

from __future__ import annotations

from collections import deque

STEPS_KEPT = 5
STEPS_LOOKED_AT = 40


class OwnTime:
    """The duration of a trainer's own part of its steps, without its waits for others."""

    def __init__(self) -> None:
        self.running_ms = 0  # of the current step, up to the last change of phase
        self._last: deque[int] = deque(maxlen=STEPS_KEPT)
        self.all_ms: deque[int] = deque(maxlen=STEPS_LOOKED_AT)  # includes steps that do not count
        self.counted_ms: deque[int] = deque(maxlen=STEPS_LOOKED_AT)

    def add(self, own_ms: int) -> None:
        """Add busy time of the trainer's own part."""
        self.running_ms += own_ms

    def step_ended(self, *, counts: bool) -> None:
        """End the current step. An excused or a failed step does not count."""
        if counts:
            self._last.append(self.running_ms)
            self.counted_ms.append(self.running_ms)
        self.all_ms.append(self.running_ms)
        self.running_ms = 0

    def forget(self) -> None:
        """Discard what was measured before a reconfiguration."""
        self._last.clear()

    @property
    def median_ms(self) -> int:
        """Return the median of the last few steps that count, or 0 if there is none."""
        return sorted(self._last)[len(self._last) // 2] if self._last else 0
