"""Finding and ending connections of this process by what they are, never by when they appeared.

Gloo and TCPStore keep their sockets to themselves, and torch 2.13 has no call that ends an operation which waits on
one. But an operating system lets any holder of a connection shut it down, and that ends every wait on it, at both
ends, at once. So the only question is which descriptors are ours to shut down. They are known by their inode, which
names an open socket for as long as it lives, and checked on a duplicate of the descriptor before anything is done to
it: a descriptor number may be reused between a look and an act, a duplicate of our own can't. Listening sockets never
match (a Gloo listener that is shut down ends the process). The law of this file: operating system only, no torch.
Linux: it reads /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import stat
import struct
import sys
import termios
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "Endpoint",
    "Held",
    "Traffic",
    "connected",
    "connecting",
    "descriptors",
    "forget_holds",
    "hide_from_programs",
    "hold",
    "let_go",
    "remote_ends",
    "shut_down",
    "supported",
    "traffic",
    "wait_until_connected",
]

_DESCRIPTORS = "/proc/self/fd"
_SYN_SENT = "02"
_SOCKADDR_BYTES = 128
_CONNECTS_WITHIN_S = 1.0
_LOOKS_EVERY_S = 0.001
# Of Linux's struct tcp_info: two 64-bit counters side by side, bytes acknowledged and bytes received; and one byte, how
# often in a row the oldest segment was sent again because its acknowledgement did not come in time.
_TCP_INFO_BYTES = 256
_TCP_RETRANSMITS = 2
_TCP_COUNTERS = struct.Struct("=120xQQ")


class Endpoint(NamedTuple):
    """One end of a TCP connection: the numeric address without zone, IPv4 written as IPv4, and the port."""

    address: str
    port: int

    @classmethod
    def of(cls, name: Sequence[object]) -> Endpoint:
        """From an address as Python's socket module writes it."""
        address = str(name[0]).split("%", 1)[0]
        if address.startswith("::ffff:") and "." in address:
            address = address[len("::ffff:") :]
        return cls(address, int(str(name[1])))

    @classmethod
    def read(cls, sockaddr: bytes) -> Endpoint | None:
        """From an address as the operating system writes it; None if that is no TCP address."""
        family = int.from_bytes(sockaddr[:2], sys.byteorder)
        place = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}.get(family)  # type: ignore[call-overload]
        if place is None or len(sockaddr) < place.stop:
            return None
        return cls.of((socket.inet_ntop(family, sockaddr[place]), int.from_bytes(sockaddr[2:4], "big")))


def supported() -> bool:
    """Whether this operating system shows a process its own descriptors as this file needs it."""
    return os.path.isdir(_DESCRIPTORS)


# A duplicate of ours looks like another owner's descriptor. So they are known, and none comes or goes during a look.
_lock = threading.Lock()  # made anew in a forked child, see `forget_holds`
_ours: set[int] = set()


def _inodes() -> Iterator[tuple[int, int]]:
    """(descriptor, inode) of each socket of this process at this moment, without our own duplicates."""
    for name in os.listdir(_DESCRIPTORS):
        descriptor = int(name)
        inode = _inode(descriptor) if descriptor not in _ours else None
        if inode is not None:
            yield descriptor, inode


def _inode(descriptor: int) -> int | None:
    """The inode of a socket; None if the descriptor is closed, or no socket."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


# No `socket.socket` is made of a descriptor: under `socket.setdefaulttimeout` that would make the connection
# non-blocking for its owner too.
_libc = ctypes.CDLL(None)


def _end(descriptor: int, *, remote: bool) -> Endpoint | None:
    """The address of one end of a socket; None if it is not connected (then it has no remote end) or not TCP."""
    sockaddr = ctypes.create_string_buffer(_SOCKADDR_BYTES)
    length = ctypes.c_uint32(_SOCKADDR_BYTES)
    get = _libc.getpeername if remote else _libc.getsockname
    if get(descriptor, sockaddr, ctypes.byref(length)) != 0:
        return None
    return Endpoint.read(sockaddr.raw[: length.value])


def connected(*, local: Collection[Endpoint] = (), remote: Collection[Endpoint] = ()) -> frozenset[int]:
    """The inodes of the connected sockets with one of these addresses at the local, or at the remote, end."""
    found = set()
    with _lock:
        for descriptor, inode in _inodes():
            there = _end(descriptor, remote=True)
            matches = there is not None and (there in remote or _end(descriptor, remote=False) in local)
            if matches and _inode(descriptor) == inode:  # else closed and reused since the look
                found.add(inode)
    return frozenset(found)


def remote_ends(remote: Collection[Endpoint]) -> frozenset[Endpoint]:
    """Those of these addresses to which a connection of this process is made."""
    with _lock:
        there = (_end(descriptor, remote=True) for descriptor, _ in _inodes())
        return frozenset(end for end in there if end is not None and end in remote)


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


def _table_endpoint(field: str) -> Endpoint:
    address, port = field.split(":")
    words = bytes.fromhex(address)
    # The kernel prints each 32-bit word of the address as a number of this machine's byte order.
    packed = b"".join(struct.pack(">I", word) for (word,) in struct.iter_unpack("=I", words))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return Endpoint.of((socket.inet_ntop(family, packed), int(port, 16)))


def descriptors(
    *,
    inodes: Collection[int] = (),
    local: Collection[Endpoint] = (),
    remote: Collection[Endpoint] = (),
    ports: Collection[int] = (),
) -> set[int]:
    """The descriptors of the sockets with one of these inodes, or one of these addresses or local ports.

    A connection of this machine with itself counts for the port at either end.
    Unlike `connected` it finds listening sockets, those that still connect, and our own duplicates too. For a process
    of one thread, such as a child that was forked a moment ago.
    """
    found: set[int] = set()
    if not (inodes or local or remote or ports) or not supported():
        return found
    wanted = set(inodes) | (connecting(remote=remote) if remote else set())
    for name in os.listdir(_DESCRIPTORS):
        descriptor = int(name)
        inode = _inode(descriptor)
        if inode is None:
            continue
        here, there = _end(descriptor, remote=False), _end(descriptor, remote=True)
        at_port = here is not None and here.port in ports
        to_port = here is not None and there is not None and there.address == here.address and there.port in ports
        if inode in wanted or at_port or to_port or here in local or there in remote:
            found.add(descriptor)
    return found


def wait_until_connected() -> None:
    """In a forked child: wait until the parent's threads have connected the sockets that they made before the fork.

    A child shares such a socket with its parent, and can tell whose it is only when it has an address. A socket that
    its owner never connects is waited for in vain, for a second.
    """
    give_up_s = time.monotonic() + _CONNECTS_WITHIN_S
    while any(map(_has_no_address, os.listdir(_DESCRIPTORS))) and time.monotonic() < give_up_s:
        time.sleep(_LOOKS_EVERY_S)


def _has_no_address(name: str) -> bool:
    """Whether that descriptor is a TCP socket that is neither bound nor connected."""
    descriptor = int(name)
    here = _end(descriptor, remote=False)
    if here is None or here.port:
        return False
    kind = ctypes.c_int()
    length = ctypes.c_uint32(ctypes.sizeof(kind))
    _libc.getsockopt(descriptor, socket.SOL_SOCKET, socket.SO_TYPE, ctypes.byref(kind), ctypes.byref(length))
    return kind.value == socket.SOCK_STREAM


def forget_holds() -> None:
    """In a forked child: no duplicate of the parent's is ours, and no thread holds the lock."""
    _lock._at_fork_reinit()  # type: ignore[attr-defined]  # as threading and logging do with theirs
    _ours.clear()


def hide_from_programs(local: Collection[Endpoint]) -> None:
    """Have no program that this process starts inherit the sockets with one of these addresses at the local end.

    Gloo (of torch 2.13) leaves its sockets open for `os.system` and for `subprocess` with `close_fds=False`.
    """
    with _lock:
        for descriptor, inode in _inodes():
            if _end(descriptor, remote=False) in local:
                _hide(descriptor, inode)


def _hide(descriptor: int, inode: int) -> None:
    with contextlib.suppress(OSError):  # closed since the look
        if _inode(descriptor) == inode:
            os.set_inheritable(descriptor, False)


class Traffic(NamedTuple):
    """What has passed over a TCP connection in its life, in bytes; zeros where the kernel does not tell."""

    acknowledged: int
    received: int


class Held(NamedTuple):
    """A duplicate of our own of a socket of this process.

    Args:
        duplicate: ours.
        descriptor: its owner's.
        inode: of both.
    """

    duplicate: int
    descriptor: int
    inode: int

    def is_owned(self) -> bool:
        """Whether its owner still has it open."""
        return _inode(self.descriptor) == self.inode

    def hide_from_programs(self) -> None:
        """Have no program that this process starts inherit its owner's descriptor either."""
        _hide(self.descriptor, self.inode)

    def queued_bytes(self) -> int:
        """What the kernel holds for either end: sent and not acknowledged, or received and not read."""
        queued = 0
        for request in (termios.TIOCOUTQ, termios.FIONREAD):
            try:
                answer = fcntl.ioctl(self.duplicate, request, b"\0" * 4)
            except OSError:  # no connection any more
                continue
            queued += int.from_bytes(answer, sys.byteorder)
        return queued

    def traffic(self) -> Traffic:
        """What has passed over it so far."""
        return Traffic(*_TCP_COUNTERS.unpack_from(self._information()))

    def remote_end(self) -> Endpoint | None:
        """Whose it is at the other end; None if it is connected no more."""
        return _end(self.duplicate, remote=True)

    def retransmits(self) -> int:
        """How often in a row the kernel has sent the same again because the other end's did not acknowledge it.

        The kernel of a stopped process acknowledges too, and one whose buffer is full is asked otherwise.
        """
        return self._information()[_TCP_RETRANSMITS]

    def _information(self) -> bytes:
        """The kernel's struct tcp_info."""
        information = ctypes.create_string_buffer(_TCP_INFO_BYTES)
        length = ctypes.c_uint32(_TCP_INFO_BYTES)
        _libc.getsockopt(self.duplicate, socket.IPPROTO_TCP, socket.TCP_INFO, information, ctypes.byref(length))
        return information.raw

    def stop_reading(self) -> None:
        """Have its owner read the end of it, once what has come is read; the other end is not told."""
        _libc.shutdown(self.duplicate, socket.SHUT_RD)

    def shut_down(self) -> bool:
        """Shut it down in both directions, for its owner too; False if it had ended by itself."""
        return bool(_libc.shutdown(self.duplicate, socket.SHUT_RDWR) == 0)


def hold(inodes: Collection[int]) -> list[Held]:
    """A duplicate of each of these sockets that is still open in this process; to be given to `let_go`."""
    with _lock:
        return list(_hold(inodes))


def _hold(inodes: Collection[int]) -> Iterator[Held]:
    for descriptor, inode in _inodes():
        if inode not in inodes:
            continue
        try:
            duplicate = os.dup(descriptor)
        except OSError:
            continue
        _ours.add(duplicate)
        held = Held(duplicate, descriptor, inode)
        if _inode(duplicate) == inode:
            yield held
        else:  # closed and reused since the look
            _let_go(held)


def let_go(holds: Collection[Held]) -> None:
    """Close our duplicates."""
    with _lock:
        for held in holds:
            _let_go(held)


def _let_go(held: Held) -> None:
    _ours.discard(held.duplicate)
    os.close(held.duplicate)


def traffic(inodes: Collection[int]) -> dict[int, Traffic]:
    """The traffic of those of these TCP sockets that are still open in this process."""
    found = {}
    with _lock:
        for held in list(_hold(inodes)):
            found[held.inode] = held.traffic()
            _let_go(held)
    return found


def shut_down(inodes: Collection[int]) -> int:
    """Shut down, in both directions, those of these sockets that are still open in this process; gives how many."""
    count = 0
    with _lock:
        for held in list(_hold(inodes)):
            count += held.shut_down()
            _let_go(held)
    return count
