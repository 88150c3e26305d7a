"""Store addresses, and clients that can be severed."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from tft_pg import (
    StoreAddressError,
    StoreUnreachableError,
    create_store_client,
    format_store_addr,
    parse_store_addr,
    store,
)
from tft_pg.store import StoreAddress, StoreClient


@pytest.mark.parametrize(
    ("text", "host", "port", "prefix"),
    [
        ("node-7:29500/job/3", "node-7", 29500, "job/3"),
        ("10.0.0.1:1", "10.0.0.1", 1, ""),
        ("[fd00::1]:29500/a", "fd00::1", 29500, "a"),
        ("fd00::1:29500/a", "fd00::1", 29500, "a"),
        ("::1:65535", "::1", 65535, ""),
    ],
)
def test_an_address_is_read(text: str, host: str, port: int, prefix: str) -> None:
    assert parse_store_addr(text) == StoreAddress(host, port, prefix)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no port"),
        ("node-7", "no port"),
        ("node-7:", "'' is not a port"),
        ("node-7:http/a", "'http' is not a port"),
        ("node-7:-1", "'-1' is not a port"),
        ("node-7:٣", "is not a port"),
        ("node-7:0", "the store port 0 is not between"),
        ("node-7:65536", "the store port 65536 is not between"),
        (":29500/a", "no host"),
        ("[]:29500", "no host"),
        ("[::1]", "the brackets must be followed by :port"),
        ("[::1", "the brackets must be followed by :port"),
        ("[::1]29500", "the brackets must be followed by :port"),
        ("fd00::1", "is not an IPv6 address"),
        ("1:2:3:4:5:6:7:8", "is not an IPv6 address"),
        ("http://node-7:29500", "a scheme"),
        ("node 7:29500", "is not a valid store host"),
        (29500, "it is not a string"),
    ],
)
def test_junk_is_refused_with_the_part_that_is_wrong(text: str, why: str) -> None:
    with pytest.raises(StoreAddressError, match=why) as caught:
        parse_store_addr(text)
    assert caught.value.address == text
    assert isinstance(caught.value, ValueError)


_HOSTS = st.one_of(
    st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)


@given(host=_HOSTS, port=st.integers(1, 65535), prefix=st.from_regex(r"[a-z0-9/_]{0,20}", fullmatch=True))
def test_what_is_written_can_be_read(host: str, port: int, prefix: str) -> None:
    assert parse_store_addr(format_store_addr(host, port, prefix)) == StoreAddress(host, port, prefix)


@given(st.text())
def test_any_text_is_an_address_or_a_clear_error(text: str) -> None:
    try:
        address = parse_store_addr(text)
    except StoreAddressError as refused:
        said = str(refused)
    else:
        assert parse_store_addr(str(address)) == address
        return
    assert repr(text) in said


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_client_sees_its_prefix_only(server: TCPStore) -> None:
    one = create_store_client(format_store_addr("127.0.0.1", server.port, "one"), timedelta(seconds=20))
    two = create_store_client(format_store_addr("127.0.0.1", server.port, "two"), timeout=timedelta(seconds=20))
    bare = create_store_client(format_store_addr("127.0.0.1", server.port))
    one.set("key", "1")
    two.set("key", "2")
    assert (one.get("key"), two.get("key"), bare.get("one/key")) == (b"1", b"2", b"1")


def test_nobody_there_is_a_clear_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(StoreUnreachableError, match=f"the store at 127.0.0.1:{port} did not answer"):
            create_store_client(format_store_addr("127.0.0.1", port, "a"), timedelta(milliseconds=100))


def test_a_store_that_never_answers_is_waited_for_no_longer_than_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = format_store_addr("127.0.0.1", silent.getsockname()[1], "a")
        with pytest.raises(StoreUnreachableError, match="it accepts connections but does not answer"):
            create_store_client(address, timedelta(milliseconds=100))


def test_a_store_that_starts_late_is_found() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    tries = []
    servers = []

    def keep_trying() -> None:
        tries.append(1)
        if len(tries) == 2:
            servers.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))

    client = StoreClient("127.0.0.1", port)
    client.connect(timedelta(seconds=20), keep_trying=keep_trying)
    client.under("a").set("key", "1")
    assert client.under("a").get("key") == b"1"


@pytest.mark.in_parts
def test_each_try_of_a_connection_may_take_longer_than_the_one_before(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report D5: with a slow resolver each was given up after a second, and begun anew, for ever."""
    limits: list[float] = []

    def fail_at_first(host: str, port: int, *, timeout: timedelta, **settings: bool) -> TCPStore:
        limits.append(round(timeout.total_seconds(), 1))
        return TCPStore(host, port if len(limits) > 5 else unused_port, timeout=timedelta(seconds=0.01), **settings)

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        unused_port = unused.getsockname()[1]
        monkeypatch.setattr(store, "TCPStore", fail_at_first)
        StoreClient("127.0.0.1", server.port).connect(timedelta(seconds=60), keep_trying=lambda: None)
    assert limits[:5] == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_name_is_looked_up_once(server: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would look it up again, in each try."""
    look_up = socket.getaddrinfo
    asked: list[object] = []

    def slow(host: object, port: object, *args: object, **more: object) -> object:
        asked.append(host)
        return look_up("127.0.0.1", port, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    client = StoreClient("store.invalid", server.port)  # the system knows no such name
    client.connect(timedelta(seconds=20), keep_trying=lambda: None)
    assert asked == ["store.invalid"]


_FROZEN = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def frozen_server() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    with subprocess.Popen(
        [sys.executable, "-c", _FROZEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process
        process.kill()


def test_severing_ends_what_a_stopped_store_never_would(frozen_server: tuple[int, subprocess.Popen[str]]) -> None:
    port, process = frozen_server
    bystander = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
    client = StoreClient("127.0.0.1", port)
    client.connect(timedelta(seconds=20), keep_trying=lambda: None)
    os.kill(process.pid, signal.SIGSTOP)
    errors: list[Exception] = []
    entered = threading.Event()

    def wait() -> None:
        entered.set()
        try:
            client.under("a").wait(["key"], timedelta(milliseconds=10))
        except RuntimeError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    entered.wait()
    client.sever()
    waiting.join(10)
    assert not waiting.is_alive()
    assert len(errors) == 1
    os.kill(process.pid, signal.SIGCONT)
    bystander.set("still", "here")
    assert bystander.get("still") == b"here"


def test_a_client_that_connected_at_the_second_try_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    failures = [RuntimeError("timed out")]

    def fails_once(*args: Any, **kwargs: Any) -> TCPStore:
        if failures:
            raise failures.pop()
        return TCPStore(*args, **kwargs)

    monkeypatch.setattr(store, "TCPStore", fails_once)
    client = StoreClient("127.0.0.1", server.port)
    client.connect(timedelta(seconds=30), keep_trying=lambda: None)
    assert not failures
    left = weakref.ref(client)
    gc.disable()  # a collection would free it too, at some later time
    try:
        del client
        assert left() is None
    finally:
        gc.enable()
