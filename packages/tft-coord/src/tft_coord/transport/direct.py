"""A bare socket beside a stream, which carries the stream's messages in its place.

A message on a stream of grpc costs several times what it costs on a socket, on both sides, and a step asks for its
quorum and is answered. So a manager server asks for a socket with its stream's first words, the lighthouse answers with
a port and a ticket, and who comes there with the ticket is who has the stream. From then on both sides say what they
have to say on the socket. The stream stays open, says that its connection lives, and its end is the socket's: one of
the two alone is never trusted. Where the port can't be reached the stream carries everything, as it did before.

On the socket each side's first message is a greeting, and each stands with its length before it. On the stream each
side's last message is an empty one: what was said before it is taken before anything from the socket is.

Law of this file: sockets, greetings and tickets; no message is understood.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import select
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, TypeAlias, cast, final

from tft_coord.errors import ProtocolError, Unreachable
from tft_coord.forks import Inheritance, let_go_in_child
from tft_coord.transport.frames import FrameReader, framed
from tft_coord.transport.outbox import MOST_WAITING_BYTES

__all__ = ["ASK", "IS_THERE", "LAST", "DirectPort", "DirectSocket", "Metadata", "Offer", "connect"]

logger = logging.getLogger(__name__)

IS_THERE: Final = hasattr(socket, "TCP_USER_TIMEOUT")
"""Whether this system can tell that a connection has died: else no socket is asked for, and none offered."""

LAST_WORDS_S: Final = 0.2
LAST: Final = b""
"""On a stream: what follows comes on the socket."""

_ASK: Final = "tft-direct"
_PORT: Final = "tft-direct-port"
_TICKET: Final = "tft-direct-ticket"
MOST_SILENT: Final = 256  # sockets that have not greeted; above it one is sent off
ACCEPT_AGAIN_S: Final = 1.0  # after the process has had no descriptor left
_GREETING: Final = b"TFT direct 1\n"
_TICKET_BYTES: Final = 16
_MOST_GREETING_BYTES: Final = len(_GREETING) + _TICKET_BYTES

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]


@final
class DirectSocket(asyncio.Protocol):
    """One end of a socket. To be used on one loop only.

    Args:
        most_bytes: of a message that is taken.
        silence_s: when what was said has not arrived at the other host for so long, the socket ends. The stream's own
            pings say nothing of it: the two connections may go different ways.
        overflows: called once, when the other side takes nothing and too much waits for it; may be set later.
    Fields:
        greeting: the other side's first message.
        ended: done when the socket has ended; what came before its end has been taken.
        host: of the other side, "" before it is connected.
    """

    def __init__(self, *, most_bytes: int, silence_s: float, overflows: Callable[[], object] = lambda: None) -> None:
        loop = asyncio.get_running_loop()
        self.greeting: asyncio.Future[bytes] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.host = ""
        self._loop = loop
        self._most_bytes = most_bytes
        self._silence_s = silence_s
        self.overflows = overflows
        self._frames = FrameReader(_MOST_GREETING_BYTES)
        self._kept: list[bytes] = []
        self._take: Callable[[bytes], None] | None = None
        self._hung_up = False
        self._transport: asyncio.Transport | None = None
        let_go_in_child(self)

    def forked(self) -> Inheritance:
        """In a child: the socket is the parent's."""
        if self._transport is None:
            return Inheritance()
        connection: socket.socket = self._transport.get_extra_info("socket")
        return Inheritance([connection.fileno()], kept=[self._transport])

    def hear(self, take: Callable[[bytes], None]) -> None:
        """Have every message taken from now on, in order; until then the kernel keeps them."""
        self._take = take
        kept, self._kept = self._kept, []
        for message in kept:
            take(message)
        if self._transport is not None:
            self._transport.resume_reading()

    def say(self, message: bytes) -> None:
        """Write a message; dropped when the socket has ended."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > MOST_WAITING_BYTES:
            self._transport.abort()
            self.overflows()
            return
        self._transport.write(framed(message))

    def close(self) -> None:
        """End when what was said is written, and soon in any case: who reads nothing may not hold it open."""
        if self._transport is not None:
            self._transport.close()
            self._loop.call_later(LAST_WORDS_S, self.abort)

    def abort(self) -> None:
        """End at once."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def hung_up(self) -> bool:
        """Whether the other side's host has said that its end is closed, as it does for a process that ends.

        It is looked at, too, when this socket's end has not come by yet: a stream's end and its socket's come on
        different ways.
        """
        if not self._hung_up and self._transport is not None and not self._transport.is_closing():
            self._hung_up = _is_hung_up(self._transport.get_extra_info("socket"))
        return self._hung_up

    # ---- asyncio's side ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.host = str((transport.get_extra_info("peername") or ("",))[0])
        connection: socket.socket = transport.get_extra_info("socket")
        # asyncio does it where a socket was made for TCP by name, which one that a listener gave was not; without it
        # the second of two messages waits for the first one's acknowledgement, which the other host delays by 40 ms.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(self._silence_s * 1000)))

    def data_received(self, data: bytes) -> None:
        self._frames.add(data)
        try:
            while (message := self._frames.next()) is not None:
                if self._take is not None:
                    self._take(message)
                elif self.greeting.done():
                    self._kept.append(message)
                else:
                    self._greeted(message)
        except ProtocolError:
            self.abort()

    def eof_received(self) -> None:
        self._hung_up = True

    def connection_lost(self, reason: Exception | None) -> None:
        self._transport = None
        self._hung_up = self._hung_up or isinstance(reason, (ConnectionResetError, BrokenPipeError))
        if not self.greeting.done():
            self.greeting.set_exception(ConnectionResetError("the other side hung up"))
            self.greeting.exception()  # nobody need have waited for it
        if not self.ended.done():
            self.ended.set_result(None)
        # What they hold holds this socket: a ring, which would keep the stream's connection until a full collection.
        self._take, self.overflows = None, lambda: None

    def _greeted(self, message: bytes) -> None:
        assert self._transport is not None
        self._transport.pause_reading()
        self._frames.most_bytes = self._most_bytes
        self.greeting.set_result(message)


def _is_hung_up(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    if not poll.poll(0):
        return False
    # A connection on which nothing was acknowledged for too long has ended as well, and nobody has said so.
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (0, errno.ECONNRESET, errno.EPIPE)


# --- the side that asks -------------------------------------------------------------------------------------------

ASK: Final = ((_ASK, "1"),) if IS_THERE else ()
"""Metadata of a stream that asks for a socket."""


@final
class Offer:
    """Where a stream's socket is to be had."""

    def __init__(self, port: int, ticket: bytes) -> None:
        self.port = port
        self.ticket = ticket

    @staticmethod
    def read(metadata: Metadata) -> Offer | None:
        """Of a stream's initial metadata; None: nothing is offered, or nothing that can be."""
        said = dict(metadata)
        with suppress(ValueError):
            port, ticket = int(said.get(_PORT, "")), bytes.fromhex(str(said.get(_TICKET, "")))
            if len(ticket) == _TICKET_BYTES and 0 < port < 65536:
                return Offer(port, ticket)
        return None


async def connect(
    host: str, offer: Offer, *, most_bytes: int, silence_s: float, overflows: Callable[[], object], within_s: float
) -> DirectSocket:
    """Take up an offer of the server at that host, within so long. The rest as `DirectSocket`'s.

    Raises: Unreachable: it can't be; nothing is left open.
    """
    loop = asyncio.get_running_loop()
    end = DirectSocket(most_bytes=most_bytes, silence_s=silence_s, overflows=overflows)

    async def greet() -> None:
        await loop.create_connection(lambda: end, host, offer.port)
        end.say(_GREETING + offer.ticket)
        if await end.greeting != _GREETING:
            raise Unreachable(f"who listens at {host}:{offer.port} is somebody else")

    waiting = loop.create_task(greet())
    try:
        await asyncio.wait([waiting], timeout=within_s)  # not wait_for, which may swallow that this is cancelled
        if not waiting.done():
            raise Unreachable(f"nobody answered at {host}:{offer.port} within {within_s:g} s")
        waiting.result()
    except BaseException as error:
        waiting.cancel()
        end.abort()
        if isinstance(error, (OSError, UnicodeError)):  # the second is how asyncio says that a name can't be one
            raise Unreachable(f"{host}:{offer.port} can't be reached: {error}") from error
        raise
    return end


# --- the side that offers -----------------------------------------------------------------------------------------


@final
class DirectPort:
    """Where a server's streams get their sockets. To be used on one loop only.

    Args:
        most_bytes, silence_s: as `DirectSocket`'s. Who has not greeted after silence_s is sent off.
    """

    def __init__(self, *, most_bytes: int, silence_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._most_bytes = most_bytes
        self._silence_s = silence_s
        self._tickets: dict[bytes, Callable[[DirectSocket], None]] = {}
        self._open: dict[DirectSocket, None] = {}  # those that have not greeted, in order
        self._taken: set[DirectSocket] = set()
        self._accepting: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._port = 0
        self._said_full = False
        let_go_in_child(self)

    def forked(self) -> Inheritance:
        """In a child: the port and its connections are the parent's."""
        return Inheritance(ports=() if self._listener is None else (self._port,))

    def open(self, host: str) -> None:
        """Listen at a free port of that host's, "" for all interfaces. Raises: OSError; then nothing is offered."""
        if not IS_THERE:
            raise OSError("this system can't tell that a connection has died")
        self._listener = _listener(host)
        self._listener.setblocking(False)
        self._port = int(self._listener.getsockname()[1])
        self._loop.add_reader(self._listener, self._accept)

    async def close(self) -> None:
        """The port is free, and every socket ended."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        if self._accepting:
            await asyncio.wait(self._accepting)  # it waits for nobody; cancelled, it might not close what it was given
        for each in [*self._open, *self._taken]:
            each.abort()
        await asyncio.sleep(0)

    def is_asked_for(self, metadata: Metadata) -> bool:
        """Whether the metadata of a stream asks for a socket, and there are any."""
        return self._listener is not None and any(name == _ASK for name, _ in metadata)

    def offer(self, taken_up: Callable[[DirectSocket], None]) -> tuple[bytes, tuple[tuple[str, str], ...]]:
        """A ticket, and the metadata that tells of it.

        Args:
            taken_up: is given the socket of who comes with the ticket, at most once.
        """
        ticket = secrets.token_bytes(_TICKET_BYTES)
        self._tickets[ticket] = taken_up
        return ticket, ((_PORT, str(self._port)), (_TICKET, ticket.hex()))

    def withdraw(self, ticket: bytes) -> None:
        """The ticket is good no more."""
        self._tickets.pop(ticket, None)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # who came has left
        except OSError as error:
            # It would be said again, and again, for as long as somebody waits at the port.
            if not self._said_full:
                self._said_full = True
                logger.warning("no socket can be taken: %s; raise the limit of open files", error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(ACCEPT_AGAIN_S, self._accept_again)
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._begin(connection))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _send_off_one(self) -> None:
        """The oldest of the host that has the most, so that one host can't push out the others."""
        hosts = Counter(each.host for each in self._open)
        most, _ = hosts.most_common(1)[0]
        next(each for each in self._open if each.host == most).abort()

    async def _begin(self, connection: socket.socket) -> None:
        end = DirectSocket(most_bytes=self._most_bytes, silence_s=self._silence_s)
        try:
            await self._loop.connect_accepted_socket(lambda: end, connection)
        except OSError:
            connection.close()
            return
        self._open[end] = None
        if len(self._open) > MOST_SILENT:
            self._send_off_one()
        patience = self._loop.call_later(self._silence_s, end.abort)

        def greeted(greeting: asyncio.Future[bytes]) -> None:
            patience.cancel()
            self._open.pop(end, None)
            if greeting.exception() is not None:
                return
            said = greeting.result()
            taken_up = self._tickets.pop(said[len(_GREETING) :], None) if said.startswith(_GREETING) else None
            if taken_up is None:
                end.abort()
                return
            self._taken.add(end)
            end.ended.add_done_callback(lambda _: self._taken.discard(end))
            end.say(_GREETING)
            taken_up(end)

        end.greeting.add_done_callback(greeted)


def _listener(host: str) -> socket.socket:
    """Raises: OSError: no address of that host's can be bound."""
    if not host:
        with suppress(OSError):
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("0.0.0.0", 0))
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, address in found[:-1]:
        with suppress(OSError):
            return socket.create_server(address[:2], family=family)
    return socket.create_server(found[-1][4][:2], family=found[-1][0])
