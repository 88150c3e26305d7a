"""Connections of strangers to the port of a state: few, not for long, and in nobody's way."""

from __future__ import annotations

import errno
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psutil
import pytest
import trustme

from tft_ckpt import Limits, StateKey
from tft_ckpt.transfer import admission
from tft_ckpt.transfer.address import listen
from tft_ckpt.transfer.routes import data_path
from tft_ckpt.transfer.server import StateServer

KEY = StateKey(quorum_id=1, nonce=2, step=3, lineage=4)
HOST = "127.0.0.1"
BOUND_S = 20.0
WRONG = f"GET {data_path(KEY)} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wrong\r\n\r\n".encode()
RIGHT = WRONG.replace(b"wrong", b"right")


@contextmanager
def serving(tls: ssl.SSLContext | None = None, silence_s: float = 60.0) -> Iterator[int]:
    """A server of a small state, with a token. Gives: its port."""
    listener = listen(HOST, 0)
    port = int(listener.getsockname()[1])
    server = StateServer(
        listener, token="right", chunk_bytes=4096, limits=Limits(), silence_s=silence_s, tls=tls and (lambda: tls)
    )
    try:
        server.offer([1], key=KEY, expected=False, check=lambda: None)
        yield port
    finally:
        server.close(wait=True)


def connected(port: int, host: str = HOST) -> socket.socket:
    return socket.create_connection((HOST, port), BOUND_S, source_address=(host, 0))


def is_served(sock: socket.socket) -> bool:
    sock.sendall(RIGHT)
    return sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def until_ended(sock: socket.socket) -> bytes:
    """Returns: all that was heard before its end."""
    heard = b""
    with suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            heard += part
    return heard


def test_a_wrong_token_ends_its_connection() -> None:
    """Else one wrong request now and then keeps a connection for ever."""
    with serving() as port, connected(port) as stranger:
        stranger.sendall(WRONG)
        assert until_ended(stranger).startswith(b"HTTP/1.1 401 ")


def test_a_body_without_the_token_is_not_read() -> None:
    with serving() as port, connected(port) as stranger:
        stranger.settimeout(5.0)  # half of the time that aiohttp reads the rest for
        stranger.sendall(WRONG.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\ncontent-length: 8000000000\r\n\r\n"))
        until_ended(stranger)


def test_who_proves_nothing_is_ended_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "AUTHENTICATION_TIMEOUT_S", 0.2)
    with serving() as port, connected(port) as member, connected(port) as silent, connected(port) as slow:
        assert is_served(member)
        slow.sendall(RIGHT[:-1])
        assert until_ended(silent) == until_ended(slow) == b""
        assert is_served(member)


def test_those_that_prove_nothing_are_few_and_push_out_no_member() -> None:
    with serving() as port, ExitStack() as ends:
        member = ends.enter_context(connected(port))
        assert is_served(member)
        other = ends.enter_context(connected(port, "127.0.0.2"))
        silent = [ends.enter_context(connected(port)) for _ in range(admission.UNAUTHENTICATED_PER_HOST_MAX + 5)]
        for each in silent[:5]:
            assert until_ended(each) == b""
        assert is_served(member)
        assert is_served(other)
        assert is_served(silent[-1])


def test_hosts_together_have_a_bound() -> None:
    hosts = [f"127.0.0.{number}" for number in range(1, 5)]
    each_has = admission.UNAUTHENTICATED_MAX // len(hosts)
    with serving() as port, ExitStack() as ends:
        silent = [ends.enter_context(connected(port, host)) for host in hosts for _ in range(each_has)]
        newcomer = ends.enter_context(connected(port, hosts[-1]))
        assert until_ended(silent[-each_has]) == b""
        assert is_served(newcomer)
        assert is_served(silent[0])


def test_a_silence_in_the_handshake_counts() -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST).configure_cert(context)
    with serving(context) as port, ExitStack() as ends:
        silent = [ends.enter_context(connected(port)) for _ in range(admission.UNAUTHENTICATED_PER_HOST_MAX + 2)]
        for each in silent[:2]:
            assert until_ended(each) == b""
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        with connected(port) as plain, trusting.wrap_socket(plain, server_hostname=HOST) as member:
            assert is_served(member)  # type: ignore[arg-type]  # wrapped, it is a socket still


def test_without_a_descriptor_it_waits_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, fails = socket.socket.accept, iter(range(3))

    def accepted(listener: socket.socket) -> Any:
        if next(fails, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(admission, "ACCEPT_AGAIN_S", 0.01)
    monkeypatch.setattr(socket.socket, "accept", accepted)
    with serving() as port, connected(port) as member:
        assert is_served(member)
    assert [record.getMessage() for record in caplog.records] == [
        "no connection can be accepted ([Errno 24] Too many open files); callers wait until one ends"
    ]


def test_the_last_descriptors_are_not_for_strangers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    most = psutil.Process().num_fds() + 40
    monkeypatch.setattr("tft_ckpt.descriptors.limit", lambda: most)
    with serving() as port, ExitStack() as ends:
        member = ends.enter_context(connected(port))
        assert is_served(member)
        silent = [ends.enter_context(connected(port)) for _ in range(40)]
        assert until_ended(silent[0]) == b""
        assert is_served(member)
    (line,) = {record.getMessage() for record in caplog.records}
    assert "nearly all of its" in line


def test_a_server_raises_the_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    with serving():
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
