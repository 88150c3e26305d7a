"""Finding and ending connections of this process by what they are, never by when they appeared.

Gloo and TCPStore keep their sockets to themselves, and torch 2.13 has no call that ends an operation which waits on
one. But an operating system lets any holder of a connection shut it down, and that ends every wait on it, at both
ends, at once. So the only question is which descriptors are ours to shut down. They are known by their inode, which
names an open socket for as long as it lives, and checked on a duplicate of the descriptor before anything is done to
it: a descriptor number may be reused between a look and an act, a duplicate can't. Listening sockets never match (a
Gloo listener that is shut down ends the process). The law of this file: operating system only, no torch. Linux: it
reads /proc.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

__all__ = ["Endpoint", "connected", "connecting", "register", "shut_down", "supported"]

_DESCRIPTORS = "/proc/self/fd"
_SYN_SENT = "02"


class Endpoint(NamedTuple):
    """One end of a TCP connection: the numeric address without zone, IPv4 written as IPv4, and the port."""

    address: str
    port: int

    @classmethod
    def of(cls, name: object) -> Endpoint | None:
        """From what getsockname or getpeername gives; None if that is no TCP address."""
        if not isinstance(name, tuple) or len(name) < 2:
            return None
        address = str(name[0]).split("%", 1)[0]
        if address.startswith("::ffff:") and "." in address:
            address = address[len("::ffff:") :]
        return cls(address, int(name[1]))


def supported() -> bool:
    """Whether this operating system shows a process its own descriptors as this file needs it."""
    return os.path.isdir(_DESCRIPTORS)


def _inodes() -> Iterator[tuple[int, int]]:
    """(descriptor, inode) of each socket of this process at this moment."""
    for name in os.listdir(_DESCRIPTORS):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            yield int(name), status.st_ino


def _duplicate(descriptor: int) -> socket.socket | None:
    """A socket object of our own on the same connection; None if the descriptor is gone or no socket by now."""
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        return None


def connected(*, local: Collection[Endpoint] = (), remote: Collection[Endpoint] = ()) -> frozenset[int]:
    """The inodes of the connected sockets with one of these addresses at the local, or at the remote, end."""
    found = set()
    for descriptor, _ in _inodes():
        duplicate = _duplicate(descriptor)
        if duplicate is None:
            continue
        with duplicate:
            try:
                here, there = Endpoint.of(duplicate.getsockname()), Endpoint.of(duplicate.getpeername())
            except OSError:  # listening, not connected yet, or no longer
                continue
            if here in local or there in remote:
                found.add(os.fstat(duplicate.fileno()).st_ino)
    return frozenset(found)


def register(epoll: select.epoll, inodes: Collection[int], events: int) -> int:
    """Let an epoll watch those of these sockets that are still open; gives how many.

    The kernel forgets each when its owner closes it.
    """
    count = 0
    for descriptor, inode in _inodes():
        if inode not in inodes:
            continue
        try:
            epoll.register(descriptor, events)
            if os.fstat(descriptor).st_ino != inode:  # closed and reused since the look
                epoll.unregister(descriptor)
                continue
        except OSError:
            continue
        count += 1
    return count


def connecting(*, remote: Collection[Endpoint]) -> frozenset[int]:
    """The inodes of the sockets that still wait for an answer from one of these addresses.

    Such a socket has no peer name yet, so the kernel's table is asked; it holds every process's, of which
    `shut_down` touches only ours.
    """
    found: set[int] = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(table, encoding="ascii") as lines:
                rows = [line.split() for line in lines][1:]
        except FileNotFoundError:  # no IPv6
            continue
        found.update(int(row[9]) for row in rows if row[3] == _SYN_SENT and _table_endpoint(row[2]) in remote)
    return frozenset(found)


def _table_endpoint(field: str) -> Endpoint | None:
    address, port = field.split(":")
    words = bytes.fromhex(address)
    # The kernel prints each 32-bit word of the address as a number of this machine's byte order.
    packed = b"".join(struct.pack(">I", word) for (word,) in struct.iter_unpack("=I", words))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return Endpoint.of((socket.inet_ntop(family, packed), int(port, 16)))


def shut_down(inodes: Collection[int]) -> int:
    """Shut down, in both directions, those of these sockets that are still open in this process; gives how many."""
    count = 0
    for descriptor, inode in _inodes():
        if inode not in inodes:
            continue
        duplicate = _duplicate(descriptor)
        if duplicate is None:
            continue
        with duplicate:
            if os.fstat(duplicate.fileno()).st_ino != inode:  # closed and reused since the look
                continue
            try:
                duplicate.shutdown(socket.SHUT_RDWR)
            except OSError:  # ended by itself meanwhile
                continue
            count += 1
    return count
