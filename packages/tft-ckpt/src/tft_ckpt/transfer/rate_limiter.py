"""A rate limit for bytes.

A caller asks before it moves bytes, and gets the time to wait. The call reserves a turn: later callers also wait for
its bytes. So all callers together keep to the rate, in the order of their calls.

Law of this file: pure; the time is given, and the caller waits. Not thread-safe: the owner locks.
"""

from __future__ import annotations

import math
from typing import final

from tft_ckpt.errors import ConfigError

__all__ = ["RateLimiter", "check_rate"]

# Unused allowance is saved for at most this long. Otherwise a long silence would permit a burst.
_SAVED_S = 0.05
_PIECES_PER_S = 20
_PIECE_BYTES_MIN = 16 << 10


def check_rate(name: str, bytes_per_s: float | None) -> None:
    """Check that a rate is valid. Raises: ConfigError."""
    if bytes_per_s is None:
        return
    if isinstance(bytes_per_s, bool) or not isinstance(bytes_per_s, (int, float)):
        raise ConfigError(f"{name} is {bytes_per_s!r}; give a number of bytes per second, or None for no limit")
    if not 1 <= bytes_per_s < math.inf:
        raise ConfigError(f"{name} is {bytes_per_s:g}; give at least 1 byte per second, or None for no limit")


@final
class RateLimiter:
    """A limiter that spreads bytes over time.

    Args:
        bytes_per_s: the rate, at least 1.
    """

    def __init__(self, bytes_per_s: float) -> None:
        check_rate("bytes_per_s", bytes_per_s)
        self.bytes_per_s = bytes_per_s
        self._free_s = -math.inf  # the time when all reserved bytes will have been moved

    @property
    def piece_bytes(self) -> int:
        """Return a length for one call: long enough to cost little, and short enough that others get their turn."""
        return max(_PIECE_BYTES_MIN, int(self.bytes_per_s / _PIECES_PER_S))

    def take(self, num_bytes: int, now_s: float) -> float:
        """Reserve this many bytes at that time. Returns: the seconds to wait before they are moved, at least 0."""
        start_s = max(self._free_s, now_s - _SAVED_S)
        self._free_s = start_s + num_bytes / self.bytes_per_s
        return max(0.0, self._free_s - now_s)
