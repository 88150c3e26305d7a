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

    def __len__(self) -> int:
        return len(self._entries)

    def has_room(self, host: str) -> bool:
        """Return whether another connection of that host may be accepted."""
        self._forget_closed()
        of_host = Counter(entry.host for entry in self._entries.values())[host]
        return len(self._entries) < CONNECTIONS_MOST and of_host < CONNECTIONS_OF_ONE_HOST_MOST

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
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        protocol: Callable[[], asyncio.BaseProtocol],
        connections: Connections,
    ) -> None:
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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
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
            try:
                transport, _ = await self._loop.connect_accepted_socket(self._protocol, connection)
            except OSError:
                connection.close()
                continue
            self._connections.add(transport, host)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._connections.sweep()

    def _warn(self, error: OSError) -> None:
        if self._loop.time() - self._warned_s >= WARN_EVERY_S:
            self._warned_s = self._loop.time()
            logger.warning("the HTTP port can't accept a connection (%s); callers wait until one ends", error)
