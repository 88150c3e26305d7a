"""Connection probes to peers that a group's builder can't reach.

A builder connects to one peer after another, so the first silent peer hides the state of the others. This file probes
all addresses at the same time. It closes each connection at once and sends nothing. A refused probe is repeated,
because a rank refuses for a moment after an abort, until it listens again.

Law of this file: connections that are made and closed; the caller decides which addresses to probe and what the result
means.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from tft_pg.forks import Inheritance, let_go_in_child

__all__ = ["AGAIN_AFTER_S", "NO_ANSWER", "ProbeAddress", "call_all"]

AGAIN_AFTER_S: Final = 0.3
NO_ANSWER: Final = "no answer to a connection"
_STEP_S: Final = 0.05
_OPEN_MAX: Final = 256  # descriptors

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class ProbeAddress:
    """An address to probe.

    Args:
        family: the address family.
        sockaddr: in the form of Python's socket module.
    """

    family: int
    sockaddr: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.sockaddr[0]} port {self.sockaddr[1]}"


@dataclass
class _Probe:
    address: ProbeAddress
    due_s: float
    began_s: float = 0.0
    connection: socket.socket | None = field(default=None, repr=False)
    refused: str = ""  # why the first probe failed

    def begin(self, now_s: float) -> int:
        """Start to connect. Returns: the error, or 0 if no error is known yet."""
        self.began_s = now_s
        self.connection = socket.socket(self.address.family, socket.SOCK_STREAM)
        self.connection.setblocking(False)
        try:
            error = self.connection.connect_ex(self.address.sockaddr)
        except OSError as failure:  # the address is invalid
            error = max(failure.errno or 0, 0) or errno.EADDRNOTAVAIL
        return 0 if error in (errno.EINPROGRESS, errno.EAGAIN) else error

    def end(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


@dataclass(eq=False)
class _RunningProbes:
    """The running probes, for a child that is forked during `call_all`."""

    probes: list[_Probe]

    def forked(self) -> Inheritance:
        connections = [probe.connection for probe in self.probes]
        return Inheritance(connection.fileno() for connection in connections if connection is not None)


def call_all(addresses: Mapping[_Key, ProbeAddress], *, until_s: float, goes_on: Callable[[], bool]) -> dict[_Key, str]:
    """Probe each address.

    Args:
        addresses: the addresses to probe.
        until_s: deadline on the monotonic clock. An address that has not answered by then counts as silent.
        goes_on: called at least every 50 ms or so. When it returns false, the probes stop.

    Returns: a short reason for each address that refuses two probes or does not answer. Reachable addresses are left
        out.
    """
    now_s = time.monotonic()
    probes = {key: _Probe(address, now_s) for key, address in addresses.items()}
    found: dict[_Key, str] = {}
    running = _RunningProbes(list(probes.values()))
    let_go_in_child(running)
    try:
        while probes and goes_on() and now_s < until_s:
            _begin_due(probes, found, now_s)
            _collect_results(probes, found)
            now_s = time.monotonic()
        if goes_on():
            for key, probe in probes.items():
                if probe.refused or probe.connection is not None:
                    found[key] = probe.refused or f"{NO_ANSWER} within {now_s - probe.began_s:.1f} s"
    finally:
        for probe in probes.values():
            probe.end()
    return found


def _begin_due(probes: dict[_Key, _Probe], found: dict[_Key, str], now_s: float) -> None:
    under_way = sum(probe.connection is not None for probe in probes.values())
    for key, probe in list(probes.items()):
        if probe.connection is None and probe.due_s <= now_s and under_way < _OPEN_MAX:
            under_way += 1
            error = probe.begin(now_s)
            if error:
                _failed(probes, found, key, error)


def _collect_results(probes: dict[_Key, _Probe], found: dict[_Key, str]) -> None:
    poll = select.poll()
    under_way = {probe.connection.fileno(): key for key, probe in probes.items() if probe.connection is not None}
    for descriptor in under_way:
        poll.register(descriptor, select.POLLOUT)
    for descriptor, _ in poll.poll(_STEP_S * 1000):
        key = under_way[descriptor]
        connection = probes[key].connection
        assert connection is not None
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            _failed(probes, found, key, error)
        else:
            probes.pop(key).end()


def _failed(probes: dict[_Key, _Probe], found: dict[_Key, str], key: _Key, error: int) -> None:
    """Record a failed probe. The second failure of an address counts."""
    probe = probes[key]
    probe.end()
    if probe.refused:
        found[key] = probe.refused
        del probes[key]
    else:
        probe.refused = os.strerror(error).lower()
        probe.due_s = time.monotonic() + AGAIN_AFTER_S
