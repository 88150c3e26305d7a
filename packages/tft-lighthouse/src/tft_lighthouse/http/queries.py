"""The queries of the routes: which keys and words each of them takes.

Law of this file: a query to a sentence about what is wrong with it; it knows nothing of aiohttp.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from tft_lighthouse.history import IncidentKind

SHOWN_MOST: Final = 64  # characters
_OF_A_CHANGE: Final = ("job", "reason")
KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "/status": (),
    "/metrics": (),
    "/api/v1/status": (),
    "/api/v1/incidents": ("job", "kind", "after", "limit"),
    "/api/v1/events": ("after",),
    "/api/v1/timeline": ("job", "after"),
    "/replica/{replica}/kill": _OF_A_CHANGE,
    "/replica/{replica}/drain": _OF_A_CHANGE,
}  # the page and health ignore their query
WORDS: Final = {"kind": tuple(kind.value for kind in IncidentKind)}


def fault(route: str, query: Collection[tuple[str, str]]) -> str:
    """Return what is wrong with the keys and words of a query, as one sentence; "": nothing.

    Args:
        route: as the router writes it.
        query: its keys and values, in their order.
    """
    known = KEYS.get(route)
    if known is None:
        return ""
    names = [name for name, _ in query]
    for name, value in query:
        if name not in known:
            keys = f"has {', '.join(known)}" if known else "takes none"
            return f"unknown key {name[:SHOWN_MOST]!r} in the query; {route} {keys}"
        if names.count(name) > 1:
            return f"{name} is {names.count(name)} times in the query; give it once"
        if name in WORDS and value not in WORDS[name]:
            return f"{name} is {value[:SHOWN_MOST]!r}; give {', '.join(WORDS[name])}"
    return ""
