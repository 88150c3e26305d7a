"""Attacks of a stranger or a broken peer on a port, and the requirements on the server behind it.

A tft server runs in a separate process and is watched from outside: its log, its memory, its descriptors. An attack is
anything that a socket or a gRPC call can carry. After each attack an honest client must be served as before.

Law of this file: starting and watching servers, and making bad bytes. `Watched.check` asserts the requirements.
"""

from __future__ import annotations

import itertools
import random
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

import grpc
import psutil

from integration_tests.strangers import Script
from tft_coord.wire import services

HONEST_WITHIN_S: Final = 1.0
TRIES: Final = 3
# The limit is one refused message of the largest size, as protobuf holds it, plus what the allocator keeps of it.
GROWTH_BYTES: Final = 64 << 20
# grpc (1.84) keeps some 150 bytes for ever of a connection that ends during its calls, as measured over 300,000 of
# them. A bare grpc.aio handler keeps 98 bytes of each cancelled call. As much again waits in the allocator.
KEPT_BY_GRPC_BYTES: Final = 400
SILENT_S: Final = 0.1
LINE_BYTES: Final = 1_000
SPARES: Final = 0.75  # share of the time in which no message ends a group
HEARD_ENOUGH: Final = 25
HEARD_WITHIN_S: Final = 20.0
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS: Final = b"\0\0\0\4\0\0\0\0\0"


@final
class Watched:
    """A server process under attack.

    Args:
        log: file that its standard error goes to.
        process: the serving process, whose memory is watched.
        port: the listening port.
    """

    def __init__(self, log: Path, process: psutil.Process, port: int) -> None:
        self.port = port
        self.pid = process.pid
        self._log = log
        self._process = process
        self._read = len(log.read_text())
        self._bytes = process.memory_info().rss

    def check(self, honest: Callable[[], object], after: object, *, connections: int = 0) -> list[str]:
        """Check that the server lives, serves the honest client at once, keeps its memory, and logs whole sentences.

        Args:
            honest: a call of the honest client.
            after: description of the attack, for messages.
            connections: their number, if so many that grpc's memory for each counts.
        Returns: the lines logged since the last check.
        """
        # The call is repeated, because the machine may be late when the server is not.
        served_s = [seconds_of(honest)]
        while served_s[-1] > HONEST_WITHIN_S and len(served_s) < TRIES:
            served_s.append(seconds_of(honest))
        assert served_s[-1] < HONEST_WITHIN_S, f"after {after}: the honest client waited {served_s} s"
        assert self._process.is_running(), f"after {after}: the server has ended"
        assert self._process.status() != psutil.STATUS_ZOMBIE, f"after {after}: the server has ended"
        grown = self._process.memory_info().rss - self._bytes
        may_grow = GROWTH_BYTES + connections * KEPT_BY_GRPC_BYTES
        assert grown < may_grow, f"after {after}: the server has grown by {grown >> 20} MiB"
        return self.check_log(after)

    def check_log(self, after: object) -> list[str]:
        """Check that only sentences were logged since the last check."""
        text = self._log.read_text(errors="replace")
        new, self._read = text[self._read :], len(text)
        assert "Traceback" not in new, f"after {after}: {new}"
        lines = new.splitlines()
        for line in lines:
            assert len(line) < LINE_BYTES, f"after {after}: {line}"
            assert line.isprintable(), f"after {after}: {line!r}"
        return lines


def seconds_of(call: Callable[[], object]) -> float:
    """Return the duration of the call."""
    began = time.monotonic()
    call()
    return time.monotonic() - began


@contextmanager
def serving(command: Sequence[str], log: Path, *, in_child: bool = False) -> Iterator[Watched]:
    """Start a server that writes `listening at http://host:port` on standard error, and end it.

    Args:
        command: of the server.
        log: file for its standard error.
        in_child: the server is the only child of the started process.
    """
    with log.open("w") as errors, ExitStack() as ends:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors)
        ends.callback(process.wait, 10)
        ends.callback(process.terminate)
        assert process.stdin is not None
        ends.callback(process.stdin.close)
        while (found := re.search(r"listening at http://[^\s:]+:(\d+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        outer = psutil.Process(process.pid)
        yield Watched(log, outer.children()[0] if in_child else outer, int(found[1]))


def program(body: str) -> list[str]:
    """Return a command that runs `body` until its standard input is closed."""
    return [sys.executable, "-c", f"import sys\n{body}\nsys.stdin.read()\n"]


def lighthouse_program(secret: str) -> list[str]:
    """Return the command of a lighthouse with min_replicas 1."""
    return program(
        "from tft_lighthouse import LighthouseServer\n"
        f"server = LighthouseServer('127.0.0.1:0', token={secret!r})\n"
        "print('listening at', server.address, file=sys.stderr, flush=True)"
    )


def manager_server_program(secret: str) -> list[str]:
    """Return a command whose child is a manager server without a lighthouse."""
    return program(
        "from tft_coord import ManagerServer\n"
        f"server = ManagerServer('a:1', '127.0.0.1:9', '127.0.0.1', '127.0.0.1:0', 's:1', 1, token={secret!r})\n"
        "print('listening at', server.address(), file=sys.stderr, flush=True)"
    )


def state_server_program(secret: str, before: str = "") -> list[str]:
    """Return a command that serves the state of step 1, `{"a": torch.ones(9)}`, after some lines of code."""
    return program(
        f"import torch\nfrom datetime import timedelta\nfrom tft_ckpt import HTTPTransport\n{before}\n"
        f"server = HTTPTransport(timedelta(seconds=60), bind='127.0.0.1', token={secret!r})\n"
        "server.send_checkpoint([1], 1, {'a': torch.ones(9)}, timedelta(seconds=20))\n"
        "print('listening at', server.metadata(), file=sys.stderr, flush=True)"
    )


# --- bytes on a socket -----------------------------------------------------------------------------------------------


def openings(seed: int) -> dict[str, bytes]:
    """Return first bytes that no gRPC client sends, by name."""
    rng = random.Random(seed)
    frame = _PREFACE + _SETTINGS
    return {
        "a silence": b"",
        "random bytes": rng.randbytes(1 << 20),
        "an HTTP/1 request": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        "a TLS hello": _tls_hello(),
        "a preface and random bytes": _PREFACE + rng.randbytes(1 << 16),
        "a frame of 16 MiB": frame + b"\xff\xff\xff\0\0\0\0\0\1" + b"x" * (1 << 17),
        "headers that are none": frame + b"\0\0\x40\1\4\0\0\0\1" + rng.randbytes(64),
        "a preface and silence": frame,
    }


def say(port: int, words: bytes) -> bytes:
    """Send bytes, and return what comes back before the other side ends or falls silent."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock, suppress(OSError):
        sock.settimeout(SILENT_S)
        sock.sendall(words)
        while len(heard) < 1 << 16 and (part := sock.recv(1 << 16)):
            heard += part
    return heard


@contextmanager
def crowd(port: int, number: int, words: bytes = b"") -> Iterator[None]:
    """Open that many connections, send these bytes on each, and keep them open."""
    with ExitStack() as open_ones:
        for _ in range(number):
            open_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)).sendall(words)
        yield


def _tls_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    handshake = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        handshake.do_handshake()
    return outgoing.read()


# --- messages in a call ----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Fuzzer:
    """A client of one server that damages some of its messages.

    Args:
        channel: to the server.
        rng: seeded.
        script: the messages to send.
    Fields:
        answers: counts of the server's answers: names of its messages on streams, and of answered calls.
    """

    channel: grpc.Channel
    rng: random.Random
    script: Script
    answers: Counter[str] = field(default_factory=Counter)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def begin(self) -> None:
        """Send an undamaged hello. The server measures later hellos by it."""
        self.converse(self.script.session(0)[:1])

    def attack(self, *, spares: bool = False) -> None:
        """Make one call, or hold one session.

        Args:
            spares: omit messages that would end for good what later attacks are to reach.
        """
        number, share = next(self._numbers), self.rng.choice((0.0, 0.1, 0.5))
        if self.rng.random() < 0.5:
            method, message = self.script.call(number)
            self.call(method, damaged(self.rng, message) if self.rng.random() < share else message)
            return
        messages = self.script.session(number)
        messages = [damaged(self.rng, one) if self.rng.random() < share else one for one in messages]
        if self.rng.random() < share:
            self.rng.shuffle(messages)
        if spares:
            messages = [one for one in messages if not self.script.ends(one)]
        self.converse(messages, lingers=self.rng.random() < 0.2)

    def call(self, method: str, request: bytes, *, within_s: float = 0.05) -> str:
        """Make one unary call. Returns: its status and the server's words."""
        try:
            services.unary_stub(self.channel, method)(request, timeout=within_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        self.answers[call_name(method)] += 1
        return "OK"

    def converse(self, messages: Sequence[bytes], *, within_s: float = 0.05, lingers: bool = False) -> str:
        """Hold one session that ends after these messages.

        Args:
            messages: sent in order.
            within_s: deadline.
            lingers: keep the session open as long as possible, for slow answers.
        Returns: its status and the server's last words.
        """
        stub: grpc.StreamStreamMultiCallable[bytes, bytes] = self.channel.stream_stream(
            self.script.stream, request_serializer=None, response_deserializer=None
        )
        ended = threading.Event()

        def spoken() -> Iterator[bytes]:
            yield from messages
            if lingers:
                ended.wait(within_s)

        last = b""
        try:
            for message in stub(spoken(), timeout=within_s):
                last = message
                self.answers[self.script.name(message)] += 1
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            ended.set()
        return f"OK {last.decode('utf-8', 'replace')}"


def call_name(method: str) -> str:
    """Return the name of a method's answer in `answers`."""
    return method.rpartition("/")[2]


def fuzz_for(
    seconds: float, attack: Callable[[bool], int], least: Mapping[str, int], answers: Mapping[str, int]
) -> None:
    """Attack for that time, first without messages that end a group, and in that phase until the fuzz was heard.

    Args:
        seconds: duration.
        attack: makes some attacks, with `spares` as its argument, and returns how many were made so far.
        least, answers: as in `until_heard`.
    """
    for share, spares in ((SPARES, True), (1 - SPARES, False)):
        attacks, end = 0, time.monotonic() + share * seconds
        while time.monotonic() < end:
            attacks = attack(spares)
        if spares:
            until_heard(lambda: attack(True), least, answers, attacks)


def until_heard(
    attack: Callable[[], object], least: Mapping[str, int], answers: Mapping[str, int], attacks: int
) -> None:
    """Attack until the fuzz was heard, and not only refused at the hello.

    The number of answers within the deadlines depends on the speed of the machine at that moment.

    Args:
        attack: makes some more attacks, and counts the answers in `answers`.
        least: for each answer's name, the number of attacks for one such answer, up to `HEARD_ENOUGH` answers. In long
            runs some become rare: a server keeps a limited number of votes, and a departed rank asks for nothing more.
        answers: counts of the answers.
        attacks: number of attacks so far.
    """
    wanted = {name: min(max(attacks // every, 1), HEARD_ENOUGH) for name, every in least.items()}
    end = time.monotonic() + HEARD_WITHIN_S
    while rare := [name for name, times in wanted.items() if answers.get(name, 0) < times]:
        assert time.monotonic() < end, (
            f"{attacks} attacks, and more for {HEARD_WITHIN_S:.0f} s, were told {', '.join(rare)} less often than "
            f"{wanted}: {dict(answers)}"
        )
        attack()


def damaged(rng: random.Random, message: bytes) -> bytes:
    """Return the message cut, lengthened, repeated, replaced, or with some of its bits flipped."""
    data = bytearray(message)
    match rng.randrange(6):
        case 0:
            return bytes(data[: rng.randrange(len(data) + 1)])
        case 1:
            for _ in range(rng.randint(1, 8)):
                if data:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 2:
            at = rng.randrange(len(data) + 1)
            data[at:at] = rng.randbytes(rng.randint(1, 64))
        case 3:
            data *= 2
        case 4:
            # A varint of ten bytes at a random place: 2^63 and its neighbours, as a length or as a number.
            at = rng.randrange(len(data) + 1)
            data[at : at + 1] = b"\xff" * 9 + b"\x01"
        case _:
            return rng.randbytes(rng.randint(0, 300))
    return bytes(data)
