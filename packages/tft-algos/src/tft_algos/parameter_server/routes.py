"""The HTTP interface between a client and a parameter server, for both sides.

``GET /new_session`` with ``authorization: Bearer <secret>`` opens a session. The answer is JSON with three fields:
``session_id``, ``key``, and ``store_addr``, which is the ``host:port/prefix`` at which both sides configure their
groups. The server is rank 0 and the client is rank 1 of 2. Over the group, each side then proves that it knows the key,
see `joining`. The key is sent nowhere else.

The answers:

====  ==============================================================================
200   the session is open; the server waits for the client to configure its group
401   the secret is missing or wrong
404   the path is not ``/new_session``
500   the server can't make a process group
503   the server has as many sessions as it allows, its store is too full, or it stops
====  ==============================================================================

Every answer except 200 has one sentence of text as its body.

A client that sends ``tft-holds-connection: 1`` keeps its connection until it has joined. The server then sends the JSON
as one line, and ends the answer as soon as its own side has joined or the session is over. If the connection ends
before, the server ends the session at once. A client without the header may disconnect after the answer. If it never
joins, its session ends after `join_timeout`.

Law of this file: spelling only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tft_algos.errors import ConfigError

__all__ = ["ANSWER_BYTES_MAX", "HOLDS_HEADER", "NEW_SESSION_ROUTE", "OpenedSession", "parse_address", "parse_answer"]

NEW_SESSION_ROUTE = "/new_session"
HOLDS_HEADER = "tft-holds-connection"
ANSWER_BYTES_MAX = 4096
_STORE_ADDR_CHARS_MAX = 512


@dataclass(frozen=True)
class OpenedSession:
    """A session that a server has opened for a client.

    Args:
        session_id: of the session.
        store_addr: `host:port/prefix` for both groups.
        key: known to the two sides only, 64 hexadecimal digits.
    """

    session_id: str
    store_addr: str
    key: str = field(repr=False)

    def body(self) -> bytes:
        """Return the body of the answer."""
        fields = {"session_id": self.session_id, "store_addr": self.store_addr, "key": self.key}
        return json.dumps(fields).encode("ascii")


def parse_answer(body: bytes) -> OpenedSession:
    """Parse the untrusted output of `OpenedSession.body`. The caller has bounded its length by `ANSWER_BYTES_MAX`.

    Raises: ValueError: the body is invalid.
    """
    try:
        fields = json.loads(body)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if type(fields) is not dict:
        raise ValueError("it is not a JSON object")
    session_id, store_addr = fields.get("session_id"), fields.get("store_addr")
    if type(session_id) is not str or not re.fullmatch(r"[A-Za-z0-9-]{1,64}", session_id):
        raise ValueError("its session_id is missing or invalid")
    if type(store_addr) is not str or not 0 < len(store_addr) <= _STORE_ADDR_CHARS_MAX:
        raise ValueError("its store_addr is missing or invalid")
    key = fields.get("key")
    if type(key) is not str or not re.fullmatch(r"[0-9a-f]{64}", key):
        raise ValueError("its key is missing or invalid; client and server need the same version of tft_algos")
    return OpenedSession(session_id, store_addr, key)


def parse_address(address: str, *, has_certificates: bool = False) -> tuple[str, int]:
    """Return the host and the port of a parameter server's address.

    Raises: ConfigError: the address is not `http://host:port/new_session`, or `https://` for a process with
        certificates.
    """
    try:
        parts = urlsplit(address)
        if parts.scheme == "https" and not has_certificates:
            raise ConfigError(
                f"{str(address)[:200]!r} asks for TLS, and this process has no certificates; set TFT_TLS_CERT, "
                "TFT_TLS_KEY and TFT_TLS_CA"
            )
        if (
            parts.scheme in ("http", "https")
            and parts.hostname
            and parts.port
            and parts.path in ("", "/", NEW_SESSION_ROUTE)
        ):
            return parts.hostname, parts.port
    except (ValueError, AttributeError):
        pass
    raise ConfigError(
        f"{str(address)[:200]!r} is not the address of a parameter server; give what its address() returns, such as "
        f"http://host:29600{NEW_SESSION_ROUTE}"
    )
