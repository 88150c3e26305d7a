"""A grpc server whose port keeps answering.

A call to a method whose name is no text ends the listening of grpc's asyncio server for good. A stranger needs no
secret for that. Open calls then go on, but no new connection gets in, and the owner hears nothing of it. A
`SteadyServer` does not end in this way. Where grpc's version lacks what `SteadyServer` needs, this file detects such an
end, and another server takes the port. A client that connects in that moment may have to retry.

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
from tft_coord.transport.address import host_of, join_host_port
from tft_coord.transport.settings import Options
from tft_coord.transport.steady import SteadyServer, is_offered
from tft_coord.wire.services import Services

logger = logging.getLogger(__name__)

GrpcServer: TypeAlias = "SteadyServer | grpc.aio.Server"
AGAIN_EVERY_S: Final = 0.02
AGAIN_FOR_S: Final = 1.0
_CALL_HAS_ENDED: Final = 'Failed "execute_batch"'  # grpc's words; other errors of the call have other words


@final
class Server:
    """A server that listens at one port. It runs on one loop only.

    Args:
        options: of grpc.
        services: the calls that it answers.
    """

    def __init__(self, options: Options, services: Services) -> None:
        self._options = options
        self._services = services
        self._bind = ""
        self._stopped = False
        self._again: asyncio.Task[None] | None = None
        self._server = self._make()
        self._watch: DescriptorWatch | None = None
        self._before: dict[GrpcServer, asyncio.Task[None]] = {}  # servers that have ended, and still have open calls
        let_go_in_child(self)

    def bind(self, address: str) -> int:
        """Bind the port. Returns: its number. Raises: RuntimeError: the address can't be bound."""
        port = self._server.add_insecure_port(address)
        self._bind = join_host_port(host_of(address), port)
        return port

    async def start(self) -> None:
        """Start to answer."""
        await self._server.start()
        self._watch = DescriptorWatch(f"the server at {self._bind}")
        _hear_of_ends(asyncio.get_running_loop(), self)

    async def stop(self, grace_s: float) -> None:
        """Stop; open calls get so long to end."""
        self._stopped = True
        if self._watch is not None:
            self._watch.end()
        if self._again is not None:
            self._again.cancel()
            await asyncio.wait([self._again])
        outlived = list(self._before.values())
        await asyncio.gather(*(server.stop(grace_s) for server in (self._server, *self._before)))
        if outlived:
            await asyncio.wait(outlived)

    def forked(self) -> Inheritance:
        """Return what a forked child inherits; the port and its connections belong to the parent."""
        ports = {int(self._bind.rpartition(":")[2])} if self._bind and not self._stopped else ()
        return Inheritance(ports=ports, kept=[self._server, *self._before])

    def look(self) -> None:
        """Check after the end of a server of this loop; listen again if it was this one."""
        if not self._stopped and (self._again is None or self._again.done()):
            self._again = asyncio.get_running_loop().create_task(self._listen_again())

    async def _listen_again(self) -> None:
        """Listen again, unless another server of this process still has the port."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + AGAIN_FOR_S
        server = self._make()
        try:
            while True:
                try:
                    server.add_insecure_port(self._bind)
                    break
                except RuntimeError:
                    if loop.time() > give_up_at:
                        return
                await asyncio.sleep(AGAIN_EVERY_S)
            await server.start()
            self._before[self._server] = loop.create_task(self._outlive(self._server))
            self._server = server
            logger.error("a call whose method is no text ended the listening at %s; it goes on", self._bind)
        finally:
            if server is not self._server:
                await server.stop(0)

    async def _outlive(self, before: GrpcServer) -> None:
        """Keep the ended server until its last call has ended."""
        try:
            with suppress(UnicodeDecodeError):  # the known error that has ended it
                await before.wait_for_termination()
            await before.stop(None)  # grpc's own stop of it broke off half-way, and kept its memory
        finally:
            self._before.pop(before, None)

    def _make(self) -> GrpcServer:
        if is_offered():
            return SteadyServer(self._options, self._services)
        return grpc.aio.server(handlers=[self._services], options=self._options)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """Return whether a log record of grpc matters.

    grpc logs a traceback for two events that a stranger can repeat at will. One is a name that is no text. The other is
    a call that has ended, most often by its own deadline, at the very moment of its answer.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, UnicodeDecodeError) or isinstance(record.msg, UnicodeDecodeError):
        return False
    return type(error).__name__ != "ExecuteBatchError" or not str(error).startswith(_CALL_HAS_ENDED)


_servers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.WeakSet[Server]] = weakref.WeakKeyDictionary()


def _hear_of_ends(loop: asyncio.AbstractEventLoop, server: Server) -> None:
    """Watch for ended servers: only grpc knows the task that listens, and its failure reaches the loop's exception
    handler."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_saying)  # a repeated call adds nothing
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
