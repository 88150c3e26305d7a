"""What a forked child keeps of this process: nothing that holds a connection, a port or a thread of ours.

A user's process forks whenever it likes (the workers of a DataLoader, `multiprocessing`, `os.fork`). The child gets a
copy of every descriptor. A connection ends only when its last descriptor is closed, so peers would learn of this
process's death only after the child's. The child therefore lets go of ours as its first act.

It does not close a descriptor but puts the null device in its place. C++ objects still know the number: they would
close it once more, or shut down whatever has the number by then. It never shuts a connection down, because that ends
the connection for the parent too. It destroys no torch group, store server or listener, because their destructors join
threads that the child does not have.

A socket that C++ has made a moment ago has no name yet by which its owner could tell it from a user's. A fork waits
while a listener is made; a child waits until a new socket is connected. The law of this file: what happens at a fork;
each owner says what is its own.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from tft_pg import sockets
from tft_pg.sockets import Endpoint

__all__ = ["Inheritance", "Owner", "fork_safe_lock", "forks_wait", "keep_for_ever", "let_go_in_child"]


@dataclass(frozen=True)
class Inheritance:
    """What a forked child has a copy of.

    Args:
        descriptors: the child lets go of these; negative ones are none.
        inodes: it lets go of the descriptors of these sockets too.
        local, remote: and of the sockets with one of these addresses at that end, listening or connected.
        ports: and of those that listen at one of these ports of any address, or were accepted there.
        kept: objects that the child must never destroy.
    """

    descriptors: Iterable[int] = ()
    inodes: Collection[int] = ()
    local: Collection[Endpoint] = ()
    remote: Collection[Endpoint] = ()
    ports: Collection[int] = ()
    kept: Iterable[object] = ()


class Owner(Protocol):
    """What owns descriptors or threads that a child must not keep."""

    def forked(self) -> Inheritance:
        """Become of no use, in the child; called there once, by its only thread."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_locks: list[threading.Lock] = []
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
        if not _hooked:
            _hooked = True
            os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


def fork_safe_lock() -> threading.Lock:
    """A lock of a module that is free in a child, whichever thread of the parent held it."""
    lock = threading.Lock()
    _locks.append(lock)
    return lock


@contextmanager
def forks_wait() -> Iterator[None]:
    """Delay the forks of other threads, by 5 s at most, while a socket exists that its owner can't name yet."""
    with _no_fork:
        yield


def keep_for_ever(obj: object) -> None:
    """Have nothing destroy this object in this process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))


def _before() -> None:
    _forking.waited = _no_fork.acquire(timeout=_FORK_WAITS_S)


def _in_parent() -> None:
    if _forking.waited:
        _no_fork.release()


def _in_child() -> None:
    for lock in (_hooking, _no_fork, *_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as threading and logging do with theirs
    sockets.forget_holds()
    owners = list(_owners)
    _owners.clear()
    inherited = [owner.forked() for owner in owners]
    for each in inherited:
        for obj in each.kept:
            keep_for_ever(obj)
    descriptors = {descriptor for each in inherited for descriptor in each.descriptors if descriptor >= 0}
    descriptors |= sockets.descriptors(
        inodes={inode for each in inherited for inode in each.inodes},
        local={endpoint for each in inherited for endpoint in each.local},
        remote={endpoint for each in inherited for endpoint in each.remote},
        ports={port for each in inherited for port in each.ports},
    )
    if descriptors:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in descriptors:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)
