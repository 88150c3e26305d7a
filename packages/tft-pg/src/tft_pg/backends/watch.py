"""A watch on a group's connections, which ends all of them on demand or when one of them has ended.

In a collective of three or more ranks, one rank may die while the others wait for each other. The expected data never
comes, and nothing reports that. But the connection to the dead rank has ended, and the kernel reports that. So each
group has a watch: one thread that sleeps until any of the group's connections ends. The watch gives operations that
already have their data a moment to finish. Then it ends the other connections, so that the operations of all ranks
fail.

The watch holds a duplicate of each connection. The owner closes its own descriptor as soon as it sees the end, and all
information with it. A duplicate keeps a connection open for the peer after the owner has closed it, as Gloo does after
a timeout. So the watch also checks regularly whether the owner still has all connections. A cut cable ends no
connection, so the watch also checks for repeated retransmissions.

Law of this file: it looks at connections and never reads from them.
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

# A finished peer may disconnect at once. The exchange between the other ranks may still finish within this time.
_GRACE_S = 0.05
# An abort ends everything within 0.2 s. These times and the last waiter's check add up to less.
_PASS_S = 0.04
_LET_GO_S = 0.02
# After the shutdown the owner closes its connections at once, unless the machine is busy.
_CLOSE_S = 0.5
_LOOK_S = 0.25
_MOMENT_S = 0.001
_QUIET_CHECKS = 3
# The kernel doubles its wait each time, after 0.2 s and a round trip at first. This many retransmissions take 1.4 s.
_RETRANSMITS_MAX = 3
_RETRANSMITS_SUSPECTED = 2  # after 0.8 s


@final
class Watch:
    """A watch that holds some connections of this process until all of them have ended.

    Args:
        inodes: the connections.
        on_severed: called once, in the watch's thread, after the shutdown of the connections. The call may block.
        needed: the number of connections that belong to the group; by default all. The others belong to strangers that
            have connected to the owner's listener. Nothing distinguishes them, but a stranger's end has no effect.
        on_suspicion: called once, in a separate thread, when the other end of a connection may be lost. Its findings of
            the first half second are available when the loss is certain.
    """

    def __init__(
        self,
        inodes: Collection[int],
        on_severed: Callable[[], None],
        *,
        needed: int | None = None,
        on_suspicion: Callable[[], None] | None = None,
    ) -> None:
        self._held = sockets.hold(inodes)
        for held in self._held:
            held.hide_from_programs()
        self._needed = len(inodes) if needed is None else needed
        self._strangers: frozenset[int] = frozenset()  # duplicates of the strangers' connections that have ended
        self._all_there = len(self._held) == len(inodes)
        self._lock = threading.Lock()
        self._on_severed = on_severed
        self._severed_s: float | None = None
        self._on_suspicion = on_suspicion
        self._silent: tuple[Endpoint, ...] = ()
        self._stopped = False
        self._closed = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="tft-pg-watch", daemon=True)
        let_go_in_child(self)
        self._thread.start()

    @property
    def severed_s(self) -> float | None:
        """Return when the connections were shut down and closed by their owner, on the monotonic clock, or None."""
        return self._severed_s

    @property
    def silent(self) -> tuple[Endpoint, ...]:
        """Return the remote ends that stopped acknowledging data, if that has ended the group."""
        return self._silent

    def end(self) -> None:
        """End every connection, here and at the peers, and the watch. Returns at once. Any thread may call this."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            # Written, not closed: a forked child may hold this end of the pipe too.
            os.write(self._wake_write, b"x")

    def join(self) -> None:
        """Wait, after `end`, until the watch has released everything, for some seconds at most."""
        join_within(self._thread)

    def forked(self) -> Inheritance:
        """Release the connections in a forked child. `end` then has no effect on the parent's connections."""
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
            if self._on_suspicion is not None and max(retransmits.values(), default=0) >= _RETRANSMITS_SUSPECTED:
                threading.Thread(target=self._on_suspicion, name="tft-pg-doubt", daemon=True).start()
                self._on_suspicion = None
            silent = [held for held, times in retransmits.items() if times >= _RETRANSMITS_MAX]
            if silent:
                self._silent = tuple(end for end in (held.remote_end() for held in silent) if end is not None)
                break
        wake.poll(_GRACE_S * 1000)
        self._wait_for_silence()
        self._sever()
        self._severed_s = time.monotonic()
        self._on_severed()
        wake.poll()
        with self._lock:  # `end` writes under it
            # First, because a child that is forked after this must not take these numbers for the watch's.
            self._closed = True
            sockets.let_go(self._held)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _are_strangers(self, ended: frozenset[int]) -> bool:
        """Return whether the ended connections belong to strangers.

        That requires more connections than needed. The owner must also keep the ended ones, because the owner closes a
        member's connection and keeps a stranger's.
        """
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
        """End the connections. Reading stops first, so that Gloo closes its sockets by itself.

        Gloo forgets a sending operation if the connection ends before Gloo has read the end of the stream.
        """
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

    def _wait_for_silence(self) -> None:
        """Wait until no data moves any more, because Gloo forgets operations that wait for half a message."""
        deadline_s = time.monotonic() + _PASS_S
        before = None
        num_quiet = 0
        while num_quiet < _QUIET_CHECKS and time.monotonic() < deadline_s:
            now = [held.traffic() for held in self._held]
            quiet = now == before and not any(held.queued_bytes() for held in self._held)
            num_quiet = num_quiet + 1 if quiet else 0
            before = now
            time.sleep(_MOMENT_S)
