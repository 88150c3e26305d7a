"""The connections of the HTTP port: bounded in number, each with a deadline.

A client may be slow, silent or hostile. A connection that asks nothing ends, and so does one that does not take its
answer in time. A new one is closed at once while its host or all hosts together have too many.

Law of this file: accepting and ending connections; no request is read here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from tft_coord.lighthouse import TLS

logger = logging.getLogger("tft_lighthouse")

CONNECTIONS_MOST: Final = 256
CONNECTIONS_OF_ONE_HOST_MOST: Final = 64
FIRST_REQUEST_S: Final = 10.0
REQUEST_S: Final = 30.0  # from a request's first byte until its answer is taken, or the next request
SWEEP_S: Final = 1.0
FULL_PAUSE_S: Final = 0.02  # after a connection too many, so that a flood of them does not hold up the lighthouse
ACCEPT_AGAIN_S: Final = 1.0
WARN_EVERY_S: Final = 60.0


@dataclass(slots=True)
class _Entry:
    host: str
    ends_s: float


@final
class Connections:
    """The open connections of one port.

    Args:
        seconds: returns the time.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._entries: dict[asyncio.BaseTransport, _Entry] = {}
        self.handshakes: Counter[str] = Counter()  # connections whose TLS handshake runs, by host

    def __len__(self) -> int:
        return len(self._entries)

    def has_room(self, host: str) -> bool:
        """Return whether another connection of that host may be accepted."""
        self._forget_closed()
        self.handshakes = +self.handshakes  # without the hosts that have none
        of_host = Counter(entry.host for entry in self._entries.values())[host] + self.handshakes[host]
        of_all = len(self._entries) + self.handshakes.total()
        return of_all < CONNECTIONS_MOST and of_host < CONNECTIONS_OF_ONE_HOST_MOST

    def add(self, transport: asyncio.BaseTransport, host: str) -> None:
        """Add a new connection; its first request must come soon."""
        self._entries[transport] = _Entry(host, self._seconds() + FIRST_REQUEST_S)

    def extend(self, transport: asyncio.BaseTransport | None) -> None:
        """Give a connection the time of one request from now on."""
        entry = self._entries.get(transport) if transport is not None else None
        if entry is not None:
            entry.ends_s = self._seconds() + REQUEST_S

    def sweep(self) -> None:
        """End the connections whose time is over."""
        self._forget_closed()
        now_s = self._seconds()
        for transport, entry in list(self._entries.items()):
            if now_s >= entry.ends_s:
                del self._entries[transport]
                if isinstance(transport, asyncio.WriteTransport):
                    transport.abort()  # unsent data is dropped

    def _forget_closed(self) -> None:
        for transport in [each for each in self._entries if each.is_closing()]:
            del self._entries[transport]


@final
class Acceptor:
    """The tasks that accept connections, from `start` to `stop`.

    Args:
        listeners: bound and listening; `stop` closes them.
        protocol: makes the protocol of each connection.
        connections: the open ones.
        tls: certificates for the connections, or None.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        protocol: Callable[[], asyncio.BaseProtocol],
        connections: Connections,
        tls: TLS | None = None,
    ) -> None:
        self._tls = tls
        self._refused = 0  # TLS handshakes since the last log line about them
        self._logged_s = -WARN_EVERY_S
        self._handshakes: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._listeners = listeners
        self._protocol = protocol
        self._connections = connections
        self._tasks: list[asyncio.Task[None]] = []
        self._warned_s = -WARN_EVERY_S

    def start(self) -> None:
        """Accept connections from now on."""
        for listener in self._listeners:
            listener.setblocking(False)
            self._tasks.append(self._loop.create_task(self._accept(listener), name="tft-http-accept"))
        self._tasks.append(self._loop.create_task(self._sweep(), name="tft-http-sweep"))

    async def stop(self) -> None:
        """Close the port; open connections stay."""
        tasks = [*self._tasks, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = await self._loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._warn(error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            host = str(address[0])
            if not self._connections.has_room(host):
                connection.close()
                await asyncio.sleep(FULL_PAUSE_S)
                continue
            if self._tls is None:
                await self._set_up(connection, host, None)
                continue
            # A handshake may take long, and the next connection does not wait for it.
            self._connections.handshakes[host] += 1
            handshake = self._loop.create_task(self._set_up(connection, host, self._tls), name="tft-http-handshake")
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _set_up(self, connection: socket.socket, host: str, tls: TLS | None) -> None:
        context = None if tls is None else tls.server_context()
        within_s = None if tls is None else FIRST_REQUEST_S
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                self._protocol, connection, ssl=context, ssl_handshake_timeout=within_s
            )
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError):
                raise
            self._log_refused(error, host)
        else:
            self._connections.add(transport, host)
        finally:
            if tls is not None:
                self._connections.handshakes[host] -= 1

    def _log_refused(self, error: OSError, host: str) -> None:
        """Log a failed TLS handshake, at most once a minute: any host may cause them."""
        if self._tls is None:
            return
        self._refused += 1
        if self._loop.time() - self._logged_s < WARN_EVERY_S:
            return
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        logger.warning(
            "the HTTP port refused %d TLS handshakes, the last from %s (%s); callers need https, and certificates of "
            "the same authority",
            self._refused,
            host,
            str(reason).lower().replace("_", " "),
        )
        self._logged_s, self._refused = self._loop.time(), 0

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._connections.sweep()

    def _warn(self, error: OSError) -> None:
        if self._loop.time() - self._warned_s >= WARN_EVERY_S:
            self._warned_s = self._loop.time()
            logger.warning("the HTTP port can't accept a connection (%s); callers wait until one ends", error)
