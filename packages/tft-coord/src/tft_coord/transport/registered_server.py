"""A grpc server whose methods are registered, so that an invalid method name can't close its port.

From version 1.84 on, grpc's asyncio server decodes the name of a method outside of the call's own task. One name that
is not valid text closes the port. This happens only with methods that are not registered in advance. This server
therefore registers all known methods. It answers every other call as unimplemented, without decoding the name.

Law of this file: all uses of grpc's private parts, and nothing else; its user has a fallback.
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

_NEEDED: Final = {  # the methods that are called or replaced here, as in versions from 1.84 on
    "AioServer._make_request_call_future": ["self", "method_bytes"],
    "AioServer._request_call": ["self"],
    "AioServer._request_registered_call": ["self", "method"],
    "AioServer.add_registered_method_handlers": ["self", "method_handlers"],
    "_handle_rpc": ["method_name", "method_resolver", "interceptors", "rpc_state", "loop", "concurrency_exceeded"],
    "_schedule_rpc_coro": ["rpc_coro", "rpc_state", "loop", "method_name"],
}


@final
class RegisteredServer:
    """The used part of a `grpc.aio.Server`, under the same names.

    Args:
        options: of grpc.
        services: the calls that it answers.
    """

    def __init__(self, options: Options, services: Services) -> None:
        self._server = _server_class()(_cygrpc().get_working_loop(), None, (), (), tuple(options), None)
        self._server.answer_with(services)

    def add_insecure_port(self, address: str) -> int:
        """Bind the port. Returns: the port's number. Raises: RuntimeError: the address can't be bound."""
        return _checked(address, self._server.add_insecure_port(address.encode()))

    def add_secure_port(self, address: str, credentials: Any) -> int:
        """Bind the port, for TLS. Returns: the port's number. Raises: RuntimeError: the address can't be bound."""
        return _checked(address, self._server.add_secure_port(address.encode(), credentials))

    async def start(self) -> None:
        """Start to answer."""
        await self._server.start()

    async def stop(self, grace: float | None) -> None:
        """Stop; open calls get so many seconds to end."""
        await self._server.shutdown(grace)

    async def wait_for_termination(self) -> None:
        """Wait until the last call has ended. Raises: the error that has ended the listening, if any."""
        await self._server.wait_for_termination(None)


@functools.cache
def is_supported() -> bool:
    """Return whether this version of grpc has the needed parts. Versions before 1.84 lack both the parts and the
    fault."""
    for name, parameters in _NEEDED.items():
        part: Any = _cygrpc()
        for each in name.split("."):
            part = getattr(part, each, None)
        if part is None or list(inspect.signature(part).parameters) != parameters:
            return False
    return True


def _checked(address: str, port: int) -> int:
    if port == 0:
        raise RuntimeError(f"the address {address} can't be bound")
    return port


def _cygrpc() -> Any:
    return importlib.import_module("grpc._cython.cygrpc")  # it ships no types


@final
class _Resolver:
    """The object that tells grpc the handler of a call."""

    def __init__(self, service: Callable[[Any], Any]) -> None:
        self.resolve_handler = service


@functools.cache
def _server_class() -> Any:
    """Return the server class, made on first use: not every version of grpc has the base class's parts."""
    cygrpc = _cygrpc()

    class Server(cygrpc.AioServer):  # type: ignore[misc, name-defined] # of a module without types
        """A server that accepts all calls itself.

        grpc's own loop waits for the next call. Here that wait is an endless task that accepts one call after the
        other, so only the end of the listening reaches grpc's loop.
        """

        def answer_with(self, services: Services) -> None:
            self._loop_of_calls = asyncio.get_running_loop()
            self._resolver = _Resolver(services.service)
            self._calls: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly
            self.add_registered_method_handlers(dict.fromkeys(services.methods))

        def _make_request_call_future(self, method_bytes: bytes | None) -> asyncio.Task[None]:
            return self._loop_of_calls.create_task(self._take(method_bytes))

        async def _take(self, method: bytes | None) -> None:
            """Accept calls of that method; None: calls of unregistered methods. Only an error of grpc ends this."""
            loop, name = self._loop_of_calls, "" if method is None else method.decode()
            while True:
                state = await (self._request_call() if method is None else self._request_registered_call(method))
                answer = cygrpc._handle_rpc(name, self._resolver, (), state, loop, False)
                call = loop.create_task(cygrpc._schedule_rpc_coro(answer, state, loop, name))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
                del state, answer, call  # no reference must stay while it waits for the next call

    return Server
