"""A grpc server that a method whose name is no text can't end.

From version 1.84 on, grpc's asyncio server decodes the name of a method outside of the call's own task; one stranger's
name that is no text ends its listening. It does so only with methods that it was not told of in advance. So it is told
of ours, and all others are answered here, without a look at the name: such a call is unimplemented, whatever it names.

Law of this file: all that we use of grpc's private parts, and nothing else; whoever uses it has another way.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Final, final

from tft_coord.transport.settings import Options
from tft_coord.wire.services import Services

_NEEDED: Final = {  # what is called or replaced here, as versions from 1.84 on have it
    "AioServer._make_request_call_future": ["self", "method_bytes"],
    "AioServer._request_call": ["self"],
    "AioServer._request_registered_call": ["self", "method"],
    "AioServer.add_registered_method_handlers": ["self", "method_handlers"],
    "_handle_rpc": ["method_name", "method_resolver", "interceptors", "rpc_state", "loop", "concurrency_exceeded"],
    "_schedule_rpc_coro": ["rpc_coro", "rpc_state", "loop", "method_name"],
}


@final
class SteadyServer:
    """What is used of a `grpc.aio.Server`, under the same names.

    Args:
        options: of grpc.
        services: what it answers.
    """

    def __init__(self, options: Options, services: Services) -> None:
        self._server = _server_class()(_cygrpc().get_working_loop(), None, (), (), tuple(options), None)
        self._server.answer_with(services)

    def add_insecure_port(self, address: str) -> int:
        """Returns: the port's number. Raises: RuntimeError: the address can't be bound."""
        port: int = self._server.add_insecure_port(address.encode())
        if port == 0:
            raise RuntimeError(f"the address {address} can't be bound")
        return port

    async def start(self) -> None:
        """Answer."""
        await self._server.start()

    async def stop(self, grace: float | None) -> None:
        """End; open calls have so many seconds."""
        await self._server.shutdown(grace)

    async def wait_for_termination(self) -> None:
        """Returns when the last call has ended. Raises: what has ended the listening, if anything has."""
        await self._server.wait_for_termination(None)


@functools.cache
def is_offered() -> bool:
    """Has this version of grpc the parts that this takes? Those before 1.84 have not, nor the fault."""
    for name, parameters in _NEEDED.items():
        part: Any = _cygrpc()
        for each in name.split("."):
            part = getattr(part, each, None)
        if part is None or list(inspect.signature(part).parameters) != parameters:
            return False
    return True


def _cygrpc() -> Any:
    return importlib.import_module("grpc._cython.cygrpc")  # it ships no types


@final
class _Resolver:
    """Says to grpc who answers a call."""

    def __init__(self, service: Callable[[Any], Any]) -> None:
        self.resolve_handler = service


@functools.cache
def _server_class() -> Any:
    """Made when it is first needed: not every version of grpc has what it stands on."""
    cygrpc = _cygrpc()

    class Server(cygrpc.AioServer):  # type: ignore[misc, name-defined] # of a module without types
        """Takes all calls itself. What grpc's own loop waits for, the next call, is here an endless task that takes
        one call after the other; so that loop is left with nothing but the end of the listening."""

        def answer_with(self, services: Services) -> None:
            self._loop_of_calls = asyncio.get_running_loop()
            self._resolver = _Resolver(services.service)
            self._calls: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly
            self.add_registered_method_handlers(dict.fromkeys(services.methods))

        def _make_request_call_future(self, method_bytes: bytes | None) -> asyncio.Task[None]:
            return self._loop_of_calls.create_task(self._take(method_bytes))

        async def _take(self, method: bytes | None) -> None:
            """Calls of that method; of those that grpc was not told of if None. Ends by an error of grpc's only."""
            loop, name = self._loop_of_calls, "" if method is None else method.decode()
            while True:
                state = await (self._request_call() if method is None else self._request_registered_call(method))
                answer = cygrpc._handle_rpc(name, self._resolver, (), state, loop, False)
                call = loop.create_task(cygrpc._schedule_rpc_coro(answer, state, loop, name))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
                del state, answer, call  # while it waits for the next one

    return Server
