"""Short replica ids for people: `replica_1:0f3a9c1d` instead of the whole UUID behind the name.

Law of this file: text to text. Records for machines and the wire keep the whole id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_UUID: Final = re.compile(r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")


# A replica id is `name:uuid`, or the UUID alone; a rank may follow it, as in `name:uuid/0`. A UUID in a path, in a
# longer word or of a job stays whole, because the short form would name nothing that exists.
_REPLICA_ID: Final = re.compile(
    r"(?:(?<=[^\s:/]:)|(?<![^\s\[({'\"=,])(?<!\bjob )(?<!\bjob ['\"]))"
    + _UUID.pattern
    + r"(?![\w-]|\.\w|/(?!\d+(?![\w/])))"
)


def shorten(text: str) -> str:
    """Cut the UUID of every replica id in a text to its first 8 characters."""
    return _REPLICA_ID.sub(r"\1", text) if text.count("-") >= 4 else text


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return the first names in order, and the number of the others."""
    shown = sorted(names)
    more = len(shown) - most
    return ", ".join(shown[:most]) + (f" and {more} more" if more > 0 else "")


def base_name(replica_id: str) -> str:
    """Return the user's name for the replica, without the part that is unique to one life; "" where the user
    gave none."""
    name, _, unique = replica_id.rpartition(":")
    return name if _UUID.fullmatch(unique) else ""
