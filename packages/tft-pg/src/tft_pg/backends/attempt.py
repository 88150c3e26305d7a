"""One `configure` in progress, which another thread can end.

A build waits for other ranks in C++ code that can't be interrupted. So each attempt has a guard thread. The guard
sleeps until the attempt has finished, is stopped, or exceeds its deadline. In the last two cases it breaks the
builder's waits repeatedly until the builder has returned, because the builder may enter another wait. An attempt goes
through phases, each with its own deadline, see `patience`.

Law of this file: no store, no backend; builders say how to break their waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import final

from tft_pg.backends.patience import Patience, Phase
from tft_pg.errors import ConfigureError, ProcessGroupError, Where
from tft_pg.threads import join_within

__all__ = ["EXAMINED_AFTER_S", "Attempt"]

# Builders that can name the missing ranks raise at the deadline itself. The guard is for the other builders.
_GRACE_S = 0.5
_SWEEP_S = 0.005
# A running store answers the examiner's request within this time.
_ANSWER_S = 0.5
_SEVERED_WITHIN_S = 5.0
# A group whose ranks are all present is built within milliseconds. Slower builds are examined.
EXAMINED_AFTER_S = 0.3
# If the ordinary timeout is the only bound, the examination starts this long before it.
_EXAMINING_S = 2.0


@final
class Attempt:
    """A context manager around the build of one group.

    Args:
        where: the new group's place.
        timeout: how long the build may take.
        patience: bounds each phase; None: only the timeout is a bound.
    """

    def __init__(self, where: Where, timeout: timedelta, patience: Patience | None = None) -> None:
        self.where = where
        self.timeout = timeout
        self._patience = patience
        self._end_s = time.monotonic() + timeout.total_seconds()
        self._phase: Phase | None = None
        self._phase_began_s = 0.0
        self._limit_s = timeout.total_seconds()  # of the phase
        self._deadline_s = self._end_s  # of the phase
        self._timeout_error: Callable[[], ProcessGroupError] | None = None
        self._examine: Callable[[], None] | None = None
        self._changed = threading.Condition()
        self._breakers: list[Callable[[], None]] = []
        self._severs: list[Callable[[], None]] = []  # the breakers that interrupt a request to the store
        self._wakes_s = 0.0  # when the guard looks again by itself; 0: it is awake
        self._finished = False
        self._stopped_by: ProcessGroupError | None = None
        self._thread = threading.Thread(target=self._guard, name="tft-pg-configure-guard", daemon=True)
        self._examiner: threading.Thread | None = None

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
        if self._examiner is not None:
            self._end_examiner(self._examiner)
        # These callbacks hold the attempt. Without this, only the garbage collector would free the group.
        self._timeout_error, self._examine = None, None
        self._breakers.clear()
        self._severs.clear()

    def _end_examiner(self, examiner: threading.Thread) -> None:
        """Wait for the examiner. Interrupt its request to a stopped store, whose connection is unusable for the
        next attempt.
        """
        examiner.join(_ANSWER_S)
        give_up_s = time.monotonic() + _SEVERED_WITHIN_S
        while self._severs and examiner.is_alive() and time.monotonic() < give_up_s:
            for sever in self._severs:
                sever()
            examiner.join(_SWEEP_S)
        join_within(examiner, 0.0 if self._severs else _SEVERED_WITHIN_S)

    @property
    def is_bounded(self) -> bool:
        """Return whether each phase has only seconds, because the next quorum is another chance."""
        return self._patience is not None

    @property
    def limit_s(self) -> float:
        """Return how long the phase may take, in seconds."""
        return self._limit_s

    @property
    def goes_on(self) -> bool:
        """Return whether the builder still builds and the attempt is not stopped."""
        return not self._finished and self._stopped_by is None

    def enter(
        self,
        phase: Phase | None,
        *,
        late: Callable[[], ProcessGroupError] | None = None,
        examine: Callable[[], None] | None = None,
    ) -> None:
        """Begin a phase. The previous phase has succeeded.

        Args:
            phase: the phase; None: a phase that only the timeout bounds.
            late: returns the error, on the guard's thread, if the builder does not notice the end of the phase's time.
            examine: called on a separate thread if the phase is slow. In a phase with a bound of seconds that is soon
                after its start, and otherwise 2 s before its end. The callback looks for the reason until `goes_on` is
                false, and may stop the attempt.

        Raises: the error of `stop`, if the attempt is already stopped.
        """
        now_s = time.monotonic()
        with self._changed:
            self._leave_phase(now_s)
            self._phase, self._phase_began_s = phase, now_s
            self._limit_s, self._deadline_s = self.timeout.total_seconds(), self._end_s
            if self._patience is not None and phase is not None:
                self._limit_s = self._patience.bound_s(phase, self._limit_s)
                self._deadline_s = min(now_s + self._limit_s, self._end_s)
            self._timeout_error = late
            self._examine = examine
            if min(self._deadline_s + _GRACE_S, self._examined_at_s() if examine else math.inf) < self._wakes_s:
                self._changed.notify_all()
        self.check()

    def succeeded(self) -> None:
        """Record that the last phase has succeeded too."""
        with self._changed:
            self._leave_phase(time.monotonic())

    def failed(self) -> None:
        """Record that the phase has failed. If its time was up, the phase gets more time the next time."""
        with self._changed:
            phase, self._phase = self._phase, None
            if self._patience is not None and phase is not None and time.monotonic() >= self._deadline_s:
                self._patience.timed_out(phase, self.timeout.total_seconds(), self.where.world_size or 1)

    def _leave_phase(self, now_s: float) -> None:
        phase, self._phase = self._phase, None
        if self._patience is not None and phase is not None:
            self._patience.succeeded(phase, now_s - self._phase_began_s, self.where.world_size or 1)

    def stop(self, error: ProcessGroupError) -> None:
        """End the builder with this error, and return at once. The first error counts."""
        with self._changed:
            if self._stopped_by is None:
                self._stopped_by = error
            self._changed.notify_all()

    def break_with(self, breaker: Callable[[], None], *, severs_store: bool = False) -> None:
        """Register a way to end the builder's next wait. It must be harmless without a wait.

        Args:
            breaker: ends the wait.
            severs_store: the breaker interrupts a request to the store. The examiner may wait for one after the
                builder's end.

        Raises: the error of `stop`, if the attempt is already stopped.
        """
        with self._changed:
            self._breakers.append(breaker)
            if severs_store:
                self._severs.append(breaker)
        self.check()

    def check(self) -> None:
        """Check whether the attempt goes on. Raises: the error of `stop`, or of the phase after its deadline."""
        with self._changed:
            if self._stopped_by is not None:
                raise self._stopped_by

    def remaining(self) -> timedelta:
        """Return the time until the phase's deadline, at least a millisecond (torch takes zero for no limit)."""
        return timedelta(seconds=max(self._deadline_s - time.monotonic(), 0.001))

    def deadline_passed(
        self, reason: str, *, missing_ranks: tuple[int, ...] = (), unreached: Mapping[int, str] | None = None
    ) -> ConfigureError:
        """Return the error of an attempt whose time is up."""
        return ConfigureError(
            f"configure did not finish within {self._limit_s:g} s ({self.where}): {reason}; "
            "ask for a new quorum and configure under its prefix",
            where=self.where,
            missing_ranks=missing_ranks,
            unreached=unreached,
        )

    def _no_answer(self) -> ConfigureError:
        return self.deadline_passed("the store or a peer did not answer")

    def _is_over(self) -> bool:
        return self._finished or self._stopped_by is not None

    def _guard(self) -> None:
        self._wait_for_end()
        while True:
            with self._changed:
                if self._finished:
                    return
                breakers = tuple(self._breakers)
            for breaker in breakers:
                breaker()
            with self._changed:
                self._changed.wait_for(lambda: self._finished, _SWEEP_S)

    def _wait_for_end(self) -> None:
        """Wait until the builder is done or must be stopped. Meanwhile phases begin, each with its own deadline."""
        with self._changed:
            while not self._is_over():
                now_s = time.monotonic()
                left_s = self._deadline_s + _GRACE_S - now_s
                if left_s <= 0:
                    self._stopped_by = self._timeout_error() if self._timeout_error is not None else self._no_answer()
                elif self._examine is None:
                    self._sleep(left_s)
                elif now_s >= self._examined_at_s():
                    self._examiner = threading.Thread(target=self._examine, name="tft-pg-examine", daemon=True)
                    self._examine = None
                    self._examiner.start()
                else:
                    self._sleep(self._examined_at_s() - now_s)

    def _sleep(self, seconds: float) -> None:
        self._wakes_s = time.monotonic() + seconds
        self._changed.wait(seconds)
        self._wakes_s = 0.0

    def _examined_at_s(self) -> float:
        soonest_s = self._phase_began_s + EXAMINED_AFTER_S
        return soonest_s if self.is_bounded else max(soonest_s, self._deadline_s - _EXAMINING_S)
