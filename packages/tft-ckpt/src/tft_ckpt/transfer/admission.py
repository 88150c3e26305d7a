"""Admission of connections: any host may connect, but unauthenticated connections are limited in number and time.

A connection is unauthenticated until a request on it shows the job's token. Any host can open such connections, and
each needs one of the trainer's descriptors. So they have a deadline and a maximum number. Above the maximum, the oldest
connection of the host with the most is closed. An honest reader shows the token with its first request, long before
that.

If the process has no descriptor left, asyncio's own listener retries a thousand times a second and logs each try. This
one waits, and logs once a minute.

Law of this file: accepting, and ending unauthenticated connections; no request is read here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

from tft_ckpt import descriptors

if TYPE_CHECKING:
    from tft_ckpt.transfer.tls import ContextSource

__all__ = ["Acceptor"]

UNAUTHENTICATED_MAX: Final = 256
UNAUTHENTICATED_PER_HOST_MAX: Final = 128
AUTHENTICATION_TIMEOUT_S: Final = 10.0
ACCEPT_AGAIN_S: Final = 1.0
DESCRIPTOR_SHARE_MAX: Final = 0.9  # of the limit of descriptors; the rest is not for unauthenticated connections
WARN_EVERY_S: Final = 60.0

_log = logging.getLogger("tft_ckpt.transfer")


@final
class Acceptor:
    """An acceptor of connections on one loop, from `open` to `close`.

    Args:
        loop: the event loop; all methods run there.
        listener: bound and listening; closed by `close`.
        protocol: makes the protocol of each connection.
        tls: returns the TLS context of the next connection, or None.
        authentication_timeout_s: the time limit for an unauthenticated connection, which is closed after it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        *,
        protocol: Callable[[], asyncio.BaseProtocol],
        tls: ContextSource | None,
        authentication_timeout_s: float,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._protocol = protocol
        self._tls = tls
        self._authentication_timeout_s = min(authentication_timeout_s, AUTHENTICATION_TIMEOUT_S)
        self._unauthenticated: dict[_Unauthenticated, None] = {}  # the oldest first
        self._by_transport: dict[asyncio.BaseTransport, _Unauthenticated] = {}
        self._again: asyncio.TimerHandle | None = None
        self._warned_s: dict[str, float] = {}
        self._descriptors_max = int(DESCRIPTOR_SHARE_MAX * descriptors.limit())

    def open(self) -> None:
        """Accept connections from now on."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    async def close(self) -> None:
        """Close the port and all unauthenticated connections."""
        if self._again is not None:
            self._again.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        entries = list(self._unauthenticated)
        for each in entries:
            self._end(each)
        await asyncio.gather(*(each.setup for each in entries), return_exceptions=True)

    def authenticated(self, transport: asyncio.BaseTransport | None) -> None:
        """Mark a connection as a member of the job."""
        if transport in self._by_transport:
            self._forget(self._by_transport[transport])

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # the caller has disconnected
        except OSError as error:
            self._warn("no connection can be accepted (%s); callers wait until one ends", error)
            self._loop.remove_reader(self._listener.fileno())
            self._again = self._loop.call_later(ACCEPT_AGAIN_S, self._accept_again)
            return
        connection.setblocking(False)
        entry = _Unauthenticated(str(address[0]) if address else "")
        self._unauthenticated[entry] = None
        entry.deadline = self._loop.call_later(self._authentication_timeout_s, self._end, entry)
        entry.setup = self._loop.create_task(self._set_up(entry, connection), name="tft-ckpt-accept")
        # Here and not in the task, because a task that is cancelled before its first turn never begins.
        entry.setup.add_done_callback(lambda _: connection.close() if entry.transport is None else None)
        self._limit_unauthenticated(connection.fileno())

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    async def _set_up(self, entry: _Unauthenticated, connection: socket.socket) -> None:
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=None if self._tls is None else self._tls(),
                ssl_handshake_timeout=None if self._tls is None else self._authentication_timeout_s,
            )
        except OSError as error:  # the caller has disconnected, or does not use TLS
            self._forget(entry)
            reason = getattr(error, "reason", None)
            if reason is not None:
                sentence = "refused a TLS handshake of %s (%s); callers need https, and certificates"
                self._warn(sentence, entry.host, str(reason).lower().replace("_", " "))
            return
        entry.transport = transport
        if entry in self._unauthenticated:
            self._by_transport[transport] = entry
        else:  # closed in the meantime
            transport.abort()

    def _limit_unauthenticated(self, descriptor: int) -> None:
        """Close one unauthenticated connection if there are too many."""
        is_near = descriptor >= self._descriptors_max
        if is_near:
            self._warn(
                "this process uses nearly all of its %d file descriptors; check its connections (ss -tnp), or raise "
                "the hard limit (ulimit -Hn)",
                descriptors.limit(),
            )
        if not is_near and len(self._unauthenticated) <= UNAUTHENTICATED_PER_HOST_MAX:
            return
        for each in [
            each for each in self._unauthenticated if each.transport is not None and each.transport.is_closing()
        ]:
            self._forget(each)
        hosts = Counter(each.host for each in self._unauthenticated)
        host, most = hosts.most_common(1)[0]
        if is_near or most > UNAUTHENTICATED_PER_HOST_MAX or len(self._unauthenticated) > UNAUTHENTICATED_MAX:
            self._end(next(each for each in self._unauthenticated if each.host == host))

    def _end(self, entry: _Unauthenticated) -> None:
        self._forget(entry)
        if entry.transport is not None:
            entry.transport.abort()
        else:
            entry.setup.cancel()

    def _forget(self, entry: _Unauthenticated) -> None:
        entry.deadline.cancel()
        self._unauthenticated.pop(entry, None)
        if entry.transport is not None:
            self._by_transport.pop(entry.transport, None)

    def _warn(self, sentence: str, *words: object) -> None:
        now = self._loop.time()
        if now - self._warned_s.get(sentence, -WARN_EVERY_S) >= WARN_EVERY_S:
            self._warned_s[sentence] = now
            _log.warning(sentence, *words)


@final
class _Unauthenticated:
    """A connection, from its acceptance until it is authenticated or closed."""

    deadline: asyncio.TimerHandle
    setup: asyncio.Task[None]

    def __init__(self, host: str) -> None:
        self.host = host
        self.transport: asyncio.Transport | None = None
