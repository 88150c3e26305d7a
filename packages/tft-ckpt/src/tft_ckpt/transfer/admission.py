"""Admission of connections: any host may connect, but unproved connections are limited in number and time.

A connection is unproved until a request on it shows the job's token. Any host can open such connections, and each needs
one of the trainer's descriptors. So they have a deadline and a maximum number. Above the maximum, the oldest connection
of the host with the most is closed. An honest reader proves itself with its first request, long before that.

If the process has no descriptor left, asyncio's own listener retries a thousand times a second and logs each try. This
one waits, and logs once a minute.

Law of this file: accepting, and ending unproved connections; no request is read here.
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
    import ssl

__all__ = ["Door"]

MOST_UNPROVED: Final = 256
MOST_UNPROVED_OF_A_HOST: Final = 128
PROOF_WITHIN_S: Final = 10.0
ACCEPT_AGAIN_S: Final = 1.0
NEAR: Final = 0.9  # of the limit of descriptors; the rest is not for unproved connections
WARN_EVERY_S: Final = 60.0

_log = logging.getLogger("tft_ckpt.transfer")


@final
class Door:
    """An acceptor of connections on one loop, from `open` to `close`.

    Args:
        loop: the event loop; all methods run there.
        listener: bound and listening; closed by `close`.
        protocol: makes the protocol of each connection.
        tls: the TLS context, or None.
        proof_within_s: the time limit for an unproved connection, which is closed after it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        *,
        protocol: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None,
        proof_within_s: float,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._protocol = protocol
        self._tls = tls
        self._proof_within_s = min(proof_within_s, PROOF_WITHIN_S)
        self._unproved: dict[_Unproved, None] = {}  # the oldest first
        self._by_transport: dict[asyncio.BaseTransport, _Unproved] = {}
        self._again: asyncio.TimerHandle | None = None
        self._warned_s: dict[str, float] = {}
        self._near = int(NEAR * descriptors.limit())

    def open(self) -> None:
        """Accept connections from now on."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    async def close(self) -> None:
        """Close the port and all unproved connections."""
        if self._again is not None:
            self._again.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        unproved = list(self._unproved)
        for each in unproved:
            self._end(each)
        await asyncio.gather(*(each.beginning for each in unproved), return_exceptions=True)

    def proved(self, transport: asyncio.BaseTransport | None) -> None:
        """Mark a connection as a member of the job."""
        if transport in self._by_transport:
            self._forget(self._by_transport[transport])

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # the caller has disconnected
        except OSError as error:
            self._warn("no connection can be accepted (%s); readers of the state wait", error)
            self._loop.remove_reader(self._listener.fileno())
            self._again = self._loop.call_later(ACCEPT_AGAIN_S, self._accept_again)
            return
        connection.setblocking(False)
        unproved = _Unproved(str(address[0]) if address else "")
        self._unproved[unproved] = None
        unproved.deadline = self._loop.call_later(self._proof_within_s, self._end, unproved)
        unproved.beginning = self._loop.create_task(self._begin(unproved, connection), name="tft-ckpt-accept")
        # Here and not in the task, because a task that is cancelled before its first turn never begins.
        unproved.beginning.add_done_callback(lambda _: connection.close() if unproved.transport is None else None)
        self._keep_few(connection.fileno())

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    async def _begin(self, unproved: _Unproved, connection: socket.socket) -> None:
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self._proof_within_s,
            )
        except OSError:  # the caller has disconnected, or does not use TLS
            self._forget(unproved)
            return
        unproved.transport = transport
        if unproved in self._unproved:
            self._by_transport[transport] = unproved
        else:  # closed in the meantime
            transport.abort()

    def _keep_few(self, descriptor: int) -> None:
        """Close one unproved connection if there are too many."""
        is_near = descriptor >= self._near
        if is_near:
            self._warn(
                "this process has nearly all of its %d descriptors in use; look who is connected (ss -tnp), or raise "
                "the hard limit (ulimit -Hn)",
                descriptors.limit(),
            )
        if not is_near and len(self._unproved) <= MOST_UNPROVED_OF_A_HOST:
            return
        for each in [each for each in self._unproved if each.transport is not None and each.transport.is_closing()]:
            self._forget(each)
        hosts = Counter(each.host for each in self._unproved)
        host, most = hosts.most_common(1)[0]
        if is_near or most > MOST_UNPROVED_OF_A_HOST or len(self._unproved) > MOST_UNPROVED:
            self._end(next(each for each in self._unproved if each.host == host))

    def _end(self, unproved: _Unproved) -> None:
        self._forget(unproved)
        if unproved.transport is not None:
            unproved.transport.abort()
        else:
            unproved.beginning.cancel()

    def _forget(self, unproved: _Unproved) -> None:
        unproved.deadline.cancel()
        self._unproved.pop(unproved, None)
        if unproved.transport is not None:
            self._by_transport.pop(unproved.transport, None)

    def _warn(self, sentence: str, *words: object) -> None:
        now = self._loop.time()
        if now - self._warned_s.get(sentence, -WARN_EVERY_S) >= WARN_EVERY_S:
            self._warned_s[sentence] = now
            _log.warning(sentence, *words)


@final
class _Unproved:
    """A connection, from its acceptance until it has proved itself or is closed."""

    deadline: asyncio.TimerHandle
    beginning: asyncio.Task[None]

    def __init__(self, host: str) -> None:
        self.host = host
        self.transport: asyncio.Transport | None = None
