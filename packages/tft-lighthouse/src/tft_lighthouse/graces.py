"""The looks at replicas whose stream has broken, when their grace to come back ends.

Law of this file: timers of a loop; what a look finds is the core's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, final

LOOKS_APART_S: Final = 0.01  # streams that break together are judged together


@final
class Graces:
    """The looks of one lighthouse, because its next tick may come much later.

    Args:
        look: judges the broken streams.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._timers: set[asyncio.TimerHandle] = set()
        self._last_look_s = 0.0
        self._has_ended = False

    def begin(self, grace_ms: int) -> None:
        """Look once this grace has ended."""
        if self._has_ended:
            return
        loop = asyncio.get_running_loop()

        def look() -> None:
            self._timers.discard(timer)
            self._look()

        ends_s = loop.time() + grace_ms / 1_000 + 0.001  # the core's milliseconds are whole numbers
        if self._last_look_s < ends_s:
            self._last_look_s = ends_s + LOOKS_APART_S
            timer = loop.call_at(self._last_look_s, look)
            self._timers.add(timer)

    def end(self) -> None:
        """Look no more."""
        self._has_ended = True
        for timer in self._timers:
            timer.cancel()
