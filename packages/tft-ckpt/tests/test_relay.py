"""A process that is still receiving serves what it has: what it tells of it, to whom, and when it stops."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from tft_ckpt import Limits, StateKey, TransportClosedError
from tft_ckpt.state.buffers import Buffer
from tft_ckpt.state.manifest import decode
from tft_ckpt.state.snapshot import Snapshot
from tft_ckpt.state.target import Target
from tft_ckpt.transfer.address import listen
from tft_ckpt.transfer.peers import Tracker
from tft_ckpt.transfer.relay import Relay
from tft_ckpt.transfer.routes import (
    HAVE_COUNT_HEADER,
    PARTIAL_HEADER,
    PEERS_MAX,
    RELAY_HEADER,
    URL_BYTES_MAX,
    WAIT_HEADER,
    chunks_body,
    chunks_bytes_max,
    chunks_path,
    data_path,
    manifest_path,
    parse_chunks,
)
from tft_ckpt.transfer.server import StateServer

KEY = StateKey(quorum_id=1, nonce=2, step=3, lineage=4)
OTHER_KEY = StateKey(quorum_id=1, nonce=2, step=9, lineage=4)
CHUNK_BYTES = 4096
BOUND = timedelta(seconds=20).total_seconds()


def snapshot_of(state: object, key: StateKey = KEY) -> Snapshot:
    snapshot = Snapshot.take(state, key=key, chunk_bytes=CHUNK_BYTES, limits=Limits(), allocate=Buffer)
    while not snapshot.checksum_next_chunk():
        pass
    return snapshot


def read_to_the_end(sock: socket.socket) -> None:
    while sock.recv(1 << 20):
        pass


class Rig:
    """A server, and a state that is being received behind it."""

    def __init__(self, num_chunks: int = 5) -> None:
        self.listener = listen("127.0.0.1", 0)
        self.host, self.port = self.listener.getsockname()
        self.server = StateServer(self.listener, token=None, chunk_bytes=CHUNK_BYTES, limits=Limits(), silence_s=BOUND)
        self.snapshot = snapshot_of([torch.arange(num_chunks * CHUNK_BYTES - 96, dtype=torch.int64).to(torch.uint8)])
        assert self.snapshot.manifest_bytes is not None
        self.manifest_bytes = self.snapshot.manifest_bytes
        self.manifest = decode(self.manifest_bytes, limits=Limits())
        self.buffer = Buffer(self.manifest.layout.data_bytes)

    def relay(self) -> Relay:
        target = Target.fresh(self.manifest.layout, self.buffer)
        return self.server.relay(self.manifest, self.manifest_bytes, target)

    def receive(self, relay: Relay, *chunks: int) -> None:
        for chunk in chunks:
            start, end = self.manifest.layout.chunk_span(chunk)
            self.buffer.view[start:end] = self.snapshot.data[start:end]
            relay.have(chunk)

    def ask(self, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=BOUND)
        try:
            connection.request("GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})
            response = connection.getresponse()
            return response, response.read()
        finally:
            connection.close()

    def refused(self, path: str) -> int:
        """The status with which it is refused, once the connections that had it have ended."""
        until = time.monotonic() + BOUND
        while (status := self.ask(path)[0].status) == 200 and time.monotonic() < until:
            time.sleep(0.001)
        return status

    def chunks(self, **headers: str) -> tuple[set[int], list[str]]:
        response, body = self.ask(chunks_path(KEY), **headers)
        assert response.status == 200, body
        have, peers = parse_chunks(body, self.manifest.layout.num_chunks)
        number = int.from_bytes(have, "little")
        return {chunk for chunk in range(self.manifest.layout.num_chunks) if number >> chunk & 1}, list(peers)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.server.close(wait=True)


def test_what_is_here_is_served_and_nothing_else(rig: Rig) -> None:
    relay = rig.relay()
    response, body = rig.ask(manifest_path(KEY))
    assert (response.status, body) == (200, rig.manifest_bytes)
    assert response.headers[PARTIAL_HEADER] == "1"
    assert rig.chunks() == (set(), [])
    rig.receive(relay, 1, 2, 4)
    assert rig.chunks() == ({1, 2, 4}, [])
    length = rig.manifest.layout.data_bytes
    for start, end, status in (
        (4096, 3 * 4096, 206),
        (5000, 5001, 206),
        (4 * 4096, length, 206),
        (4095, 4097, 503),
        (3 * 4096 - 1, 3 * 4096 + 1, 503),
        (0, 1, 503),
        (0, length, 503),
    ):
        response, body = rig.ask(data_path(KEY), range=f"bytes={start}-{end - 1}")
        assert response.status == status
        if status == 206:
            assert response.headers["content-range"] == f"bytes {start}-{end - 1}/{length}"
            assert body == rig.snapshot.data[start:end]
    assert rig.ask(data_path(KEY), range=f"bytes={length}-")[0].status == 416
    rig.receive(relay, 0, 3, 3)
    assert rig.ask(data_path(KEY))[1] == rig.snapshot.data
    relay.end()
    relay.end()
    for path in (manifest_path(KEY), chunks_path(KEY), data_path(KEY)):
        assert rig.ask(path)[0].status == 503


def test_who_waits_for_chunks_is_answered_when_one_comes(rig: Rig) -> None:
    relay = rig.relay()
    rig.receive(relay, 3)
    heard: list[set[int]] = []

    def follow() -> None:
        have: set[int] = set()
        while len(have) < 5:
            have = rig.chunks(**{WAIT_HEADER: "20000", HAVE_COUNT_HEADER: str(len(have))})[0]
            heard.append(have)
            came.release()

    came = threading.Semaphore(0)
    thread = threading.Thread(target=follow)
    thread.start()
    for chunk in (0, 4, 1, 2):
        assert came.acquire(timeout=BOUND)
        rig.receive(relay, chunk)
    thread.join(BOUND)
    assert heard == [{3}, {0, 3}, {0, 3, 4}, {0, 1, 3, 4}, {0, 1, 2, 3, 4}]


def test_who_waits_in_vain_is_answered_as_it_is_or_told_of_the_end(rig: Rig) -> None:
    relay = rig.relay()
    assert rig.chunks(**{WAIT_HEADER: "1", HAVE_COUNT_HEADER: "0"}) == (set(), [])
    answers: list[int] = []
    waiting = threading.Thread(
        target=lambda: answers.append(
            rig.ask(chunks_path(KEY), **{WAIT_HEADER: "20000", HAVE_COUNT_HEADER: "0", RELAY_HEADER: "http://a:1"})[
                0
            ].status
        )
    )
    waiting.start()
    while rig.chunks()[1] != ["http://a:1"]:
        pass
    relay.end()
    waiting.join(BOUND)
    assert answers == [503]


def test_who_comes_before_the_relay_waits_for_it(rig: Rig) -> None:
    answers: list[tuple[int, bytes]] = []

    def ask() -> None:
        response, body = rig.ask(manifest_path(KEY), **{WAIT_HEADER: "20000"})
        answers.append((response.status, body))

    waiting = threading.Thread(target=ask)
    waiting.start()
    rig.relay()
    waiting.join(BOUND)
    assert answers == [(200, rig.manifest_bytes)]


def test_an_offered_state_goes_before_a_relayed_one_and_ends_no_relay(rig: Rig) -> None:
    relay = rig.relay()
    rig.receive(relay, 0)
    rig.server.offer([torch.zeros(1)], key=OTHER_KEY, expected=True, check=lambda: None)
    assert rig.chunks()[0] == {0}
    assert rig.ask(data_path(KEY), range="bytes=0-9")[1] == rig.snapshot.data[:10]
    rig.server.offer([torch.ones(5000)], key=KEY, expected=True, check=lambda: None)
    response, body = rig.ask(manifest_path(KEY), **{WAIT_HEADER: "20000"})
    assert PARTIAL_HEADER not in response.headers
    assert decode(body, limits=Limits()).layout.data_bytes == 20_000
    assert rig.chunks()[0] == {0, 1, 2, 3, 4}
    rig.server.refuse(OTHER_KEY, "no")
    until = time.monotonic() + BOUND
    while rig.chunks()[0] != {0}:  # once nobody is connected who had read the offered one
        assert time.monotonic() < until
    assert rig.ask(manifest_path(OTHER_KEY))[0].status == 410
    relay.end()
    assert rig.refused(manifest_path(KEY)) == 409


def test_a_second_relay_of_one_state_takes_the_place_of_the_first(rig: Rig) -> None:
    first = rig.relay()
    second = rig.relay()
    rig.receive(second, 2)
    assert rig.chunks()[0] == {2}
    first.end()
    assert rig.chunks()[0] == {2}


def test_the_end_waits_for_readers_which_are_broken_off() -> None:
    rig = Rig(num_chunks=4096)  # 16 MiB: more than the sockets hold
    relay = rig.relay()
    rig.receive(relay, *range(4096))
    with socket.create_connection((rig.host, rig.port)) as reader:
        reader.sendall(f"GET {data_path(KEY)} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert reader.recv(1)
        relay.end()
        rig.buffer.view[:] = bytes(len(rig.buffer.view))
        with pytest.raises(ConnectionResetError):
            read_to_the_end(reader)
    rig.server.close(wait=True)


@pytest.mark.parametrize("when", ["before", "while somebody reads"])
def test_the_end_of_the_server_is_the_end_of_the_relay(when: str) -> None:
    rig = Rig(num_chunks=4096)
    relay = rig.relay()
    rig.receive(relay, *range(4096))
    with socket.create_connection((rig.host, rig.port)) as reader:
        if when != "before":
            reader.sendall(f"GET {data_path(KEY)} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            assert reader.recv(1)
        rig.server.close(wait=True)
    relay.have(0)
    relay.end()
    with pytest.raises(TransportClosedError):
        rig.relay()


def test_relays_are_told_of_each_other(rig: Rig) -> None:
    rig.server.offer([torch.ones(5000)], key=KEY, expected=True, check=lambda: None)
    rig.ask(manifest_path(KEY), **{WAIT_HEADER: "20000", RELAY_HEADER: "http://a:1"})
    assert rig.chunks() == ({0, 1, 2, 3, 4}, ["http://a:1"])
    assert rig.chunks(**{RELAY_HEADER: "http://b:2"})[1] == ["http://a:1"]
    assert rig.chunks(**{RELAY_HEADER: "http://a:1"})[1] == ["http://b:2"]
    rig.server.offer([torch.ones(5000)], key=OTHER_KEY, expected=True, check=lambda: None)
    assert rig.refused(chunks_path(KEY)) == 409
    _, body = rig.ask(chunks_path(OTHER_KEY))
    assert json.loads(body)["fellows"] == []


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ({RELAY_HEADER: "x"}, b"not a source's address"),
        ({RELAY_HEADER: "http://" + "a" * URL_BYTES_MAX + ":1"}, b"above the limit"),
        ({HAVE_COUNT_HEADER: "-1"}, b"not a number"),
        ({WAIT_HEADER: "x"}, b"not a number"),
    ],
)
def test_bad_questions_for_chunks_get_a_sentence(rig: Rig, headers: dict[str, str], word: bytes) -> None:
    rig.relay()
    response, body = rig.ask(chunks_path(KEY), **headers)
    assert response.status == 400
    assert word in body


# ---- the tracker, and the spelling ----


def test_the_tracker_forgets_who_is_silent_and_who_is_one_too_many() -> None:
    tracker = Tracker()
    tracker.record(KEY, "a", 0.0)
    tracker.record(KEY, "b", 20.0)
    tracker.record(OTHER_KEY, "c", 20.0)
    assert tracker.peers(KEY, "b", 30.0) == ["a"]
    assert tracker.peers(KEY, None, 31.0) == ["b"]
    tracker.record(KEY, "a", 40.0)
    assert tracker.peers(KEY, None, 49.0) == ["a", "b"]
    tracker.keep_only({OTHER_KEY})
    assert tracker.peers(KEY, None, 49.0) == []
    assert tracker.peers(OTHER_KEY, None, 49.0) == ["c"]
    for index in range(1000):
        tracker.record(KEY, str(index), 50.0)
    assert tracker.peers(KEY, "999", 50.0) == [str(index) for index in range(998, 998 - PEERS_MAX, -1)]
    for index in range(1000):
        tracker.record(KEY, "999", 51.0 + index)
    assert len(tracker.peers(KEY, None, 80.0)) == PEERS_MAX


def test_what_is_told_of_chunks_is_read_as_it_was_meant() -> None:
    for num_chunks in (0, 1, 8, 9):
        have = ((1 << num_chunks) - 1).to_bytes(-(-num_chunks // 8), "little")
        peers = ("http://[fd00::2]:7",) * PEERS_MAX
        body = chunks_body(have, peers)
        assert parse_chunks(body, num_chunks) == (have, peers)
        assert len(body) <= chunks_bytes_max(num_chunks)
    long = chunks_body(b"", ["\x01" * URL_BYTES_MAX] * PEERS_MAX)
    assert len(long) <= chunks_bytes_max(0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"have":"01"}',
        b'{"have":"01","fellows":[],"more":1}',
        b'{"have":1,"fellows":[]}',
        b'{"have":"0","fellows":[]}',
        b'{"have":"0101","fellows":[]}',
        b'{"have":"10","fellows":[]}',
        b'{"have":"zz","fellows":[]}',
        b'{"have":"  ","fellows":[]}',
        b'{"have":"01","fellows":"x"}',
        b'{"have":"01","fellows":[1]}',
        b'{"have":"01","fellows":["' + b"x" * (URL_BYTES_MAX + 1) + b'"]}',
        b'{"have":"01","fellows":[' + b'"x",' * PEERS_MAX + b'"x"]}',
    ],
)
def test_what_tells_nothing_of_chunks_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of whatever sentence
        parse_chunks(body, 4)


def test_equal_states_have_equal_sums_whatever_their_memory_held() -> None:
    def dirty(num_bytes: int) -> Buffer:
        buffer = Buffer(num_bytes)
        buffer.tensor.fill_(255)
        return buffer

    state: Any = [torch.ones(3), torch.ones(5), torch.ones(70)]
    used = Snapshot.take(state, key=KEY, chunk_bytes=CHUNK_BYTES, limits=Limits(), allocate=dirty)
    assert bytes(used.data) == bytes(snapshot_of(state).data)
