"""Release of this package's connections, ports and threads in a forked child.

A user's process forks at any time (DataLoader workers, `multiprocessing`, `os.fork`). The child gets a copy of every
descriptor. A connection ends only when its last descriptor is closed, so peers would notice the parent's death only
after the child's. Therefore the child releases this package's descriptors first.

The child does not close a descriptor but replaces it with the null device. C++ objects still know the number. They
would close the number again, or shut down an unrelated new descriptor with that number. The child never shuts a
connection down, because that ends the connection for the parent too. The child destroys no torch group, store server or
listener, because their destructors join threads that the child does not have.

A socket that C++ has just created has no address yet, so its owner can't distinguish it from a user's socket. A fork
waits while a listener is created. A child waits until a new socket is connected.

Law of this file: what happens at a fork; each owner reports its own resources.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from tft_pg import sockets
from tft_pg.sockets import Endpoint

__all__ = ["Inheritance", "Owner", "fork_safe_lock", "forks_wait", "let_go_in_child", "never_destroy"]


@dataclass(frozen=True)
class Inheritance:
    """The inherited resources of one owner in a forked child.

    Args:
        descriptors: descriptors to release; negative ones are ignored.
        inodes: release the descriptors of these sockets.
        local, remote: release the sockets with one of these addresses at that end, listening or connected.
        ports: release the sockets that listen at one of these ports, at any address, or were accepted there.
        kept: objects that the child must never destroy.
    """

    descriptors: Iterable[int] = ()
    inodes: Collection[int] = ()
    local: Collection[Endpoint] = ()
    remote: Collection[Endpoint] = ()
    ports: Collection[int] = ()
    kept: Iterable[object] = ()


class Owner(Protocol):
    """An owner of descriptors or threads that a child must not keep."""

    def forked(self) -> Inheritance:
        """Become unusable in the child. The only thread of the child calls this method once."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_locks: list[threading.Lock] = []
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
        if not _hooked:
            _hooked = True
            os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


def fork_safe_lock() -> threading.Lock:
    """Return a module lock that is free in a forked child, even if a thread of the parent held it."""
    lock = threading.Lock()
    _locks.append(lock)
    return lock


@contextmanager
def forks_wait() -> Iterator[None]:
    """Delay the forks of other threads, by 5 s at most, while a socket exists that its owner can't identify yet."""
    with _no_fork:
        yield


def never_destroy(obj: object) -> None:
    """Prevent the destruction of this object in this process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))


def _before() -> None:
    _forking.waited = _no_fork.acquire(timeout=_FORK_WAITS_S)


def _in_parent() -> None:
    if _forking.waited:
        _no_fork.release()


def _in_child() -> None:
    # The parent's garbage may hold torch groups, and a collection in the child would destroy them.
    gc.freeze()
    for lock in (_hooking, _no_fork, *_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as threading and logging do with their locks
    sockets.forget_holds()
    owners = list(_owners)
    _owners.clear()
    inherited = [owner.forked() for owner in owners]
    for each in inherited:
        for obj in each.kept:
            never_destroy(obj)
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
