"""The address at which other hosts reach this process.

A host's own name is the best address if other hosts can resolve it. On many hosts it resolves only to the host itself.
Then this file takes the source address of packets to the outside. Neither is certain, so the user can set the address.

Law of this file: facts of sockets and the resolver about this host, and the spelling of addresses.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tft_ckpt.errors import ConfigError, StateUnavailableError
from tft_ckpt.forks import forks_wait
from tft_ckpt.transfer.connection import opened

__all__ = ["BACKLOG", "advertised_url", "interface_address", "is_of_loopback", "is_tls", "listen", "parse_url"]

# The maximum number of waiting connections. A whole job may connect to one source at once.
BACKLOG = 1024

# Addresses reserved for documentation, so no host has them. Connecting a datagram socket sends nothing.
_OUTSIDE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


# Linux: the request for an interface's IPv4 address, and the kernel's list of the IPv6 addresses.
_SIOCGIFADDR = 0x8915
_NAME_BYTES_MAX = 15
_IPV6_LIST = Path("/proc/net/if_inet6")
_LINK_LOCAL = ipaddress.ip_network("fe80::/10")


def listen(bind: str | None, port: int, interface: str | None = None) -> socket.socket:
    """Return a listening TCP socket.

    Args:
        bind: a host name or address, or None for all interfaces, including IPv6 if the host has it.
        port: 0 for a free port.
        interface: name of the network interface whose address to listen on, in place of bind.

    Raises: ConfigError: the address is not this host's, the port is taken, or bind and interface are both given. Or
        the interface does not exist or has no address.
    """
    if interface is not None:
        if bind is not None:
            raise ConfigError(f"bind is {bind!r} and interface is {interface!r}; give one of them")
        bind = interface_address(interface)
    dual = bind in (None, "::") and socket.has_dualstack_ipv6()
    host = bind if bind is not None else "::" if dual else "0.0.0.0"
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with forks_wait():
            listener = socket.create_server(info[4][:2], family=info[0], backlog=BACKLOG, dualstack_ipv6=dual)
            opened.add(listener)
        return listener
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"can't listen on {host} port {port}: {error}; choose another bind or port") from error


def is_of_loopback(listener: socket.socket) -> bool:
    """Return whether only this machine can reach a listening socket."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def interface_address(name: str) -> str:
    """Return the address of a network interface of this host: its IPv4 address, else a reachable IPv6 address.

    Raises: ConfigError: the interface does not exist or has no address, or this system can't find it.
    """
    if sys.platform != "linux":
        raise ConfigError(f"interface is {name!r}, but interface works only on Linux; give bind instead")
    known = [each for _, each in socket.if_nameindex()]
    if name not in known:
        raise ConfigError(f"interface is {name!r}, which this host does not have; give one of {', '.join(known)}")
    address = _ipv4_of(name) or _ipv6_of(name)
    if address is None:
        raise ConfigError(f"interface {name} has no address; give an interface with an address, or give bind")
    return address


def _ipv4_of(name: str) -> str | None:
    import fcntl  # absent on Windows

    encoded = name.encode()[:_NAME_BYTES_MAX]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", encoded))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_of(name: str) -> str | None:
    try:
        lines = _IPV6_LIST.read_text().splitlines()
    except OSError:
        return None
    found = [ipaddress.IPv6Address(int(line.split()[0], 16)) for line in lines if line.split()[-1] == name]
    # A link-local address in a URL does not mean the same on another host.
    return next((str(address) for address in found if address not in _LINK_LOCAL), None)


def advertised_url(listener: socket.socket, advertise_addr: str | None, scheme: str = "http") -> str:
    """Return the URL of a listening socket for other hosts.

    Args:
        advertise_addr: host name or address, with its own port if another port is forwarded here; None to determine it
            automatically.
        scheme: http or https.

    Raises: ConfigError: advertise_addr is malformed.
    """
    port = int(listener.getsockname()[1])
    if advertise_addr is not None:
        return f"{scheme}://{_given_place(advertise_addr, port)}"
    bound = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    host = _own_host() if bound.is_unspecified else str(bound)
    return f"{scheme}://{_bracketed(host)}:{port}"


def parse_url(url: str) -> tuple[str, int]:
    """Return the host and the port of a source's URL.

    Raises: StateUnavailableError: the URL is malformed.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port and parts.path in ("", "/"):
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise StateUnavailableError(f"{url[:200]!r} is not a source's address; give http://host:port", source=url)


def is_tls(url: str) -> bool:
    """Return whether a source's URL requires TLS."""
    return url[:8].lower() == "https://"


def _given_place(text: str, port: int) -> str:
    bare_ipv6 = text.count(":") > 1 and not text.startswith("[")
    try:
        parts = urlsplit(f"http://{_bracketed(text) if bare_ipv6 else text}")
        if not parts.hostname or parts.path or parts.username is not None:
            raise ValueError("it contains more than a host and a port")
        return f"{_bracketed(parts.hostname)}:{parts.port or port}"
    except ValueError as error:
        raise ConfigError(f"advertise_addr is {text!r}: {error}; give host, host:port or [ipv6]:port") from error


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _own_host() -> str:
    name = socket.gethostname()
    try:
        found = {info[4][0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        found = set()
    if found and not any(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found):
        return name
    for family, outside in _OUTSIDE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((outside, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "localhost"
