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
import secrets
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, TypeAlias, cast, final

from tft_coord.errors import ProtocolError, Unreachable
from tft_coord.transport.frames import FrameReader, framed
from tft_coord.transport.outbox import MOST_WAITING_BYTES

__all__ = ["ASK", "LAST", "DirectPort", "DirectSocket", "Metadata", "Offer", "connect"]

LAST: Final = b""
"""On a stream: what follows comes on the socket."""

_ASK: Final = "tft-direct"
_PORT: Final = "tft-direct-port"
_TICKET: Final = "tft-direct-ticket"
_GREETING: Final = b"TFT direct 1\n"
_TICKET_BYTES: Final = 16
_MOST_GREETING_BYTES: Final = len(_GREETING) + _TICKET_BYTES

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]


@final
class DirectSocket(asyncio.Protocol):
    """One end of a socket. To be used on one loop only.

    Args:
        most_bytes: of a message that is taken.
        overflows: called once, when the other side takes nothing and too much waits for it; may be set later.
    Fields:
        greeting: the other side's first message.
        ended: done when the socket has ended; what came before its end has been taken.
    """

    def __init__(self, *, most_bytes: int, overflows: Callable[[], object] = lambda: None) -> None:
        loop = asyncio.get_running_loop()
        self.greeting: asyncio.Future[bytes] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._most_bytes = most_bytes
        self.overflows = overflows
        self._frames = FrameReader(_MOST_GREETING_BYTES)
        self._kept: list[bytes] = []
        self._take: Callable[[bytes], None] | None = None
        self._transport: asyncio.Transport | None = None

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
        """End, when what was said is written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End at once."""
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio's side ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

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

    def connection_lost(self, _reason: Exception | None) -> None:
        self._transport = None
        if not self.greeting.done():
            self.greeting.cancel()
        if not self.ended.done():
            self.ended.set_result(None)

    def _greeted(self, message: bytes) -> None:
        assert self._transport is not None
        self._transport.pause_reading()
        self._frames.most_bytes = self._most_bytes
        self.greeting.set_result(message)


# --- the side that asks -------------------------------------------------------------------------------------------

ASK: Final = ((_ASK, "1"),)
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
    host: str, offer: Offer, *, most_bytes: int, overflows: Callable[[], object], within_s: float
) -> DirectSocket:
    """Take up an offer of the server at that host. Raises: Unreachable: it can't be; nothing is left open."""
    loop = asyncio.get_running_loop()
    end: DirectSocket | None = None

    async def greeted() -> DirectSocket:
        nonlocal end
        _, end = await loop.create_connection(
            lambda: DirectSocket(most_bytes=most_bytes, overflows=overflows), host, offer.port
        )
        end.say(_GREETING + offer.ticket)
        if await end.greeting != _GREETING:
            raise Unreachable(f"who listens at {host}:{offer.port} is somebody else")
        return end

    waiting = loop.create_task(greeted())
    try:
        await asyncio.wait([waiting], timeout=within_s)
        if not waiting.done():
            raise Unreachable(f"nobody answered at {host}:{offer.port} within {within_s:g} s")
        if waiting.cancelled():
            raise Unreachable(f"{host}:{offer.port} hung up")
        return waiting.result()
    except BaseException as error:
        waiting.cancel()
        if end is not None:
            end.abort()
        if isinstance(error, OSError):
            raise Unreachable(f"{host}:{offer.port} can't be reached: {error}") from error
        raise


# --- the side that offers -----------------------------------------------------------------------------------------


@final
class DirectPort:
    """Where a server's streams get their sockets. To be used on one loop only.

    Args:
        most_bytes: of a message that is taken.
        greeting_s: who has not greeted after so long is sent off.
    """

    def __init__(self, *, most_bytes: int, greeting_s: float) -> None:
        self._most_bytes = most_bytes
        self._greeting_s = greeting_s
        self._tickets: dict[bytes, Callable[[DirectSocket], None]] = {}
        self._unknown: set[DirectSocket] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    async def open(self, host: str) -> None:
        """Listen at a free port of that host's, "" for all interfaces. Raises: OSError; then nothing is offered."""
        loop = asyncio.get_running_loop()
        listener = _listener(host)
        self._port = int(listener.getsockname()[1])
        self._server = await loop.create_server(self._accepted, sock=listener, backlog=1024)

    async def close(self) -> None:
        """The port is free, and those that have not greeted are sent off; sockets that were taken up stay."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for each in list(self._unknown):
            each.abort()
        await asyncio.sleep(0)

    def is_asked_for(self, metadata: Metadata) -> bool:
        """Whether the metadata of a stream asks for a socket, and there are any."""
        return self._server is not None and any(name == _ASK for name, _ in metadata)

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

    def _accepted(self) -> DirectSocket:
        end = DirectSocket(most_bytes=self._most_bytes)
        self._unknown.add(end)
        patience = asyncio.get_running_loop().call_later(self._greeting_s, end.abort)

        def greeted(greeting: asyncio.Future[bytes]) -> None:
            patience.cancel()
            self._unknown.discard(end)
            if greeting.cancelled():
                return
            said = greeting.result()
            taken_up = self._tickets.pop(said[len(_GREETING) :], None) if said.startswith(_GREETING) else None
            if taken_up is None:
                end.abort()
                return
            end.say(_GREETING)
            taken_up(end)

        end.greeting.add_done_callback(greeted)
        return end


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
