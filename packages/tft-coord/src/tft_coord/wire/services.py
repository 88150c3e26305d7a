"""The names of the calls, and handlers and stubs for them over grpc's generic interface.

Everything is bytes at this border. A codec makes values of them inside the handlers. A handler can refuse a damaged
message with a sentence, and give one encoded answer to many callers.

Law of this file: grpc's view of the services; no decisions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final, NoReturn, TypeAlias, final

from tft_coord.rpc import grpc
from tft_coord.security import Gate, opens_job, wrong_job
from tft_coord.transport.address import peer_address

logger = logging.getLogger(__name__)

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
HEALTH_CHECK = "/grpc.health.v1.Health/Check"

# The two answers of grpc's health protocol: a HealthCheckResponse whose status (field 1) is SERVING or NOT_SERVING.
# They are written out, because a second description of that message would clash with grpcio-health-checking's.
SERVING: Final = b"\x08\x01"
NOT_SERVING: Final = b"\x08\x02"

# A refused call costs this process as much as a member's call, and a stranger can make thousands a second. Above a few
# a second their answers are therefore delayed. A connection has a limited number of calls, so its rate falls to
# MAX_STREAMS per REFUSAL_DELAY_S. No more than MAX_DELAYED_REFUSALS calls wait, each with its twenty kilobytes.
PROMPT_REFUSALS_PER_S: Final = 16
REFUSAL_DELAY_S: Final = 4.0
MAX_DELAYED_REFUSALS: Final = 2048
LOG_EVERY_S: Final = 60.0

# These are quoted, because grpc's classes take type arguments in their stubs only.
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
        gate: knows the secrets. The server refuses a call that opens nothing by its headers. It reads no message of
            such a call, so the call costs no memory.
        is_serving: returns the answer to grpc's health checks; None: they are not answered. They need no secret,
            because an orchestrator's probe has none.
    """

    def __init__(
        self,
        *,
        unary: Mapping[str, UnaryHandler],
        streams: Mapping[str, StreamHandler],
        gate: Gate,
        is_serving: Callable[[], bool] | None = None,
    ) -> None:
        self._gate = gate
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(handler) for name, handler in unary.items()
        }
        for name, stream_handler in streams.items():
            handlers[name] = grpc.stream_stream_rpc_method_handler(stream_handler)
        self._handlers = handlers
        # Before grpc calls a handler of one request, it reads the request, up to the server's maximum. A handler of a
        # stream of requests reads for itself, and on the wire the two kinds are the same.
        refusals = self._refused = _Refusals()
        refusal: Any = grpc.stream_unary_rpc_method_handler(refusals.refuse)
        self._refusals = dict.fromkeys(handlers, refusal)
        if is_serving is not None:
            health = _Health(is_serving, refusals)
            handlers[HEALTH_CHECK] = grpc.stream_unary_rpc_method_handler(health.check)
            self._refusals[HEALTH_CHECK] = grpc.stream_unary_rpc_method_handler(health.check_for_stranger)

    @property
    def methods(self) -> Collection[str]:
        """Return the full names of the answered methods."""
        return self._handlers.keys()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return the handler of that call, or None for an unknown method. grpc asks once for each call."""
        opened = self._gate.opens(handler_call_details.invocation_metadata)
        return (self._handlers if opened is not None else self._refusals).get(handler_call_details.method)

    def opened(self, context: Context) -> str | None:
        """Return what the secret of a call opens, as `Gate.opens` does."""
        return self._gate.opens(_metadata(context))

    async def check_job(self, context: Context, job: str) -> None:
        """Refuse the call unless its secret opens that job."""
        opened = self.opened(context)
        if not opens_job(opened, job):
            await self._refused.refuse_for(context, wrong_job(opened, job))


def _metadata(context: Context) -> list[tuple[str, str | bytes]]:
    return [(str(key), value) for key, value in context.invocation_metadata() or ()]


@final
class _Refusals:
    """The refusal of calls that do not show the secret: a few at once, a flood with a delay."""

    def __init__(self) -> None:
        self._second = 0
        self._refused = 0  # in this second
        self._delayed = 0  # refusals that wait
        self._unlogged = 0  # refusals since the last log line
        self._logged_s = -LOG_EVERY_S

    async def refuse(self, _messages: object, context: Context) -> bytes:
        return await self.refuse_for(
            context,
            "this server requires a shared secret, and the call had none or a different one; "
            "set TFT_TOKEN or TFT_TOKEN_FILE to the same secret in every process of the job",
        )

    async def refuse_for(self, context: Context, sentence: str) -> NoReturn:
        self._log(peer_address(context.peer()))
        await self.delay()
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, sentence)
        raise AssertionError("abort always raises")

    async def delay(self) -> None:
        """Delay the answer to a call without the secret while there is a flood of them."""
        if self._is_flood() and self._delayed < MAX_DELAYED_REFUSALS:
            self._delayed += 1
            try:
                await asyncio.sleep(REFUSAL_DELAY_S)
            finally:
                self._delayed -= 1

    def _log(self, peer: str) -> None:
        """Log a refusal, at most once a minute: any host may cause them."""
        self._unlogged += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s < LOG_EVERY_S:
            return
        logger.warning(
            "refused %d calls without the right shared secret, the last from %s; set TFT_TOKEN or TFT_TOKEN_FILE to "
            "the same secret in every process of the job",
            self._unlogged,
            peer,
        )
        self._logged_s, self._unlogged = now_s, 0

    def _is_flood(self) -> bool:
        second = int(asyncio.get_running_loop().time())
        if second != self._second:
            self._second, self._refused = second, 0
        self._refused += 1
        return self._refused > PROMPT_REFUSALS_PER_S


@final
class _Health:
    """The answers to health checks, for the server as a whole. A request names a service, and is not read: a stranger
    may send it, and it may be large."""

    def __init__(self, is_serving: Callable[[], bool], refusals: _Refusals) -> None:
        self._is_serving = is_serving
        self._refusals = refusals

    async def check(self, _messages: object, _context: Context) -> bytes:
        return SERVING if self._is_serving() else NOT_SERVING

    async def check_for_stranger(self, messages: object, context: Context) -> bytes:
        await self._refusals.delay()
        return await self.check(messages, context)


def unary_stub(channel: grpc.Channel, method: str) -> UnaryStub:
    """Return a blocking stub of bytes for that method."""
    return channel.unary_unary(method, request_serializer=None, response_deserializer=None)


def call_stub(channel: grpc.aio.Channel, method: str) -> CallStub:
    """Return an asyncio stub of bytes for that method with one message each way."""
    return channel.unary_unary(method, request_serializer=None, response_deserializer=None)


def stream_stub(channel: grpc.aio.Channel, method: str) -> StreamStub:
    """Return an asyncio stub of bytes for that method with a stream each way."""
    return channel.stream_stream(method, request_serializer=None, response_deserializer=None)
