"""What the first bytes of an answer say of who listens at an address."""

from __future__ import annotations

import pytest

from tft_coord.errors import ProtocolError, Unreachable
from tft_coord.timeouts import Timeouts
from tft_coord.transport.listener import _verdict
from tft_coord.transport.settings import channel_options

SETTINGS_FRAME = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00"


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (b"HTTP/1.1 400 Bad", ProtocolError, "an HTTP server answers there"),
        (b"<!DOCTYPE HTML P", ProtocolError, "an HTTP server answers there"),
        (b"SSH-2.0-OpenSSH_", ProtocolError, "a server of another kind answers there"),
        (b"\x15\x03\x01\x00\x02\x02\x46", ProtocolError, "wants TLS"),
        (SETTINGS_FRAME, Unreachable, "the connection broke"),
        (b"", Unreachable, "takes the connection and ends it"),
        (None, Unreachable, "says nothing within 1 s"),
    ],
)
def test_the_first_bytes_tell_who_listens(answer: bytes | None, kind: type[Exception], says: str) -> None:
    found = _verdict(answer)
    assert type(found) is kind
    assert says in str(found)


@pytest.mark.parametrize("heartbeat_timeout_ms", [200, 5_000, 60_000])
def test_one_connection_may_take_as_long_as_one_dial(heartbeat_timeout_ms: int) -> None:
    """grpc ends a connection attempt after its shortest back-off; a lighthouse 2 s away was never reached."""
    options = dict(channel_options(Timeouts(heartbeat_timeout_ms=heartbeat_timeout_ms)))
    assert options["grpc.min_reconnect_backoff_ms"] >= heartbeat_timeout_ms
