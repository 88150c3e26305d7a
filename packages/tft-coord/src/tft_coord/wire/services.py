"""Names of the calls, and handlers and stubs for them over grpc's generic interface.

Everything is bytes at this border: a codec makes values of them inside the handlers, where a damaged message can be
refused with a sentence, and one encoded answer can be given to many.

Law of this file: what grpc has to be told about our services; nothing that decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final, TypeAlias, final

from tft_coord.rpc import grpc
from tft_coord.security import admits

MANAGER_QUORUM = "/torchft.ManagerService/Quorum"
MANAGER_CHECKPOINT_METADATA = "/torchft.ManagerService/CheckpointMetadata"
MANAGER_SHOULD_COMMIT = "/torchft.ManagerService/ShouldCommit"
MANAGER_KILL = "/torchft.ManagerService/Kill"
LIGHTHOUSE_QUORUM = "/torchft.LighthouseService/Quorum"
LIGHTHOUSE_HEARTBEAT = "/torchft.LighthouseService/Heartbeat"
LIGHTHOUSE_DESCRIBE = "/torchft.TftLighthouseService/Describe"
LIGHTHOUSE_DRAIN = "/torchft.TftLighthouseService/Drain"
LIGHTHOUSE_SESSION = "/torchft.TftLighthouseService/Session"
MANAGER_SESSION = "/torchft.TftManagerService/Session"

# A refused call costs this process as much as a call of a member, and a stranger can make thousands a second. So above
# a few a second their answers are late, and a connection has but so many calls: its rate falls to MAX_STREAMS by
# LATE_S. No more than MOST_LATE wait, each with its twenty kilobytes.
AT_ONCE_A_SECOND: Final = 16
LATE_S: Final = 4.0
MOST_LATE: Final = 2048

# Quoted: grpc's classes take type arguments in their stubs only.
Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
UnaryStub: TypeAlias = "grpc.UnaryUnaryMultiCallable[bytes, bytes]"
CallStub: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
StreamStub: TypeAlias = "grpc.aio.StreamStreamMultiCallable[bytes, bytes]"
UnaryHandler: TypeAlias = Callable[[bytes, Context], Awaitable[bytes]]
StreamHandler: TypeAlias = Callable[[object, Context], Awaitable[None]]


@final
class Services(grpc.GenericRpcHandler):
    """The calls that a server answers.

    Args:
        unary: handlers of calls with one message each way, by full name of the method.
        streams: handlers of calls with a stream each way; they read and write through the context.
        token: the job's shared secret, or None. A call that does not show it is refused by its headers: no message of
            it is read, so that it costs no memory.
    """

    def __init__(
        self, *, unary: Mapping[str, UnaryHandler], streams: Mapping[str, StreamHandler], token: str | None
    ) -> None:
        self._token = token
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(handler) for name, handler in unary.items()
        }
        for name, stream_handler in streams.items():
            handlers[name] = grpc.stream_stream_rpc_method_handler(stream_handler)
        self._handlers = handlers
        # Before a handler of one request is called grpc reads the request, up to the largest that the server takes.
        # A handler of a stream of requests reads for itself, and on the wire the two kinds are the same.
        refusal: Any = grpc.stream_unary_rpc_method_handler(_Refusals().refuse)
        self._refusals = dict.fromkeys(handlers, refusal)

    @property
    def methods(self) -> Collection[str]:
        """Full names of what it answers."""
        return self._handlers.keys()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """The handler of that call, or None for a method that is not ours. grpc asks once for each call."""
        allowed = admits(self._token, handler_call_details.invocation_metadata)
        return (self._handlers if allowed else self._refusals).get(handler_call_details.method)


@final
class _Refusals:
    """Refuses calls that do not show the secret: a few at once, a flood late."""

    def __init__(self) -> None:
        self._second = 0
        self._refused = 0  # in this second
        self._late = 0  # that wait

    async def refuse(self, _messages: object, context: Context) -> bytes:
        if self._is_flood() and self._late < MOST_LATE:
            self._late += 1
            try:
                await asyncio.sleep(LATE_S)
            finally:
                self._late -= 1
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            "this server has a shared secret, and the call showed none or another; "
            "set TFT_TOKEN or TFT_TOKEN_FILE to the same secret in every process of the job",
        )
        raise AssertionError("abort always raises")

    def _is_flood(self) -> bool:
        second = int(asyncio.get_running_loop().time())
        if second != self._second:
            self._second, self._refused = second, 0
        self._refused += 1
        return self._refused > AT_ONCE_A_SECOND


def unary_stub(channel: grpc.Channel, method: str) -> UnaryStub:
    """A blocking stub of bytes for that method."""
    return channel.unary_unary(method, request_serializer=None, response_deserializer=None)


def call_stub(channel: grpc.aio.Channel, method: str) -> CallStub:
    """An asyncio stub of bytes for that method with one message each way."""
    return channel.unary_unary(method, request_serializer=None, response_deserializer=None)


def stream_stub(channel: grpc.aio.Channel, method: str) -> StreamStub:
    """An asyncio stub of bytes for that method."""
    return channel.stream_stream(method, request_serializer=None, response_deserializer=None)
