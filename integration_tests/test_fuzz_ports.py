"""Damaged connections at the ports of the servers, while an honest client is served without a pause.

`test_bad_input` damages messages inside good connections. This test damages the bytes of the connections themselves:
the preface, the frames of HTTP/2, their lengths, kinds and streams, the headers, and the messages inside. The server
must not crash or hang. Its memory, threads and descriptors must not grow.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from select import select
from socket import create_connection, socket
from typing import Final, Protocol, final

import psutil
import pytest
from grpc import insecure_channel

from benchmarks.swarm import Connection
from integration_tests.hostile import (
    HONEST_WITHIN_S,
    Fuzzer,
    Watched,
    call_name,
    damaged,
    fuzz_for,
    seconds_of,
)
from integration_tests.strangers import SCRIPTS, Script
from integration_tests.test_bad_input import PORTS
from tft_coord.errors import CoordinationError
from tft_coord.transport import registered_server
from tft_coord.wire import services

FUZZ_S: Final = 2.5
SOAK_S: Final = 300.0
AT_ONCE: Final = 8  # number of concurrent connections
CALLS: Final = 4  # number of calls on one connection
FRAME_HEAD_BYTES: Final = 9  # size of an HTTP/2 frame header
DATA: Final = 0
SILENT_S: Final = 0.04  # longer than the deadline of a call
LISTEN_S: Final = 0.3
GONE_WITHIN_S: Final = 20.0  # a silent connection is closed after heartbeat_timeout
POOL_NAME: Final = "event_engine"
POOL_MORE: Final = 4  # more of grpc's own threads, which it starts while all are busy
POOL_MORE_IN_MINUTES: Final = 48


def conversation(script: Script, number: int, *, spares: bool) -> list[bytes]:
    """Return a good session, write by write. With `spares` it does not end what later sessions are to reach."""
    said = Recorder()
    stream = Connection(said)
    first, *messages = script.session(number)
    stream.open_stream(script.stream, first)
    for message in messages:
        if not (spares and script.ends(message)):
            stream.send(stream.framed(message))
    return said.written


def calls(script: Script, numbers: range) -> list[bytes]:
    """Return good unary calls, write by write, over one connection."""
    said = Recorder()
    caller = Connection(said)
    for number in numbers:
        caller.send(caller.unary(*script.call(number), timeout="50m"))
    return said.written


def answers_in(reply: bytes) -> list[tuple[int, bytes]]:
    """Return the whole messages of a server's reply, each with the position of its call on the connection."""
    at, data, found = 0, defaultdict[int, bytes](bytes), []
    while len(reply) - at >= FRAME_HEAD_BYTES:
        length, kind, stream = int.from_bytes(reply[at : at + 3], "big"), reply[at + 3], reply[at + 5 : at + 9]
        body = reply[at + FRAME_HEAD_BYTES : at + FRAME_HEAD_BYTES + length]
        at += FRAME_HEAD_BYTES + length
        if kind != DATA:
            continue
        call = int.from_bytes(stream, "big") // 2
        data[call] += body
        while len(data[call]) >= 5 and len(data[call]) >= (end := 5 + int.from_bytes(data[call][1:5], "big")):
            found.append((call, data[call][5:end]))
            data[call] = data[call][end:]
    return found


def heard(socks: Collection[socket]) -> dict[socket, bytes]:
    """Return what is received on each of them until all have fallen silent."""
    words, end = dict.fromkeys(socks, b""), time.monotonic() + LISTEN_S
    living = set(socks)
    while living and time.monotonic() < end and (ready := select(living, [], [], SILENT_S)[0]):
        for sock in ready:
            part = b""
            with suppress(OSError):
                part = sock.recv(1 << 16)
            words[sock] += part
            if not part:
                living.discard(sock)
    return words


class Recorder:
    """A replacement for a socket that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def sendall(self, words: bytes) -> None:
        self.written.append(words)


def connected(port: int) -> socket:
    """Connect, even if the server has just closed its listener and is about to reopen it."""
    end = time.monotonic() + GONE_WITHIN_S
    while True:
        try:
            return create_connection(("127.0.0.1", port), timeout=5)
        except ConnectionError:
            assert time.monotonic() < end, "nobody listens any more"
            time.sleep(0.01)


def thread_names(pid: int) -> list[str]:
    """Return the names of the process's threads, as the system knows them."""
    names = []
    for thread in psutil.Process(pid).threads():
        with suppress(OSError):  # the thread has just ended
            names.append(Path(f"/proc/{pid}/task/{thread.id}/comm").read_text().strip())
    return names


class Attacker(Protocol):
    """A maker of damaged connections. `answers` counts the server's answers, as far as they were read."""

    answers: Counter[str]

    def attack(self, number: int, *, spares: bool) -> None:
        """Make some concurrent connections and end them in any order. With `spares` they don't end what later ones
        need."""


def with_damage(rng: random.Random, written: Sequence[bytes]) -> list[bytes]:
    """Return the writes, most often with some of them damaged."""
    share = rng.choice((0.0, 0.1, 0.5))
    return [damaged(rng, words) if rng.random() < share else words for words in written]


@final
class AtThePort:
    """Connections that speak HTTP/2: sessions, calls, or both. No call acts for a rank that has a session."""

    def __init__(self, server: Watched, script: Script, rng: random.Random) -> None:
        self.answers: Counter[str] = Counter()
        self._server = server
        self._script = script
        self._rng = rng
        with insecure_channel(f"127.0.0.1:{server.port}") as channel:
            Fuzzer(channel, rng, script).begin()

    def attack(self, number: int, *, spares: bool) -> None:
        kinds = self._rng.choice([[True], [False], [True, False]])
        with ExitStack() as ends:
            names: dict[socket, Callable[[int, bytes], str]] = {}
            for index in range(number * AT_ONCE, (number + 1) * AT_ONCE):
                sock = ends.enter_context(connected(self._server.port))
                is_session = self._rng.choice(kinds)
                if is_session:
                    written = conversation(self._script, index, spares=spares)
                else:
                    written = calls(self._script, range(index, index + CALLS))
                for words in with_damage(self._rng, written):
                    with suppress(OSError):
                        sock.sendall(words)
                if self._rng.random() < 0.5:
                    names[sock] = self._name_on_stream if is_session else partial(self._name_of_call, index)
            for sock, reply in heard(names).items():
                self.answers.update(names[sock](*answer) for answer in answers_in(reply))

    def _name_on_stream(self, _: int, message: bytes) -> str:
        return self._script.name(message)

    def _name_of_call(self, first: int, call: int, _: bytes) -> str:
        method, _ = self._script.call(first + call)
        return call_name(method)


@dataclass(frozen=True)
class Target:
    """An attack target: a server's port, an attacker, and for each answer the maximum number of connections for one."""

    server: str
    attacker: Callable[[Watched, Script, random.Random], Attacker]
    reaches: Mapping[str, int]


TARGETS: Final = {
    "lighthouse": Target(
        "lighthouse",
        AtThePort,
        {
            "Welcome": 20,
            "AskForQuorum": 80,
            "AnswerQuorum": 25,
            "Quorum": 40,
            "Heartbeat": 40,
            "Describe": 40,
            "Drain": 400,
        },
    ),
    "manager server": Target(
        "manager server",
        AtThePort,
        {"RankWelcome": 20, "a no": 15, "ShouldCommit": 20, "CheckpointMetadata": 40, "Quorum": 150},
    ),
}


def patient(honest: Callable[[], object]) -> Callable[[], None]:
    """Return a call that is repeated if it met the moment in which the listener was closed, as clients do."""
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
    """A client that is served all the while, on a separate thread."""

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


def fuzz(name: str, folder: Path, seed: int, seconds: float, *, pool_more: int = POOL_MORE) -> int:
    """Attack the target with damaged connections. Returns: number of connections."""
    rng, target = random.Random(seed), TARGETS[name]
    with PORTS[target.server](folder) as (server, served):
        honest = patient(served)
        attacker = target.attacker(server, SCRIPTS[target.server], rng)
        for number in range(2):  # grpc starts some threads once and keeps them
            attacker.attack(number, spares=True)
        server.check(honest, "the first connections")
        process = psutil.Process(server.pid)
        threads, descriptors = Counter(thread_names(server.pid)), process.num_fds()
        number = 2

        def attack(spares: bool) -> int:
            nonlocal number
            attacker.attack(number, spares=spares)
            number += 1
            if number % 20 == 0:
                made = number * AT_ONCE
                server.check(honest, f"{made} connections of seed {seed}", connections=made)
            return number * AT_ONCE

        with Honest(honest) as client:
            fuzz_for(seconds, attack, target.reaches, attacker.answers)
        assert client.failed is None, f"seed {seed}: {client.failed!r}"
        assert client.served > 0
        # The bound is many times the cost on a busy machine. A server that waits for a stranger would exceed any bound.
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
    print(f"{number * AT_ONCE} connections to the {name}: {dict(attacker.answers)}")
    return number * AT_ONCE


def call_what_is_no_text(port: str, server: Watched, times: int) -> None:
    """Call a method whose name is not valid UTF-8, on a fresh connection each time."""
    for _ in range(times):
        with connected(server.port) as sock:
            sock.settimeout(0.02)
            with suppress(OSError):
                for words in calls(SCRIPTS[port], range(CALLS)):
                    sock.sendall(words.replace(b"torchft", b"t\xefrchft"))
                sock.recv(1 << 16)


@pytest.mark.parametrize("port", SCRIPTS)
def test_a_method_that_is_no_text_ends_no_listening(port: str, tmp_path: Path) -> None:
    """A plain grpc server stops listening at the first such call."""
    with PORTS[port](tmp_path) as (server, served):
        honest = patient(served)
        threads = psutil.Process(server.pid).num_threads()
        call_what_is_no_text(port, server, 20)
        lines = server.check(honest, "methods that are no text")
        assert not any("closed the port" in line for line in lines) or not registered_server.is_supported()
        connected(server.port).close()
        assert psutil.Process(server.pid).num_threads() <= threads + 4


@pytest.mark.in_parts
def test_a_call_that_ends_as_it_is_answered_is_no_news(tmp_path: Path) -> None:
    """The call's deadline passes at that moment, and grpc logs a traceback for it."""
    with PORTS["lighthouse"](tmp_path) as (server, served):
        for _ in range(30):
            said = Recorder()
            caller = Connection(said)
            many = [caller.unary(services.LIGHTHOUSE_DESCRIBE, b"", f"{1 + number % 12}m") for number in range(60)]
            with connected(server.port) as sock:
                sock.sendall(b"".join([*said.written, *many]))
                heard([sock])
        server.check(served, "calls that ended as they were answered")


@pytest.mark.in_parts
@pytest.mark.parametrize("target", TARGETS)
def test_damaged_connections_hurt_nobody(target: str, tmp_path: Path) -> None:
    assert fuzz(target, tmp_path, seed=1, seconds=FUZZ_S) >= 3 * AT_ONCE


@pytest.mark.soak
@pytest.mark.parametrize("target", TARGETS)
def test_nor_do_they_in_minutes(target: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    assert fuzz(target, tmp_path, seed=seed, seconds=SOAK_S, pool_more=POOL_MORE_IN_MINUTES) > 1_000
