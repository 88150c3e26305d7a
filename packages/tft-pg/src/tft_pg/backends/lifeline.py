"""A connection between each two ranks of a group, which tells one end when the other end disconnects.

A library that moves data between devices may not notice that a peer is gone or has disconnected. Over shared memory and
NVLink no connection can break, and a kernel waits forever. So the ranks hold plain TCP connections to each other. A
rank that aborts, dies or reconfigures shuts down its own connections. The others notice at once, also if they wait for
a third rank, and also if a rank in between is stopped.

Once a round a word passes over these connections (see `word_line`). They carry no other data.

A listener accepts a connection only from a caller that knows the token. The listener put the token into the store
during the `configure`. Then the listener is closed. A machine without power ends no connection. So the kernel probes
silent ends, and shuts down the connections that don't answer.

Law of this file: connections and their end; no library, no decision about what an end means, and no byte is read here
after the greeting.
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
from tft_pg.calls import ProbeAddress
from tft_pg.errors import ConfigureError
from tft_pg.forks import Inheritance, forks_wait, let_go_in_child
from tft_pg.sockets import Endpoint
from tft_pg.threads import join_within

__all__ = ["Lifeline"]

_HELLO = struct.Struct("!16sI")
_TOKEN_BYTES = 16
_RECORD_BYTES_MAX = 256
_NAME_BYTES_MAX = 100
_LOOK_S = 0.02
# Strangers must not keep out the group's callers. So this many more callers than ranks may wait. A further caller
# replaces the caller that has been silent for the longest.
_STRANGERS = 64
_BACKLOG = 1024
# The kernel answers these probes, so they disconnect only a lost machine and not a stopped process.
_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 3
_UNANSWERED_MS = 1000 * (_KEEPALIVE_IDLE_S + _KEEPALIVE_PROBES * _KEEPALIVE_INTERVAL_S)


@dataclass(frozen=True)
class _Invitation:
    """One rank's listening address, and the token for its callers."""

    token: bytes = field(repr=False)
    port: int
    address: str
    name: str = ""  # of the rank's replica, for messages

    def record(self) -> bytes:
        name = self.name.replace(" ", "_").encode("ascii", "replace")[:_NAME_BYTES_MAX]
        return f"{self.token.hex()} {self.port} {self.address} ".encode() + name

    @property
    def place(self) -> ProbeAddress:
        """Return the place to connect to."""
        return ProbeAddress(socket.AF_INET6 if ":" in self.address else socket.AF_INET, (self.address, self.port))

    @classmethod
    def read(cls, record: bytes, rank: int) -> _Invitation:
        """Parse an invitation. Raises: ConfigureError: the record is not an invitation."""
        try:
            if len(record) > _RECORD_BYTES_MAX:
                raise ValueError("too long")
            token, port, address, name = record.decode("ascii").split(" ")
            invitation = cls(bytes.fromhex(token), int(port), address, name)
            if len(invitation.token) != _TOKEN_BYTES or not 0 <= invitation.port < 1 << 16:
                raise ValueError("out of range")
        except ValueError as error:
            raise ConfigureError(
                f"the store record of rank {rank} is not an address ({error}); use a separate prefix for each kind of "
                "group"
            ) from error
        return invitation


@final
class Lifeline:
    """One rank's connections to all others.

    The object is a context manager. Inside, its connections may be used, and stay open even if `end` shuts them down.

    Args:
        rank: of this process.
        world_size: of the group.
        address: this machine's numeric address to listen on.
        name: of this rank's replica, for the others' messages.

    Raises: ConfigureError: nothing can listen there.
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
        self.is_exchanging = False  # set by the exchange of a word
        self._names: dict[int, str] = {}
        self._wakes = (-1, -1)  # the read end and the write end of a pipe
        self._called: set[Endpoint] = set()
        self._places: dict[int, ProbeAddress] = {}  # the listening addresses of the others
        self._thread: threading.Thread | None = None
        self._invitation = _Invitation(self._token, 0, address, name)
        with forks_wait():  # a child that is forked in the meantime would keep the listener
            if world_size > 1:
                self._listen(address, name)
            let_go_in_child(self)

    def _listen(self, address: str, name: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigureError(
                f"this rank can't listen on {address} ({error}); pass another hostname", is_own=True
            ) from error
        self._listener.setblocking(False)
        self._invitation = _Invitation(self._token, self._listener.getsockname()[1], address, name)

    def record(self) -> bytes:
        """Return the record for the other ranks. No two records are the same."""
        return self._invitation.record()

    def unconnected(self) -> dict[int, list[ProbeAddress]]:
        """Return the listening addresses of the ranks without a connection yet."""
        return {rank: [place] for rank, place in self._places.items() if rank not in self._peers}

    def connect(self, records: Sequence[bytes], attempt: Attempt) -> None:
        """Connect to every other rank, and block until all are connected.

        Args:
            records: of all ranks, in order.
            attempt: ends the wait.

        Raises: ConfigureError: a rank can't be reached; the attempt's error. Nothing is left open then.
        """
        self.connect_lower(records, attempt)
        self.accept_callers(attempt)

    def connect_lower(self, records: Sequence[bytes], attempt: Attempt) -> None:
        """Connect to the lower ranks. `accept_callers` must follow. For arguments and errors see `connect`."""
        try:
            invitations = [_Invitation.read(record, rank) for rank, record in enumerate(records)]
            self._places = {rank: each.place for rank, each in enumerate(invitations) if rank != self._rank}
            self._names = {rank: each.name for rank, each in enumerate(invitations) if each.name}
            # Each rank connects to the lower ranks. Connecting completes without the peer's help, so no circular wait
            # is possible.
            called = dict(enumerate(invitations[: self._rank]))
            self._called |= {Endpoint.of((each.address, each.port)) for each in called.values()}
            connections: dict[int, socket.socket] = {}
            try:
                with forks_wait():  # a forked child could not identify the owner of an unconnected socket
                    for rank, invitation in called.items():
                        connections[rank] = socket.socket(invitation.place.family, socket.SOCK_STREAM)
                        _begin_connect(connections[rank], rank, invitation, attempt)
                for rank, invitation in called.items():
                    _finish_connect(
                        connections[rank], rank, invitation, _HELLO.pack(invitation.token, self._rank), attempt
                    )
                    self._peers[rank] = connections.pop(rank)
            finally:
                for connection in connections.values():
                    connection.close()
        except BaseException:
            self.end()
            raise

    def accept_callers(self, attempt: Attempt) -> None:
        """Wait until the higher ranks have connected, then close the listener. Raises: as `connect`."""
        try:
            self._accept_callers(attempt)
        except BaseException:
            self.end()
            raise
        finally:
            if self._listener is not None:
                self._listener.close()

    def _accept_callers(self, attempt: Attempt) -> None:
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
                            self._read_hello(caller, selector, callers)  # type: ignore[arg-type]
                    if self._listener in ready:  # last, so a caller that has just spoken is not replaced
                        self._accept(selector, callers)
        finally:
            for caller in callers:
                caller.close()

    def _accept(self, selector: selectors.BaseSelector, callers: dict[socket.socket, bytes]) -> None:
        assert self._listener is not None
        try:
            caller, _ = self._listener.accept()
        except OSError:  # the caller has already disconnected
            return
        if len(callers) >= self._world_size + _STRANGERS:
            # A rank speaks as soon as it is connected, so a rank is never the caller with the longest silence.
            oldest = next(iter(callers))
            selector.unregister(oldest)
            del callers[oldest]
            oldest.close()
        caller.setblocking(False)
        _set_options(caller)
        callers[caller] = b""
        selector.register(caller, selectors.EVENT_READ)

    def _read_hello(
        self, caller: socket.socket, selector: selectors.BaseSelector, callers: dict[socket.socket, bytes]
    ) -> None:
        try:
            received = caller.recv(_HELLO.size - len(callers[caller]))
        except BlockingIOError:
            return
        except OSError:
            received = b""
        callers[caller] += received
        if received and len(callers[caller]) < _HELLO.size:
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

    def disconnected_rank(self) -> int | None:
        """Return the rank of the first connection that has ended, before `watch`, or None if all are connected."""
        poll = select.poll()
        ranks = {peer.fileno(): rank for rank, peer in self._peers.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLRDHUP)  # not POLLIN, because a faster peer may have sent a word
        return next((ranks[descriptor] for descriptor, _ in poll.poll(0)), None)

    def watch(self, on_disconnect: Callable[[int], None]) -> None:
        """Start to report the first connection that ends.

        Args:
            on_disconnect: called at most once, in the watch's thread, with the rank at the other end. Not called
                after `settle`.
        """
        if not self._peers:
            return
        self._wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # The thread holds the connections and not this object. So an unreferenced lifeline ends its thread too.
        self._thread = threading.Thread(
            target=_watch,
            args=(dict(self._peers), self._wakes, on_disconnect, self._in_use),
            name="tft-pg-lifeline",
            daemon=True,
        )
        self._thread.start()

    def end(self, because: str = "") -> None:
        """Shut down every connection, here and at the peers, and return at once. Any thread may call this repeatedly.

        Args:
            because: the reason, for users of the connections. The first reason counts.
        """
        with self._lock:
            if self._ended:
                return
            self._ended_because = because
            self._ended = True
            for peer in self._peers.values():
                _shut_down(peer)
            if self._thread is not None:
                # Written, not closed: a forked child may hold this end of the pipe too.
                os.write(self._wakes[1], b"x")
        if self._listener is not None:
            self._listener.close()
        self._close_unused()

    def _close_unused(self) -> None:
        """Close the disconnected sockets, unless a user still holds them. The last user closes them."""
        if self._thread is None and self._in_use.acquire(blocking=False):  # otherwise the watch's thread does it
            try:
                for peer in self._peers.values():
                    peer.close()
            finally:
                self._in_use.release()

    @property
    def ended(self) -> bool:
        """Return whether `end` was called."""
        return self._ended

    @property
    def ended_because(self) -> str:
        """Return the reason given to `end`."""
        return self._ended_because

    def __enter__(self) -> dict[int, socket.socket]:
        """Return the connections by rank, for one user at a time. They may be closed already: check `ended` first."""
        self._in_use.acquire()
        return self._peers

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._in_use.release()
        if self._ended:
            self._close_unused()

    def name_of(self, rank: int) -> str:
        """Return a rank with its replica, for a sentence."""
        name = self._names.get(rank)
        return f"rank {rank} (replica {name})" if name else f"rank {rank}"

    def settle(self) -> None:
        """Wait, after `end`, until the thread has ended, for some seconds at most."""
        if self._thread is not None and self._thread is not threading.current_thread():
            join_within(self._thread)

    def forked(self) -> Inheritance:
        """Release the connections in a forked child. `end` then has no effect on the parent's connections."""
        wakes = () if self._ended else self._wakes  # after its end the thread closes them
        self._ended = True
        self._lock, self._in_use = threading.Lock(), threading.Lock()
        own = Endpoint.of((self._invitation.address, self._invitation.port))
        return Inheritance(wakes, local={own} if own.port else (), remote=self._called)

    def __del__(self) -> None:
        self.end()


def _begin_connect(connection: socket.socket, rank: int, invitation: _Invitation, attempt: Attempt) -> None:
    connection.setblocking(False)
    _set_options(connection)
    try:
        connection.connect_ex((invitation.address, invitation.port))
    except OSError as error:  # the address is invalid
        raise _unreachable(rank, invitation, error, attempt) from error


def _finish_connect(
    connection: socket.socket, rank: int, invitation: _Invitation, hello: bytes, attempt: Attempt
) -> None:
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


def _unreachable(rank: int, invitation: _Invitation, error: OSError, attempt: Attempt) -> ConfigureError:
    return ConfigureError(
        f"rank {rank} can't be reached at {invitation.address} port {invitation.port} ({error.strerror}); ask for a "
        "new quorum, or set another hostname on that rank",
        where=attempt.where,
    )


def _set_options(connection: socket.socket) -> None:
    """Let the kernel detect a lost machine, and send small messages without delay."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other end was faster
        return


def _watch(
    peers: dict[int, socket.socket],
    wakes: tuple[int, int],
    on_disconnect: Callable[[int], None],
    in_use: threading.Lock,
) -> None:
    wake_read, wake_write = wakes
    poll = select.poll()
    poll.register(wake_read, select.POLLIN)
    ranks = {peer.fileno(): rank for rank, peer in peers.items()}
    for descriptor in ranks:
        poll.register(descriptor, select.POLLRDHUP)  # not POLLIN, because an incoming word must not wake this thread
    ended = [descriptor for descriptor, _ in poll.poll()]
    if wake_read not in ended:
        on_disconnect(ranks[ended[0]])
        wake = select.poll()
        wake.register(wake_read, select.POLLIN)
        wake.poll()
    with in_use:  # the shutdown has woken a thread that waited for a word
        for peer in peers.values():
            peer.close()
    os.close(wake_read)
    os.close(wake_write)
