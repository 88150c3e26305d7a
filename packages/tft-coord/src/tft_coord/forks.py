"""What a forked child keeps of this process: nothing that says that its parent lives.

A user's process forks whenever it likes (the workers of a DataLoader, `multiprocessing`, `os.fork`). The child gets a
copy of every descriptor. A connection ends only when its last descriptor is closed, so others would learn of this
process's death only after the child's. The child therefore lets go of ours as its first act.

It does not close a descriptor but puts the null device in its place: grpc still knows the number and may close it once
more. It never shuts a connection down, because that ends the connection for the parent too. It destroys nothing of
grpc's or asyncio's, because that would wait for threads that the child does not have, and take sockets out of an epoll
that it shares with the parent.

Law of this file: what happens in the child; each owner says what is its own.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import threading
import weakref
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from tft_coord.transport.names import plain

_DESCRIPTORS: Final = "/proc/self/fd"


@dataclass(frozen=True)
class Inheritance:
    """What a forked child has a copy of.

    Args:
        descriptors: the child lets go of these; negative ones are none.
        ports: and of sockets that listen at these ports, or were accepted there.
        places: and of connections to these numeric addresses, each at its port.
        kept: objects that the child must never destroy.
    """

    descriptors: Iterable[int] = ()
    ports: Collection[int] = ()
    places: Collection[tuple[str, int]] = ()
    kept: Iterable[object] = ()


class Owner(Protocol):
    """What owns descriptors or threads that a child must not keep."""

    def forked(self) -> Inheritance:
        """Become of no use, in the child; called there once, by its only thread."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_hooking = threading.Lock()
_hooked = False


def let_go_in_child(owner: Owner) -> None:
    """From now on each forked child asks this owner what to let go of; the owner is held weakly."""
    global _hooked
    with _hooking:
        _owners.add(owner)
        if not _hooked and hasattr(os, "register_at_fork"):
            _hooked = True
            os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    global _hooking
    _hooking = threading.Lock()
    owners = list(_owners)
    _owners.clear()
    inherited = [owner.forked() for owner in owners]
    for each in inherited:
        for obj in each.kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))
    found = {descriptor for each in inherited for descriptor in each.descriptors if descriptor >= 0}
    ports = {port for each in inherited for port in each.ports}
    places = {place for each in inherited for place in each.places}
    if ports or places:
        found.update(_sockets_at(ports, places))
    if found:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in found:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)


def _sockets_at(ports: Collection[int], places: Collection[tuple[str, int]]) -> set[int]:
    """The descriptors of the TCP sockets at one of these local ports, or connected to one of these places.

    Only for a process of one thread: a time-out that is the default for new sockets is taken away meanwhile, or each
    look would make its socket non-blocking, for the parent too.
    """
    found = set()
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)
    try:
        for name in os.listdir(_DESCRIPTORS):
            descriptor = int(name)
            with suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    continue
                look = socket.socket(fileno=descriptor)
                try:
                    if look.family in (socket.AF_INET, socket.AF_INET6) and look.type == socket.SOCK_STREAM:
                        if look.getsockname()[1] in ports:
                            found.add(descriptor)
                            continue
                        host, port = look.getpeername()[:2]
                        if (plain(host), port) in places:
                            found.add(descriptor)
                finally:
                    look.detach()
    except FileNotFoundError:  # no Linux: such a child lets go of what we have descriptors of
        return found
    finally:
        socket.setdefaulttimeout(timeout)
    return found
