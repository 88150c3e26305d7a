"""The one way to a rank's step: every thread tells its events here, and here only.

Whoever delivers an event takes the mailbox's lock, has the core handle it, lets go of the lock, and performs what was
decided, in order. So nothing that blocks, and no code of the user's, ever runs under the lock. Readers get a frozen
status, and wait for no lock unless an event has just changed it.

A signal handler may interrupt a thread in the midst of an event. What it tells is then kept, and handled next.

Law of this file: the lock of the step, and who performs what. What is decided stands in `tft_coord.core.step`.
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
        settings: of its core.
        monotonic: the time, in seconds.
    """

    def __init__(self, settings: StepSettings, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._core = StepCore(settings)
        self._lock = threading.RLock()  # taken again only by a signal handler of the thread that holds it
        self._handles = False  # the thread that holds the lock is in the midst of an event
        self._posted: deque[Event] = deque()
        self._performers: Mapping[type, Perform] = {}
        self._last = self._core.status  # the newest that somebody has read
        self._status: StepStatus | None = self._last  # None: an event has come since
        let_go_in_child(self)

    def performs(self, performers: Mapping[type, Perform]) -> None:
        """Say who performs which effects, whichever thread is told them. Call it once, before other threads know this.

        Args:
            performers: by kind of effect. Effects of all other kinds are returned to the thread that told the event.
        """
        self._performers = performers

    @property
    def now_ms(self) -> int:
        """Return the core's time."""
        return round(self._monotonic() * 1_000)

    @property
    def status(self) -> StepStatus:
        """Return what the step is like. Inside a signal handler that interrupts an event: as it was before."""
        status = self._status
        return status if status is not None and not self._posted else self._read()

    def forked(self) -> Inheritance:
        """In a forked child, which has a copy of a lock that another thread of its parent may hold: read on without."""
        self._lock = threading.RLock()
        self._handles = False
        self._posted = deque()
        self._status = self._last
        return Inheritance()

    def post(self, event: Event) -> None:
        """Leave an event to whoever comes next; takes no lock, so that a signal handler may call it."""
        self._posted.append(event)

    def tell(self, event: Event) -> Effects:
        """Tell an event, and perform what follows from it.

        Returns: the effects that the caller performs itself, in order.
        Raises: what the core raises about the event; what performing an effect raises, and then the rest is not done.
        """
        if self._posted:
            self._take_posted()
        # All of it in one function: a step tells some ten events, and calls are what they cost.
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
        """Handle what was posted. Nobody waits for what follows from it."""
        effects: Effects = ()
        with self._lock:
            if self._handles:
                return  # a signal handler, in the midst of an event
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
