"""A connection between each two ranks of a group: when one end lets go of it, the other end knows.

A library that moves data between devices may not notice that a peer is gone, or has let go: over shared memory and
NVLink there is nothing that could break, and a kernel waits for ever. So the ranks hold plain TCP connections to each
other. Who aborts, dies, or configures anew cuts its own, and the others know within a moment, also those that wait for
a third rank, also when a rank in between is stopped.

Once a round a word passes over them (see `word_line`); nothing else is ever said.

A connection is taken from who can name the token that its listener put into the store, within the time of the
`configure`; then the listener is closed. A machine that loses its power cuts nothing, so the kernel asks after silent
ends by itself, and cuts for those that don't answer. The law of this file: connections and their end; no library, no
decision about what an end means, and no byte is read here after the greeting.
"""

from __future__ import annotations

import os
import secrets
import select
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import final

from tft_pg.backends.attempt import Attempt
from tft_pg.calls import Place
from tft_pg.errors import ConfigureFailed
from tft_pg.forks import Inheritance, forks_wait, let_go_in_child
from tft_pg.sockets import Endpoint
from tft_pg.threads import join_within

__all__ = ["Lifeline"]

_HELLO = struct.Struct("!16sI")
_TOKEN_BYTES = 16
_RECORD_BYTES_MAX = 256
_NAME_BYTES_MAX = 100
_LOOK_S = 0.02
# Callers that are none of the group's must not keep out those that are: so many are heard out beside the ranks, and who
# comes then takes the place of the one that has been silent for the longest.
_STRANGERS = 64
_BACKLOG = 1024
# The kernel of a machine answers these, so only one that is gone is cut off, and not a process that is stopped.
_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 3
_UNANSWERED_MS = 1000 * (_KEEPALIVE_IDLE_S + _KEEPALIVE_PROBES * _KEEPALIVE_INTERVAL_S)


@dataclass(frozen=True)
class _Invitation:
    """Where one rank listens, and what to say there."""

    token: bytes = field(repr=False)
    port: int
    address: str
    name: str = ""  # of the rank's replica, for messages

    def record(self) -> bytes:
        name = self.name.replace(" ", "_").encode("ascii", "replace")[:_NAME_BYTES_MAX]
        return f"{self.token.hex()} {self.port} {self.address} ".encode() + name

    @property
    def place(self) -> Place:
        """Where to call."""
        return Place(socket.AF_INET6 if ":" in self.address else socket.AF_INET, (self.address, self.port))

    @classmethod
    def read(cls, record: bytes, rank: int) -> _Invitation:
        """Raises: ConfigureFailed: it is none."""
        try:
            if len(record) > _RECORD_BYTES_MAX:
                raise ValueError("too long")
            token, port, address, name = record.decode("ascii").split(" ")
            invitation = cls(bytes.fromhex(token), int(port), address, name)
            if len(invitation.token) != _TOKEN_BYTES or not 0 <= invitation.port < 1 << 16:
                raise ValueError("out of range")
        except ValueError as error:
            raise ConfigureFailed(
                f"rank {rank} has put something else than its address into the store ({error}); give each kind of "
                "group a prefix of its own"
            ) from error
        return invitation


@final
class Lifeline:
    """One rank's connections to all others.

    Args:
        rank: of this process.
        world_size: of the group.
        address: numeric, of this machine, to listen on.
        name: of this rank's replica, for the others' messages.
    Raises: ConfigureFailed: nothing can listen there.

    It is a context manager: inside, its connections may be used, and stay open also where `end` cuts them.
    """

    def __init__(self, rank: int, world_size: int, address: str, name: str = "") -> None:
        self._rank = rank
        self._world_size = world_size
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._peers: dict[int, socket.socket] = {}
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._ended_because = ""
        self._in_use = threading.Lock()
        self.is_exchanging = False  # set by who exchanges a word
        self._names: dict[int, str] = {}
        self._wakes = (-1, -1)  # the read end and the write end of a pipe
        self._called: set[Endpoint] = set()
        self._places: dict[int, Place] = {}  # where the others listen
        self._thread: threading.Thread | None = None
        self._invitation = _Invitation(self._token, 0, address, name)
        with forks_wait():  # a child that is forked meanwhile would keep the listener
            if world_size > 1:
                self._listen(address, name)
            let_go_in_child(self)

    def _listen(self, address: str, name: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigureFailed(f"nothing can listen on {address} ({error}); name another hostname") from error
        self._listener.setblocking(False)
        self._invitation = _Invitation(self._token, self._listener.getsockname()[1], address, name)

    def record(self) -> bytes:
        """What the other ranks must know; no two are the same."""
        return self._invitation.record()

    def unconnected(self) -> dict[int, list[Place]]:
        """Where those ranks listen to which there is no connection yet."""
        return {rank: [place] for rank, place in self._places.items() if rank not in self._peers}

    def connect(self, records: Sequence[bytes], attempt: Attempt) -> None:
        """Connect to every other rank; blocks until all are there.

        Args:
            records: of all ranks, in order.
            attempt: ends the wait.
        Raises: ConfigureFailed: a rank can't be reached; the attempt's error. Nothing is left open then.
        """
        self.call(records, attempt)
        self.take_calls(attempt)

    def call(self, records: Sequence[bytes], attempt: Attempt) -> None:
        """Connect to the ranks below this one; `take_calls` is to follow. Arguments and errors as for `connect`."""
        try:
            invitations = [_Invitation.read(record, rank) for rank, record in enumerate(records)]
            self._places = {rank: each.place for rank, each in enumerate(invitations) if rank != self._rank}
            self._names = {rank: each.name for rank, each in enumerate(invitations) if each.name}
            # Each calls those below it. A call is complete without the other's help, so nobody waits for a waiter.
            called = dict(enumerate(invitations[: self._rank]))
            self._called |= {Endpoint.of((each.address, each.port)) for each in called.values()}
            calls: dict[int, socket.socket] = {}
            try:
                with forks_wait():  # a child could not tell whose a socket is that calls nobody yet
                    for rank, invitation in called.items():
                        calls[rank] = socket.socket(invitation.place.family, socket.SOCK_STREAM)
                        _begin_call(calls[rank], rank, invitation, attempt)
                for rank, invitation in called.items():
                    _finish_call(calls[rank], rank, invitation, _HELLO.pack(invitation.token, self._rank), attempt)
                    self._peers[rank] = calls.pop(rank)
            finally:
                for connection in calls.values():
                    connection.close()
        except BaseException:
            self.end()
            raise

    def take_calls(self, attempt: Attempt) -> None:
        """Wait for the ranks above this one to connect, and listen no more. Raises: as `connect`."""
        try:
            self._take_calls(attempt)
        except BaseException:
            self.end()
            raise
        finally:
            if self._listener is not None:
                self._listener.close()

    def _take_calls(self, attempt: Attempt) -> None:
        if self._listener is None:
            return
        callers: dict[socket.socket, bytes] = {}
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                while len(self._peers) < self._world_size - 1:
                    attempt.check()
                    ready = [key.fileobj for key, _ in selector.select(_LOOK_S)]
                    for caller in ready:
                        if caller is not self._listener:
                            self._hear(caller, selector, callers)  # type: ignore[arg-type]
                    if self._listener in ready:  # last, so that nobody who has just spoken makes room
                        self._accept(selector, callers)
        finally:
            for caller in callers:
                caller.close()

    def _accept(self, selector: selectors.BaseSelector, callers: dict[socket.socket, bytes]) -> None:
        assert self._listener is not None
        try:
            caller, _ = self._listener.accept()
        except OSError:  # it has hung up already
            return
        if len(callers) >= self._world_size + _STRANGERS:
            # A rank speaks as soon as it is through, so it is never the one that has been silent for the longest.
            oldest = next(iter(callers))
            selector.unregister(oldest)
            del callers[oldest]
            oldest.close()
        caller.setblocking(False)
        _set_options(caller)
        callers[caller] = b""
        selector.register(caller, selectors.EVENT_READ)

    def _hear(
        self, caller: socket.socket, selector: selectors.BaseSelector, callers: dict[socket.socket, bytes]
    ) -> None:
        try:
            said = caller.recv(_HELLO.size - len(callers[caller]))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        callers[caller] += said
        if said and len(callers[caller]) < _HELLO.size:
            return
        selector.unregister(caller)
        hello = callers.pop(caller)
        if len(hello) == _HELLO.size:
            token, rank = _HELLO.unpack(hello)
            known = secrets.compare_digest(token, self._token)
            if known and self._rank < rank < self._world_size and rank not in self._peers:
                self._peers[rank] = caller
                return
        caller.close()

    def cut_by(self) -> int | None:
        """The rank whose connection has ended by now, before `watch`; None if all are there."""
        poll = select.poll()
        ranks = {peer.fileno(): rank for rank, peer in self._peers.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLRDHUP)  # a peer that is ahead may have sent a word
        return next((ranks[descriptor] for descriptor, _ in poll.poll(0)), None)

    def watch(self, on_cut: Callable[[int], None]) -> None:
        """From now on be told of the first connection that ends.

        Args:
            on_cut: called at most once, in the watch's thread, with the rank at the other end; never after `settle`.
        """
        if not self._peers:
            return
        self._wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # The thread holds the connections, not this object: one that nobody holds any more ends its thread too.
        self._thread = threading.Thread(
            target=_watch,
            args=(dict(self._peers), self._wakes, on_cut, self._in_use),
            name="tft-pg-lifeline",
            daemon=True,
        )
        self._thread.start()

    def end(self, because: str = "") -> None:
        """Cut every connection, here and at the peers; returns at once. Any thread, any number of times.

        Args:
            because: why, for who uses the connections; the first counts.
        """
        with self._lock:
            if self._ended:
                return
            self._ended_because = because
            self._ended = True
            for peer in self._peers.values():
                _cut(peer)
            if self._thread is not None:
                # Written, not closed: a forked child may hold this end of the pipe too.
                os.write(self._wakes[1], b"x")
        if self._listener is not None:
            self._listener.close()
        self._close_unused()

    def _close_unused(self) -> None:
        """Close the connections that were cut, unless somebody still uses them: who does, closes them at last."""
        if self._thread is None and self._in_use.acquire(blocking=False):  # else the watch's thread does it
            try:
                for peer in self._peers.values():
                    peer.close()
            finally:
                self._in_use.release()

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return self._ended

    @property
    def ended_because(self) -> str:
        """Why, as it was told."""
        return self._ended_because

    def __enter__(self) -> dict[int, socket.socket]:
        """The connections by rank, for one user at a time. They may have been closed before: ask `ended` first."""
        self._in_use.acquire()
        return self._peers

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._in_use.release()
        if self._ended:
            self._close_unused()

    def name_of(self, rank: int) -> str:
        """A rank with its replica, for a sentence."""
        name = self._names.get(rank)
        return f"rank {rank} (replica {name})" if name else f"rank {rank}"

    def settle(self) -> None:
        """Wait until nothing is left, after `end`; some seconds at most."""
        if self._thread is not None and self._thread is not threading.current_thread():
            join_within(self._thread)

    def forked(self) -> Inheritance:
        """In a child: no connection is held, and `end` cuts nothing of the parent's."""
        wakes = () if self._ended else self._wakes  # after its end the thread closes them
        self._ended = True
        self._lock, self._in_use = threading.Lock(), threading.Lock()
        own = Endpoint.of((self._invitation.address, self._invitation.port))
        return Inheritance(wakes, local={own} if own.port else (), remote=self._called)

    def __del__(self) -> None:
        self.end()


def _begin_call(connection: socket.socket, rank: int, invitation: _Invitation, attempt: Attempt) -> None:
    connection.setblocking(False)
    _set_options(connection)
    try:
        connection.connect_ex((invitation.address, invitation.port))
    except OSError as error:  # no address at all
        raise _unreachable(rank, invitation, error, attempt) from error


def _finish_call(connection: socket.socket, rank: int, invitation: _Invitation, hello: bytes, attempt: Attempt) -> None:
    try:
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        while not poll.poll(_LOOK_S * 1000):
            attempt.check()
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        connection.sendall(hello)  # fits into any buffer
    except OSError as error:
        attempt.check()
        raise _unreachable(rank, invitation, error, attempt) from error


def _unreachable(rank: int, invitation: _Invitation, error: OSError, attempt: Attempt) -> ConfigureFailed:
    return ConfigureFailed(
        f"rank {rank} can't be reached at {invitation.address} port {invitation.port} ({error.strerror}); ask for a "
        "new quorum, or have that rank listen on another hostname",
        where=attempt.where,
    )


def _set_options(connection: socket.socket) -> None:
    """Have the kernel notice that the other machine is gone, and send a word at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _cut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other end was faster
        return


def _watch(
    peers: dict[int, socket.socket],
    wakes: tuple[int, int],
    on_cut: Callable[[int], None],
    in_use: threading.Lock,
) -> None:
    wake_read, wake_write = wakes
    poll = select.poll()
    poll.register(wake_read, select.POLLIN)
    ranks = {peer.fileno(): rank for rank, peer in peers.items()}
    for descriptor in ranks:
        poll.register(descriptor, select.POLLRDHUP)  # a word that comes wakes nobody here
    ended = [descriptor for descriptor, _ in poll.poll()]
    if wake_read not in ended:
        on_cut(ranks[ended[0]])
        wake = select.poll()
        wake.register(wake_read, select.POLLIN)
        wake.poll()
    with in_use:  # who waits for a word there was woken by the cut
        for peer in peers.values():
            peer.close()
    os.close(wake_read)
    os.close(wake_write)
