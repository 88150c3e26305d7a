"""The mailbox of a rank's step, which receives the events of all threads.

A thread that delivers an event takes the mailbox's lock, lets the core handle the event, releases the lock, and
performs the resulting effects in order. So no blocking code, and no code of the user, runs under the lock. Readers get
a frozen status. They take the lock only if an event has changed the status since the last read.

A signal handler may interrupt a thread that handles an event. The handler's event is then kept, and handled next.

Law of this file: the lock of the step, and the performers of its effects. The decisions are in `tft_coord.core.step`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, final

from tft_coord.core.step import Effects, Event, StepCore, StepSettings, StepStatus
from tft_pg.forks import Inheritance, let_go_in_child

Perform = Callable[[Any], object]


@final
class StepMailbox:
    """The mailbox of one rank's step.

    Args:
        settings: settings of its core.
        monotonic: returns the time in seconds.
    """

    def __init__(self, settings: StepSettings, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._core = StepCore(settings)
        self._lock = threading.RLock()  # only a signal handler takes it again, on the thread that holds it
        self._handles = False  # the thread that holds the lock is handling an event
        self._posted: deque[Event] = deque()
        self._performers: Mapping[type, Perform] = {}
        self._last = self._core.status  # the newest status that was read
        self._status: StepStatus | None = self._last  # None: an event has arrived since
        let_go_in_child(self)

    def performs(self, performers: Mapping[type, Perform]) -> None:
        """Set the performers of effects, for any thread that delivers an event.

        Call this once, before other threads start.

        Args:
            performers: by type of effect. Effects of all other types are returned to the thread that delivers the
                event.
        """
        self._performers = performers

    @property
    def now_ms(self) -> int:
        """Return the core's time."""
        return round(self._monotonic() * 1_000)

    @property
    def status(self) -> StepStatus:
        """Return the status of the step.

        In a signal handler that interrupts an event, this is the status before the event.
        """
        status = self._status
        return status if status is not None and not self._posted else self._read()

    def forked(self) -> Inheritance:
        """Reset the locks in a forked child, because other threads of the parent may hold them. Reading still works."""
        self._lock = threading.RLock()
        self._handles = False
        self._posted = deque()
        self._status = self._last
        return Inheritance()

    def post(self, event: Event) -> None:
        """Leave an event for the next delivery or read. Takes no lock, so a signal handler may call this."""
        self._posted.append(event)

    def tell(self, event: Event) -> Effects:
        """Deliver an event, and perform its effects.

        Returns: the effects that the caller performs itself, in order.
        Raises: the core's error about the event, or the error of performing an effect. The remaining effects are then
            not performed.
        """
        if self._posted:
            self._take_posted()
        # One function does everything, because a step delivers about ten events, and the calls are their main cost.
        core = self._core
        with self._lock:
            if self._handles:
                self._posted.append(event)
                return ()
            self._handles = True
            try:
                effects = core.handle(event, round(self._monotonic() * 1_000))
            finally:
                self._status = core.known_status
                self._handles = False
        return self._perform(effects) if effects else effects

    def _perform(self, effects: Effects) -> Effects:
        performers, rest = self._performers, []
        for effect in effects:
            perform = performers.get(type(effect))
            if perform is None:
                rest.append(effect)
            else:
                perform(effect)
        return tuple(rest)

    def _take_posted(self) -> None:
        """Handle the posted events. No caller waits for their effects."""
        effects: Effects = ()
        with self._lock:
            if self._handles:
                return  # in a signal handler that interrupts an event
            self._handles = True
            try:
                while self._posted:
                    effects += self._core.handle(self._posted.popleft(), self.now_ms)
            finally:
                self._status = None
                self._handles = False
        self._perform(effects)

    def _read(self) -> StepStatus:
        if self._posted:
            self._take_posted()
        with self._lock:
            if not self._handles:
                self._last = self._status = self._core.status
            return self._last
