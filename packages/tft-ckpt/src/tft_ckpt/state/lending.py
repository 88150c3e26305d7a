"""The end of serving a state from its live tensors.

The trainer waits while its live state is served. So it must not wait for readers that have the state already, or never
connect. A reader identifies itself in its first request, and holds the state by a connection until it is done.

Law of this file: pure; the time is given.
"""

from __future__ import annotations

from typing import Final, final

__all__ = ["Lending"]

GRACE_S: Final = 0.5
"""The wait after the last reader has left. A reader that lost its connection reconnects sooner."""
NO_SHOW_S: Final = 5.0
"""The wait for readers that do not come. A replica that recovers asks as soon as it has its plan, which is earlier.

A later request is refused, and the replica waits for the next quorum.
"""


@final
class Lending:
    """The serving of one live state.

    Args:
        num_expected: announced readers, at least 1.
        now_s: start time.
    """

    def __init__(self, num_expected: int, now_s: float) -> None:
        self._num_expected = num_expected
        self._num_seen = 0
        self._busy_s = now_s

    def is_over(self, *, num_seen: int, num_holding: int, now_s: float) -> bool:
        """Return whether the training may continue.

        Args:
            num_seen: readers that have requested the state so far, including those that have left.
            num_holding: connections that hold it now.
            now_s: the present time.
        """
        if num_holding or num_seen > self._num_seen:
            self._num_seen, self._busy_s = num_seen, now_s
        idle_s = now_s - self._busy_s
        return not num_holding and idle_s >= (GRACE_S if num_seen >= self._num_expected else NO_SHOW_S)
