"""Holding a group's connections, so that they can be ended together: on demand, or because one of them has ended.

In a collective of three or more, a rank may wait for a neighbour that itself waits, or is stopped, while it was a
third one that died: nothing that it waits on ever comes, and nothing says so. But its connection to the dead one has
ended, and the kernel tells. So each group has a watch: one thread that sleeps until any of the group's connections
ends, leaves a moment for operations that have their data already, and then ends the rest, so that everybody's
operations fail.

It holds a duplicate of each connection, because the owner closes its own descriptor as soon as it sees the end, and
with it every trace. A duplicate keeps a connection open for the peer that the owner has closed by itself, as Gloo does
after a time-out, so the watch also looks now and then whether the owner still has all of them. A cut cable ends no
connection, so it also looks whether the kernel sends the same again and again on one of them. The law of this file: it
looks at connections and never reads from them.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Collection
from typing import final

from tft_pg import sockets
from tft_pg.forks import Inheritance, let_go_in_child
from tft_pg.sockets import Endpoint
from tft_pg.threads import join_within

__all__ = ["Watch"]

# A peer that has finished may leave at once; what the others still exchange among themselves must come to its end.
_GRACE_S = 0.05
# An abort ends everything within 0.2 s: these, and what follows until the last waiter has looked, add up to less.
_PASS_S = 0.04
_LET_GO_S = 0.02
# Once all is shut down the owner lets go in no time, unless the machine is busy with something else.
_CLOSE_S = 0.5
_LOOK_S = 0.25
_MOMENT_S = 0.001
_QUIET_LOOKS = 3
# The kernel waits twice as long each time, and 0.2 s and a round trip first: so many in a row are 1.4 s in vain.
_RETRANSMITS_MOST = 3
_RETRANSMITS_DOUBTED = 2  # 0.8 s before


@final
class Watch:
    """Holds some connections of this process until all of them have ended.

    Args:
        inodes: the connections.
        on_severed: called once, in the watch's thread, when they have been shut down; may take its time.
        needed: so many of them are the group's; by default all. The others are strangers', who have called the owner's
            listener. Nothing tells which, but the end of one of those ends nothing.
        on_doubt: called once, in a thread of its own, when the other end of one may be gone; what it finds out within
            half a second is known when that is sure.
    """

    def __init__(
        self,
        inodes: Collection[int],
        on_severed: Callable[[], None],
        *,
        needed: int | None = None,
        on_doubt: Callable[[], None] | None = None,
    ) -> None:
        self._held = sockets.hold(inodes)
        for held in self._held:
            held.hide_from_programs()
        self._needed = len(inodes) if needed is None else needed
        self._strangers: frozenset[int] = frozenset()  # duplicates of those that have ended
        self._all_there = len(self._held) == len(inodes)
        self._lock = threading.Lock()
        self._on_severed = on_severed
        self._severed_s: float | None = None
        self._on_doubt = on_doubt
        self._silent: tuple[Endpoint, ...] = ()
        self._stopped = False
        self._closed = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="tft-pg-watch", daemon=True)
        let_go_in_child(self)
        self._thread.start()

    @property
    def severed_s(self) -> float | None:
        """When the connections had been shut down and their owner had closed them, on the monotonic clock; or None."""
        return self._severed_s

    @property
    def silent(self) -> tuple[Endpoint, ...]:
        """Who acknowledges nothing any more, at the other ends, where that has ended the group."""
        return self._silent

    def end(self) -> None:
        """End every connection, here and at the peers, and the watch; returns at once. Any thread."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            # Written, not closed: a forked child may hold this end of the pipe too.
            os.write(self._wake_write, b"x")

    def join(self) -> None:
        """Wait until the watch has let go of everything, after `end`; some seconds at most."""
        join_within(self._thread)

    def forked(self) -> Inheritance:
        """In a child: no connection is held, and `end` ends nothing of the parent's."""
        self._stopped = True
        self._lock = threading.Lock()
        wakes = () if self._closed else (self._wake_read, self._wake_write)
        return Inheritance(wakes, inodes={held.inode for held in self._held})

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        for held in self._held:
            poll.register(held.duplicate, select.POLLRDHUP)
        wake = select.poll()
        wake.register(self._wake_read, select.POLLIN)
        while self._all_there and all(held.is_owned() for held in self._held):
            ended = frozenset(descriptor for descriptor, _ in poll.poll(_LOOK_S * 1000))
            if ended and not self._are_strangers(ended):
                break
            for descriptor in ended:
                poll.unregister(descriptor)
            self._strangers |= ended
            retransmits = {held: held.retransmits() for held in self._held}
            if self._on_doubt is not None and max(retransmits.values(), default=0) >= _RETRANSMITS_DOUBTED:
                threading.Thread(target=self._on_doubt, name="tft-pg-doubt", daemon=True).start()
                self._on_doubt = None
            silent = [held for held, times in retransmits.items() if times >= _RETRANSMITS_MOST]
            if silent:
                self._silent = tuple(end for end in (held.remote_end() for held in silent) if end is not None)
                break
        wake.poll(_GRACE_S * 1000)
        self._let_messages_pass()
        self._sever()
        self._severed_s = time.monotonic()
        self._on_severed()
        wake.poll()
        with self._lock:  # `end` writes under it
            self._closed = True  # first: a child that is forked from here on must not take these numbers for ours
            sockets.let_go(self._held)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _are_strangers(self, ended: frozenset[int]) -> bool:
        """Whether what has ended can do so without a loss: there is more than is needed, and the owner, who lets go of
        a member that has ended and keeps a stranger, keeps it."""
        if self._wake_read in ended or len(self._held) - len(self._strangers | ended) < self._needed:
            return False
        held = [each for each in self._held if each.duplicate in ended]
        deadline_s = time.monotonic() + _LOOK_S
        while time.monotonic() < deadline_s and not self._stopped:
            if not all(each.is_owned() for each in held):
                return False
            time.sleep(_MOMENT_S)
        return not self._stopped

    def _sever(self) -> None:
        """First no more is read, so that Gloo lets go by itself: it forgets who sends before it has read the end."""
        for held in self._held:
            held.stop_reading()
        self._wait_for_owner(_LET_GO_S)
        for held in self._held:
            held.shut_down()
        self._wait_for_owner(_CLOSE_S)

    def _wait_for_owner(self, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        held = [each for each in self._held if each.duplicate not in self._strangers]
        while any(each.is_owned() for each in held) and time.monotonic() < deadline_s:
            time.sleep(_MOMENT_S)

    def _let_messages_pass(self) -> None:
        """Wait until nothing is under way, or moves any more: Gloo forgets who waits for half a message."""
        deadline_s = time.monotonic() + _PASS_S
        before = None
        num_quiet = 0
        while num_quiet < _QUIET_LOOKS and time.monotonic() < deadline_s:
            now = [held.traffic() for held in self._held]
            quiet = now == before and not any(held.queued_bytes() for held in self._held)
            num_quiet = num_quiet + 1 if quiet else 0
            before = now
            time.sleep(_MOMENT_S)
