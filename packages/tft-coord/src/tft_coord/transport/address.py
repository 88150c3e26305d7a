"""The address of a server as users write it.

Law of this file: text alone; it imports no grpc, so that settings are checked before grpc is needed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import unquote

from tft_coord.errors import ConfigError
from tft_coord.wire.limits import MAX_ADDRESS_BYTES


def target(address: str) -> str:
    """Return grpc's form of an address as users write it: `host:port`, `http://host:port`, `[::1]:29510`.

    The scheme may be https. The certificates of a process decide whether it uses TLS, see `check_scheme`.

    Raises: ConfigError: there is no host or no port in it.
    """
    bare = address.strip()
    for scheme in ("http://", "https://"):
        if bare.startswith(scheme):
            bare = bare.removeprefix(scheme).rstrip("/")
            break
    if "@" in bare:  # it may be a password, which no log should have
        raise ConfigError(
            "an address has a user or a password in front of an @, and none is used; give host:port, such as "
            "localhost:29510"
        )
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s/:\[\]]+):(\d{1,5})", bare)
    if match is None or not 0 < int(match[2]) < 65536 or len(bare) > MAX_ADDRESS_BYTES:
        raise ConfigError(f"{address[:MAX_ADDRESS_BYTES]!r} is not an address; give host:port, such as localhost:29510")
    return bare


def targets(addresses: str) -> tuple[str, ...]:
    """Return grpc's form of one address or several with commas between them, in order, each once.

    Raises: ConfigError: one of them is invalid, or there is none.
    """
    return tuple(dict.fromkeys(target(address) for address in addresses.split(",")))


def index_of(address: str, known: Sequence[str]) -> int | None:
    """Return the index of an address that a peer names, among those of the user; None: it is none of them.

    Args:
        address: as `target` takes it, or not valid.
        known: as `targets` gives them.
    """
    with suppress(ConfigError, ValueError):
        return known.index(target(address))
    return None


def check_scheme(addresses: str, *, has_certificates: bool) -> None:
    """Check that no address asks for TLS in a process that has no certificates.

    Raises: ConfigError: one does. Without TLS the process would show its secret to everybody on the way.
    """
    asks = next((each.strip() for each in addresses.split(",") if each.strip().startswith("https://")), None)
    if asks is not None and not has_certificates:
        raise ConfigError(
            f"{asks[:MAX_ADDRESS_BYTES]!r} asks for TLS, and this process has no certificates; set TFT_TLS_CERT, "
            "TFT_TLS_KEY and TFT_TLS_CA, or give http://host:port"
        )


def check_host(name: str, host: str) -> None:
    """Check that `target` accepts that host with a port behind it.

    Args:
        name: of the setting.
        host: a host's name or its address, an IPv6 one with brackets or without.
    Raises: ConfigError: `target` rejects it; the message names the setting.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if ":" in bare or bare != host:  # brackets would hide a port behind a name from `target`
            ipaddress.IPv6Address(bare)
        target(f"http://{join_host_port(host, 65535)}")
    except (ConfigError, ValueError):
        raise ConfigError(
            f"{name} is {host[:MAX_ADDRESS_BYTES]!r}; give a host's name or address without a port, for example node-1 "
            "or 10.0.0.1"
        ) from None


def host_of(address: str) -> str:
    """Return the host of an address as `target` gives it, without an IPv6 address's brackets."""
    return address.rpartition(":")[0].strip("[]")


def interface_of(bind: str) -> str:
    """Return the host that `host:port` listens at, or "" for all interfaces, however they are written."""
    host = host_of(bind)
    with suppress(ValueError):
        return "" if ipaddress.ip_address(host).is_unspecified else host
    return host


def is_loopback(host: str) -> bool:
    """Return whether that name or address means the local machine on every machine."""
    if host in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def join_host_port(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def peer_address(peer: str) -> str:
    """Return the address of a caller as `host:port`; gRPC's form is `ipv6:%5B::1%5D:35658`."""
    return unquote(peer.removeprefix("ipv4:").removeprefix("ipv6:"))
