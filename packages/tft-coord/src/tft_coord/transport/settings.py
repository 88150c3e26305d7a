"""The settings of all channels and servers, and the translation of errors.

Law of this file: settings of grpc and translations to and from it; no calls, no state.
"""

from __future__ import annotations

from typing import Any, NoReturn

from tft_coord import descriptors
from tft_coord.core.types import Refusal
from tft_coord.errors import (
    CoordinationError,
    JobOverError,
    ProtocolError,
    RefusedError,
    ReplicaGroupLostError,
    RequestTimeoutError,
    StaleQuorumError,
    UnknownCallError,
    UnreachableError,
)
from tft_coord.rpc import grpc
from tft_coord.timeouts import Timeouts
from tft_coord.wire.services import Context

MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # a quorum of 100,000 members; the codec bounds every part once more
# A server's limit is lower, because anyone may send to it. The largest message to a server is a quorum, of 20,000
# members here.
MAX_REQUEST_BYTES = 8 * 1024 * 1024
MAX_STREAMS = 128  # calls of one connection at a time; a grpc client keeps further calls waiting
# A connection without a call is closed after so long, and its client reconnects with its next call.
CONNECTION_IDLE_MS = 30_000
# A connection of that age accepts no new calls. Its streams continue without a limit; the next call of its client
# opens another connection. A stranger's refused calls therefore can't keep a connection open for ever.
CONNECTION_AGE_MS = 600_000
CODE_KEY = "tft-code"  # trailing metadata: the error of this project behind a status
# grpc.aio reports this for a stream that ended while a message was written (grpc's issue 36066). The other side's own
# status is overwritten, so only the break is known.
BROKE_WHILE_WRITING = "Internal error from Core"

TOO_LARGE = "larger than max"  # grpc's text for a message above the receiver's limit

Options = list[tuple[str, int]]

_STATUS = {
    "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
    "group_lost": grpc.StatusCode.ABORTED,
    Refusal.STALE.value: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.MALFORMED.value: grpc.StatusCode.INVALID_ARGUMENT,
    Refusal.DUPLICATE.value: grpc.StatusCode.ALREADY_EXISTS,
    Refusal.OLD_LIGHTHOUSE.value: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.STANDBY.value: grpc.StatusCode.UNAVAILABLE,
    Refusal.LEFT.value: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.UNKNOWN.value: grpc.StatusCode.NOT_FOUND,
}


def channel_options(timeouts: Timeouts, *, to_lighthouse: bool = False, within_ms: int = 0) -> Options:
    """Return the options of a client's channel, which may take `within_ms` to connect, and at least
    heartbeat_timeout_ms.

    The answer to a ping may take as long: a server that takes long to connect to is far away.
    A lighthouse has thousands of channels, and every ping costs it as much as a beat. Pings to it are therefore rarer,
    and a hung lighthouse is found later.
    The caller redials itself: each dial is a new channel with its own pool. grpc's back-off, which channels of one
    address share, therefore never delays a dial.
    """
    return [
        *_common(timeouts, MAX_MESSAGE_BYTES, timeouts.heartbeat_timeout_ms // (2 if to_lighthouse else 8), within_ms),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # This is also grpc's time limit for one connection attempt. With a shorter limit grpc would restart the attempt
        # for ever where the server is far away or the machine busy.
        ("grpc.min_reconnect_backoff_ms", max(1_000, timeouts.heartbeat_timeout_ms, within_ms)),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]


def server_options(
    timeouts: Timeouts, *, hears_beats: bool = False, max_request_bytes: int = MAX_REQUEST_BYTES
) -> Options:
    """Return the options of a server: a port has one owner, and pings may come at any pace.

    A server that judges its clients by their beats does not need its own pings to find silent ones. Its pings are for
    connections that send nothing at all.
    """
    return [
        *_common(timeouts, max_request_bytes, timeouts.heartbeat_timeout_ms // (1 if hears_beats else 8)),
        ("grpc.so_reuseport", 0),
        # Messages to a server are small, and grpc's ping after each message, to measure the link, would double its
        # work.
        ("grpc.http2.bdp_probe", 0),
        # A silent connection is closed, because its descriptor is needed for others.
        ("grpc.server_handshake_timeout_ms", timeouts.heartbeat_timeout_ms),
        ("grpc.max_connection_idle_ms", CONNECTION_IDLE_MS),
        ("grpc.max_connection_age_ms", CONNECTION_AGE_MS),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", descriptors.most_connections()),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ]


def _common(timeouts: Timeouts, most_received_bytes: int, ping_after_ms: int, within_ms: int = 0) -> Options:
    # grpc's own threads send and answer pings, without the interpreter lock. A busy trainer answers. A stopped one, or
    # a cut cable, does not, and is found heartbeat_timeout after a ping, which goes out after ping_after_ms. Both
    # timeouts are set: a server waits for the longer of the two, and the second is a minute by default.
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
    """End a call with an error of this project: `code` for its own clients, a status for all others."""
    status = _STATUS.get(code, grpc.StatusCode.PERMISSION_DENIED)
    await context.abort(status, message, trailing_metadata=((CODE_KEY, code),))
    raise AssertionError("abort always raises")


def error_of(failure: grpc.RpcError, what: str) -> CoordinationError:
    """Return the error for a failed call; `what` names the call and its target in a few words."""
    status, details = failure.code(), failure.details() or ""
    trailing: Any = failure.trailing_metadata() or ()
    code = next((_text(value) for key, value in trailing if key == CODE_KEY), "")
    if code:
        return error_of_code(code, details, what)
    sentence = f"{what}: {details}" if details else what
    match status:
        case grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
            return RequestTimeoutError(f"{what}: no answer before the deadline")
        case grpc.StatusCode.UNAVAILABLE:
            return UnreachableError(sentence)
        case grpc.StatusCode.INTERNAL if details == BROKE_WHILE_WRITING:
            return UnreachableError(f"{what}: the stream ended in the middle of a message")
        case grpc.StatusCode.UNIMPLEMENTED:
            return UnknownCallError(
                f"{what}: the server does not know this call; it is another program, or an older version"
            )
        case grpc.StatusCode.INVALID_ARGUMENT:
            return ProtocolError(sentence)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if TOO_LARGE in details:
            sentence = (
                f"{what}: a message is larger than the receiver takes ({details}); send less, or raise "
                "max_message_bytes if a lighthouse is the receiver"
            )
            return RefusedError(sentence, code=Refusal.FULL.value)
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNAUTHENTICATED:
            return RefusedError(sentence, code=status.name.lower())
        case _:
            return CoordinationError(f"{what}: {status.name}: {details}")


def error_of_code(code: str, message: str, what: str) -> CoordinationError:
    """Return the error for a code of this project, from any source."""
    sentence = f"{what}: {message}"
    match code:
        case "deadline":
            return RequestTimeoutError(sentence)
        case "group_lost":
            return ReplicaGroupLostError(sentence)
        case Refusal.STALE.value:
            return StaleQuorumError(sentence)
        case Refusal.MALFORMED.value:
            return ProtocolError(sentence)
        case Refusal.OVER.value:
            return JobOverError(sentence, code=code)
        case _:
            return RefusedError(sentence, code=code)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else bytes(value).decode("utf-8", "replace")
