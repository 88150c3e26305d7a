"""Search and shutdown of this process's connections, by their identity.

Gloo and TCPStore hide their sockets, and torch 2.13 has no call that ends an operation waiting on one. But any holder
of a connection can shut it down, and that ends every wait on it at once, at both ends. This file therefore identifies
the descriptors that belong to a group.

An inode identifies an open socket for its whole life. The inode is checked on a duplicate of the descriptor before any
action. Another thread may reuse a descriptor number between a check and an action, but not the number of a duplicate.
Listening sockets never match, because a Gloo listener that is shut down ends the process.

Law of this file: operating system only, no torch. Linux: it reads /proc.
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
    "bound",
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
# Fields of Linux's struct tcp_info. Two adjacent 64-bit counters hold the bytes acknowledged and the bytes received.
# One byte counts the consecutive retransmissions of the oldest unacknowledged segment.
_TCP_INFO_BYTES = 256
_TCP_RETRANSMITS = 2
_TCP_COUNTERS = struct.Struct("=120xQQ")
# Its first byte is the state. For a listening socket, the counter of unacknowledged segments counts what waits.
_TCP_LISTEN = 10
_TCP_WAITING = struct.Struct("=24xI")
# A socket filter of one instruction, "return 0": no packet passes.
_SO_ATTACH_FILTER = 26
_BPF_DROP = struct.pack("=HBBI", 0x06, 0, 0, 0)


class Endpoint(NamedTuple):
    """One end of a TCP connection: the numeric address without zone, IPv4 written as IPv4, and the port."""

    address: str
    port: int

    @classmethod
    def of(cls, name: Sequence[object]) -> Endpoint:
        """Return the endpoint of an address in the form of Python's socket module."""
        address = str(name[0]).split("%", 1)[0]
        if address.startswith("::ffff:") and "." in address:
            address = address[len("::ffff:") :]
        return cls(address, int(str(name[1])))

    @classmethod
    def read(cls, sockaddr: bytes) -> Endpoint | None:
        """Return the endpoint of an address in the operating system's form, or None if it is no TCP address."""
        family = int.from_bytes(sockaddr[:2], sys.byteorder)
        place = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}.get(family)  # type: ignore[call-overload]
        if place is None or len(sockaddr) < place.stop:
            return None
        return cls.of((socket.inet_ntop(family, sockaddr[place]), int.from_bytes(sockaddr[2:4], "big")))


def supported() -> bool:
    """Return whether this operating system exposes a process's descriptors as this file needs them."""
    return os.path.isdir(_DESCRIPTORS)


# A duplicate looks like another owner's descriptor. So the duplicates are recorded, and none appears or disappears
# during a scan.
_lock = threading.Lock()  # made anew in a forked child, see `forget_holds`
_duplicates: set[int] = set()


def _inodes() -> Iterator[tuple[int, int]]:
    """Yield (descriptor, inode) of each socket of this process, without this module's duplicates."""
    for name in os.listdir(_DESCRIPTORS):
        descriptor = int(name)
        inode = _inode(descriptor) if descriptor not in _duplicates else None
        if inode is not None:
            yield descriptor, inode


def _inode(descriptor: int) -> int | None:
    """Return the inode of a socket, or None if the descriptor is closed or not a socket."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


# No `socket.socket` is made from a descriptor. Under `socket.setdefaulttimeout`, that would make the connection
# non-blocking for its owner too.
_libc = ctypes.CDLL(None)


def _end(descriptor: int, *, remote: bool) -> Endpoint | None:
    """Return the address of one end of a socket. None: the socket has no such end, or is not TCP."""
    sockaddr = ctypes.create_string_buffer(_SOCKADDR_BYTES)
    length = ctypes.c_uint32(_SOCKADDR_BYTES)
    get = _libc.getpeername if remote else _libc.getsockname
    if get(descriptor, sockaddr, ctypes.byref(length)) != 0:
        return None
    return Endpoint.read(sockaddr.raw[: length.value])


def connected(*, local: Collection[Endpoint] = (), remote: Collection[Endpoint] = ()) -> frozenset[int]:
    """Return the inodes of the connected sockets with one of these addresses at the local or the remote end."""
    found = set()
    with _lock:
        for descriptor, inode in _inodes():
            there = _end(descriptor, remote=True)
            matches = there is not None and (there in remote or _end(descriptor, remote=False) in local)
            if matches and _inode(descriptor) == inode:  # otherwise closed and reused since the check
                found.add(inode)
    return frozenset(found)


def bound(local: Collection[Endpoint]) -> frozenset[int]:
    """Return the inodes of the sockets with one of these local addresses, also of those that listen or have ended."""
    found = set()
    with _lock:
        for descriptor, inode in _inodes():
            if _end(descriptor, remote=False) in local and _inode(descriptor) == inode:
                found.add(inode)
    return frozenset(found)


def remote_ends(remote: Collection[Endpoint]) -> frozenset[Endpoint]:
    """Return those of these addresses to which this process has a connection."""
    with _lock:
        there = (_end(descriptor, remote=True) for descriptor, _ in _inodes())
        return frozenset(end for end in there if end is not None and end in remote)


def connecting(*, remote: Collection[Endpoint]) -> frozenset[int]:
    """Return the inodes of the sockets that still wait for an answer from one of these addresses.

    Such a socket has no peer name yet, so this function reads the kernel's table. The table lists the sockets of all
    processes, but `shut_down` touches only this process's.
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
    # The kernel prints each 32-bit word of the address as a number in this machine's byte order.
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
    """Return the descriptors of the sockets with one of these inodes, addresses or local ports.

    A connection of this machine with itself matches the port at either end.

    Unlike `connected`, this function also finds listening sockets, connecting sockets and this module's duplicates. It
    is meant for a process with one thread, such as a newly forked child.
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
    """Wait, in a forked child, until the parent's threads have connected the sockets that they made before the fork.

    A child shares such a socket with its parent, and can identify its owner only once the socket has an address. If the
    owner never connects the socket, the wait ends after a second.
    """
    give_up_s = time.monotonic() + _CONNECTS_WITHIN_S
    while any(map(_has_no_address, os.listdir(_DESCRIPTORS))) and time.monotonic() < give_up_s:
        time.sleep(_LOOKS_EVERY_S)


def _has_no_address(name: str) -> bool:
    """Return whether a descriptor is a TCP socket that is neither bound nor connected."""
    descriptor = int(name)
    here = _end(descriptor, remote=False)
    if here is None or here.port:
        return False
    kind = ctypes.c_int()
    length = ctypes.c_uint32(ctypes.sizeof(kind))
    _libc.getsockopt(descriptor, socket.SOL_SOCKET, socket.SO_TYPE, ctypes.byref(kind), ctypes.byref(length))
    return kind.value == socket.SOCK_STREAM


def forget_holds() -> None:
    """Reset the lock and the list of duplicates in a forked child. The child has no other thread, so none holds
    the lock.
    """
    _lock._at_fork_reinit()  # type: ignore[attr-defined]  # as threading and logging do with their locks
    _duplicates.clear()


def hide_from_programs(local: Collection[Endpoint]) -> None:
    """Exclude the sockets with one of these local addresses from inheritance by started programs.

    Gloo (of torch 2.13) leaves its sockets open for `os.system` and for `subprocess` with `close_fds=False`.
    """
    with _lock:
        for descriptor, inode in _inodes():
            if _end(descriptor, remote=False) in local:
                _hide(descriptor, inode)


def _hide(descriptor: int, inode: int) -> None:
    with contextlib.suppress(OSError):  # closed since the check
        if _inode(descriptor) == inode:
            os.set_inheritable(descriptor, False)


class Traffic(NamedTuple):
    """The total traffic of a TCP connection, in bytes. Zeros if the kernel does not report it."""

    acknowledged: int
    received: int


class Held(NamedTuple):
    """A duplicate of a socket's descriptor in this process.

    Args:
        duplicate: the duplicate's descriptor.
        descriptor: the owner's descriptor.
        inode: of both.
    """

    duplicate: int
    descriptor: int
    inode: int

    def is_owned(self) -> bool:
        """Return whether the owner still has its descriptor open."""
        return _inode(self.descriptor) == self.inode

    def hide_from_programs(self) -> None:
        """Exclude the owner's descriptor from inheritance by started programs."""
        _hide(self.descriptor, self.inode)

    def queued_bytes(self) -> int:
        """Return the bytes in the kernel's buffers: sent and not acknowledged, or received and not read."""
        queued = 0
        for request in (termios.TIOCOUTQ, termios.FIONREAD):
            try:
                answer = fcntl.ioctl(self.duplicate, request, b"\0" * 4)
            except OSError:  # the connection has ended
                continue
            queued += int.from_bytes(answer, sys.byteorder)
        return queued

    def traffic(self) -> Traffic:
        """Return the traffic of this connection so far."""
        return Traffic(*_TCP_COUNTERS.unpack_from(self._information()))

    def remote_end(self) -> Endpoint | None:
        """Return the remote address of the connection, or None if it is no longer connected."""
        return _end(self.duplicate, remote=True)

    def retransmits(self) -> int:
        """Return how many consecutive times the kernel has resent data that the remote kernel did not acknowledge.

        The kernel of a stopped process acknowledges too. A peer with a full buffer is probed in another way.
        """
        return self._information()[_TCP_RETRANSMITS]

    def _information(self) -> bytes:
        """Return the kernel's struct tcp_info."""
        information = ctypes.create_string_buffer(_TCP_INFO_BYTES)
        length = ctypes.c_uint32(_TCP_INFO_BYTES)
        _libc.getsockopt(self.duplicate, socket.IPPROTO_TCP, socket.TCP_INFO, information, ctypes.byref(length))
        return information.raw

    def is_listening(self) -> bool:
        """Return whether this socket listens."""
        return self._information()[0] == _TCP_LISTEN

    def num_waiting(self) -> int:
        """Return how many connections of this listening socket its owner has not accepted yet."""
        return int(_TCP_WAITING.unpack_from(self._information())[0])

    def refuse_connections(self) -> bool:
        """Drop every packet to this listening socket, so that its owner accepts only what waits already.

        Returns: False if the kernel can't do this.
        """
        drop = ctypes.create_string_buffer(_BPF_DROP, len(_BPF_DROP))
        program = struct.pack("@HP", 1, ctypes.addressof(drop))
        return bool(_libc.setsockopt(self.duplicate, socket.SOL_SOCKET, _SO_ATTACH_FILTER, program, len(program)) == 0)

    def stop_reading(self) -> None:
        """Let the owner read the end of the stream after the received data. The remote end does not notice."""
        _libc.shutdown(self.duplicate, socket.SHUT_RD)

    def shut_down(self) -> bool:
        """Shut the connection down in both directions, for its owner too. Returns False if it had already ended."""
        return bool(_libc.shutdown(self.duplicate, socket.SHUT_RDWR) == 0)


def hold(inodes: Collection[int]) -> list[Held]:
    """Return a duplicate of each of these sockets that is still open in this process. Pass the result to `let_go`."""
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
        _duplicates.add(duplicate)
        held = Held(duplicate, descriptor, inode)
        if _inode(duplicate) == inode:
            yield held
        else:  # closed and reused since the check
            _let_go(held)


def let_go(holds: Collection[Held]) -> None:
    """Close these duplicates."""
    with _lock:
        for held in holds:
            _let_go(held)


def _let_go(held: Held) -> None:
    _duplicates.discard(held.duplicate)
    os.close(held.duplicate)


def traffic(inodes: Collection[int]) -> dict[int, Traffic]:
    """Return the traffic of each of these TCP sockets that is still open in this process."""
    found = {}
    with _lock:
        for held in list(_hold(inodes)):
            found[held.inode] = held.traffic()
            _let_go(held)
    return found


def shut_down(inodes: Collection[int]) -> int:
    """Shut down, in both directions, those of these sockets that are still open here. Returns: their number."""
    count = 0
    with _lock:
        for held in list(_hold(inodes)):
            count += held.shut_down()
            _let_go(held)
    return count
