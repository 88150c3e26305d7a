"""A grpc server whose port keeps answering.

A call to a method whose name is not valid text permanently closes the port of grpc's asyncio server. A stranger needs
no secret for that. Open calls then continue, but no new connection is accepted, and the owner gets no error. A
`RegisteredServer` does not end in this way. Where grpc's version lacks the parts that `RegisteredServer` needs, this
file detects the closed port, and another server takes it. A client that connects in that moment may have to retry.

Law of this file: listening, and listening again; it knows nothing of the answers.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from contextlib import suppress
from typing import Any, Final, TypeAlias, final

from tft_coord.descriptors import DescriptorWatch
from tft_coord.forks import Inheritance, let_go_in_child
from tft_coord.rpc import grpc
from tft_coord.tls import TLS
from tft_coord.transport.address import host_of, join_host_port
from tft_coord.transport.credentials import add_port
from tft_coord.transport.registered_server import RegisteredServer, is_supported
from tft_coord.transport.settings import Options
from tft_coord.wire.services import Services

logger = logging.getLogger(__name__)

GrpcServer: TypeAlias = "RegisteredServer | grpc.aio.Server"
REBIND_EVERY_S: Final = 0.02
REBIND_FOR_S: Final = 1.0
_CALL_HAS_ENDED: Final = 'Failed "execute_batch"'  # grpc's text; other errors of the call have another text


@final
class Server:
    """A server that listens at one port, on one loop only.

    Args:
        options: of grpc.
        services: the calls that it answers.
    """

    def __init__(self, options: Options, services: Services) -> None:
        self._tls: TLS | None = None
        self._options = options
        self._services = services
        self._bind = ""
        self._stopped = False
        self._rebinding: asyncio.Task[None] | None = None
        self._server = self._make()
        self._watch: DescriptorWatch | None = None
        self._draining: dict[GrpcServer, asyncio.Task[None]] = {}  # servers that have ended, with open calls
        let_go_in_child(self)

    @property
    def services(self) -> Services:
        """Return the calls that it answers."""
        return self._services

    def bind(self, address: str, tls: TLS | None = None) -> int:
        """Bind the port, for TLS if there are certificates.

        Returns: its number.
        Raises: RuntimeError: the address can't be bound.
        """
        self._tls = tls
        port = add_port(self._server, address, self._tls)
        self._bind = join_host_port(host_of(address), port)
        return port

    async def start(self) -> None:
        """Start to answer."""
        await self._server.start()
        self._watch = DescriptorWatch(f"the server at {self._bind}")
        _watch_for_ends(asyncio.get_running_loop(), self)

    async def stop(self, grace_s: float) -> None:
        """Stop; open calls get so long to end."""
        self._stopped = True
        if self._watch is not None:
            self._watch.end()
        if self._rebinding is not None:
            self._rebinding.cancel()
            await asyncio.wait([self._rebinding])
        outlived = list(self._draining.values())
        await asyncio.gather(*(server.stop(grace_s) for server in (self._server, *self._draining)))
        if outlived:
            await asyncio.wait(outlived)

    def forked(self) -> Inheritance:
        """Return what a forked child inherits; the port and its connections belong to the parent."""
        ports = {int(self._bind.rpartition(":")[2])} if self._bind and not self._stopped else ()
        return Inheritance(ports=ports, kept=[self._server, *self._draining])

    def look(self) -> None:
        """Check after the end of a server of this loop; listen again if it was this one."""
        if not self._stopped and (self._rebinding is None or self._rebinding.done()):
            self._rebinding = asyncio.get_running_loop().create_task(self._rebind())

    async def _rebind(self) -> None:
        """Listen again, unless another server of this process still has the port."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + REBIND_FOR_S
        server = self._make()
        try:
            while True:
                try:
                    add_port(server, self._bind, self._tls)
                    break
                except RuntimeError:
                    if loop.time() > give_up_at:
                        return
                await asyncio.sleep(REBIND_EVERY_S)
            await server.start()
            self._draining[self._server] = loop.create_task(self._drain(self._server))
            self._server = server
            logger.error("a call with an invalid method name closed the port %s; it is open again", self._bind)
        finally:
            if server is not self._server:
                await server.stop(0)

    async def _drain(self, before: GrpcServer) -> None:
        """Keep the ended server until its last call has ended."""
        try:
            with suppress(UnicodeDecodeError):  # the known error that has ended it
                await before.wait_for_termination()
            await before.stop(None)  # grpc's own stop of it ended half-way, and kept its memory
        finally:
            self._draining.pop(before, None)

    def _make(self) -> GrpcServer:
        if is_supported():
            return RegisteredServer(self._options, self._services)
        return grpc.aio.server(handlers=[self._services], options=self._options)


def _is_relevant(record: logging.LogRecord) -> bool:
    """Return whether a log record of grpc matters.

    grpc logs a traceback for two events that a stranger can repeat at will. One is a method name that is not text. The
    other is a call that has ended, most often by its own deadline, at the very moment of its answer.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, UnicodeDecodeError) or isinstance(record.msg, UnicodeDecodeError):
        return False
    return type(error).__name__ != "ExecuteBatchError" or not str(error).startswith(_CALL_HAS_ENDED)


_servers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.WeakSet[Server]] = weakref.WeakKeyDictionary()


def _watch_for_ends(loop: asyncio.AbstractEventLoop, server: Server) -> None:
    """Watch for ended servers: only grpc knows the task that listens, and its failure reaches the loop's exception
    handler."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_relevant)  # a repeated call adds nothing
    if loop in _servers:
        _servers[loop].add(server)
        return
    _servers[loop] = weakref.WeakSet([server])

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        for each in list(_servers.get(loop, ())):
            each.look()
        if not isinstance(context.get("exception"), UnicodeDecodeError):
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
