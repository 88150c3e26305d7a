"""One `configure` in progress, which can be ended from outside.

Building a group means waiting for others in C++ code that listens to nobody. So each attempt has a guard: a thread
that sleeps until the attempt is over, or is told to stop, or its deadline passes; in the last two cases it breaks
whatever the builder waits on, again and again (the builder may be on its way into the next wait), until the builder
has come out. The law of this file: no store, no backend; builders say how to break their waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import final

from tft_pg.errors import ConfigureFailed, ProcessGroupError, Where
from tft_pg.threads import join_within

__all__ = ["Attempt"]

# Builders that can tell who is missing do so at the deadline itself; the guard is for those that can't.
_GRACE_S = 0.25
_SWEEP_S = 0.005


@final
class Attempt:
    """A context manager round the building of one group.

    Args:
        where: the group to be.
        timeout: how long building may take.
    """

    def __init__(self, where: Where, timeout: timedelta) -> None:
        self.where = where
        self.timeout = timeout
        self._deadline_s = time.monotonic() + timeout.total_seconds()
        self._changed = threading.Condition()
        self._breakers: list[Callable[[], None]] = []
        self._finished = False
        self._stopped_by: ProcessGroupError | None = None
        self._thread = threading.Thread(target=self._guard, name="tft-pg-configure-guard", daemon=True)

    def __enter__(self) -> Attempt:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._finished = True
            self._changed.notify_all()
        join_within(self._thread)

    def stop(self, error: ProcessGroupError) -> None:
        """Make the builder come out with this error; returns at once; the first error counts."""
        with self._changed:
            if self._stopped_by is None:
                self._stopped_by = error
            self._changed.notify_all()

    def break_with(self, breaker: Callable[[], None]) -> None:
        """Name a way to end what the builder waits on next; must be harmless when it waits on nothing.

        Raises: the error of `stop`, if that has come already.
        """
        with self._changed:
            self._breakers.append(breaker)
        self.check()

    def check(self) -> None:
        """Raises: the error of `stop`, or ConfigureFailed after the guard has acted on the deadline."""
        with self._changed:
            if self._stopped_by is not None:
                raise self._stopped_by

    def remaining(self) -> timedelta:
        """Time until the deadline, never less than a millisecond (torch takes zero for no limit)."""
        return timedelta(seconds=max(self._deadline_s - time.monotonic(), 0.001))

    def deadline_passed(self, waited_for: str, *, missing_ranks: tuple[int, ...] = ()) -> ConfigureFailed:
        """The error of an attempt whose time is up."""
        return ConfigureFailed(
            f"no group was built within {self.timeout.total_seconds():g} s ({self.where}): {waited_for}; "
            "ask for a new quorum and configure under its prefix",
            where=self.where,
            missing_ranks=missing_ranks,
        )

    def _guard(self) -> None:
        wait_s = self.remaining().total_seconds() + _GRACE_S
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._stopped_by is not None, wait_s)
            if self._stopped_by is None and not self._finished:
                self._stopped_by = self.deadline_passed("the store or a peer did not answer")
        while True:
            with self._changed:
                if self._finished:
                    return
                breakers = tuple(self._breakers)
            for breaker in breakers:
                breaker()
            with self._changed:
                self._changed.wait_for(lambda: self._finished, _SWEEP_S)
