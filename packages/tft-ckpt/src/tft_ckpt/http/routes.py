"""The HTTP interface between two processes, as both sides spell it.

``GET /state/{key}/manifest`` gives the manifest, ``GET /state/{key}/data`` the run of bytes or a range of it. A source
that does not have the state yet keeps the request open for as long as the header ``x-tft-wait-ms`` allows.

A process that is still receiving serves what it has already: it is a relay, and says so with ``x-tft-partial: 1`` on
its manifest. ``GET /state/{key}/chunks`` tells what is there and who else is fetching it, as JSON: ``have``, the hex
digits of a bitmap of the chunks, little-endian (bit 0 of the first byte is chunk 0), and ``fellows``, the URLs of
others that fetch this state and relay it. Who relays gives its own URL in ``x-tft-relay`` with its requests for
manifest and chunks. With ``x-tft-wait-ms`` the question for chunks is kept open until there are other than
``x-tft-have-count`` many.

The answers:

====  ==========================================================================================
200   here it is; 206 a range of it
400   the request can't be understood
401   the token is missing or wrong
409   this source has another state (its key in ``x-tft-key``) and will not have the one asked for
410   taking the state failed at this source
416   the range lies outside the data
503   not here yet (of a relay: not these chunks), or shutting down: ask again
====  ==========================================================================================

Every answer but 200 and 206 has one sentence of text as its body.

Law of this file: spelling only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tft_ckpt.key import StateKey

__all__ = [
    "FELLOWS_MAX",
    "HAVE_COUNT_HEADER",
    "KEY_HEADER",
    "PARTIAL_HEADER",
    "RELAY_HEADER",
    "WAIT_HEADER",
    "WAIT_MS_MAX",
    "authorization",
    "chunks_body",
    "chunks_bytes_max",
    "chunks_path",
    "data_path",
    "manifest_path",
    "parse_chunks",
]

WAIT_HEADER = "x-tft-wait-ms"
KEY_HEADER = "x-tft-key"
RELAY_HEADER = "x-tft-relay"
PARTIAL_HEADER = "x-tft-partial"
HAVE_COUNT_HEADER = "x-tft-have-count"
WAIT_MS_MAX = 60_000
FELLOWS_MAX = 32
URL_BYTES_MAX = 300

MANIFEST_ROUTE = "/state/{key}/manifest"
DATA_ROUTE = "/state/{key}/data"
CHUNKS_ROUTE = "/state/{key}/chunks"


def manifest_path(key: StateKey) -> str:
    """Path of a state's manifest."""
    return MANIFEST_ROUTE.format(key=key)


def data_path(key: StateKey) -> str:
    """Path of a state's run of bytes."""
    return DATA_ROUTE.format(key=key)


def chunks_path(key: StateKey) -> str:
    """Path of what is there of a state, and who else fetches it."""
    return CHUNKS_ROUTE.format(key=key)


def chunks_body(have: bytes | bytearray, fellows: Sequence[str]) -> bytes:
    """The answer on `chunks_path`, of a bitmap of the chunks and the URLs of others."""
    return json.dumps({"have": have.hex(), "fellows": list(fellows)}, separators=(",", ":")).encode("ascii")


def parse_chunks(body: bytes, num_chunks: int) -> tuple[bytes, tuple[str, ...]]:
    """Read what `chunks_body` wrote, believing nothing; the caller has bounded its length by `chunks_bytes_max`.

    Returns: the bitmap, of exactly as many bits as chunks (rounded up to a byte), and the URLs.
    Raises: ValueError: it is no such answer.
    """
    try:
        fields = json.loads(body)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if type(fields) is not dict or set(fields) != {"have", "fellows"}:
        raise ValueError("its fields are not have and fellows")
    text, fellows = fields["have"], fields["fellows"]
    if type(text) is not str or len(text) != 2 * (-(-num_chunks // 8)):
        raise ValueError("its bitmap is not one of this state's chunks")
    if type(fellows) is not list or len(fellows) > FELLOWS_MAX:
        raise ValueError("its fellows are no list, or too many")
    if any(type(fellow) is not str or len(fellow) > URL_BYTES_MAX for fellow in fellows):
        raise ValueError("a fellow is no address")
    have = bytes.fromhex(text)
    if len(have) != -(-num_chunks // 8) or int.from_bytes(have, "little") >> num_chunks:
        raise ValueError("its bitmap is not one of this state's chunks")
    return have, tuple(fellows)


def chunks_bytes_max(num_chunks: int) -> int:
    """Length that no answer on `chunks_path` exceeds."""
    return 64 + 2 * (-(-num_chunks // 8)) + FELLOWS_MAX * (6 * URL_BYTES_MAX + 3)


def authorization(token: str) -> str:
    """Value of the authorization header for a job's token."""
    return f"Bearer {token}"
