"""Aborting running operations of a quorum that a loss has broken.

A reduction that waits for a lost member waits until its time-out, or for ever. So when a loss is reported, the process
group of that quorum is aborted, during a rendezvous as well as during a reduction. The abort comes a moment after the
notice, so that a reduction that has its data can end. In that moment, the group may have been rebuilt for the next
quorum. A rebuilt group is not aborted.

Law of this file: the current quorum of the group, and its abort. Broken quorums are detected elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, final

from tft_algos.manager.clock import SystemClock
from tft_algos.manager.interfaces import Clock, ProcessGroupLike
from tft_coord.core.types import QuorumKey
from tft_pg.threads import join_within

ABORT_AFTER_S: Final = 0.05
AGAIN_S: Final = 0.02


@final
class QuorumAborter:
    """The aborts of a process group, each on behalf of one quorum.

    Args:
        group: the process group. It is only configured inside `configuring`.
        clock: measures the delay after a notice. None: the system's clock.
    """

    def __init__(self, group: ProcessGroupLike, clock: Clock | None = None) -> None:
        self._group = group
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._key: QuorumKey | None = None  # the quorum for which the group is configured, or is being configured
        self._configuring = False
        self._broken: QuorumKey | None = None
        self._closing = threading.Event()
        self._starting = threading.Lock()  # makes the start of a thread atomic for `close`
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
        """Abort operations of that quorum after a short delay. Returns at once. A second notice for it does nothing."""
        if self._broken == key:
            return
        self._broken = key
        self._start(key, ABORT_AFTER_S)

    def break_all(self) -> None:
        """Abort all operations, because this replica group is lost. Returns at once."""
        self._start(None, 0.0)

    def close(self, *, wait: bool) -> None:
        """End. No abort follows."""
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
            # An abort just before `configure` began had no effect. So repeat it until `configure` has begun and ended.
            wait_s = AGAIN_S
