"""A server that is fed nonsense for long neither ends nor grows, and goes on serving who asks properly.

The nonsense is made of requests that are nearly right, for those reach furthest: a bit turned, a piece doubled, left
out or stretched, cut short, sent in drops, or broken off while the answer comes.
"""

from __future__ import annotations

import ctypes
import gc
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest
import torch

from tft_ckpt import Limits, StateKey, TransportClosedError
from tft_ckpt.state.buffers import Buffer
from tft_ckpt.state.manifest import decode
from tft_ckpt.state.snapshot import Snapshot
from tft_ckpt.state.target import Target
from tft_ckpt.transfer.address import listen
from tft_ckpt.transfer.routes import (
    HAVE_COUNT_HEADER,
    RELAY_HEADER,
    WAIT_HEADER,
    chunks_path,
    data_path,
    manifest_path,
)
from tft_ckpt.transfer.server import StateServer

KEY = StateKey(quorum_id=1, nonce=2, step=3, lineage=4)
RELAYED_KEY = StateKey(quorum_id=1, nonce=2, step=4, lineage=4)
TOKEN = "right"
BOUND_S = 20.0
NUM_BYTES = 1 << 20
# What the interpreter and the kernel's allocators may come to hold without anything having been leaked.
GROWTH_BYTES_MAX = 24 << 20

HEADERS = (
    f"authorization: Bearer {TOKEN}",
    f"{WAIT_HEADER}: 3",
    f"{RELAY_HEADER}: http://10.0.0.7:4123",
    f"{HAVE_COUNT_HEADER}: 2",
    "range: bytes=100-70000",
    "connection: keep-alive",
    "content-length: 3",
    "transfer-encoding: chunked",
    "expect: 100-continue",
    "upgrade: websocket",
    "accept-encoding: gzip, br",
)


def request_of(chance: random.Random) -> bytes:
    """A request that is right, or nearly."""
    key = chance.choice([KEY, KEY, RELAYED_KEY, StateKey(quorum_id=9, nonce=9, step=9, lineage=9)])
    path = chance.choice([manifest_path, data_path, chunks_path])(key)
    method = chance.choice(["GET"] * 8 + ["HEAD", "POST", "OPTIONS", "PRI"])
    chosen = [HEADERS[0]] * (chance.random() < 0.9) + chance.sample(HEADERS[1:], chance.randint(0, 4))
    data = "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *chosen, "", ""]).encode()
    return hurt(chance, data) if chance.random() < 0.7 else data


def hurt(chance: random.Random, data: bytes) -> bytes:
    """The same bytes, but for a small damage."""
    at, length = chance.randrange(len(data)), chance.randint(1, 40)
    match chance.randrange(7):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at] + data[at + length :]
        case 2:
            return data[:at] + data[at : at + length] * chance.choice([2, 1000]) + data[at + length :]
        case 3:
            return data[:at]
        case 4:
            return data[:at] + chance.randbytes(length) + data[at:]
        case 5:
            return data * chance.randint(2, 20)
        case _:
            return chance.randbytes(chance.choice([1, 100, 70_000]))


def pester(chance: random.Random, port: int) -> None:
    """One connection: some requests, read or not, ended properly or not."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), BOUND_S) as sock:
        sock.settimeout(0.02)
        for _ in range(chance.randint(1, 3)):
            data = request_of(chance)
            if chance.random() < 0.1:
                for at in range(0, min(len(data), 60), 3):
                    sock.send(data[at : at + 3])
            else:
                sock.sendall(data)
            if chance.random() < 0.7:
                sock.recv(chance.choice([1, 100, 1 << 20]))
        if chance.random() < 0.3:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def ask(port: int, path: str) -> bytes:
    """What is answered to a proper request, to the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), BOUND_S) as sock:
        sock.sendall(
            f"GET {path} HTTP/1.1\r\nhost: x\r\n{HEADERS[0]}\r\n{WAIT_HEADER}: 20000\r\n".encode()
            + b"connection: close\r\n\r\n"
        )
        answer = bytearray()
        while data := sock.recv(1 << 20):
            answer += data
        return bytes(answer)


def feed(port: int, seed: int, num_connections: int, going_on: Callable[[], bool]) -> int:
    """Nonsense from several threads at once. Returns: how many connections there were."""
    counts: list[int] = []

    def go(index: int) -> None:
        chance, count = random.Random(seed + index), 0
        while count < num_connections and going_on():
            pester(chance, port)
            count += 1
        counts.append(count)

    threads = [threading.Thread(target=go, args=(index,), name=f"fuzz-{index}") for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def survive(seed: int, num_connections: int, seconds: float) -> None:
    """Feed a server for so long, or so many connections a thread; compare it with itself after a first round."""
    print(f"seed {seed}")
    snapshot = Snapshot.take(
        [torch.ones(NUM_BYTES // 4)],
        key=RELAYED_KEY,
        chunk_bytes=65536,
        limits=Limits(),
        allocate=Buffer,
    )
    while not snapshot.checksum_next_chunk():
        pass
    assert snapshot.manifest_bytes is not None
    manifest = decode(snapshot.manifest_bytes, limits=Limits())
    listener = listen("127.0.0.1", 0)
    port = int(listener.getsockname()[1])
    server = StateServer(listener, token=TOKEN, chunk_bytes=65536, limits=Limits(), silence_s=0.5)
    process = psutil.Process()

    def settled() -> tuple[int, int, int]:
        """Memory, descriptors, threads, once the connections of before have ended."""
        deadline_s = time.monotonic() + BOUND_S
        while (found := process.num_fds()) > descriptors + 1 and time.monotonic() < deadline_s:
            ask(port, chunks_path(KEY))
        gc.collect()
        # What the C library keeps for later is not what the server holds.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        return process.memory_info().rss, found, threading.active_count()

    try:
        server.offer([torch.ones(NUM_BYTES // 4)], key=KEY, expected=True, check=lambda: None)
        relay = server.relay(manifest, snapshot.manifest_bytes, Target.fresh(manifest.layout, snapshot.buffer))
        for chunk in range(0, manifest.layout.num_chunks, 2):
            relay.have(chunk)
        good = ask(port, manifest_path(KEY)).partition(b"\r\n\r\n")[2]
        descriptors = process.num_fds()
        feed(port, seed, min(150, num_connections), lambda: True)
        before = settled()
        until_s = time.monotonic() + seconds
        num_fed = feed(port, seed + 100, num_connections, lambda: time.monotonic() < until_s)
        after = settled()
        assert num_fed > 0
        assert ask(port, manifest_path(KEY)).partition(b"\r\n\r\n")[2] == good
        assert ask(port, data_path(KEY)).endswith(bytes(torch.ones(1000).numpy().tobytes()))
        assert after[0] - before[0] < GROWTH_BYTES_MAX, "its memory grew"
        assert after[1] <= descriptors + 1, "its descriptors grew"
        assert after[2] == before[2], "its threads grew"
        relay.end()
    finally:
        server.close(wait=True)
    with pytest.raises(TransportClosedError, match="was shut down"):  # and had not ended before
        server.refuse(KEY, "x")


@pytest.mark.in_parts
def test_nonsense_for_seconds(caplog: pytest.LogCaptureFixture) -> None:
    survive(seed=1, num_connections=300, seconds=8.0)
    warnings = [record for record in caplog.records if record.name == "tft_ckpt.transfer.requests"]
    assert 0 < len(warnings) <= 2 * 20, "in the one or two minutes that this took"
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_nonsense_for_ten_minutes(caplog: pytest.LogCaptureFixture) -> None:
    survive(seed=time.time_ns(), num_connections=1 << 62, seconds=600.0)
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
