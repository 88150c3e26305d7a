"""What serving costs: a rate that is kept, memory that is given back, many readers, and a port that ends."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import psutil
import pytest
import torch

from tft_ckpt import ConfigError, HTTPTransport, Limits, StateKey
from tft_ckpt.state.snapshot import Snapshot
from tft_ckpt.transfer import server as server_module
from tft_ckpt.transfer.address import listen
from tft_ckpt.transfer.app import _joined_writes, _SilenceWatch
from tft_ckpt.transfer.rate_limiter import RateLimiter, check_rate
from tft_ckpt.transfer.routes import data_path
from tft_ckpt.transfer.server import StateServer
from tft_ckpt.transfer.snapshot_store import Found, Refused, SnapshotStore

KEY = StateKey(quorum_id=1, nonce=2, step=3, lineage=4)
REQUEST = f"GET {data_path(KEY)} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
BOUND_S = 20.0


@contextmanager
def serving(num_bytes: int, **settings: Any) -> Iterator[int]:
    """A server of a state of so many bytes. Gives: its port."""
    listener = listen("127.0.0.1", 0)
    port = int(listener.getsockname()[1])
    server = StateServer(
        listener,
        token=None,
        chunk_bytes=1 << 20,
        limits=Limits(),
        silence_s=settings.pop("silence_s", 60.0),
        **settings,
    )
    try:
        server.offer([torch.ones(num_bytes // 4)], key=KEY, expected=False, check=lambda: None)
        yield port
    finally:
        server.close(wait=True)


def reader(port: int) -> socket.socket:
    """A connection that has asked for the run."""
    sock = socket.create_connection(("127.0.0.1", port), BOUND_S)
    sock.sendall(REQUEST)
    return sock


def read(sock: socket.socket, num_bytes: int) -> int:
    """Read at least so many bytes, or to the end. Returns: how many there were."""
    buffer, got = bytearray(1 << 20), 0
    while got < num_bytes:
        count = sock.recv_into(buffer)
        if count == 0:
            break
        got += count
    return got


# ---- the rate ----


def test_a_pace_gives_each_his_turn_and_saves_little_up() -> None:
    rate_limiter = RateLimiter(1000.0)
    assert rate_limiter.take(50, 0.0) == 0.0
    assert rate_limiter.take(100, 0.0) == pytest.approx(0.1)
    assert rate_limiter.take(100, 0.0) == pytest.approx(0.2)
    assert rate_limiter.take(100, 0.2) == pytest.approx(0.1)
    assert rate_limiter.take(100, 100.0) == pytest.approx(0.05), "a long silence is not made up for"
    assert RateLimiter(1.0).piece_bytes == 16 << 10
    assert RateLimiter(200e6).piece_bytes == 10_000_000


@pytest.mark.parametrize("rate", [0, -1, 0.5, float("inf"), float("nan"), "1", True])
def test_what_is_no_rate_is_named_and_leaves_no_port(rate: Any) -> None:
    with pytest.raises(ConfigError, match="send_bytes_per_s"):
        check_rate("send_bytes_per_s", rate)
    before = threading.active_count(), psutil.Process().num_fds()
    with pytest.raises(ConfigError, match="send_bytes_per_s"):
        HTTPTransport(bind="127.0.0.1", send_bytes_per_s=rate)
    assert (threading.active_count(), psutil.Process().num_fds()) == before


def test_all_readers_together_keep_to_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a clock: by what the pace was asked for, and that its word was waited for."""
    asked: list[int] = []
    take = RateLimiter.take

    def recording(rate_limiter: RateLimiter, num_bytes: int, now_s: float) -> float:
        asked.append(num_bytes)
        return take(rate_limiter, num_bytes, now_s)

    monkeypatch.setattr(RateLimiter, "take", recording)
    num_bytes = 4 << 20
    with serving(num_bytes, send_bytes_per_s=40e6) as port, ExitStack() as stack:
        started_s = time.monotonic()
        readers = [stack.enter_context(reader(port)) for _ in range(2)]
        threads = [threading.Thread(target=read, args=(each, num_bytes)) for each in readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND_S)
        took_s = time.monotonic() - started_s
    assert sum(asked) == 2 * num_bytes
    assert took_s >= 2 * num_bytes / 40e6 - 0.1


def test_a_reader_that_waits_for_the_rate_is_not_taken_for_silent() -> None:
    """Its next piece comes later than the silence that it would be sent off for."""
    num_bytes = 64 << 10
    with serving(num_bytes, send_bytes_per_s=100e3, silence_s=0.05) as port, reader(port) as sock:
        assert read(sock, num_bytes + 100) > num_bytes


def test_a_watch_that_is_paused_breaks_nothing() -> None:
    class Loop:
        def call_later(self, seconds: float, callback: Any) -> Any:
            self.callback = callback
            return threading.Timer(0, callback)

    class Transport:
        broken = False

        def get_write_buffer_size(self) -> int:
            return 7

        def get_extra_info(self, name: str) -> None:
            return None

        def abort(self) -> None:
            self.broken = True

    loop, transport = Loop(), Transport()
    watch = _SilenceWatch(loop, transport, 1.0)  # type: ignore[arg-type]
    loop.callback()
    with watch.paused():
        loop.callback()
        loop.callback()
    loop.callback()
    assert not transport.broken, "after the pause the reader has the whole time again"
    loop.callback()
    assert transport.broken


# ---- memory ----


def test_memory_that_is_not_to_be_kept_is_given_back_at_once() -> None:
    store = SnapshotStore(keep_buffers=False)

    def put(step: int) -> tuple[Snapshot, weakref.ref[Snapshot]]:
        key = StateKey(quorum_id=0, nonce=0, step=step, lineage=0)
        store.begin(key)
        snapshot = Snapshot.take(
            [torch.ones(1000)], key=key, chunk_bytes=4096, limits=Limits(), allocate=store.allocate
        )
        store.publish(snapshot)
        return snapshot, weakref.ref(snapshot)

    assert not store.wants_memory(4000)
    first, first_memory = put(1)
    del first
    assert first_memory() is not None, "it is on offer"
    second, second_memory = put(2)
    assert first_memory() is None
    assert store.lease(second)
    _, third_memory = put(3)
    assert second_memory() is not None, "somebody reads it"
    store.release(second)
    del second
    assert second_memory() is None
    assert third_memory() is not None


@pytest.mark.parametrize("keep_buffers", [False, True])
def test_a_state_for_which_nobody_comes_is_let_go_of_unless_buffers_are_kept(keep_buffers: bool) -> None:
    store = SnapshotStore(keep_buffers=keep_buffers)
    key = StateKey(quorum_id=0, nonce=0, step=1, lineage=0)
    store.withdraw()
    store.begin(key)
    snapshot = Snapshot.take([torch.ones(1000)], key=key, chunk_bytes=4096, limits=Limits(), allocate=store.allocate)
    store.publish(snapshot)
    assert store.lease(snapshot)
    store.withdraw()
    assert store.look_up(key) == Found(snapshot), "it is being read"
    store.release(snapshot)
    store.withdraw()
    if keep_buffers:
        assert store.look_up(key) == Found(snapshot)
    else:
        answer = store.look_up(key)
        assert isinstance(answer, Refused)
        assert "no replica requested it for long" in answer.sentence
        assert not store.lease(snapshot)


def test_the_server_lets_go_of_a_state_for_which_nobody_comes() -> None:
    with serving(4096, keep_buffers=False, silence_s=0.1) as port:
        status = b"200"
        while status == b"200":
            with reader(port) as sock:
                status = sock.recv(4096).split()[1]
            # Each question is one who comes: leave it alone for longer than the silence.
            threading.Event().wait(0.3)
        assert status == b"410"


def test_short_pieces_are_joined_and_long_ones_are_not_copied() -> None:
    long = memoryview(bytearray(100_000))
    short = memoryview(b"abc")
    joined = list(_joined_writes([short, short, long, short]))
    assert joined == [b"abcabc", long, b"abc"]
    assert joined[1] is long
    assert list(_joined_writes([])) == []


# ---- readers ----


def test_readers_that_read_nothing_slow_no_honest_one_and_take_no_memory() -> None:
    num_silent, num_bytes = 200, 32 << 20
    with serving(num_bytes) as port, ExitStack() as stack:
        with reader(port) as sock:
            assert read(sock, num_bytes) >= num_bytes
        before = psutil.Process().memory_info().rss
        for _ in range(num_silent):
            stack.enter_context(reader(port))
        with reader(port) as sock:
            assert read(sock, num_bytes) >= num_bytes
        grown = psutil.Process().memory_info().rss - before
    # Each may hold what waits in its transport, and little else; once it was a mebibyte and more.
    assert grown < num_silent * (256 << 10)


def test_the_port_is_closed_after_the_shutdown() -> None:
    """A transport that leaves its listening socket open keeps its port from the next one, and its readers waiting."""
    with serving(4096) as port:
        socket.create_connection(("127.0.0.1", port), BOUND_S).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), BOUND_S)
    listen("127.0.0.1", port).close()
    descriptors = psutil.Process().num_fds()
    for _ in range(3):
        with serving(4096) as port, reader(port) as sock:
            assert read(sock, 4096) >= 4096
    assert psutil.Process().num_fds() == descriptors
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tft-")]


def test_a_write_past_the_transport_tells_a_reader_that_left_from_one_that_is_slow() -> None:
    from tft_ckpt.transfer.app import _send_now

    class Transport:
        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock

        def get_extra_info(self, name: str) -> socket.socket:
            return self.sock

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        transport: Any = Transport(ours)
        while _send_now(transport, bytes(1 << 20)):
            pass
        theirs.close()
        with pytest.raises(ConnectionResetError, match=os.strerror(errno.EPIPE)):
            _send_now(transport, b"x")


# ---- the web server, which takes a tenth of a second to import ----

_WITHOUT_USE = """
import sys, threading, time
import torch
from datetime import timedelta
from tft_ckpt import HTTPTransport
bound = timedelta(seconds=20)
settings = dict(bind="127.0.0.1", token="x")
with HTTPTransport(**settings, import_later=True), HTTPTransport(**settings, import_later=True):
    pass
assert not [thread for thread in threading.enumerate() if thread.name == "tft-ckpt-http"]
assert "aiohttp" not in sys.modules, "a transport that was never used imported it"
"""
_LATER = """
source = {source}
until = time.monotonic() + 20
while "tft_ckpt.transfer.app" not in sys.modules and time.monotonic() < until:
    time.sleep(0.01)
source.shutdown()
assert "tft_ckpt.transfer.app" in sys.modules, "it never came"
"""


@pytest.mark.parametrize(
    "later",
    [
        _LATER.format(source="HTTPTransport(**settings, import_later=True); source.prepare_to_send()"),
        _LATER.format(source="HTTPTransport(**settings)"),
    ],
    ids=["at a hint", "at once"],
)
def test_a_transport_imports_its_web_server_when_somebody_has_use_for_it(later: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_USE + later], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_comes_before_any_use_is_answered() -> None:
    listener = listen("127.0.0.1", 0)
    server = StateServer(listener, token=None, chunk_bytes=4096, limits=Limits(), silence_s=BOUND_S, import_later=True)
    try:
        with reader(int(listener.getsockname()[1])) as sock:
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
    finally:
        server.close(wait=True)
    assert listener.fileno() == -1


def test_nothing_is_left_where_a_connection_can_not_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(_: object) -> None:
        raise OSError("an end that failed")

    monkeypatch.setattr("aiohttp.web.AppRunner.cleanup", fails)
    listener = listen("127.0.0.1", 0)
    server = StateServer(listener, token=None, chunk_bytes=4096, limits=Limits(), silence_s=BOUND_S)
    with reader(int(listener.getsockname()[1])) as sock:
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        server.close(wait=True)
        assert sock.recv(1) == b""
    assert listener.fileno() == -1
    assert asyncio.all_tasks(server._loop) == set()


def forget_web_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have its module imported again; afterwards the one of before is back, in both places that name it."""
    monkeypatch.setattr("tft_ckpt.transfer.app", sys.modules["tft_ckpt.transfer.app"])
    monkeypatch.delitem(sys.modules, "tft_ckpt.transfer.app")


class _NoDescriptors:
    """A finder of modules: the web server is not to be had, for so many attempts."""

    def __init__(self, error: Exception, num_attempts: int) -> None:
        self._error = error
        self.left = num_attempts

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "tft_ckpt.transfer.app" and self.left > 0:
            self.left -= 1
            raise self._error


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), ImportError("x.so: cannot open shared object file")],
    ids=["source", "library"],
)
def test_a_web_server_that_can_not_be_imported_is_tried_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers of what was offered meanwhile get it; their connections were refused for good."""
    monkeypatch.setattr(server_module, "_IMPORT_AGAIN_S", 0.01)
    finder = _NoDescriptors(error, 3)
    forget_web_server(monkeypatch)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    with serving(1 << 20) as port, reader(port) as sock:
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    assert finder.left == 0
    said = [(each.levelname, each.getMessage()) for each in caplog.records]
    assert [level for level, _ in said] == ["ERROR"]
    assert "this process can't serve its state yet, because importing the web server failed" in said[0][1]
    assert str(error) in said[0][1]


def test_a_server_whose_import_fails_for_ever_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_IMPORT_AGAIN_S", 0.01)
    forget_web_server(monkeypatch)
    finder = _NoDescriptors(OSError(errno.EMFILE, "none left"), 1 << 30)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    listener = listen("127.0.0.1", 0)
    server = StateServer(listener, token=None, chunk_bytes=4096, limits=Limits(), silence_s=BOUND_S)
    server.offer([], key=KEY, expected=True, check=lambda: None)
    server.close(wait=True)
    assert (listener.fileno(), server._thread.is_alive()) == (-1, False)


def test_an_end_during_the_import_asks_nobody_for_a_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that ends at once, on a busy machine: the import takes longer than an end waits."""
    begun, goes_on = threading.Event(), threading.Event()

    class Slow:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "tft_ckpt.transfer.app":
                begun.set()
                assert goes_on.wait(BOUND_S)

    monkeypatch.setattr(server_module, "_END_TIMEOUT_S", 0.01)
    monkeypatch.setattr("tft_ckpt.threads.join_within.__defaults__", (0.01,))
    forget_web_server(monkeypatch)
    monkeypatch.setattr(sys, "meta_path", [Slow(), *sys.meta_path])
    listener = listen("127.0.0.1", 0)
    server = StateServer(listener, token=None, chunk_bytes=4096, limits=Limits(), silence_s=BOUND_S)
    assert begun.wait(BOUND_S)
    server.close(wait=True)
    goes_on.set()
    server._thread.join(BOUND_S)
    assert (listener.fileno(), server._thread.is_alive(), caplog.records) == (-1, False, [])


class SlowApp:
    """In the web server's place: it takes a while to be there, and notes what it is told."""

    told: ClassVar[list[StateKey]] = []
    begun: ClassVar[threading.Event] = threading.Event()
    goes_on: ClassVar[threading.Event] = threading.Event()

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: socket.socket, **_: Any) -> None:
        self._listener = listener
        self._ended = asyncio.Event()
        SlowApp.begun.set()
        assert SlowApp.goes_on.wait(BOUND_S)

    async def serve(self) -> None:
        await self._ended.wait()
        self._listener.close()

    def published(self, snapshot: Snapshot, expected: bool) -> None:
        SlowApp.told.append(snapshot.key)

    def disconnect_readers(self, sources: object) -> None:
        """Nobody reads."""

    def stop(self) -> None:
        self._ended.set()


def test_what_is_told_while_the_web_server_is_imported_is_told_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tft_ckpt.transfer.app.App", SlowApp)
    SlowApp.told.clear()
    server = StateServer(listen("127.0.0.1", 0), token=None, chunk_bytes=4096, limits=Limits(), silence_s=BOUND_S)
    keys = [StateKey(1, 2, step, 4) for step in range(3)]
    server.offer([], key=keys[0], expected=True, check=lambda: None)
    assert SlowApp.begun.wait(BOUND_S)
    for key in keys[1:]:
        server.offer([], key=key, expected=True, check=lambda: None)
    SlowApp.goes_on.set()
    server.close(wait=True)
    assert SlowApp.told == keys
