"""Forked children of this process: they keep no connection that would make their parent look alive.

A user's process may fork at any time (the workers of a DataLoader, `multiprocessing`, `os.fork`). The child gets a copy
of every descriptor. A connection ends only when its last descriptor is closed, so peers would learn of this process's
death only after the child's. The child therefore releases this package's descriptors as its first act.

The child does not close a descriptor but puts the null device in its place. grpc still knows the number and may close
it once more. The child never shuts a connection down, because that ends the connection for the parent too. It destroys
no object of grpc or asyncio. That would wait for threads that the child does not have, and take sockets out of an epoll
that it shares with the parent.

Law of this file: the actions in the child; each owner names its own descriptors.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import stat
import threading
import weakref
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from tft_coord.transport.names import canonical

_DESCRIPTORS: Final = "/proc/self/fd"


@dataclass(frozen=True)
class Inheritance:
    """The descriptors and objects of which a forked child has a copy.

    Args:
        descriptors: the child releases these; negative ones are ignored.
        ports: the child also releases sockets that listen at these ports, or were accepted there.
        places: the child also releases connections to these numeric addresses, each at its port.
        kept: objects that the child must never destroy.
    """

    descriptors: Iterable[int] = ()
    ports: Collection[int] = ()
    places: Collection[tuple[str, int]] = ()
    kept: Iterable[object] = ()


class Owner(Protocol):
    """An owner of descriptors or threads that a child must not keep."""

    def forked(self) -> Inheritance:
        """Make the owner useless in the child; called there once, by its only thread."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_hooking = threading.Lock()
_hooked = False


def let_go_in_child(owner: Owner) -> None:
    """Register an owner, so that each forked child releases its descriptors. The reference to the owner is weak."""
    global _hooked
    with _hooking:
        _owners.add(owner)
        if not _hooked and hasattr(os, "register_at_fork"):
            _hooked = True
            os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    global _hooking
    gc.freeze()  # a collection in the child would destroy the parent's garbage, which may hold objects of C++
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
    """Return the descriptors of the TCP sockets at one of these local ports, or connected to one of these places.

    Only a process with one thread may call this. The default timeout for new sockets is removed meanwhile, because it
    would make each inspected socket non-blocking, for the parent too.
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
                        if (canonical(host), port) in places:
                            found.add(descriptor)
                finally:
                    look.detach()
    except FileNotFoundError:  # without Linux's /proc the child releases only the known descriptors
        return found
    finally:
        socket.setdefaulttimeout(timeout)
    return found
