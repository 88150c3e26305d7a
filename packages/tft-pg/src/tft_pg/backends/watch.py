"""Noticing that a peer has gone while an operation waits for another one.

In a collective of three or more, a rank may wait for a neighbour that itself waits, or is stopped, while it was a
third one that died: nothing that it waits on ever comes, and nothing says so. But its connection to the dead one has
ended, and the kernel tells. So each group has a watch: one thread that sleeps until any of the group's connections
ends, leaves a moment for operations that have their data already, and then ends the rest, so that everybody's
operations fail. The law of this file: it looks at connections and never reads from them.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Collection
from typing import final

from tft_pg import sockets

__all__ = ["Watch"]

# A peer that has finished may leave at once; what the others still exchange among themselves must come to its end.
_GRACE_S = 0.05
_ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


@final
class Watch:
    """Calls a function when one of some connections has ended, unless stopped before.

    Args:
        inodes: the connections, of this process.
        on_loss: called at most once, from the watch's thread.
    """

    def __init__(self, inodes: Collection[int], on_loss: Callable[[], object]) -> None:
        self._on_loss = on_loss
        self._epoll = select.epoll()
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._epoll.register(self._wake_read, select.EPOLLIN)
        # The descriptors themselves, not duplicates: those would keep a connection open that its owner has closed.
        self._lost = sockets.register(self._epoll, inodes, _ENDED) < len(inodes)
        self._thread = threading.Thread(target=self._run, name="tft-pg-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch; returns at once. Any thread."""
        with self._lock:
            if self._wake_write >= 0:
                os.close(self._wake_write)
                self._wake_write = -1

    def join(self) -> None:
        """Wait until the watch has ended, after `stop`."""
        self._thread.join()

    def _run(self) -> None:
        try:
            ended = [] if self._lost else [descriptor for descriptor, _ in self._epoll.poll()]
            if self._wake_read in ended:
                return
            if self._stopped_within(_GRACE_S):
                return
            self._on_loss()
        finally:
            self._epoll.close()
            os.close(self._wake_read)

    def _stopped_within(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
