"""A web server on one listener and one event loop, from its start to the end of its last connection.

Law of this file: the start and the end of aiohttp's server. Its routes, its secret and its answers are its user's.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Final, final

from aiohttp import web

from tft_ckpt.transfer.admission import Acceptor
from tft_ckpt.transfer.request_log import request_logger

if TYPE_CHECKING:
    from tft_ckpt.transfer.tls import ContextSource

__all__ = ["WebServer"]

REFUSALS_EVERY_S: Final = 60.0


@final
class WebServer:
    """A web server, from `start` to `close`. All methods run on the loop.

    Args:
        loop: the event loop. Its other tasks are cancelled by `close`.
        listener: bound and listening; closed at the end.
        log: the parent of the log of requests that can't be read or answered.
        tls: returns the TLS context of the next connection, or None for plain HTTP.
        authentication_timeout_s: the time limit for a connection until `authenticated`. It is closed after that time.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        *,
        log: logging.Logger,
        tls: ContextSource | None,
        authentication_timeout_s: float,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._log = log
        self._tls = tls
        self._authentication_timeout_s = authentication_timeout_s
        self._runner: web.AppRunner | None = None
        self._server: web.Server | None = None
        self._acceptor: Acceptor | None = None
        self._unlogged = 0  # refused requests since the last log line about them
        self._logged_s = -REFUSALS_EVERY_S

    async def start(self, app: web.Application) -> None:
        """Answer requests from now on. Raises: the error that prevents the start; the port is closed then."""
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            handler_cancellation=True,
            access_log=None,
            logger=request_logger(self._log),
            shutdown_timeout=0.05,
            lingering_time=0.0,  # requests have no body, and a request with one ends its connection after the answer
        )
        try:
            await self._runner.setup()
        except BaseException:
            self._listener.close()
            raise
        assert self._runner.server is not None, "a runner that was set up has a server"
        self._server = self._runner.server
        self._acceptor = Acceptor(
            self._loop,
            self._listener,
            protocol=self._server,
            tls=self._tls,
            authentication_timeout_s=self._authentication_timeout_s,
        )
        self._acceptor.open()

    def authenticated(self, transport: asyncio.BaseTransport | None) -> None:
        """Mark a connection as a member of the job."""
        if self._acceptor is not None:
            self._acceptor.authenticated(transport)

    def refused(self, address: str | None) -> None:
        """Log requests without the right token, at most once a minute: any host may send them."""
        self._unlogged += 1
        if self._loop.time() - self._logged_s < REFUSALS_EVERY_S:
            return
        self._log.warning(
            "refused %d requests without the right token, the last from %s; give every process of the job the same one "
            "(TFT_TOKEN or TFT_TOKEN_FILE)",
            self._unlogged,
            address,
        )
        self._logged_s, self._unlogged = self._loop.time(), 0

    @property
    def transports(self) -> list[asyncio.Transport]:
        """Return the open connections."""
        connections = [] if self._server is None else self._server.connections
        transports = [each.transport for each in connections]
        return [transport for transport in transports if isinstance(transport, asyncio.Transport)]

    async def close(self) -> None:
        """Close the port and every connection, and cancel the other tasks of the loop. Call it once, after `start`."""
        assert self._runner is not None
        assert self._server is not None
        assert self._acceptor is not None
        try:
            # First the acceptor is closed. New connections then become known to the runner, which closes them.
            await self._acceptor.close()
            await _run_pending_callbacks()
            await self._runner.cleanup()
        finally:  # no connection stays, even if closing one of them raises
            await self._acceptor.close()
            await _run_pending_callbacks()
            for connection in self._server.connections:
                connection.force_close()
            tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task(self._loop)}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # A closed transport closes its socket in the loop's next turn.
            await _run_pending_callbacks()


async def _run_pending_callbacks() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
