"""The HTTP interface between two processes, as both sides spell it.

``GET /state/{key}/manifest`` gives the manifest, ``GET /state/{key}/data`` the run of bytes or a range of it. A source
that does not have the state yet keeps the request open for as long as the header ``x-tft-wait-ms`` allows. The answers:

====  ==========================================================================================
200   here it is; 206 a range of it
400   the request can't be understood
401   the token is missing or wrong
409   this source has another state (its key in ``x-tft-key``) and will not have the one asked for
410   taking the state failed at this source
416   the range lies outside the data
503   not here yet, or shutting down: ask again
====  ==========================================================================================

Every answer but 200 and 206 has one sentence of text as its body.

Law of this file: spelling only.
"""

from __future__ import annotations

from tft_ckpt.key import StateKey

__all__ = ["KEY_HEADER", "WAIT_HEADER", "WAIT_MS_MAX", "authorization", "data_path", "manifest_path"]

WAIT_HEADER = "x-tft-wait-ms"
KEY_HEADER = "x-tft-key"
WAIT_MS_MAX = 60_000

MANIFEST_ROUTE = "/state/{key}/manifest"
DATA_ROUTE = "/state/{key}/data"


def manifest_path(key: StateKey) -> str:
    """Path of a state's manifest."""
    return MANIFEST_ROUTE.format(key=key)


def data_path(key: StateKey) -> str:
    """Path of a state's run of bytes."""
    return DATA_ROUTE.format(key=key)


def authorization(token: str) -> str:
    """Value of the authorization header for a job's token."""
    return f"Bearer {token}"
