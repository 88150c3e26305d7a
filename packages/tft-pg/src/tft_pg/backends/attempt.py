"""One `configure` in progress, which can be ended from outside.

Building a group means waiting for others in C++ code that listens to nobody. So each attempt has a guard: a thread
that sleeps until the attempt is over, or is told to stop, or its deadline passes; in the last two cases it breaks
whatever the builder waits on, again and again (the builder may be on its way into the next wait), until the builder
has come out. An attempt goes through phases, each with a deadline of its own, see `patience`. The law of this file: no
store, no backend; builders say how to break their waits.
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
from tft_pg.errors import ConfigureFailed, ProcessGroupError, Where
from tft_pg.threads import join_within

__all__ = ["EXAMINED_AFTER_S", "Attempt"]

# Builders that can tell who is missing do so at the deadline itself; the guard is for those that can't.
_GRACE_S = 0.5
_SWEEP_S = 0.005
# An answer that the examiner has asked the store for takes less, unless the store is stopped.
_ANSWER_S = 0.5
_SEVERED_WITHIN_S = 5.0
# A group whose ranks are all there is built within milliseconds. What takes longer is looked into.
EXAMINED_AFTER_S = 0.3
# Where the ordinary time-out is the only bound, it is looked into so long before that.
_EXAMINING_S = 2.0


@final
class Attempt:
    """A context manager round the building of one group.

    Args:
        where: the group to be.
        timeout: how long building may take.
        patience: bounds each phase; None: only the time-out does.
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
        self._late: Callable[[], ProcessGroupError] | None = None
        self._examine: Callable[[], None] | None = None
        self._changed = threading.Condition()
        self._breakers: list[Callable[[], None]] = []
        self._severs: list[Callable[[], None]] = []  # those that break a question to the store
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
        # What these hold holds the attempt: a group's last traces would be left to the garbage collector.
        self._late, self._examine = None, None
        self._breakers.clear()
        self._severs.clear()

    def _end_examiner(self, examiner: threading.Thread) -> None:
        """Wait for it. A question to a stopped store is broken, whose connection is of no use to the next attempt."""
        examiner.join(_ANSWER_S)
        give_up_s = time.monotonic() + _SEVERED_WITHIN_S
        while self._severs and examiner.is_alive() and time.monotonic() < give_up_s:
            for sever in self._severs:
                sever()
            examiner.join(_SWEEP_S)
        join_within(examiner, 0.0 if self._severs else _SEVERED_WITHIN_S)

    @property
    def is_bounded(self) -> bool:
        """Whether each phase has seconds only, because the next quorum is another chance."""
        return self._patience is not None

    @property
    def limit_s(self) -> float:
        """How long the phase may take, in seconds."""
        return self._limit_s

    @property
    def goes_on(self) -> bool:
        """Whether the builder still builds, and nothing has stopped it."""
        return not self._finished and self._stopped_by is None

    def enter(
        self,
        phase: Phase | None,
        *,
        late: Callable[[], ProcessGroupError] | None = None,
        examine: Callable[[], None] | None = None,
    ) -> None:
        """Begin a phase; the one before has succeeded.

        Args:
            phase: which; None: one that is bounded by the time-out alone.
            late: makes the error, on the guard's thread, where the builder does not notice by itself that the time of
                the phase is up.
            examine: called on a thread of its own if the phase takes longer than it should: at once in a phase that is
                bounded by seconds, and else as much before its end. It looks for the reason, until `goes_on` is false,
                and may stop the attempt.
        Raises: the error of `stop`, if that has come already.
        """
        now_s = time.monotonic()
        with self._changed:
            self._leave_phase(now_s)
            self._phase, self._phase_began_s = phase, now_s
            self._limit_s, self._deadline_s = self.timeout.total_seconds(), self._end_s
            if self._patience is not None and phase is not None:
                self._limit_s = self._patience.bound_s(phase, self._limit_s)
                self._deadline_s = min(now_s + self._limit_s, self._end_s)
            self._late = late
            self._examine = examine
            if min(self._deadline_s + _GRACE_S, self._examined_at_s() if examine else math.inf) < self._wakes_s:
                self._changed.notify_all()
        self.check()

    def succeeded(self) -> None:
        """Note that the last phase has succeeded too."""
        with self._changed:
            self._leave_phase(time.monotonic())

    def failed(self) -> None:
        """Note that the phase has failed; it gets more time the next time, if its time was up."""
        with self._changed:
            phase, self._phase = self._phase, None
            if self._patience is not None and phase is not None and time.monotonic() >= self._deadline_s:
                self._patience.passed(phase, self.timeout.total_seconds(), self.where.world_size or 1)

    def _leave_phase(self, now_s: float) -> None:
        phase, self._phase = self._phase, None
        if self._patience is not None and phase is not None:
            self._patience.succeeded(phase, now_s - self._phase_began_s, self.where.world_size or 1)

    def stop(self, error: ProcessGroupError) -> None:
        """Make the builder come out with this error; returns at once; the first error counts."""
        with self._changed:
            if self._stopped_by is None:
                self._stopped_by = error
            self._changed.notify_all()

    def break_with(self, breaker: Callable[[], None], *, severs_store: bool = False) -> None:
        """Name a way to end what the builder waits on next; must be harmless when it waits on nothing.

        Args:
            breaker: ends it.
            severs_store: it ends a question to the store. The examiner may wait for one when the builder is done.
        Raises: the error of `stop`, if that has come already.
        """
        with self._changed:
            self._breakers.append(breaker)
            if severs_store:
                self._severs.append(breaker)
        self.check()

    def check(self) -> None:
        """Raises: the error of `stop`, or of the phase after the guard has acted on its deadline."""
        with self._changed:
            if self._stopped_by is not None:
                raise self._stopped_by

    def remaining(self) -> timedelta:
        """Time until the deadline of the phase, never less than a millisecond (torch takes zero for no limit)."""
        return timedelta(seconds=max(self._deadline_s - time.monotonic(), 0.001))

    def deadline_passed(
        self, waited_for: str, *, missing_ranks: tuple[int, ...] = (), unreached: Mapping[int, str] | None = None
    ) -> ConfigureFailed:
        """The error of an attempt whose time is up."""
        return ConfigureFailed(
            f"no group was built within {self._limit_s:g} s ({self.where}): {waited_for}; "
            "ask for a new quorum and configure under its prefix",
            where=self.where,
            missing_ranks=missing_ranks,
            unreached=unreached,
        )

    def _nobody_answered(self) -> ConfigureFailed:
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
        """Wait until the builder is done, or is to be stopped; phases begin meanwhile, each with its own deadline."""
        with self._changed:
            while not self._is_over():
                now_s = time.monotonic()
                left_s = self._deadline_s + _GRACE_S - now_s
                if left_s <= 0:
                    self._stopped_by = self._late() if self._late is not None else self._nobody_answered()
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
