"""Release of this package's connections, ports and threads in a forked child.

A user's process forks at any time (DataLoader workers, `multiprocessing`, `os.fork`). The child gets a copy of every
descriptor, and a connection ends only when its last descriptor is closed. Therefore the child releases this package's
descriptors first.

The child does not close a descriptor but replaces it with the null device. asyncio still knows the number and may close
it again. The child never shuts a connection down, because that ends the connection for the parent too. The child
destroys no event loop, because that removes sockets from an epoll that it shares with the parent.

A fork of another thread waits while a new socket exists that its owner does not know yet.

Law of this file: what happens in the child; each owner reports its own resources.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import stat
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Protocol

__all__ = ["Inheritance", "Owner", "forks_wait", "let_go_in_child"]

_DESCRIPTORS: Final = "/proc/self/fd"


@dataclass(frozen=True)
class Inheritance:
    """The inherited resources of one owner in a forked child.

    Args:
        descriptors: descriptors to release; negative ones are ignored.
        ports: release the sockets that listen at these ports, or were accepted there.
        kept: objects that the child must never destroy.
    """

    descriptors: Iterable[int] = ()
    ports: Collection[int] = ()
    kept: Iterable[object] = ()


class Owner(Protocol):
    """An owner of descriptors or threads that a child must not keep."""

    def forked(self) -> Inheritance:
        """Become unusable in the child. The only thread of the child calls this method once."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_hooking = threading.Lock()
_hooked = False

_FORK_WAITS_S: Final = 5.0
_no_fork = threading.RLock()
_forking = threading.local()  # `waited`: whether this thread holds the lock for its fork


def let_go_in_child(owner: Owner) -> None:
    """Let each forked child ask this owner from now on what to release. The owner is held weakly."""
    global _hooked
    with _hooking:
        _owners.add(owner)
        if not _hooked and hasattr(os, "register_at_fork"):
            _hooked = True
            os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


@contextmanager
def forks_wait() -> Iterator[None]:
    """Delay the forks of other threads, by 5 s at most, while a socket exists that its owner does not know yet."""
    with _no_fork:
        yield


def _before() -> None:
    _forking.waited = _no_fork.acquire(timeout=_FORK_WAITS_S)


def _in_parent() -> None:
    if getattr(_forking, "waited", False):  # also False in a fork that began before the hook was registered
        _no_fork.release()


def _in_child() -> None:
    gc.freeze()  # a collection in the child would destroy the parent's garbage, which may hold objects of C++
    # As threading and logging do with their locks.
    _hooking._at_fork_reinit()  # type: ignore[attr-defined]
    _no_fork._at_fork_reinit()  # type: ignore[attr-defined]
    owners = list(_owners)
    _owners.clear()
    inherited = [owner.forked() for owner in owners]
    for each in inherited:
        for obj in each.kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))
    found = {descriptor for each in inherited for descriptor in each.descriptors if descriptor >= 0}
    ports = {port for each in inherited for port in each.ports}
    if ports:
        found.update(_sockets_at(ports))
    if found:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in found:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)


def _sockets_at(ports: Collection[int]) -> set[int]:
    """Return the descriptors of the TCP sockets at one of these local ports.

    Only for a process with one thread. The function suspends the default timeout of new sockets. Otherwise each look
    would make its socket non-blocking, for the parent too.
    """
    found = set()
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)
    try:
        for name in os.listdir(_DESCRIPTORS):
            with suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                look = socket.socket(fileno=int(name))
                try:
                    if look.family in (socket.AF_INET, socket.AF_INET6) and look.getsockname()[1] in ports:
                        found.add(int(name))
                finally:
                    look.detach()
    except FileNotFoundError:  # not Linux: the child releases only the known descriptors
        return found
    finally:
        socket.setdefaulttimeout(timeout)
    return found
