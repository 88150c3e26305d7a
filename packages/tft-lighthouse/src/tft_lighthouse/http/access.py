"""Who may see and who may change what, over HTTP.

With a secret, every request but those for health must show it. Without one, everybody whom the port serves may read,
and only this machine may change anything. A browser on this machine runs the scripts of any page that its user opens.
Such a page can't read the answers of another origin, but it can send requests, and it can give its own name this
machine's address. So a change must come from this port's own page, or from no page, and under a name of this machine.

Law of this file: facts of a request to a denial; it knows nothing of aiohttp.
"""

from __future__ import annotations

import base64
import binascii
import enum
import ipaddress
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, final
from urllib.parse import urlsplit

from tft_coord.lighthouse import Gate, is_loopback

AUTHORIZATION: Final = "authorization"
_BASIC: Final = "Basic "
_HOST_HEADER: Final = re.compile(r"(\[[^\[\]]+\]|[^\[\]:]+)(:[0-9]{1,5})?")  # a name with a tail is another name
_MAPPED: Final = "::ffff:"  # an IPv4 address at a socket for both versions


class Kind(enum.Enum):
    """What a request asks for."""

    HEALTH = "health"
    READ = "read"
    CHANGE = "change"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """The facts of a request.

    Args:
        address: of the other end of the connection.
        host: the Host header.
        origin: the Origin header, or None.
        authorization: the Authorization header, or "".
        is_forwarded: a proxy has sent it for another client.
    """

    address: str
    host: str
    origin: str | None = None
    authorization: str = field(default="", repr=False)
    is_forwarded: bool = False


@dataclass(frozen=True, slots=True)
class Denial:
    """The answer to a request that is denied: the HTTP status, a sentence, and additional headers."""

    status: int
    sentence: str
    headers: Mapping[str, str] = field(default_factory=dict)


@final
class Access:
    """The rules of one port.

    Args:
        gate: knows the secrets.
        names: the names by which this machine is reached, besides its addresses and localhost.
        insecure: without a secret, other machines are served too.
    """

    def __init__(self, gate: Gate, *, names: Collection[str], insecure: bool) -> None:
        self._gate = gate
        self._names = frozenset(name.lower().strip("[]") for name in names if name)
        self._insecure = insecure

    def denial(self, visitor: Visitor, kind: Kind) -> Denial | None:
        """Return why a request is denied, or None."""
        if kind is Kind.HEALTH:
            return None
        if kind is Kind.CHANGE and visitor.origin is not None and not _is_same_origin(visitor):
            return Denial(403, "this request comes from the page of another server; use the lighthouse's own page")
        if self._gate.has_secret:
            return None if self.shows_secret(visitor, kind) else NO_SECRET
        if (kind is Kind.CHANGE or not self._insecure) and not self._is_own_name(visitor.host):
            return Denial(
                421, f"{visitor.host[:64]!r} is no name of this machine; use its address, its host name, or localhost"
            )
        if kind is Kind.CHANGE and (visitor.is_forwarded or not is_loopback(_host(visitor.address))):
            return Denial(
                403,
                "no shared secret is set, so only this machine may drain or kill a replica; set TFT_TOKEN to the same "
                "secret in every process of the job",
            )
        return None

    def shows_secret(self, visitor: Visitor, kind: Kind) -> bool:
        """Return whether the request shows a secret that opens something; True without one."""
        return self.opens(visitor, kind) is not None

    def opens(self, visitor: Visitor, kind: Kind) -> str | None:
        """Return what the secret of the request opens, as `Gate.opens` does.

        A browser asks its user for a name and a password, and then sends the password with every request, also for the
        pages of others. It opens only what can be read; a change needs `Authorization: Bearer`, which no page can send
        for another one.
        """
        given = visitor.authorization
        if kind is not Kind.CHANGE and given.startswith(_BASIC):
            given = f"Bearer {_password_of(given)}"
        return self._gate.opens(((AUTHORIZATION, given),))

    def _is_own_name(self, host_header: str) -> bool:
        if not _HOST_HEADER.fullmatch(host_header):
            return False
        host = _host(host_header).lower()
        with suppress(ValueError):
            return bool(ipaddress.ip_address(host))  # no page can make an address its name
        return host in self._names or is_loopback(host)


NO_SECRET: Final = Denial(
    401,
    "this lighthouse requires a shared secret, and the request had none or a different one; send the header "
    "Authorization: Bearer with it, or to read, the secret as the password of any user",
    {"WWW-Authenticate": 'Basic realm="tft-lighthouse"'},
)


def _is_same_origin(visitor: Visitor) -> bool:
    try:
        return urlsplit(visitor.origin or "").netloc.lower() == visitor.host.lower() != ""
    except ValueError:
        return False


def _host(text: str) -> str:
    """Return the host in `host:port`, `[host]:port` or `host`."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    host = text if text.count(":") > 1 else text.partition(":")[0]
    return host.removeprefix(_MAPPED)


def _password_of(basic: str) -> str:
    try:
        decoded = base64.b64decode(basic.removeprefix(_BASIC), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return decoded.partition(":")[2]
