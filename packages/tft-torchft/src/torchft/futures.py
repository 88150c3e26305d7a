"""Time-outs of futures, blocks of code and device streams, under torchft's names.

Law of this file: names, and objects that are no futures. The work is in tft_pg.
"""

from __future__ import annotations

import os
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final, TypeVar, final

from torch.futures import Future

import tft_pg
from tft_pg import context_timeout, stream_timeout
from tft_pg.futures import watchdog_timeout

__all__ = ["WATCHDOG_TIMEOUT_SEC", "context_timeout", "future_timeout", "future_wait", "stream_timeout"]

T = TypeVar("T")

WATCHDOG_TIMEOUT_SEC: Final = "TORCHFT_WATCHDOG_TIMEOUT_SEC"


def future_timeout(fut: Future[T], timeout: timedelta) -> Future[T]:
    """Return a future of the same result, or of a TimeoutError. An object that is no future is returned unchanged."""
    return tft_pg.future_timeout(fut, timeout) if isinstance(fut, Future) else fut


def future_wait(fut: Future[T], timeout: timedelta) -> T:
    """Return the value of a future. Raises: its error. TimeoutError: it was not done in time."""
    return tft_pg.future_wait(fut, timeout) if isinstance(fut, Future) else fut.wait()


@final
class _TimeoutManager:
    """The timer of this process, with the attributes that torchft's tests use.

    Its thread lives while a time-out is pending, and a time-out that is over is dropped at once. So there is no queue
    to clear and no thread to stop.
    """

    def __init__(self) -> None:
        self._del_queue: SimpleQueue[Any] = SimpleQueue()

    @property
    def _watchdog_interval(self) -> timedelta | None:
        """After how long a stuck timer ends the process, for the next thread of the timer. None: never."""
        return watchdog_timeout()

    @_watchdog_interval.setter
    def _watchdog_interval(self, interval: timedelta | None) -> None:
        if interval is None:
            os.environ.pop(WATCHDOG_TIMEOUT_SEC, None)
        else:
            os.environ[WATCHDOG_TIMEOUT_SEC] = str(interval.total_seconds())

    def _clear_del_queue(self) -> int:
        """Empty the queue, which only a caller has filled. Returns: how many entries it had."""
        entries = self._del_queue.qsize()
        for _ in range(entries):
            self._del_queue.get()
        return entries

    def shutdown(self) -> None:
        """Do nothing, because the thread ends with the last time-out."""


_TIMEOUT_MANAGER: Final = _TimeoutManager()
