"""Several hosts on one machine, with cables that can be cut or limited.

A host is a network namespace with an interface `eth0` and its own address. A cable is a pair of virtual interfaces
between the host and a bridge. The bridge has its own namespace too, so the machine's network stays untouched.

A cut cable loses packets without a signal, so no connection ends. The packets of one host to another can be lost alone,
in one direction, while all else arrives. A limited cable carries a fixed number of bits a second each way, by a token
bucket at either end. Waiting packets are queued.

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
# Largest unit that a cable takes at once, like a network card that does the segmentation itself. Cut into packets of
# 1500 bytes, traffic on a limited cable costs a timer, an interrupt and a wake-up each, on the cores whose time is
# measured. That is 4 to 6 % of it, as much as the synchronization itself costs there.
_SEGMENT_BYTES: Final = 16_384
_BURST_BYTES: Final = 2 * _SEGMENT_BYTES
_NAMESPACES: Final = Path("/run/netns")


class Hosts:
    """Hosts with one switch between them. `hosts` creates it.

    Args:
        prefix: of the names of the machine's namespaces.
        names: of the hosts.
    """

    def __init__(self, prefix: str, names: tuple[str, ...]) -> None:
        self._prefix = prefix
        self._places = {name: place for place, name in enumerate(names, start=1)}

    def address(self, name: str) -> str:
        """Return the address of a host."""
        return f"10.77.0.{self._places[name]}"

    def namespace(self, name: str) -> Path:
        """Return the namespace that a process enters to be on a host."""
        return _NAMESPACES / f"{self._prefix}-{name}"

    def cut(self, name: str) -> None:
        """Cut a host's cable, at the switch."""
        self._in(_SWITCH, "link", "set", f"to{self._places[name]}", "down")

    def mend(self, name: str) -> None:
        """Mend a cut cable."""
        self._in(_SWITCH, "link", "set", f"to{self._places[name]}", "up")

    def lose(self, name: str, to: str) -> None:
        """Lose the packets of one host to another, and no others: they go to a MAC address without an interface."""
        self._in(name, "neigh", "replace", self.address(to), "lladdr", _NOBODY, "dev", INTERFACE, "nud", "permanent")

    def find(self, name: str, to: str) -> None:
        """Deliver these packets again."""
        with contextlib.suppress(subprocess.CalledProcessError):  # cutting the cable has removed the entry already
            self._in(name, "neigh", "delete", self.address(to), "dev", INTERFACE)

    def limit(self, name: str, mbit_per_s: float) -> None:
        """Limit the rate of a host's cable, each way, until `unlimit` or another limit."""
        for namespace, interface in self._ends(name):
            tc("-n", namespace, "qdisc", "replace", "dev", interface, "root", *_bucket(mbit_per_s))

    def unlimit(self, name: str) -> None:
        """Remove the limit of a host's cable."""
        for namespace, interface in self._ends(name):
            tc("-n", namespace, "qdisc", "delete", "dev", interface, "root")

    def _ends(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return namespace and interface of both ends of a cable."""
        return ((self.namespace(name).name, INTERFACE), (self.namespace(_SWITCH).name, f"to{self._places[name]}"))

    def _in(self, name: str, *arguments: str) -> None:
        ip("-n", self.namespace(name).name, *arguments)

    def make(self) -> None:
        """Create the switch, the hosts and their cables."""
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
        """Remove all namespaces, with everything inside."""
        for name in (*self._places, _SWITCH):
            with contextlib.suppress(subprocess.CalledProcessError):  # `make` may have failed before this one
                ip("netns", "delete", self.namespace(name).name)


def ip(*arguments: str) -> None:
    """Run iproute2's command. Raises: subprocess.CalledProcessError."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def tc(*arguments: str) -> None:
    """Run iproute2's command for queues. Raises: subprocess.CalledProcessError."""
    subprocess.run(["tc", *arguments], check=True, capture_output=True, text=True)


def _bucket(mbit_per_s: float) -> tuple[str, ...]:
    return ("tbf", "rate", f"{round(mbit_per_s * 1_000)}kbit", "burst", str(_BURST_BYTES), "latency", "50ms")


def why_not(*, limited: bool = False) -> str | None:
    """Return why hosts, or limited cables, are impossible here, as a sentence, or None if they are possible."""
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
        error_text = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        return f"this machine limits no cables: {error_text}; install iproute2 and load the kernel module sch_tbf"
    finally:
        ip("netns", "delete", probe)
    return None


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Yield hosts of these names while the block lasts."""
    made = Hosts(f"tft{os.getpid()}", names)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def on_host(namespace: Path, target: Callable[..., object], *arguments: object) -> None:
    """Move this process to a host, and run the target there. The process must not have a thread or socket yet."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace, encoding="ascii") as entry:
        if libc.setns(entry.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"can't enter {namespace}")
    target(*arguments)
