"""What a stranger or a broken peer sends to a port, and what must stay true of the server behind it.

A server of ours runs in a process of its own, watched from outside: its log, its memory, its descriptors. An attack is
whatever a socket or a gRPC call can carry; after each one an honest client must be served as if nothing had been.

Law of this file: starting and watching servers, and making bad bytes; what must hold is asserted by `Watched.check`.
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
# One refused message of the largest size that is read, as protobuf holds it, and what the allocator keeps of it.
GROWTH_BYTES: Final = 64 << 20
# Of a connection that is ended in the middle of its calls grpc (1.84) keeps some 150 bytes for ever, seen over 300,000
# of them; 98 go with each cancelled call of a bare grpc.aio handler. As much again waits for the allocator to tidy up.
KEPT_BY_GRPC_BYTES: Final = 400
SILENT_S: Final = 0.1
LINE_BYTES: Final = 1_000
SPARES: Final = 0.75  # of the time: nothing is said that ends a group
HEARD_ENOUGH: Final = 25
HEARD_WITHIN_S: Final = 20.0
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS: Final = b"\0\0\0\4\0\0\0\0\0"


@final
class Watched:
    """A server process under attack.

    Args:
        log: file that its standard error goes to.
        process: that serves; its memory is watched.
        port: that it listens at.
    """

    def __init__(self, log: Path, process: psutil.Process, port: int) -> None:
        self.port = port
        self.pid = process.pid
        self._log = log
        self._process = process
        self._read = len(log.read_text())
        self._bytes = process.memory_info().rss

    def check(self, honest: Callable[[], object], after: object, *, connections: int = 0) -> list[str]:
        """That the server lives, serves the honest at once, holds no memory, and logs whole sentences.

        Args:
            after: what was done to it, for messages.
            connections: how many it has had, where they are so many that what grpc keeps of each counts.
        Returns: the lines that it has logged since the last check.
        """
        # More than once, because the machine may be late where the server is not.
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
        """That nothing but sentences was logged since the last check."""
        text = self._log.read_text(errors="replace")
        new, self._read = text[self._read :], len(text)
        assert "Traceback" not in new, f"after {after}: {new}"
        lines = new.splitlines()
        for line in lines:
            assert len(line) < LINE_BYTES, f"after {after}: {line}"
            assert line.isprintable(), f"after {after}: {line!r}"
        return lines


def seconds_of(call: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.monotonic()
    call()
    return time.monotonic() - began


@contextmanager
def serving(command: Sequence[str], log: Path, *, in_child: bool = False) -> Iterator[Watched]:
    """Start a server that writes `listening at http://host:port` on standard error, and end it.

    Args:
        in_child: what serves is the only child of the process that is started.
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
    """A command that runs `body` until its standard input is closed."""
    return [sys.executable, "-c", f"import sys\n{body}\nsys.stdin.read()\n"]


def lighthouse_program(secret: str) -> list[str]:
    """A command that is a lighthouse of one replica at least."""
    return program(
        "from tft_lighthouse import LighthouseServer\n"
        f"server = LighthouseServer('127.0.0.1:0', token={secret!r})\n"
        "print('listening at', server.address, file=sys.stderr, flush=True)"
    )


def manager_server_program(secret: str) -> list[str]:
    """A command whose child is a manager server without a lighthouse."""
    return program(
        "from tft_coord import ManagerServer\n"
        f"server = ManagerServer('a:1', '127.0.0.1:9', '127.0.0.1', '127.0.0.1:0', 's:1', 1, token={secret!r})\n"
        "print('listening at', server.address(), file=sys.stderr, flush=True)"
    )


def state_server_program(secret: str, before: str = "") -> list[str]:
    """A command that serves the state of step 1, `{"a": torch.ones(9)}`, after some lines of code."""
    return program(
        f"import torch\nfrom datetime import timedelta\nfrom tft_ckpt import HTTPTransport\n{before}\n"
        f"server = HTTPTransport(timedelta(seconds=60), bind='127.0.0.1', token={secret!r})\n"
        "server.send_checkpoint([1], 1, {'a': torch.ones(9)}, timedelta(seconds=20))\n"
        "print('listening at', server.metadata(), file=sys.stderr, flush=True)"
    )


# --- bytes on a socket -----------------------------------------------------------------------------------------------


def openings(seed: int) -> dict[str, bytes]:
    """First words that are not those of a gRPC client, by name."""
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
    """Send, and return what comes back before the other side ends or falls silent."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock, suppress(OSError):
        sock.settimeout(SILENT_S)
        sock.sendall(words)
        while len(heard) < 1 << 16 and (part := sock.recv(1 << 16)):
            heard += part
    return heard


@contextmanager
def crowd(port: int, number: int, words: bytes = b"") -> Iterator[None]:
    """Connections that are opened, say that much, and stay."""
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
    """Talks to one server, and damages some of the messages.

    Args:
        channel: to it.
        rng: seeded.
        script: what is said.
    Fields:
        told: how often the server has said what: the names of its messages on streams, and of calls that it answered.
    """

    channel: grpc.Channel
    rng: random.Random
    script: Script
    told: Counter[str] = field(default_factory=Counter)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def begin(self) -> None:
        """Say an undamaged hello: whoever a server takes this peer for, later ones are measured by it."""
        self.converse(self.script.session(0)[:1])

    def attack(self, *, spares: bool = False) -> None:
        """Make one call, or hold one session.

        Args:
            spares: nothing is said that would end for good what later attacks are to reach.
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
        """One unary call. Returns: its status and the server's words."""
        try:
            services.unary_stub(self.channel, method)(request, timeout=within_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        self.told[call_name(method)] += 1
        return "OK"

    def converse(self, messages: Sequence[bytes], *, within_s: float = 0.05, lingers: bool = False) -> str:
        """One session that ends after these messages.

        Args:
            lingers: it stays as long as it may, for answers that take their time.
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
                self.told[self.script.name(message)] += 1
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            ended.set()
        return f"OK {last.decode('utf-8', 'replace')}"


def call_name(method: str) -> str:
    """Of a method's answer, among what a server has told."""
    return method.rpartition("/")[2]


def fuzz_for(seconds: float, attack: Callable[[bool], int], least: Mapping[str, int], told: Mapping[str, int]) -> None:
    """Attack for so long, first without what ends a group, and there until the fuzz was heard.

    Args:
        attack: makes some more, which spare what later ones are to reach or not; returns how many were made so far.
        least, told: of `until_heard`.
    """
    for share, spares in ((SPARES, True), (1 - SPARES, False)):
        attacks, end = 0, time.monotonic() + share * seconds
        while time.monotonic() < end:
            attacks = attack(spares)
        if spares:
            until_heard(lambda: attack(True), least, told, attacks)


def until_heard(attack: Callable[[], object], least: Mapping[str, int], told: Mapping[str, int], attacks: int) -> None:
    """Attack until a fuzz was heard, and not turned away at the door.

    How many answers are listened to until they come is a matter of how fast the machine is at that moment.

    Args:
        attack: makes some more, and notes in `told` what it is told.
        least: names of answers, each to be told once in so many attacks, up to `HEARD_ENOUGH` times. In minutes some
            become rare: a server keeps no more votes than it has room for, and who has left asks for nothing more.
        told: how often each was.
        attacks: that have been made.
    """
    wanted = {name: min(max(attacks // every, 1), HEARD_ENOUGH) for name, every in least.items()}
    end = time.monotonic() + HEARD_WITHIN_S
    while rare := [name for name, times in wanted.items() if told.get(name, 0) < times]:
        assert time.monotonic() < end, (
            f"{attacks} attacks, and more for {HEARD_WITHIN_S:.0f} s, were told {', '.join(rare)} less often than "
            f"{wanted}: {dict(told)}"
        )
        attack()


def damaged(rng: random.Random, message: bytes) -> bytes:
    """The message, cut, lengthened, repeated, or with some of its bits turned over."""
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
            # A varint of ten bytes at some place: 2^63 and its neighbours, as a length or as a number.
            at = rng.randrange(len(data) + 1)
            data[at : at + 1] = b"\xff" * 9 + b"\x01"
        case _:
            return rng.randbytes(rng.randint(0, 300))
    return bytes(data)
