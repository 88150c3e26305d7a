"""How users write the address of a server.

Law of this file: text alone; it imports no grpc, so that settings are checked before that is needed.
"""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress

from tft_coord.errors import SettingError
from tft_coord.wire.limits import MAX_ADDRESS_BYTES


def target(address: str) -> str:
    """What grpc dials for an address as users write it: `host:port`, `http://host:port`, `[::1]:29510`.

    Raises: SettingError: there is no host or no port in it.
    """
    bare = address.strip()
    if bare.startswith("https://"):
        raise SettingError(f"{bare[:MAX_ADDRESS_BYTES]!r} asks for TLS, which is not there yet; give http://host:port")
    if bare.startswith("http://"):
        bare = bare.removeprefix("http://").rstrip("/")
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s/:\[\]]+):(\d{1,5})", bare)
    if match is None or not 0 < int(match[2]) < 65536 or len(bare) > MAX_ADDRESS_BYTES:
        raise SettingError(
            f"{address[:MAX_ADDRESS_BYTES]!r} is no address; give host:port, for example localhost:29510"
        )
    return bare


def targets(addresses: str) -> tuple[str, ...]:
    """What grpc dials for one address or several with commas between them, in order, each once.

    Raises: SettingError: one of them is none, or there is none.
    """
    return tuple(dict.fromkeys(target(address) for address in addresses.split(",")))


def host_of(address: str) -> str:
    """The host of an address as `target` gives it, without an IPv6 address's brackets."""
    return address.rpartition(":")[0].strip("[]")


def interface_of(bind: str) -> str:
    """The host that `host:port` listens at, or "" for all interfaces, however they are written."""
    host = host_of(bind)
    with suppress(ValueError):
        return "" if ipaddress.ip_address(host).is_unspecified else host
    return host


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
