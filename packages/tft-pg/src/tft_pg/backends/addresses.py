"""The address by which other machines reach this machine.

A machine's own name may mean loopback to the machine itself and a real address to all others. For example, Debian
writes 127.0.1.1 into /etc/hosts. So this file takes the address from the route to another machine.

Law of this file: it asks the resolver and the routing table, and sends nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from typing import Final

__all__ = ["address_towards", "default_address", "loopback_of", "own_name_is_loopback"]

# Reserved for documentation, so no machine has them.
_OUTSIDE: Final = (("192.0.2.1", 9), ("2001:db8::1", 9))


def address_towards(host: str, port: int) -> str:
    """Return this machine's numeric address on the route to another machine. The neighbours of that machine can reach
    it too.

    If the host is this machine by a name that means loopback only here, return the address of the default route, if
    any.

    Raises: OSError: the host has no address, or there is no route to it.
    """
    address = _towards(host, port)
    if not _is_loopback(address) or loopback_of(host) is not None:
        return address
    for outside in _OUTSIDE:
        with suppress(OSError):
            return _towards(*outside)
    return address


def default_address() -> str:
    """Return the numeric address at which other machines reach this one, or loopback if there is no route to any."""
    for outside in _OUTSIDE:
        with suppress(OSError):
            return _towards(*outside)
    return "127.0.0.1"


def own_name_is_loopback() -> bool:
    """Return whether only this machine can reach a listener at its own name's address, as used by Gloo.

    Torch takes the first address of the name that it can listen on, and loopback if there is none.
    """
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    for family, kind, protocol, _, place in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return _is_loopback(str(place[0]))
    return True


def loopback_of(host: str) -> str | None:
    """Return the loopback address that this name or address means on every machine, or None."""
    if host == "localhost" or host.startswith("127."):
        return "127.0.0.1"
    return host if host == "::1" else None


def _towards(host: str, port: int) -> str:
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:  # connecting a datagram socket sends nothing
        probe.connect(place)
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
