"""What the first bytes of an answer say of who listens at an address."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from tft_coord import LighthouseClient, ManagerClient
from tft_coord.errors import ProtocolError, UnreachableError
from tft_coord.rpc import grpc
from tft_coord.timeouts import Timeouts
from tft_coord.transport.diagnosis import _PREFACE, _verdict, diagnose
from tft_coord.transport.settings import channel_options
from tft_coord.transport.trust import UntrustedError

SETTINGS_FRAME = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00"
GOAWAY_FRAME = b"\x00\x00\x08\x07\x00\x00\x00\x00\x00"
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (b"HTTP/1.1 400 Bad", ProtocolError, "an HTTP server answers there"),
        (b"HTTP/1.1 500 Int", ProtocolError, "an HTTP server answers there"),
        (
            b"HTTP/1.1 502 Bad",
            UnreachableError,
            "a proxy answers there with HTTP status 502, so the server behind it may",
        ),
        (b"HTTP/1.1 503 Ser", UnreachableError, "a proxy answers there with HTTP status 503"),
        (b"HTTP/1.0 504 Gat", UnreachableError, "a proxy answers there with HTTP status 504"),
        (b"<!DOCTYPE HTML P", ProtocolError, "an HTTP server answers there"),
        (b"SSH-2.0-OpenSSH_", ProtocolError, "a server of another protocol answers there"),
        (b"\x15\x03\x01\x00\x02\x02\x46", UntrustedError, "the server there uses TLS, and this process has no cert"),
        (SETTINGS_FRAME, UnreachableError, "the connection broke"),
        (GOAWAY_FRAME, UnreachableError, "the connection broke"),
        (SETTINGS_FRAME[:2], UnreachableError, "the connection broke"),
        (b"\x00\x00\x06\x04\x00text", ProtocolError, "a server of another protocol answers there"),
        (b"", UnreachableError, "accepts the connection and closes it"),
        (None, UnreachableError, "sends nothing within 1 s"),
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


def test_an_answer_to_a_ping_may_take_as_long_as_the_connection_may() -> None:
    timeouts = Timeouts(heartbeat_timeout_ms=5_000)
    for within_ms, unanswered_ms in ((0, 5_000), (20_000, 20_000)):
        options = dict(channel_options(timeouts, to_lighthouse=True, within_ms=within_ms))
        assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"] == unanswered_ms


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert isinstance(port, int)
    return port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])  # which has two addresses on most machines
def test_a_name_of_several_addresses_is_refused_as_one(host: str) -> None:
    assert str(diagnose(f"{host}:{free_port()}")).startswith("no server listens there (connection refused)")


def test_a_check_while_the_interpreter_exits_is_a_failed_dial() -> None:
    """At that time asyncio has no threads for names any more, and later Pythons start no thread at all."""
    script = """
import atexit
from tft_coord.transport.diagnosis import diagnose

@atexit.register
def check():
    why = diagnose("localhost:1")
    print(f"{type(why).__name__}: {why}")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.startswith("UnreachableError: no connection can be made ("), done.stdout
    assert (done.returncode, done.stderr) == (0, "")


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
        found = diagnose(f"127.0.0.1:{server.getsockname()[1]}")
    assert isinstance(found, UnreachableError)
    assert "no connection can be made (timed out after 1 s; the host is down" in str(found)


@pytest.mark.parametrize("waits", [True, False])
def test_a_client_waits_for_a_server_only_if_it_is_to(waits: bool) -> None:
    within_s = 1.0 if waits else 60.0
    started = time.monotonic()
    with pytest.raises(
        UnreachableError, match=r"can't be reached.*: no server listens there \(connection refused\)"
    ) as raised:
        LighthouseClient(f"127.0.0.1:{free_port()}", timedelta(seconds=within_s), waits=waits)
    lasted_s = time.monotonic() - started
    assert lasted_s >= within_s if waits else lasted_s < within_s / 4
    assert raised.value.__suppress_context__


@contextlib.contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that handles one connection at a time. Gives: its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    answer(connection)

        thread = threading.Thread(target=accept, name="test-server")
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (SETTINGS_FRAME, UnreachableError, "the connection broke"),
        (GOAWAY_FRAME, UnreachableError, "the connection broke"),
        (SETTINGS_FRAME[:8], UnreachableError, "the connection broke"),
        (UNAVAILABLE, UnreachableError, "HTTP status 503"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", ProtocolError, "another protocol"),
    ],
    ids=["settings", "goaway", "part of a frame", "503", "ssh"],
)
@pytest.mark.parametrize("ends", [True, False])
def test_an_answer_may_come_in_pieces(answer: bytes, kind: type[Exception], says: str, ends: bool) -> None:
    def in_pieces(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(answer[:2])
        time.sleep(0.05)  # else both pieces may be read at once
        connection.sendall(answer[2:])
        while not ends and connection.recv(4096):
            pass

    with serving(in_pieces) as address:
        found = diagnose(address)
    assert type(found) is kind
    assert says in str(found)


@contextlib.contextmanager
def grpc_server(num_unavailable: int) -> Iterator[str]:
    """A server that knows no call, after it was unavailable for some, as a proxy says it. Gives: its address."""
    left = [num_unavailable]

    class Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            if left[0] == 0:
                return None
            left[0] -= 1
            return grpc.unary_unary_rpc_method_handler(
                lambda _, context: context.abort(grpc.StatusCode.UNAVAILABLE, "received http2 header with status: 503")
            )

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Calls()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_a_client_waits_while_a_proxy_says_in_http_2_that_the_server_is_unavailable() -> None:
    with grpc_server(num_unavailable=4) as address:
        LighthouseClient(address, timedelta(seconds=60)).close()


def test_a_client_waits_while_a_proxy_says_in_http_1_that_the_server_is_unavailable() -> None:
    """The server behind it is there for the attempt after the client's diagnose at the address."""
    looked = threading.Event()
    with grpc_server(num_unavailable=0) as behind:

        def answer(connection: socket.socket) -> None:
            if not looked.is_set():
                if connection.recv(4096) == _PREFACE:
                    looked.set()
                connection.sendall(UNAVAILABLE)
                return
            host, _, port = behind.rpartition(":")
            with socket.create_connection((host, int(port))) as far:
                back = threading.Thread(target=copy, args=(far, connection), name="test-proxy")
                back.start()
                copy(connection, far)
                back.join()

        with serving(answer) as address:
            LighthouseClient(address, timedelta(seconds=60)).close()


def copy(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_WR)


def test_another_kind_of_server_is_waited_for_by_nobody() -> None:
    with serving(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")) as address:
        started = time.monotonic()
        with pytest.raises(ProtocolError, match="is not a lighthouse: a server of another protocol answers there"):
            LighthouseClient(address, timedelta(seconds=60))
        with pytest.raises(ProtocolError, match="is not a manager server: a server of another protocol answers there"):
            ManagerClient(address, timedelta(seconds=60))
        assert time.monotonic() - started < 20
