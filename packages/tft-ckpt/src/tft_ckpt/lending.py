"""When a state that is served from its live tensors has been served.

The trainer waits meanwhile, so it must not wait for readers that have what they want, or will not come. A reader names
itself with its first request, and has the state in its hold by a connection until it is done.

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
    """One state's.

    Args:
        num_expected: readers that were announced, at least 1.
        now_s: when it began.
    """

    def __init__(self, num_expected: int, now_s: float) -> None:
        self._num_expected = num_expected
        self._num_come = 0
        self._busy_s = now_s

    def is_over(self, *, num_come: int, num_holding: int, now_s: float) -> bool:
        """Whether to go on with the training.

        Args:
            num_come: readers that have asked for it so far, whether or not they have left.
            num_holding: connections that hold it now.
        """
        if num_holding or num_come > self._num_come:
            self._num_come, self._busy_s = num_come, now_s
        idle_s = now_s - self._busy_s
        return not num_holding and idle_s >= (GRACE_S if num_come >= self._num_expected else NO_SHOW_S)
