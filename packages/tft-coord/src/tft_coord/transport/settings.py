"""What every channel and server of ours is set to, and how errors cross it.

Law of this file: settings of grpc and translations to and from it; no calls, no state.
"""

from __future__ import annotations

from typing import Any, NoReturn

from tft_coord import descriptors
from tft_coord.core.types import Refusal
from tft_coord.errors import (
    CoordinationError,
    DeadlinePassed,
    GroupLost,
    JobOver,
    ProtocolError,
    Refused,
    StaleQuorum,
    UnknownCall,
    Unreachable,
)
from tft_coord.rpc import grpc
from tft_coord.timeouts import Timeouts
from tft_coord.wire.services import Context

MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # a quorum of 100,000 members; every part is bounded once more by the codec
# A server takes less, because anyone may send to it: the largest that it is told is a quorum, of 20,000 members here.
MAX_REQUEST_BYTES = 8 * 1024 * 1024
MAX_STREAMS = 128  # calls of one connection at a time; a client of grpc keeps what is above it waiting
# A connection without a call is closed after so long, and its client connects again with its next call.
CONNECTION_IDLE_MS = 30_000
# A connection of that age takes no new calls. Its streams go on for as long as they like; the next call of its client
# opens another connection. So a stranger's refused calls do not keep a connection for good.
CONNECTION_AGE_MS = 600_000
CODE_KEY = "tft-code"  # trailing metadata: which error of ours a status stands for
# What grpc.aio says of a stream that ended while a message was written (grpc's issue 36066): the other side's own
# status is overwritten, so that nothing is known but that the stream broke.
BROKE_WHILE_WRITING = "Internal error from Core"

Options = list[tuple[str, int]]

_STATUS = {
    "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
    "group_lost": grpc.StatusCode.ABORTED,
    Refusal.STALE.value: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.MALFORMED.value: grpc.StatusCode.INVALID_ARGUMENT,
    Refusal.DUPLICATE.value: grpc.StatusCode.ALREADY_EXISTS,
    Refusal.OLD_LIGHTHOUSE.value: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.LEFT.value: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.UNKNOWN.value: grpc.StatusCode.NOT_FOUND,
}


def channel_options(timeouts: Timeouts, *, to_lighthouse: bool = False, within_ms: int = 0) -> Options:
    """For a client's channel, which may take `within_ms` to connect, and at least heartbeat_timeout_ms.

    So may the answer to a ping: a server that takes long to connect to is far away.

    A lighthouse has thousands of them, and every ping costs it as much as a beat; that one hangs is found later.

    Redials are the caller's: each dial is a new channel with a pool of its own, so that grpc's back-off, which is
    shared between channels of one address, never delays one.
    """
    return [
        *_common(timeouts, MAX_MESSAGE_BYTES, timeouts.heartbeat_timeout_ms // (2 if to_lighthouse else 8), within_ms),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also the longest time that grpc gives one connection. A shorter one would be begun anew for ever, and never
        # made, where the server is far away or the machine busy.
        ("grpc.min_reconnect_backoff_ms", max(1_000, timeouts.heartbeat_timeout_ms, within_ms)),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]


def server_options(timeouts: Timeouts, *, hears_beats: bool = False) -> Options:
    """For a server: a port has one owner, and pings are welcome at any pace.

    One that judges its clients by their beats needs no pings of its own to know who is silent; they are for connections
    that say nothing at all.
    """
    return [
        *_common(timeouts, MAX_REQUEST_BYTES, timeouts.heartbeat_timeout_ms // (1 if hears_beats else 8)),
        ("grpc.so_reuseport", 0),
        # What a server is told is small, and a ping after whatever comes, to measure the link, would double its work.
        ("grpc.http2.bdp_probe", 0),
        # Who connects and says nothing is sent off: its connection is a descriptor that others need.
        ("grpc.server_handshake_timeout_ms", timeouts.heartbeat_timeout_ms),
        ("grpc.max_connection_idle_ms", CONNECTION_IDLE_MS),
        ("grpc.max_connection_age_ms", CONNECTION_AGE_MS),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # Half of the descriptors, for all else of this process needs some as well. Above it a connection is ended as it
        # is made.
        ("grpc.max_allowed_incoming_connections", max(1, descriptors.limit() // 2)),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ]


def _common(timeouts: Timeouts, most_received_bytes: int, ping_after_ms: int, within_ms: int = 0) -> Options:
    # Pings are sent and answered by grpc's own threads, without the interpreter lock: a busy trainer answers, a stopped
    # one or a cut cable does not: it is found heartbeat_timeout after a ping, and that goes out after ping_after_ms.
    # Both time-outs are set: a server waits for the longer of the two, and the second is a minute by default.
    unanswered_ms = max(timeouts.heartbeat_timeout_ms, within_ms)
    return [
        ("grpc.keepalive_time_ms", max(1, ping_after_ms)),
        ("grpc.keepalive_timeout_ms", unanswered_ms),
        ("grpc.http2.ping_timeout_ms", unanswered_ms),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", most_received_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]


async def fail(context: Context, code: str, message: str) -> NoReturn:
    """End a call with an error of ours: `code` for our clients, a status for everybody's."""
    status = _STATUS.get(code, grpc.StatusCode.PERMISSION_DENIED)
    await context.abort(status, message, trailing_metadata=((CODE_KEY, code),))
    raise AssertionError("abort always raises")


def error_of(failure: grpc.RpcError, what: str) -> CoordinationError:
    """Our error for a failed call; `what` says in a few words what was called, and where."""
    status, details = failure.code(), failure.details() or ""
    trailing: Any = failure.trailing_metadata() or ()
    code = next((_text(value) for key, value in trailing if key == CODE_KEY), "")
    if code:
        return error_of_code(code, details, what)
    sentence = f"{what}: {details}" if details else what
    match status:
        case grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
            return DeadlinePassed(f"{what}: no answer before the deadline")
        case grpc.StatusCode.UNAVAILABLE:
            return Unreachable(sentence)
        case grpc.StatusCode.INTERNAL if details == BROKE_WHILE_WRITING:
            return Unreachable(f"{what}: its stream ended in the middle of a message")
        case grpc.StatusCode.UNIMPLEMENTED:
            return UnknownCall(f"{what}: it does not know this call; it is another program's server, or an older one")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return ProtocolError(sentence)
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNAUTHENTICATED:
            return Refused(sentence, code=status.name.lower())
        case _:
            return CoordinationError(f"{what}: {status.name}: {details}")


def error_of_code(code: str, message: str, what: str) -> CoordinationError:
    """Our error for a code of ours, wherever it was read."""
    sentence = f"{what}: {message}"
    match code:
        case "deadline":
            return DeadlinePassed(sentence)
        case "group_lost":
            return GroupLost(sentence)
        case Refusal.STALE.value:
            return StaleQuorum(sentence)
        case Refusal.MALFORMED.value:
            return ProtocolError(sentence)
        case Refusal.OVER.value:
            return JobOver(sentence, code=code)
        case _:
            return Refused(sentence, code=code)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else bytes(value).decode("utf-8", "replace")
