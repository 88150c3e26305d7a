"""Attacks of a stranger without the secret on a port, for any length of time. Each attack is a separate process.

The attacker yields to all other processes of the machine (nice 19), so that its cost is what its victim spends on it.

Law of this file: one function an attack, which goes on until its process is killed. Tests hold the allowed costs.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import grpc

from tft_ckpt import StateKey
from tft_ckpt.transfer.routes import data_path, manifest_path
from tft_coord.wire import services

MANY: Final = 700
LARGE: Final = bytes((8 << 20) - 16)
KEY: Final = StateKey(quorum_id=0, nonce=0, step=1, lineage=0)
WRONG: Final = (("authorization", "Bearer wrong"),)
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
TIMEOUT_S: Final = 20.0
METHODS: Final = (services.LIGHTHOUSE_QUORUM, services.LIGHTHOUSE_DESCRIBE, services.MANAGER_QUORUM)


@dataclass(frozen=True)
class Ports:
    """The ports of a job's servers.

    Args:
        grpc: lighthouse and manager servers.
        state: the trainers' state servers.
    """

    grpc: tuple[int, ...]
    state: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        return (*self.grpc, *self.state)


def attack(name: str, ports: Ports, ready: Connection) -> None:
    """Run the attack until this process is killed, and send "ready" when it has begun."""
    os.nice(19)
    ATTACKS[name](ports, lambda: ready.send("ready"))


def _calls(ports: Ports, began: Callable[[], None], body: bytes, at_once: int) -> None:
    with ExitStack() as ends:
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        channels = [ends.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options)) for port in ports.grpc]
        stubs = [services.unary_stub(channel, method) for channel in channels for method in METHODS]
        for turn in itertools.count():
            calls = [stub.future(body, timeout=TIMEOUT_S) for stub in stubs for _ in range(at_once)]
            for call in calls:
                call.code()
            if turn == 0:
                began()


def big_bodies(ports: Ports, began: Callable[[], None]) -> None:
    """Call with bodies of eight megabytes."""
    _calls(ports, began, LARGE, at_once=4)  # each is a copy in this process


def refused_calls(ports: Ports, began: Callable[[], None]) -> None:
    """Call without a secret, as often as calls are answered."""
    _calls(ports, began, b"", at_once=100)


def wrong_secrets(ports: Ports, began: Callable[[], None]) -> None:
    """Call and request alternately, with a secret that is not the job's."""
    request = f"GET {data_path(KEY)} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wrong\r\n\r\n".encode()
    with ExitStack() as ends:
        channels = [ends.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}")) for port in ports.grpc]
        stubs = [services.unary_stub(channel, method) for channel in channels for method in METHODS]
        for turn in itertools.count():
            for call in [stub.future(b"", timeout=TIMEOUT_S, metadata=WRONG) for stub in stubs]:
                call.code()
            for port in ports.state:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as sock:
                    sock.sendall(request)
                    while sock.recv(1 << 16):
                        pass
            if turn == 0:
                began()


def many_connections(ports: Ports, began: Callable[[], None]) -> None:
    """Open silent connections, and reopen the ended ones."""
    _hold(ports.all, began, b"", each_s=0.1)


def slow_headers(ports: Ports, began: Callable[[], None]) -> None:
    """Send requests that never end: a byte of a header at a time."""
    _hold(ports.all, began, f"GET {manifest_path(KEY)} HTTP/1.1\r\nhost: x\r\nx-".encode(), each_s=0.5, more=b"a")


def _hold(ports: Sequence[int], began: Callable[[], None], words: bytes, *, each_s: float, more: bytes = b"") -> None:
    held: dict[socket.socket, int] = {}
    for turn in itertools.count():
        for port in ports:
            for _ in range(min(50, MANY - sum(each == port for each in held.values()))):
                with suppress(OSError):
                    sock = socket.create_connection(("127.0.0.1", port), 5)
                    held[sock] = port
                    sock.sendall(words)
                    sock.setblocking(False)
        for sock in list(held):
            try:
                if more:
                    sock.send(more)
                if sock.recv(1 << 16) == b"":
                    raise ConnectionResetError
            except BlockingIOError:
                continue
            except OSError:
                sock.close()
                del held[sock]
        if turn == 0:
            began()
        time.sleep(each_s)


def ping_floods(ports: Ports, began: Callable[[], None]) -> None:
    """Send HTTP/2 pings, as fast as the server reads them."""
    pings = b"".join(b"\0\0\x08\6\0\0\0\0\0" + struct.pack(">Q", number) for number in range(500))
    open_ones: dict[int, socket.socket] = {}
    for turn in itertools.count():
        for port in ports.grpc:
            try:
                if port not in open_ones:
                    open_ones[port] = socket.create_connection(("127.0.0.1", port), 5)
                    open_ones[port].sendall(PREFACE)
                open_ones[port].sendall(pings)
                while open_ones[port].recv(1 << 16, socket.MSG_DONTWAIT):
                    pass
                raise ConnectionResetError
            except BlockingIOError:
                continue
            except OSError:
                if port in open_ones:
                    open_ones.pop(port).close()
        if turn == 0:
            began()


ATTACKS: Final[dict[str, Callable[[Ports, Callable[[], None]], None]]] = {
    each.__name__.replace("_", " "): each
    for each in (big_bodies, refused_calls, wrong_secrets, many_connections, slow_headers, ping_floods)
}
