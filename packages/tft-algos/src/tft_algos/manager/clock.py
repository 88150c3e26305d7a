"""The clock of a Manager: time, waits and alarms.

Law of this file: the system's clock behind `parts.Clock`. The use of time is decided elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import final

from tft_pg.futures import timer


@final
class SystemClock:
    """The clock of this machine. Callbacks run on tft-pg's timer thread, which exists while a callback is pending."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.wait(timeout_s)

    def after(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], object]:
        pending = timer().after_s(delay_s, callback)
        return lambda: timer().cancel(pending)
