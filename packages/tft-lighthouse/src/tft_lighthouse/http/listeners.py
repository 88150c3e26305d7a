"""The sockets of the HTTP port, bound before the lighthouse starts, so that a port in use is found at once.

Law of this file: binding.
"""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from typing import Final

from tft_coord import ConfigError
from tft_coord.lighthouse import host_of, interface_of

BACKLOG: Final = 128


def listen(bind: str) -> tuple[socket.socket, ...]:
    """Listen for HTTP at all addresses that `host:port` means; port 0 takes one free port for all of them.

    Returns: the listening sockets, at least one.
    Raises: ConfigError: none can be bound, or the port is in use at one of them.
    """
    try:
        return _listen(bind)
    except OSError as error:
        raise ConfigError(
            f"the lighthouse's HTTP port can't listen at {bind}: {_reason(error)}; end the other process, give another "
            "--http-bind, or --http-bind 0 for none"
        ) from error


def listen_for_http(bind: str, http_bind: str | None) -> tuple[socket.socket, ...]:
    """Check the port for replicas, and then listen for HTTP.

    Args:
        bind: for replicas, `host:port`.
        http_bind: for HTTP; None: there is no such port.
    Returns: the listening sockets of HTTP.
    Raises: ConfigError: one of the two can't be bound.
    """
    check_bind(bind)
    return listen(http_bind) if http_bind is not None else ()


def check_bind(bind: str) -> None:
    """Check that the port for replicas can be bound, before the HTTP port is.

    Most faults are of both ports, and grpc has no words for them.

    Raises: ConfigError: it can't.
    """
    try:
        found = _listen(bind)
    except OSError as error:
        raise ConfigError(
            f"the lighthouse can't listen at {bind}: {_reason(error)}; end the other process, or give another --bind"
        ) from error
    for each in found:
        each.close()


def _reason(error: OSError) -> str:
    return "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)


def _listen(bind: str) -> tuple[socket.socket, ...]:
    host, port = interface_of(bind), int(bind.rpartition(":")[2])
    found: list[socket.socket] = []
    try:
        if not host:
            return (_listen_everywhere(port),)
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, _, _, _, place in dict.fromkeys(places):
            address = (place[0], found[0].getsockname()[1] if found else port)
            # "localhost" may name an address that this machine does not have, such as ::1 in a container.
            with suppress(_NoSuchAddressError):
                found.append(_listen_at(family, address))
        if not found:
            raise OSError(f"{host_of(bind)} is no address of this machine")
    except OSError:
        for each in found:
            each.close()
        raise
    return tuple(found)


class _NoSuchAddressError(Exception):
    """This machine does not have the address."""


def _listen_at(family: int, address: tuple[object, ...]) -> socket.socket:
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise _NoSuchAddressError from error
        raise


def _listen_everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port), backlog=BACKLOG)
