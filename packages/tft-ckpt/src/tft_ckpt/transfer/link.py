"""A check that a transfer used the intended network link.

A host may have a management network beside the fast one. A name that resolves to the wrong network makes every recovery
a hundred times slower without an error. So a long transfer far below its link's speed causes a warning.

Law of this file: one pure decision, and Linux's facts about interfaces. On other systems nothing is known, so there is
no warning.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tft_ckpt.errors import ConfigError
from tft_ckpt.transfer.address import interface_address

__all__ = ["interface_of", "link_bytes_per_s", "slow_link_sentence"]

TRANSFER_BYTES_MIN: Final = 64 << 20
"""Minimum size of a transfer that is compared with its link."""
SHARE_MIN: Final = 0.1
"""The share of its link's speed that a transfer should reach."""
_INTERFACES: Final = Path("/sys/class/net")
_IPV6_LIST: Final = Path("/proc/net/if_inet6")


def slow_link_sentence(
    num_bytes: int,
    seconds: float,
    addresses: tuple[str, str],
    *,
    find_interface: Callable[[str], str | None],
    find_bytes_per_s: Callable[[str], float | None],
) -> str | None:
    """Return a warning about a transfer far below its link's speed, or None if it was faster or the speed is unknown.

    Args:
        num_bytes, seconds: of the transfer, without the time when no data was in flight.
        addresses: of one of its connections, (this side's, the other side's).
        find_interface: as `interface_of`.
        find_bytes_per_s: as `link_bytes_per_s`.
    """
    if num_bytes < TRANSFER_BYTES_MIN or seconds <= 0:
        return None
    interface = find_interface(addresses[0])
    link = None if interface is None else find_bytes_per_s(interface)
    rate = num_bytes / seconds
    if link is None or rate >= SHARE_MIN * link:
        return None
    return (
        f"received a state from {addresses[1]} at {addresses[0]} (interface {interface}) with {rate / 1e6:.0f} MB/s, "
        f"over a link of {link / 1e6:.0f} MB/s. If the source sets no rate limit, check the network, or set "
        "advertise_addr or interface at the source to use another network"
    )


def interface_of(address: str) -> str | None:
    """Return the name of this host's interface with that address, or None."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
        names = [name for _, name in socket.if_nameindex()]
    except (ValueError, OSError):
        return None
    if wanted.version == 6:
        return _ipv6_interface(wanted)
    for name in names:
        try:
            if ipaddress.ip_address(interface_address(name)) == wanted:
                return name
        except ConfigError:  # the interface has no address
            continue
    return None


def _ipv6_interface(wanted: ipaddress.IPv6Address) -> str | None:
    try:
        lines = [line.split() for line in _IPV6_LIST.read_text().splitlines()]
    except OSError:
        return None
    return next((words[-1] for words in lines if int(words[0], 16) == int(wanted)), None)


def link_bytes_per_s(interface: str) -> float | None:
    """Return the negotiated speed of the interface's link, or None if there is none."""
    try:
        megabits = int((_INTERFACES / interface / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * 1e6 / 8 if megabits > 0 else None
