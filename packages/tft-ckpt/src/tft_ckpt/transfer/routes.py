"""The HTTP interface between two processes, for both sides.

``GET /state/{key}/manifest`` returns the manifest, and ``GET /state/{key}/data`` the payload or a range of it. A source
without the state keeps the request open for as long as the header ``x-tft-wait-ms`` allows.

A process that is still receiving serves its finished chunks as a relay. It says so with ``x-tft-partial: 1`` on its
manifest. ``GET /state/{key}/chunks`` returns its chunks and peers as JSON. ``have`` is a bitmap of the chunks in hex
digits, little-endian (bit 0 of the first byte is chunk 0). ``fellows`` are the URLs of peers that fetch this state and
relay it.

A relay sends its own URL in ``x-tft-relay`` with its requests for manifest and chunks. With ``x-tft-wait-ms`` the
request for chunks is kept open until the number of chunks differs from ``x-tft-have-count``.

The answers:

====  ==========================================================================================
200   success; 206 for a range
400   the request is malformed
401   the token is missing or wrong
409   this source has another state (its key in ``x-tft-key``) and will not have the requested one
410   taking the state failed at this source
416   the range is outside the data
503   not available yet (at a relay: not these chunks), or shutting down: ask again
====  ==========================================================================================

Every answer except 200 and 206 has one sentence of text as its body.

Law of this file: spelling only.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tft_ckpt.key import StateKey

__all__ = [
    "HAVE_COUNT_HEADER",
    "KEY_HEADER",
    "PARTIAL_HEADER",
    "PEERS_MAX",
    "RELAY_HEADER",
    "WAIT_HEADER",
    "WAIT_MS_MAX",
    "Token",
    "admits",
    "authorization",
    "chunks_body",
    "chunks_bytes_max",
    "chunks_path",
    "data_path",
    "manifest_path",
    "parse_chunks",
    "shown_token",
]

WAIT_HEADER = "x-tft-wait-ms"
KEY_HEADER = "x-tft-key"
RELAY_HEADER = "x-tft-relay"
PARTIAL_HEADER = "x-tft-partial"
HAVE_COUNT_HEADER = "x-tft-have-count"
WAIT_MS_MAX = 60_000
PEERS_MAX = 32
URL_BYTES_MAX = 300

MANIFEST_ROUTE = "/state/{key}/manifest"
DATA_ROUTE = "/state/{key}/data"
CHUNKS_ROUTE = "/state/{key}/chunks"


def manifest_path(key: StateKey) -> str:
    """Return the path of a state's manifest."""
    return MANIFEST_ROUTE.format(key=key)


def data_path(key: StateKey) -> str:
    """Return the path of a state's payload."""
    return DATA_ROUTE.format(key=key)


def chunks_path(key: StateKey) -> str:
    """Return the path of the list of a state's chunks and of its peers."""
    return CHUNKS_ROUTE.format(key=key)


def chunks_body(have: bytes | bytearray, peers: Sequence[str]) -> bytes:
    """Return the body of an answer on `chunks_path`, from a bitmap of the chunks and the URLs of peers."""
    return json.dumps({"have": have.hex(), "fellows": list(peers)}, separators=(",", ":")).encode("ascii")


def parse_chunks(body: bytes, num_chunks: int) -> tuple[bytes, tuple[str, ...]]:
    """Parse the untrusted output of `chunks_body`. The caller has bounded its length by `chunks_bytes_max`.

    Returns: the bitmap, of exactly as many bits as chunks (rounded up to a byte), and the URLs.
    Raises: ValueError: the body is invalid.
    """
    try:
        fields = json.loads(body)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if type(fields) is not dict or set(fields) != {"have", "fellows"}:
        raise ValueError("its fields are not `have` and `fellows`")
    text, peers = fields["have"], fields["fellows"]
    if type(text) is not str or len(text) != 2 * (-(-num_chunks // 8)):
        raise ValueError("its bitmap does not fit this state's chunks")
    if type(peers) is not list or len(peers) > PEERS_MAX:
        raise ValueError("`fellows` is not a list, or is too long")
    if any(type(peer) is not str or len(peer) > URL_BYTES_MAX for peer in peers):
        raise ValueError("`fellows` contains an invalid address")
    have = bytes.fromhex(text)
    if len(have) != -(-num_chunks // 8) or int.from_bytes(have, "little") >> num_chunks:
        raise ValueError("its bitmap does not fit this state's chunks")
    return have, tuple(peers)


def chunks_bytes_max(num_chunks: int) -> int:
    """Return the maximum length of an answer on `chunks_path`."""
    return 64 + 2 * (-(-num_chunks // 8)) + PEERS_MAX * (6 * URL_BYTES_MAX + 3)


Token: TypeAlias = "str | Callable[[], Sequence[str]] | None"
"""A job's token, or what returns the tokens of the moment: the first is shown, and all are accepted; None: no token."""


def authorization(token: str) -> str:
    """Return the value of the authorization header for a job's token."""
    return f"Bearer {token}"


def shown_token(token: Token) -> str | None:
    """Return the token that a request shows now, or None."""
    return next(iter(token()), None) if callable(token) else token


def admits(token: Token, header: str) -> bool:
    """Return whether a request with that authorization header may be answered."""
    if token is None:
        return True
    given = header.encode("utf-8", "surrogateescape")
    accepted = token() if callable(token) else (token,)
    # Each is compared, so that the time does not tell which one fits.
    return sum(hmac.compare_digest(given, authorization(each).encode()) for each in accepted) > 0
