"""Names of the calls, and handlers and stubs for them over grpc's generic interface.

Everything is bytes at this border: a codec makes values of them inside the handlers, where a damaged message can be
refused with a sentence, and one encoded answer can be given to many.

Law of this file: what grpc has to be told about our services; nothing that decides.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeAlias, final

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
        token: the job's shared secret, or None; a call that does not show it is refused before it is read.
    """

    def __init__(
        self, *, unary: Mapping[str, UnaryHandler], streams: Mapping[str, StreamHandler], token: str | None
    ) -> None:
        self._token = token
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(handler) for name, handler in unary.items()
        }
        refusals: dict[str, Any] = {name: grpc.unary_unary_rpc_method_handler(_refuse) for name in unary}
        for name, stream_handler in streams.items():
            handlers[name] = grpc.stream_stream_rpc_method_handler(stream_handler)
            refusals[name] = grpc.stream_stream_rpc_method_handler(_refuse)
        self._handlers = handlers
        self._refusals = refusals

    @property
    def methods(self) -> Collection[str]:
        """Full names of what it answers."""
        return self._handlers.keys()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """The handler of that call, or None for a method that is not ours. grpc asks once for each call."""
        allowed = admits(self._token, handler_call_details.invocation_metadata)
        return (self._handlers if allowed else self._refusals).get(handler_call_details.method)


async def _refuse(_request: object, context: Context) -> bytes:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "this server has a shared secret, and the call showed none or another; "
        "set TFT_TOKEN or TFT_TOKEN_FILE to the same secret in every process of the job",
    )


def unary_stub(channel: grpc.Channel, method: str) -> UnaryStub:
    """A blocking stub of bytes for that method."""
    return channel.unary_unary(method, request_serializer=None, response_deserializer=None)


def call_stub(channel: grpc.aio.Channel, method: str) -> CallStub:
    """An asyncio stub of bytes for that method with one message each way."""
    return channel.unary_unary(method, request_serializer=None, response_deserializer=None)


def stream_stub(channel: grpc.aio.Channel, method: str) -> StreamStub:
    """An asyncio stub of bytes for that method."""
    return channel.stream_stream(method, request_serializer=None, response_deserializer=None)
