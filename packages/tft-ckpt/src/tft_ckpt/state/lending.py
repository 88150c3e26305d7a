"""The end of serving a state from its live tensors.

The trainer waits while its live state is served. So it must not wait for readers that have the state already, or never
come. A reader identifies itself in its first request, and holds the state by a connection until it is done.

Law of this file: pure; the time is given.
"""

from __future__ import annotations

from typing import Final, final

__all__ = ["Lending"]

GRACE_S: Final = 0.5
"""A reader whose connection broke comes again sooner."""
NO_SHOW_S: Final = 5.0
"""Who heals asks as soon as its plan is there, which was before this; later it is told to try the next quorum."""


@final
class Lending:
    """The serving of one live state.

    Args:
        num_expected: announced readers, at least 1.
        now_s: start time.
    """

    def __init__(self, num_expected: int, now_s: float) -> None:
        self._num_expected = num_expected
        self._num_come = 0
        self._busy_s = now_s

    def is_over(self, *, num_come: int, num_holding: int, now_s: float) -> bool:
        """Return whether the training may continue.

        Args:
            num_come: readers that have requested the state so far, including those that have left.
            num_holding: connections that hold it now.
            now_s: the present time.
        """
        if num_holding or num_come > self._num_come:
            self._num_come, self._busy_s = num_come, now_s
        idle_s = now_s - self._busy_s
        return not num_holding and idle_s >= (GRACE_S if num_come >= self._num_expected else NO_SHOW_S)
