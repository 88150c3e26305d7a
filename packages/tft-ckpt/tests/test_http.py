"""HTTP itself: what the server answers to whom, what the receiver makes of a hostile source, and addresses."""

from __future__ import annotations

import asyncio
import http.client
import queue
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tft_ckpt import (
    CheckpointError,
    ConfigError,
    HTTPTransport,
    Limits,
    StateCorruptError,
    StateKey,
    StateMismatchError,
    StateUnavailableError,
    TransferTimeoutError,
    TransportClosedError,
)
from tft_ckpt.state.buffers import Buffer
from tft_ckpt.state.manifest import decode
from tft_ckpt.state.snapshot import Snapshot
from tft_ckpt.testing import Fault, FaultyProxy, assert_same_state
from tft_ckpt.transfer import app
from tft_ckpt.transfer.address import advertised_url, listen, parse_url
from tft_ckpt.transfer.connection import LOOK_UP_THREAD_NAME
from tft_ckpt.transfer.routes import KEY_HEADER, WAIT_HEADER, data_path, manifest_path

BOUND = timedelta(seconds=20)
KEY = StateKey(quorum_id=0, nonce=0, step=1, lineage=0)


@pytest.fixture
def source() -> Iterator[HTTPTransport[Any]]:
    with HTTPTransport(bind="127.0.0.1", chunk_bytes=4096) as transport:
        yield transport


@pytest.fixture
def receiver() -> Iterator[HTTPTransport[Any]]:
    with HTTPTransport(bind="127.0.0.1") as transport:
        yield transport


def ask(url: str, path: str, *, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def test_who_has_received_gets_memory_ready_to_send(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.prepare_to_send()  # nothing was received, so nothing is known of its size
    state = {"a": torch.arange(2000, dtype=torch.int32)}
    source.send_checkpoint([1], 1, state, BOUND)
    assert_same_state(receiver.recv_checkpoint(0, source.metadata(), 1, BOUND), state)
    touched: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
    monkeypatch.setattr(Buffer, "touch", lambda buffer, _: touched.put(buffer))
    receiver.prepare_to_send()
    buffer = touched.get(timeout=BOUND.total_seconds())
    receiver.shutdown()
    assert buffer.fits(8000)
    assert not [thread for thread in threading.enumerate() if thread.name == "tft-ckpt-memory"]


def test_who_knows_how_large_its_state_is_gets_memory_ready_without_having_received(
    receiver: HTTPTransport[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
    monkeypatch.setattr(Buffer, "touch", lambda buffer, _: touched.put(buffer))
    receiver.prepare_to_send(5_000)
    assert touched.get(timeout=BOUND.total_seconds()).fits(5_000)


# ---- the server ----


def test_the_manifest_and_any_range_of_the_data_are_there(source: HTTPTransport[Any]) -> None:
    state = {"a": torch.arange(2000, dtype=torch.int32)}
    source.send_checkpoint([], 1, state, BOUND)
    response, body = ask(source.address(), manifest_path(KEY), **{WAIT_HEADER: "20000"})
    manifest = decode(body, limits=Limits())
    assert response.status == 200
    assert (manifest.layout.key, manifest.layout.data_bytes, len(manifest.checksums)) == (KEY, 8000, 2)
    leaf = manifest.layout.read(lambda leaf: leaf)["a"]
    assert (leaf.path, leaf.shape, leaf.stride, leaf.offset, leaf.length) == ("state['a']", (2000,), (1,), 0, 8000)
    response, whole = ask(source.address(), data_path(KEY))
    assert (response.status, len(whole)) == (200, 8000)
    assert_same_state(manifest.layout.build(memoryview(bytearray(whole))), state)
    for span, start, end in (("0-0", 0, 1), ("100-4999", 100, 5000), ("7990-9999", 7990, 8000), ("-5", 7995, 8000)):
        response, body = ask(source.address(), data_path(KEY), range=f"bytes={span}")
        assert response.status == 206
        assert response.headers["content-range"] == f"bytes {start}-{end - 1}/8000"
        assert body == whole[start:end]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, 404),
        ("/state/1.2.3.4/manifest", {}, 400),
        ("/state/x/data", {}, 400),
        (data_path(KEY), {"range": "bytes=8000-"}, 416),
        (data_path(KEY), {"range": "bytes=5-4"}, 416),
        (data_path(KEY), {"range": "bytes=0-1,3-4"}, 416),
        (data_path(KEY), {"range": "chunks=0-1"}, 416),
        (data_path(KEY), {WAIT_HEADER: "-1"}, 400),
        (data_path(KEY), {WAIT_HEADER: "9" * 100}, 400),
        (manifest_path(KEY), {WAIT_HEADER: "soon"}, 400),
        (manifest_path(StateKey(quorum_id=0, nonce=0, step=0, lineage=0)), {}, 409),
        (data_path(StateKey(quorum_id=0, nonce=0, step=2, lineage=0)), {WAIT_HEADER: "1"}, 503),
    ],
)
def test_bad_requests_get_a_sentence(
    source: HTTPTransport[Any], path: str, headers: dict[str, str], status: int
) -> None:
    source.send_checkpoint([1], 1, {"a": torch.zeros(2000)}, BOUND)
    response, body = ask(source.address(), path, **headers)
    assert response.status == status, body
    assert body
    if status == 409:
        assert response.headers[KEY_HEADER] == str(KEY)


def test_a_state_that_is_refused_is_refused_to_who_waits_and_who_comes_later(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    said: list[str] = []

    def receive() -> None:
        with pytest.raises(StateUnavailableError) as caught:
            receiver.recv_checkpoint(0, source.metadata(), 1, BOUND)
        said.append(str(caught.value))

    waiting = threading.Thread(target=receive)
    waiting.start()
    source.refuse_checkpoint(1, "its state_dict raised ValueError('no')")
    waiting.join()
    receive()
    assert len(said) == 2
    assert all("its state_dict raised ValueError('no')" in sentence for sentence in said)
    source.send_checkpoint([1], 2, {"a": 1}, BOUND)
    assert receiver.recv_checkpoint(0, source.metadata(), 2, BOUND) == {"a": 1}


UNREADABLE = {
    "random bytes": b"\xff\xfe\x00" * 100,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    "a long path": b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "a long header": b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 100_000 + b"\r\n\r\n",
    "a token in a bad header": b"GET / HTTP/1.1\r\nhost: x\r\nauthorization: Bearer s3cret\0\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "an expectation that is no text": b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\nexpect: \xb0\r\n\r\n",
    "chunks that are none": b"GET /state/x/data HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZZ\r\n",
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_is_answered_and_logged_in_a_sentence(
    kind: str, source: HTTPTransport[Any], caplog: pytest.LogCaptureFixture
) -> None:
    parts = urlsplit(source.address())
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20) as sock:
        sock.sendall(UNREADABLE[kind])
        heard = b""
        while part := sock.recv(65536):
            heard += part
    assert re.match(rb"HTTP/1.[01] (400|500) ", heard)
    logged = [record for record in caplog.records if record.name == "tft_ckpt.transfer.requests"]
    assert len(logged) == (kind != "random bytes")  # of a method that is none aiohttp says nothing
    for record in logged:
        assert record.levelname == "WARNING"
        assert record.exc_info is None
        assert re.fullmatch(
            r"Error handling request.*: the request can't be read or .*, so its .* closed", record.getMessage()
        )
        assert len(record.getMessage()) < 300
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("words", [b"", b"GET /state", b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET"])
def test_a_connection_that_asks_for_nothing_is_sent_off(words: bytes) -> None:
    with HTTPTransport[Any](timedelta(milliseconds=100), bind="127.0.0.1") as source:
        parts = urlsplit(source.address())
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20) as sock:
            sock.sendall(words)
            with suppress(ConnectionResetError):
                sock.recv(65536)  # where there is a whole request, its answer
                assert sock.recv(65536) == b""


def test_only_get_is_answered(source: HTTPTransport[Any]) -> None:
    for method in ("HEAD", "POST", "PUT", "DELETE"):
        assert ask(source.address(), manifest_path(KEY), method=method)[0].status == 405


def test_garbage_ends_its_connection_and_nothing_else(source: HTTPTransport[Any], receiver: HTTPTransport[Any]) -> None:
    parts = urlsplit(source.address())
    for garbage in (
        b"\x00\xff" * 100,
        b"GET " + b"x" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
    ):
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20) as sock:
            try:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
            except ConnectionError:
                pass
    source.send_checkpoint([1], 1, {"a": 1}, BOUND)
    assert receiver.recv_checkpoint(0, source.metadata(), 1, BOUND) == {"a": 1}


def test_nothing_answers_without_the_token() -> None:
    with HTTPTransport(bind="127.0.0.1", token="right") as source:
        source.send_checkpoint([1], 1, {"a": torch.zeros(3)}, BOUND)
        for path in (manifest_path(KEY), data_path(KEY), "/", "/state/x/data"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}):
                response, body = ask(source.address(), path, **headers)
                assert response.status == 401, path
                assert response.headers["www-authenticate"] == "Bearer"
                assert b"right" not in body
        for token in (None, "wrong"):
            with (
                HTTPTransport[Any](bind="127.0.0.1", token=token) as stranger,
                pytest.raises(StateUnavailableError, match=r"401: this job's token"),
            ):
                stranger.recv_checkpoint(0, source.metadata(), 1, BOUND)
        with HTTPTransport[Any](bind="127.0.0.1", token="right") as friend:
            assert friend.recv_checkpoint(0, source.metadata(), 1, BOUND)["a"].equal(torch.zeros(3))


def test_a_transport_without_a_token_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with HTTPTransport[Any](bind="127.0.0.1", token="x"):
        assert not caplog.records
    with HTTPTransport[Any](bind="127.0.0.1"):
        assert "no token is set; only this machine is served: every process that reaches" in caplog.text
    with HTTPTransport[Any](insecure=True):
        assert "no token is set; every process that reaches" in caplog.text


def test_without_a_token_only_this_machine_is_served() -> None:
    def listens(transport: HTTPTransport[Any]) -> str:
        return str(transport._server._listener.getsockname()[0])

    with HTTPTransport[Any]() as inside, HTTPTransport[Any](token="x") as member:
        assert listens(inside) in ("127.0.0.1", "::1")
        assert listens(member) == "::"
    with HTTPTransport[Any](insecure=True) as everywhere, HTTPTransport[Any](bind="::1") as said:
        assert (listens(everywhere), listens(said)) == ("::", "::1")
    for bind in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match=f"serve its state at {bind} to everybody: .*openssl rand -hex 32"):
            HTTPTransport[Any](bind=bind)


def test_a_token_is_not_shown() -> None:
    with HTTPTransport[Any](bind="127.0.0.1", token="s3cret") as transport:
        assert "s3cret" not in repr(transport._settings)


def test_a_reader_that_takes_nothing_is_sent_off() -> None:
    with HTTPTransport(timedelta(milliseconds=100), bind="127.0.0.1") as source:
        source.send_checkpoint([1], 1, {"a": torch.zeros(16 << 20)}, BOUND)
        parts = urlsplit(source.address())
        with socket.create_connection((parts.hostname or "", parts.port or 0)) as sock:
            sock.sendall(f"GET {data_path(KEY)} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            poll = select.poll()
            poll.register(sock, 0)
            assert poll.poll(20_000), "the connection was not broken"


def test_a_state_may_be_taken_while_the_one_before_is_read(receiver: HTTPTransport[Any]) -> None:
    """A run of steps, each with a reader that is still reading the step before."""
    with HTTPTransport(bind="127.0.0.1") as source:
        results: list[Any] = []
        for step in range(1, 6):
            state = {"a": torch.full((1 << 20,), float(step))}
            source.send_checkpoint([1], step, state, BOUND)
            fault = Fault("data", "stall", at=1 << 20)
            with FaultyProxy(source.metadata(), fault) as proxy:
                thread = threading.Thread(
                    target=lambda step=step, url=proxy.url: results.append(
                        receiver.recv_checkpoint(0, url, step, BOUND)
                    )
                )
                thread.start()
                assert fault.happened.wait(20)
                source.send_checkpoint([1], step + 1, {"a": torch.zeros(1 << 20)}, BOUND)
                proxy.release()
                thread.join()
            assert_same_state(results[-1], state)


def test_the_state_before_is_served_while_a_connection_holds_it_and_refused_afterwards(
    source: HTTPTransport[Any],
) -> None:
    source.send_checkpoint([1], 1, {"a": torch.ones(1000)}, BOUND)
    url = source.address()
    parts = urlsplit(url)
    reader = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    reader.request("GET", data_path(KEY))
    held = reader.getresponse().read()
    source.send_checkpoint([1], 2, {"a": torch.zeros(1000)}, BOUND)
    for _ in range(3):  # a new reader each time
        response, data = ask(url, data_path(KEY))
        assert (response.status, data) == (200, held)
    reader.close()
    until = time.monotonic() + 20
    while len(source._server._store.keys) > 1 and time.monotonic() < until:
        time.sleep(0.01)
    response, data = ask(url, data_path(KEY))
    assert response.status == 409, (response.status, data)
    assert b"was replaced here by" in data


# ---- the receiver ----


@contextmanager
def scripted(*answers: bytes) -> Iterator[str]:
    """A source that gives each connection one answer, whatever it asks, and then ends it; the last one for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for index in range(1000):
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock:
                    try:
                        sock.recv(65536)
                        sock.sendall(answers[min(index, len(answers) - 1)])
                        sock.shutdown(socket.SHUT_WR)
                        while sock.recv(65536):
                            pass
                    except OSError:
                        # The receiver left, as it may.
                        continue

        thread = threading.Thread(target=serve, name="scripted")
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextmanager
def answering(serve: Callable[[socket.socket], object]) -> Iterator[str]:
    """A source of which each connection is given to a function, on a thread of its own."""
    threads = []

    def run(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            serve(sock)

    def accept() -> None:
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                threads.append(threading.Thread(target=run, args=(sock,), name="answering"))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads.append(threading.Thread(target=accept, name="answering"))
        threads[0].start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


@contextmanager
def trickling(source: HTTPTransport[Any], asked: str) -> Iterator[str]:
    """A source in front of another one that gives the last byte of one kind of answer never, and the others slowly."""
    place = urlsplit(source.metadata())

    def serve(sock: socket.socket) -> None:
        with socket.create_connection((place.hostname, place.port)) as behind:
            while request := sock.recv(65536):
                behind.sendall(request)
                if f"/{asked} ".encode() not in request:
                    head = b""
                    while b"\r\n\r\n" not in head:
                        head += behind.recv(1)
                    length = int(head.lower().partition(b"content-length:")[2].split()[0])
                    sock.sendall(head + behind.recv(length, socket.MSG_WAITALL))
                    continue
                while True:
                    sock.sendall(behind.recv(1))
                    sock.settimeout(0.01)
                    try:
                        if not sock.recv(1):
                            return
                    except TimeoutError:
                        continue

    with answering(serve) as url:
        yield url


def answer(body: bytes, status: str = "200 OK", **headers: object) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    if "content_length" not in headers:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def manifest_of(state: object, key: StateKey = KEY) -> tuple[bytes, bytes]:
    snapshot = Snapshot.take(state, key=key, chunk_bytes=4096, limits=Limits(), allocate=Buffer)
    while not snapshot.checksum_next_chunk():
        pass
    assert snapshot.manifest_bytes is not None
    return snapshot.manifest_bytes, bytes(snapshot.data)


MANIFEST, DATA = manifest_of({"a": torch.ones(1000)})
OTHER_MANIFEST, _ = manifest_of({"a": torch.ones(1000)}, StateKey(quorum_id=9, nonce=9, step=9, lineage=9))
RANGE = f"bytes 0-3999/{len(DATA)}"

HOSTILE: dict[str, tuple[type[CheckpointError], list[bytes]]] = {
    "no HTTP": (StateUnavailableError, [b"\x16\x03\x01 hello"]),
    "nothing": (StateUnavailableError, [b""]),
    "half a head": (StateCorruptError, [b"HTTP/1.1 200 OK\r\ncontent-le"]),
    "endless head": (StateUnavailableError, [b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000]),
    "long line": (StateUnavailableError, [b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000]),
    "no such state": (StateUnavailableError, [answer(b"gone", "404 Not Found")]),
    "failed there": (StateUnavailableError, [answer(b"gone", "410 Gone")]),
    "elsewhere": (StateUnavailableError, [answer(b"", "302 Found", location="http://127.0.0.1:9/")]),
    "another state": (StateMismatchError, [answer(b"", "409 Conflict", x_tft_key="nonsense")]),
    "manifest of another state": (StateMismatchError, [answer(OTHER_MANIFEST)]),
    "manifest without length": (StateCorruptError, [answer(MANIFEST, transfer_encoding="chunked", content_length=0)]),
    "huge manifest": (StateCorruptError, [answer(b"", content_length=2**40)]),
    "negative manifest": (StateCorruptError, [answer(b"", content_length=-1)]),
    "manifest that breaks off": (StateUnavailableError, [answer(MANIFEST[:50], content_length=len(MANIFEST))]),
    "damaged manifest": (StateCorruptError, [answer(MANIFEST[:-1] + b"]")]),
    "no data": (StateUnavailableError, [answer(MANIFEST), b""] * 3),
    "data that breaks off": (
        StateUnavailableError,
        [answer(MANIFEST), answer(DATA[:9], "206 X", content_range=RANGE, content_length=4000)] * 3,
    ),
    "data without range": (StateCorruptError, [answer(MANIFEST), answer(DATA)] * 3),
    "another range": (
        StateCorruptError,
        [answer(MANIFEST), answer(DATA, "206 X", content_range="bytes 1-4000/4001")] * 3,
    ),
    "short data": (StateCorruptError, [answer(MANIFEST), answer(DATA[:9], "206 X", content_range=RANGE)] * 3),
    "damaged data": (
        StateCorruptError,
        [answer(MANIFEST), answer(b"\1" + DATA[1:], "206 X", content_range=RANGE)] * 3,
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_source_is_named(kind: str, receiver: HTTPTransport[Any]) -> None:
    expected, answers = HOSTILE[kind]
    with scripted(*answers) as url:
        with pytest.raises(expected) as caught:
            receiver.recv_checkpoint(0, url, 1, BOUND)
        assert type(caught.value) is expected
        assert url in str(caught.value)
        assert caught.value.source == url  # type: ignore[attr-defined]


HOSTILE_TEXT = "\x1b[2J\x07\u202e first\nsecond " + "long " * 2_000


@pytest.mark.parametrize(
    "answers",
    [
        [answer(HOSTILE_TEXT.encode(), "404 Not Found")],
        [answer(HOSTILE_TEXT.encode(), "410 Gone")],
        [answer(HOSTILE_TEXT.encode(), "500 Oh")],
        [answer(b"", "404 \x1b[31m\u202e" + "long " * 2_000)],
        [b"XTTP \x1b[2J\x07" + b"long " * 2_000 + b"\r\n\r\n"],
        [answer(MANIFEST), answer(DATA, "206 X", content_range="bytes \x1b[2J" + "long " * 2_000)] * 3,
    ],
    ids=["404", "410", "500", "reason", "status line", "range"],
)
def test_a_text_of_a_source_can_not_write_to_a_terminal_or_forge_a_line(
    answers: list[bytes], receiver: HTTPTransport[Any]
) -> None:
    with scripted(*answers) as url, pytest.raises(CheckpointError) as caught:
        receiver.recv_checkpoint(0, url, 1, BOUND)
    text = str(caught.value)
    assert url in text
    assert "long" in text
    assert text.isprintable()
    assert len(text) < 1_000


def test_a_source_that_disconnects_is_told_from_one_without_the_state(receiver: HTTPTransport[Any]) -> None:
    remedy = "check the log of the source, and firewalls and proxies"
    with scripted(b"") as url, pytest.raises(StateUnavailableError, match=f"failure 3 of 3 in a row; {remedy}"):
        receiver.recv_checkpoint(0, url, 1, BOUND)
    soon = timedelta(seconds=1)
    later = answer(b"", "503 Service Unavailable")
    expected = rf"no source had it yet; the connection was lost \d+ times; {remedy}"
    with scripted(*[later, b""] * 500) as url, pytest.raises(TransferTimeoutError, match=expected):
        receiver.recv_checkpoint(0, url, 1, soon)
    with scripted(later) as url, pytest.raises(TransferTimeoutError, match="no source had it yet; current"):
        receiver.recv_checkpoint(0, url, 1, soon)
    silent = answering(lambda sock: sock.recv(1 << 20) and sock.recv(1))
    with silent as url, pytest.raises(TransferTimeoutError, match="no source answered; check whether it runs"):
        receiver.recv_checkpoint(0, url, 1, soon)


def test_an_honest_script_is_believed(receiver: HTTPTransport[Any]) -> None:
    """Else the test above could pass for another reason."""
    for close in ({}, {"connection": "close"}):
        honest = [answer(MANIFEST, **close), answer(DATA, "206 X", content_range=RANGE, **close)]
        with scripted(*honest) as url:
            assert receiver.recv_checkpoint(0, url, 1, BOUND)["a"].equal(torch.ones(1000))


def test_a_state_above_the_limit_takes_no_memory(source: HTTPTransport[Any]) -> None:
    source.send_checkpoint([1], 1, {"a": torch.ones(100_000)}, BOUND)
    with HTTPTransport[Any](bind="127.0.0.1", limits=Limits(data_bytes=1000)) as receiver:
        receiver._allocate = None  # type: ignore[method-assign,assignment]
        with pytest.raises(StateCorruptError, match="limit of 1000"):
            receiver.recv_checkpoint(0, source.metadata(), 1, BOUND)


@pytest.mark.parametrize(
    "metadata",
    ["", "<n/a>", "http://", "http://host", "ftp://h:1", "http://h:x", "http://h:1/other", "http://[::1:5"],
)
def test_what_is_no_address_is_refused(metadata: str, receiver: HTTPTransport[Any]) -> None:
    with pytest.raises(StateUnavailableError, match="not a source's address"):
        receiver.recv_checkpoint(0, metadata, 1, BOUND)


@pytest.mark.parametrize(
    ("metadata", "sources", "word"),
    [
        (None, (), "metadata is None"),
        ("http://h:1", "http://h:1", "sources"),
        ("http://h:1", [None], "sources"),
        ("http://h:1", None, "sources"),
    ],
)
def test_what_is_no_list_of_addresses_is_named(
    metadata: Any, sources: Any, word: str, receiver: HTTPTransport[Any]
) -> None:
    with pytest.raises(ConfigError, match=word):
        receiver.recv_checkpoint(0, metadata, 1, BOUND, sources=sources)


def test_a_name_that_nobody_answers_for_holds_up_nothing(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system looks up a name for as long as it likes."""
    answered, look_up = threading.Event(), socket.getaddrinfo

    def stalled(host: str, *args: Any, flags: int = 0, **more: Any) -> Any:
        if host == "stalled.invalid" and not flags:
            answered.wait()
        return look_up("127.0.0.1" if host == "fine.invalid" else host, *args, flags=flags, **more)

    monkeypatch.setattr(socket, "getaddrinfo", stalled)
    source.send_checkpoint([1], 1, {"a": 1}, BOUND)
    fine = source.metadata().replace("127.0.0.1", "fine.invalid")
    try:
        with pytest.raises(TransferTimeoutError):
            receiver.recv_checkpoint(0, "http://stalled.invalid:1", 1, timedelta(seconds=0.1))
        timeout = timedelta(seconds=1)
        assert receiver.recv_checkpoint(0, "http://stalled.invalid:1", 1, timeout, sources=[fine]) == {"a": 1}
        report = receiver.last_receive
        assert report is not None
        assert report.sources == (fine,)
    finally:
        answered.set()
        for thread in threading.enumerate():
            if thread.name == LOOK_UP_THREAD_NAME:
                thread.join()


def test_a_silent_source_does_not_use_up_the_time_of_the_others(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    """The first takes connections and says nothing."""
    source.send_checkpoint([1], 1, {"a": 1}, BOUND)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        got = receiver.recv_checkpoint(0, url, 1, timedelta(seconds=2), sources=[source.metadata()])
    assert got == {"a": 1}
    report = receiver.last_receive
    assert report is not None
    assert report.sources == (source.metadata(),)


@pytest.mark.parametrize("asked", ["manifest", "data"])
def test_nor_does_one_that_says_a_little_now_and_then(
    asked: str, source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    source.send_checkpoint([1], 1, {"a": torch.ones(100_000)}, BOUND)
    with trickling(source, asked) as url:
        got = receiver.recv_checkpoint(0, url, 1, timedelta(seconds=2), sources=[source.metadata()])
    assert got["a"].equal(torch.ones(100_000))
    report = receiver.last_receive
    assert report is not None
    if asked == "manifest":
        assert report.sources == (source.metadata(),), "another one was quicker"
    else:
        assert any(url in fault and "took too long" in fault for fault in report.faults)


def test_who_talks_without_end_is_interrupted(receiver: HTTPTransport[Any]) -> None:
    """The standard library reads over any number of such answers, and there is always one more to read."""
    ended = threading.Event()

    def talk(sock: socket.socket) -> None:
        sock.recv(65536)
        while not ended.is_set():
            sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 2000)

    try:
        with answering(talk) as url, pytest.raises(TransferTimeoutError):
            receiver.recv_checkpoint(0, url, 1, timedelta(seconds=0.3))
    finally:
        ended.set()


def test_a_very_long_time_is_no_error() -> None:
    with (
        HTTPTransport[Any](timedelta(days=1000), bind="127.0.0.1") as source,
        HTTPTransport[Any](timedelta(days=1000), bind="127.0.0.1") as receiver,
    ):
        offer = threading.Timer(0.05, source.send_checkpoint, ([1], 1, {"a": 1}, BOUND))
        offer.start()
        assert receiver.recv_checkpoint(0, source.metadata(), 1, timedelta(days=1000)) == {"a": 1}
        offer.join()


def test_kept_buffers_are_used_again(source: HTTPTransport[Any]) -> None:
    with HTTPTransport[Any](bind="127.0.0.1", reuse_buffers=True) as receiver:
        places = []
        for step in range(3):
            source.send_checkpoint([1], step, {"a": torch.full((1 << 20,), float(step))}, BOUND)
            got = receiver.recv_checkpoint(0, source.metadata(), step, BOUND)
            assert got["a"][-1] == step
            places.append(got["a"].data_ptr())
        assert len(set(places)) == 1


def test_fresh_buffers_are_the_rule(source: HTTPTransport[Any], receiver: HTTPTransport[Any]) -> None:
    source.send_checkpoint([1], 1, {"a": torch.ones(1 << 20)}, BOUND)
    first = receiver.recv_checkpoint(0, source.metadata(), 1, BOUND)
    second = receiver.recv_checkpoint(0, source.metadata(), 1, BOUND)
    second["a"].zero_()
    assert first["a"].equal(torch.ones(1 << 20))


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_an_error_in_a_callback_ends_the_receive(num_chunks: int) -> None:
    def fail(done: int, total: int) -> None:
        if done:
            raise KeyError("mine")

    before = threading.active_count()
    with (
        HTTPTransport[Any](bind="127.0.0.1", chunk_bytes=1 << 20) as source,
        HTTPTransport[Any](BOUND, num_chunks, bind="127.0.0.1") as receiver,
    ):
        source.send_checkpoint([1], 1, {"a": torch.ones(8 << 20)}, BOUND)
        with pytest.raises(KeyError, match="mine"):
            receiver.recv_checkpoint(0, source.metadata(), 1, BOUND, progress=fail)
        assert threading.active_count() == before + 2, "only the two servers are left"
        assert receiver.recv_checkpoint(0, source.metadata(), 1, BOUND)["a"][-1] == 1


@pytest.mark.parametrize("num_chunks", [0, 3])
@pytest.mark.parametrize("ending", ["abort", "deadline", "cancelled"])
def test_a_transfer_under_way_can_be_ended(num_chunks: int, ending: str) -> None:
    with (
        HTTPTransport[Any](bind="127.0.0.1", chunk_bytes=1 << 20) as source,
        HTTPTransport[Any](BOUND, num_chunks, bind="127.0.0.1") as receiver,
    ):
        source.send_checkpoint([1], 1, {"a": torch.ones(8 << 20)}, BOUND)
        fault = Fault("data", "stall", at=1 << 20)
        with FaultyProxy(source.metadata(), fault) as proxy:
            stalled = fault.happened.is_set
            timeout = timedelta(milliseconds=500) if ending == "deadline" else BOUND
            expected = TransferTimeoutError if ending == "deadline" else TransportClosedError
            thread = threading.Thread(target=lambda: (fault.happened.wait(20), receiver.abort()))
            if ending == "abort":
                thread.start()
            cancelled: Callable[[], bool] | None = stalled if ending == "cancelled" else None
            with pytest.raises(expected):
                receiver.recv_checkpoint(0, proxy.url, 1, timeout, cancelled=cancelled)
            if ending == "abort":
                thread.join()


# ---- settings and addresses ----


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"timeout": timedelta(0)}, "timeout"),
        ({"timeout": 60}, "timeout is 60; give a timedelta"),
        ({"num_chunks": -1}, "num_chunks"),
        ({"num_chunks": 65}, "num_chunks"),
        ({"port": 70000}, "port"),
        ({"token": ""}, "token"),
        ({"token": "a\nb"}, "token"),
        ({"chunk_bytes": 1}, "chunk_bytes"),
        ({"bind": "203.0.113.7"}, "bind"),
        ({"advertise_addr": "http://x"}, "advertise_addr"),
        ({"advertise_addr": ""}, "advertise_addr"),
        ({"advertise_addr": "host:port"}, "advertise_addr"),
    ],
)
def test_a_wrong_setting_is_named_and_leaves_nothing(settings: dict[str, Any], word: str) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=word):
        HTTPTransport(**settings)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("node7", "http://node7:{port}"),
        ("node7:99", "http://node7:99"),
        ("10.0.0.7", "http://10.0.0.7:{port}"),
        ("fd00::2", "http://[fd00::2]:{port}"),
        ("[fd00::2]", "http://[fd00::2]:{port}"),
        ("[fd00::2]:99", "http://[fd00::2]:99"),
    ],
)
def test_the_advertised_address_can_be_chosen(given: str, expected: str) -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        url = advertised_url(listener, given)
        assert url == expected.format(port=port)
        host, advertised_port = parse_url(url)
        assert host == given.removesuffix(":99").strip("[]")
        assert advertised_port == (99 if given.endswith("99") else port)


def test_the_address_found_out_is_one_that_reaches_it() -> None:
    with HTTPTransport[Any](insecure=True) as everywhere, HTTPTransport[Any](bind="::1") as inside:
        assert inside.metadata().startswith("http://[::1]:")
        assert "0.0.0.0" not in everywhere.metadata()
        assert "[::]" not in everywhere.metadata()
        everywhere.send_checkpoint([1], 1, {"a": 1}, BOUND)
        assert inside.recv_checkpoint(0, everywhere.metadata(), 1, BOUND) == {"a": 1}
        inside.send_checkpoint([1], 1, {"a": 2}, BOUND)
        assert everywhere.recv_checkpoint(0, inside.metadata(), 1, BOUND) == {"a": 2}


def own_host(monkeypatch: pytest.MonkeyPatch, resolved: list[str]) -> str:
    def resolve(host: str, *_: object, **__: object) -> list[Any]:
        if not resolved:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in resolved]

    monkeypatch.setattr(socket, "gethostname", lambda: "thishost")
    with listen("0.0.0.0", 0) as listener:
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        return parse_url(advertised_url(listener, None))[0]


def test_the_host_name_is_given_if_it_means_this_host_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_host(monkeypatch, ["10.1.2.3"]) == "thishost"


@pytest.mark.parametrize("resolved", [[], ["127.0.1.1"], ["::1", "10.1.2.3"]])
def test_else_the_address_that_goes_out(monkeypatch: pytest.MonkeyPatch, resolved: list[str]) -> None:
    assert own_host(monkeypatch, resolved) != "thishost"


def test_a_reader_that_has_hung_up_meanwhile_can_be_sent_off_all_the_same() -> None:
    """Its request may not be over yet; an error here would end the server's thread."""

    async def hang_up_first() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
            transport.abort()
            while ours.fileno() >= 0:
                await asyncio.sleep(0)
            app._disconnect(transport)

    asyncio.run(asyncio.wait_for(hang_up_first(), BOUND.total_seconds()))
