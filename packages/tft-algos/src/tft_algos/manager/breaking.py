"""Ending what runs in a quorum that a loss has broken.

A reduction that waits for the dead waits for ever, or for as long as its time-out says. So when the loss of a member is
told, the process group of that quorum is aborted, whatever it does: rendezvous or reduction. It happens a moment
after the notice, for a reduction that has its data already shall end. The quorum may be over by then, and the group
built anew for the next one: that one is not touched.

Law of this file: which quorum the group belongs to at this moment, and its abort. What is broken is decided elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, final

from tft_algos.manager.clock import SystemClock
from tft_algos.manager.parts import Clock, Group
from tft_coord.core.types import QuorumKey
from tft_pg.threads import join_within

ABORT_AFTER_S: Final = 0.05
AGAIN_S: Final = 0.02


@final
class Breaker:
    """Aborts a process group on behalf of one quorum at a time.

    Args:
        group: the process group; configured inside `configuring` only.
        clock: measures the moment after a notice; None: the system's.
    """

    def __init__(self, group: Group, clock: Clock | None = None) -> None:
        self._group = group
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._key: QuorumKey | None = None  # that the group is configured for, or is being configured for
        self._configuring = False
        self._broken: QuorumKey | None = None
        self._closing = threading.Event()
        self._starting = threading.Lock()  # who closes sees each thread either started or not at all
        self._threads: list[threading.Thread] = []

    @contextmanager
    def configuring(self, key: QuorumKey) -> Iterator[None]:
        """Mark the group as being built for this quorum. From now on, only this quorum can be aborted."""
        with self._lock:
            self._key = key
            self._configuring = True
        try:
            yield
        finally:
            with self._lock:
                self._configuring = False

    def break_quorum(self, key: QuorumKey) -> None:
        """Abort what runs in that quorum, soon; returns at once. A second notice for it changes nothing."""
        if self._broken == key:
            return
        self._broken = key
        self._start(key, ABORT_AFTER_S)

    def break_all(self) -> None:
        """Abort whatever runs, for this replica group is lost; returns at once."""
        self._start(None, 0.0)

    def close(self, *, wait: bool) -> None:
        """End; nothing is aborted any more."""
        with self._starting:
            self._closing.set()
            threads = list(self._threads)
        if wait:
            for thread in threads:
                join_within(thread)

    def _start(self, key: QuorumKey | None, after_s: float) -> None:
        with self._starting:
            if self._closing.is_set():
                return
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=self._run, args=(key, after_s), name="tft-break", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, key: QuorumKey | None, after_s: float) -> None:
        wait_s = after_s
        while not self._clock.wait(self._closing, wait_s):
            with self._lock:
                if key is not None and self._key != key:
                    return
                self._group.abort()
                if not self._configuring:
                    return
            # An abort that came just before `configure` began has ended nothing; until it has begun and ended, repeat.
            wait_s = AGAIN_S
