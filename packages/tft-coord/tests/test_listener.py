"""What the first bytes of an answer say of who listens at an address."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from datetime import timedelta

import pytest

from tft_coord import LighthouseClient, ManagerClient
from tft_coord.errors import ProtocolError, Unreachable
from tft_coord.timeouts import Timeouts
from tft_coord.transport.listener import _verdict, look
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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert isinstance(port, int)
    return port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])  # which has two addresses on most machines
def test_a_name_of_several_addresses_is_refused_as_one(host: str) -> None:
    assert str(look(f"{host}:{free_port()}")).startswith("nobody listens there (connection refused)")


def test_who_drops_the_first_packet_is_not_said_to_take_the_connection() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        is_full = False
        while not is_full:  # a queue that is full drops packets, as a firewall does
            client = stack.enter_context(socket.socket())
            client.settimeout(0.2)
            try:
                client.connect(server.getsockname())
            except TimeoutError:
                is_full = True
        found = look(f"127.0.0.1:{server.getsockname()[1]}")
    assert isinstance(found, Unreachable)
    assert "no connection can be made (none stands after 1 s; the host is down" in str(found)


@pytest.mark.parametrize("waits", [True, False])
def test_a_client_waits_for_a_server_only_if_it_is_to(waits: bool) -> None:
    within_s = 1.0 if waits else 60.0
    started = time.monotonic()
    with pytest.raises(Unreachable, match=r"can't be reached.*: nobody listens there \(connection refused\)") as raised:
        LighthouseClient(f"127.0.0.1:{free_port()}", timedelta(seconds=within_s), waits=waits)
    lasted_s = time.monotonic() - started
    assert lasted_s >= within_s if waits else lasted_s < within_s / 4
    assert raised.value.__suppress_context__


def test_another_kind_of_server_is_waited_for_by_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")

        thread = threading.Thread(target=answer, name="test-ssh")
        thread.start()
        try:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            started = time.monotonic()
            with pytest.raises(ProtocolError, match="is no lighthouse: a server of another kind answers there"):
                LighthouseClient(address, timedelta(seconds=60))
            with pytest.raises(ProtocolError, match="is no manager server: a server of another kind answers there"):
                ManagerClient(address, timedelta(seconds=60))
            assert time.monotonic() - started < 20
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
