"""Damaged connections at the ports that speak gRPC, while an honest client is served without a pause.

`test_bad_input` damages messages inside good connections; here the bytes of the connections themselves are damaged:
the preface, the frames of HTTP/2, their lengths, kinds and streams, the headers, and the messages inside. Nothing may
crash, hang or grow: no memory, no thread, no descriptor.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from socket import create_connection, socket
from typing import Final

import psutil
import pytest

from benchmarks.swarm import Connection
from integration_tests.hostile import HONEST_WITHIN_S, Watched, damaged, seconds_of
from integration_tests.test_bad_input import ASK, EVIL, PORTS, VOTE, lighthouse_session, rank_session
from tft_coord.errors import CoordinationError
from tft_coord.transport import steady
from tft_coord.wire import codec, rank_codec, services

FUZZ_S: Final = 2.5
SOAK_S: Final = 300.0
AT_ONCE: Final = 8  # connections that are open together
GONE_WITHIN_S: Final = 20.0  # a connection that says nothing more is closed after heartbeat_timeout
POOL_NAME: Final = "event_engine"
POOL_MORE: Final = 4  # of grpc's own threads: it starts more while all are busy
POOL_MORE_IN_MINUTES: Final = 48


def conversations(port: str, number: int) -> list[list[bytes]]:
    """Good ones, write by write: a session, and unary calls."""
    sessions = {
        "lighthouse": (services.LIGHTHOUSE_SESSION, lighthouse_session(number)),
        "manager server": (services.MANAGER_SESSION, rank_session(number)),
    }
    calls = {
        "lighthouse": [
            (services.LIGHTHOUSE_HEARTBEAT, codec.encode_heartbeat("evil")),
            (services.LIGHTHOUSE_QUORUM, codec.encode_lighthouse_request(EVIL)),
        ],
        "manager server": [
            (services.MANAGER_QUORUM, rank_codec.encode_rank_request(ASK)),
            (services.MANAGER_SHOULD_COMMIT, rank_codec.encode_vote(VOTE)),
            (services.MANAGER_CHECKPOINT_METADATA, rank_codec.encode_metadata_request(1)),
        ],
    }
    method, messages = sessions[port]
    session, unary = Recorder(), Recorder()
    stream = Connection(session)
    stream.open_stream(method, messages[0])
    for message in messages[1:]:
        stream.say(stream.framed(message))
    caller = Connection(unary)
    for method, message in calls[port]:
        caller.say(caller.unary(method, message))
    return [session.written, unary.written]


class Recorder:
    """Stands where a socket would, and keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def sendall(self, words: bytes) -> None:
        self.written.append(words)


def connected(port: int) -> socket:
    """At a moment when the listening has just been ended, and goes on."""
    end = time.monotonic() + GONE_WITHIN_S
    while True:
        try:
            return create_connection(("127.0.0.1", port), timeout=5)
        except ConnectionError:
            assert time.monotonic() < end, "nobody listens any more"
            time.sleep(0.01)


def thread_names(pid: int) -> list[str]:
    """Of its threads, as the system knows them."""
    names = []
    for thread in psutil.Process(pid).threads():
        with suppress(OSError):  # it has just ended
            names.append(Path(f"/proc/{pid}/task/{thread.id}/comm").read_text().strip())
    return names


def attack(port: str, number: int, rng: random.Random, server: Watched) -> None:
    """Some connections at once, each with a part of what it says damaged, ended in any order."""
    with ExitStack() as ends:
        for index in range(AT_ONCE):
            sock = ends.enter_context(connected(server.port))
            sock.settimeout(0.01)
            for words in rng.choice(conversations(port, number * AT_ONCE + index)):
                with suppress(OSError):
                    sock.sendall(damaged(rng, words) if rng.random() < 0.3 else words)
            if rng.random() < 0.5:
                with suppress(OSError):
                    sock.recv(1 << 16)


def patient(honest: Callable[[], object]) -> Callable[[], None]:
    """A call that met the very moment in which the listening was ended is made again, as clients do."""
    one_at_a_time = threading.Lock()

    def call() -> None:
        end = time.monotonic() + GONE_WITHIN_S
        while True:
            try:
                with one_at_a_time:
                    honest()
                return
            except CoordinationError:
                if time.monotonic() > end:
                    raise

    return call


class Honest:
    """A client that is served all the while, on a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.slowest_s = 0.0
        self.served = 0
        self.failed: BaseException | None = None
        self._call = call
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="honest")

    def __enter__(self) -> Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._end.wait(0.01):
                self.slowest_s = max(self.slowest_s, seconds_of(self._call))
                self.served += 1
        except BaseException as error:
            self.failed = error


def fuzz(port: str, folder: Path, seed: int, seconds: float, *, pool_more: int = POOL_MORE) -> int:
    """Returns: how many connections were made."""
    rng = random.Random(seed)
    with PORTS[port](folder) as (server, served):
        honest = patient(served)
        for number in range(2):  # what grpc starts once and keeps
            attack(port, number, rng, server)
        server.check(honest, "the first connections")
        process = psutil.Process(server.pid)
        threads, descriptors = Counter(thread_names(server.pid)), process.num_fds()
        number, end = 2, time.monotonic() + seconds
        with Honest(honest) as client:
            while time.monotonic() < end:
                attack(port, number, rng, server)
                number += 1
                if number % 20 == 0:
                    made = number * AT_ONCE
                    server.check(honest, f"{made} connections of seed {seed}", connections=made)
        assert client.failed is None, f"seed {seed}: {client.failed!r}"
        assert client.served > 0
        # Many times what a busy machine costs it; a server that waits for a stranger takes as long as that likes.
        assert client.slowest_s < 5 * HONEST_WITHIN_S, f"seed {seed}: the honest client waited {client.slowest_s:.1f} s"
        end = time.monotonic() + GONE_WITHIN_S
        allowed = threads + Counter({POOL_NAME: pool_more})
        while process.num_fds() > descriptors + 2 or Counter(thread_names(server.pid)) - allowed:
            assert time.monotonic() < end, (
                f"seed {seed}: {process.num_fds()} descriptors where there were {descriptors}, "
                f"threads {thread_names(server.pid)} where there were {threads}"
            )
            time.sleep(0.05)
        server.check(honest, f"all connections of seed {seed}", connections=number * AT_ONCE)
    return number * AT_ONCE


def call_what_is_no_text(port: str, server: Watched, times: int) -> None:
    """Each time over a connection of its own."""
    for _ in range(times):
        with connected(server.port) as sock:
            sock.settimeout(0.02)
            with suppress(OSError):
                for words in conversations(port, 0)[1]:
                    sock.sendall(words.replace(b"torchft", b"t\xefrchft"))
                sock.recv(1 << 16)


@pytest.mark.parametrize("port", ["lighthouse", "manager server"])
def test_a_method_that_is_no_text_ends_no_listening(port: str, tmp_path: Path) -> None:
    """grpc's server ends at the first one."""
    with PORTS[port](tmp_path) as (server, served):
        honest = patient(served)
        threads = psutil.Process(server.pid).num_threads()
        call_what_is_no_text(port, server, 20)
        lines = server.check(honest, "methods that are no text")
        assert not any("ended the listening" in line for line in lines) or not steady.is_offered()
        connected(server.port).close()
        assert psutil.Process(server.pid).num_threads() <= threads + 4


@pytest.mark.parametrize("port", ["lighthouse", "manager server"])
def test_damaged_connections_hurt_nobody(port: str, tmp_path: Path) -> None:
    assert fuzz(port, tmp_path, seed=1, seconds=FUZZ_S) >= 3 * AT_ONCE


@pytest.mark.soak
@pytest.mark.parametrize("port", ["lighthouse", "manager server"])
def test_nor_do_they_in_minutes(port: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    assert fuzz(port, tmp_path, seed=seed, seconds=SOAK_S, pool_more=POOL_MORE_IN_MINUTES) > 1_000
