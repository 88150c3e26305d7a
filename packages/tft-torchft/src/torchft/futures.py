"""Time-outs of futures, blocks of code and device streams, under torchft's names.

Law of this file: names, and objects that are no futures. The work is in tft_pg.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final, TypeVar

from torch.futures import Future

import tft_pg
from tft_pg import context_timeout, stream_timeout

__all__ = ["WATCHDOG_TIMEOUT_SEC", "context_timeout", "future_timeout", "future_wait", "stream_timeout"]

T = TypeVar("T")

WATCHDOG_TIMEOUT_SEC: Final = "TORCHFT_WATCHDOG_TIMEOUT_SEC"


def future_timeout(fut: Future[T], timeout: timedelta) -> Future[T]:
    """Return a future of the same result, or of a TimeoutError. An object that is no future is returned unchanged."""
    return tft_pg.future_timeout(fut, timeout) if isinstance(fut, Future) else fut


def future_wait(fut: Future[T], timeout: timedelta) -> T:
    """Return the value of a future. Raises: its error. TimeoutError: it was not done in time."""
    return tft_pg.future_wait(fut, timeout) if isinstance(fut, Future) else fut.wait()
