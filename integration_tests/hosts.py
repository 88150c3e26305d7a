"""Several hosts on one machine, with cables that can be cut, and that carry only so much.

A host is a network namespace with an interface `eth0` and an address of its own; a cable is a pair of virtual
interfaces between it and a bridge, which is in a namespace of its own too, so that nothing of the machine's network is
touched. A cable that is cut carries nothing, and nobody is told: no connection ends, packets are lost. What one host
sends to another can be lost alone, in one direction, while all else arrives. A cable that is limited carries so many
bits a second each way, by a token bucket at either end; what waits there waits in a queue.

Law of this file: namespaces and their interfaces. They need root and iproute2, and are gone when the block ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

INTERFACE: Final = "eth0"
_SWITCH: Final = "switch"
_NOBODY: Final = "00:00:00:00:00:01"
_CLONE_NEWNET: Final = 0x4000_0000
# A cable takes and hands over so much at once, as a network card that does the segmentation itself. Cut into packets of
# 1500 bytes, what passes a limited cable costs a timer, an interrupt and a wake-up each, on the very cores whose time
# is measured: 4 to 6 % of it, as much as the synchronization itself costs there.
_SEGMENT_BYTES: Final = 16_384
_BURST_BYTES: Final = 2 * _SEGMENT_BYTES
_NAMESPACES: Final = Path("/run/netns")


class Hosts:
    """Hosts with one switch between them; made by `hosts`.

    Args:
        prefix: of the namespaces' names, which are the machine's.
        names: of the hosts.
    """

    def __init__(self, prefix: str, names: tuple[str, ...]) -> None:
        self._prefix = prefix
        self._places = {name: place for place, name in enumerate(names, start=1)}

    def address(self, name: str) -> str:
        """Of a host."""
        return f"10.77.0.{self._places[name]}"

    def namespace(self, name: str) -> Path:
        """What a process enters to be on a host."""
        return _NAMESPACES / f"{self._prefix}-{name}"

    def cut(self, name: str) -> None:
        """Cut a host's cable, at the switch."""
        self._in(_SWITCH, "link", "set", f"to{self._places[name]}", "down")

    def mend(self, name: str) -> None:
        """Mend what was cut."""
        self._in(_SWITCH, "link", "set", f"to{self._places[name]}", "up")

    def lose(self, name: str, to: str) -> None:
        """Lose what one host sends to another, and nothing else: it goes to an interface that nobody has."""
        self._in(name, "neigh", "replace", self.address(to), "lladdr", _NOBODY, "dev", INTERFACE, "nud", "permanent")

    def find(self, name: str, to: str) -> None:
        """Deliver again what was lost."""
        with contextlib.suppress(subprocess.CalledProcessError):  # a cable that was cut has forgotten it by itself
            self._in(name, "neigh", "delete", self.address(to), "dev", INTERFACE)

    def limit(self, name: str, mbit_per_s: float) -> None:
        """Let a host's cable carry so much and no more, each way; until `unlimit` or another limit."""
        for namespace, interface in self._ends(name):
            tc("-n", namespace, "qdisc", "replace", "dev", interface, "root", *_bucket(mbit_per_s))

    def unlimit(self, name: str) -> None:
        """Let a host's cable that was limited carry what the machine can."""
        for namespace, interface in self._ends(name):
            tc("-n", namespace, "qdisc", "delete", "dev", interface, "root")

    def _ends(self, name: str) -> tuple[tuple[str, str], ...]:
        """Of a cable: namespace and interface."""
        return ((self.namespace(name).name, INTERFACE), (self.namespace(_SWITCH).name, f"to{self._places[name]}"))

    def _in(self, name: str, *arguments: str) -> None:
        ip("-n", self.namespace(name).name, *arguments)

    def make(self) -> None:
        """The switch, the hosts and their cables."""
        ip("netns", "add", self.namespace(_SWITCH).name)
        self._in(_SWITCH, "link", "add", "bridge", "type", "bridge")
        self._in(_SWITCH, "link", "set", "bridge", "up")
        for name, place in self._places.items():
            host = self.namespace(name).name
            ip("netns", "add", host)
            self._in(_SWITCH, "link", "add", f"to{place}", "type", "veth", "peer", "name", INTERFACE, "netns", host)
            self._in(_SWITCH, "link", "set", f"to{place}", "master", "bridge", "up")
            self._in(name, "addr", "add", f"{self.address(name)}/24", "dev", INTERFACE)
            self._in(name, "link", "set", INTERFACE, "up")
            self._in(name, "link", "set", "lo", "up")
            for namespace, interface in self._ends(name):
                ip("-n", namespace, "link", "set", interface, "gso_max_size", str(_SEGMENT_BYTES))

    def remove(self) -> None:
        """All of it; what is inside goes with it."""
        for name in (*self._places, _SWITCH):
            with contextlib.suppress(subprocess.CalledProcessError):  # `make` may not have come so far
                ip("netns", "delete", self.namespace(name).name)


def ip(*arguments: str) -> None:
    """iproute2's command. Raises: subprocess.CalledProcessError."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def tc(*arguments: str) -> None:
    """iproute2's command for queues. Raises: subprocess.CalledProcessError."""
    subprocess.run(["tc", *arguments], check=True, capture_output=True, text=True)


def _bucket(mbit_per_s: float) -> tuple[str, ...]:
    return ("tbf", "rate", f"{round(mbit_per_s * 1_000)}kbit", "burst", str(_BURST_BYTES), "latency", "50ms")


def why_not(*, limited: bool = False) -> str | None:
    """Why there can be no hosts here, or none with limited cables, as a sentence; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root; run this test as root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip; install iproute2"
    probe = f"tft{os.getpid()}-probe"
    try:
        ip("netns", "add", probe)
    except subprocess.CalledProcessError as error:
        return f"this machine allows no network namespaces: {error.stderr.strip()}"
    try:
        if limited:
            tc("-n", probe, "qdisc", "replace", "dev", "lo", "root", *_bucket(1.0))
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        return f"this machine limits no cables: {said}; install iproute2 and load the kernel module sch_tbf"
    finally:
        ip("netns", "delete", probe)
    return None


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Hosts of these names while the block lasts."""
    made = Hosts(f"tft{os.getpid()}", names)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def on_host(namespace: Path, target: Callable[..., object], *arguments: object) -> None:
    """Move this process to a host, and run the target there; for a process that has no thread or socket yet."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace, encoding="ascii") as entry:
        if libc.setns(entry.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"can't enter {namespace}")
    target(*arguments)
