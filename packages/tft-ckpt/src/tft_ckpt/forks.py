"""What a forked child keeps of this process: nothing that holds a connection, a port or a thread of ours.

A user's process forks whenever it likes (the workers of a DataLoader, `multiprocessing`, `os.fork`). The child gets a
copy of every descriptor, and a connection ends only when its last descriptor is closed. The child therefore lets go of
ours as its first act.

It does not close a descriptor but puts the null device in its place: asyncio still knows the number and may close it
once more. It never shuts a connection down, because that ends the connection for the parent too. It destroys no event
loop, because that takes sockets out of an epoll that it shares with the parent.

A fork of another thread waits while a new socket exists that its owner does not know yet.

Law of this file: what happens in the child; each owner says what is its own.
"""

from __future__ import annotations

import ctypes
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
    """What a forked child has a copy of.

    Args:
        descriptors: the child lets go of these; negative ones are none.
        ports: and of sockets that listen at these ports, or were accepted there.
        kept: objects that the child must never destroy.
    """

    descriptors: Iterable[int] = ()
    ports: Collection[int] = ()
    kept: Iterable[object] = ()


class Owner(Protocol):
    """What owns descriptors or threads that a child must not keep."""

    def forked(self) -> Inheritance:
        """Become of no use, in the child; called there once, by its only thread."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_hooking = threading.Lock()
_hooked = False

_FORK_WAITS_S: Final = 5.0
_no_fork = threading.RLock()
_forking = threading.local()  # `waited`: whether this thread holds the lock for its fork


def let_go_in_child(owner: Owner) -> None:
    """From now on each forked child asks this owner what to let go of; the owner is held weakly."""
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
    if getattr(_forking, "waited", False):  # False too in a fork that had begun before the hook was there
        _no_fork.release()


def _in_child() -> None:
    # As threading and logging do with theirs.
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
    """The descriptors of the TCP sockets at one of these local ports.

    Only for a process of one thread: a time-out that is the default for new sockets is taken away meanwhile, or each
    look would make its socket non-blocking, for the parent too.
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
    except FileNotFoundError:  # no Linux: such a child lets go of what we have descriptors of
        return found
    finally:
        socket.setdefaulttimeout(timeout)
    return found
