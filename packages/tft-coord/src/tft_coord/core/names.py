"""Replica ids as people read them: `replica_1:0f3a9c1d` in place of the whole UUID behind the name.

Law of this file: text to text. Records for machines and the wire keep the whole id.
"""

from __future__ import annotations

import re
from typing import Final

_UUID: Final = re.compile(r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")


# A replica id is `name:uuid`, or the UUID alone; a rank may stand behind it, as in `name:uuid/0`. A UUID in a path, in
# a longer word or of a job is left whole: cut, it would name something that there is not.
_REPLICA_ID: Final = re.compile(
    r"(?:(?<=[^\s:/]:)|(?<![^\s\[({'\"=,])(?<!\bjob )(?<!\bjob ['\"]))"
    + _UUID.pattern
    + r"(?![\w-]|\.\w|/(?!\d+(?![\w/])))"
)


def shorten(text: str) -> str:
    """Cut the UUID of every replica id in a text to its first 8 characters."""
    return _REPLICA_ID.sub(r"\1", text) if text.count("-") >= 4 else text


def base_name(replica_id: str) -> str:
    """The name that the user gave, without the part that is unique to one life; "" where the user gave none."""
    name, _, unique = replica_id.rpartition(":")
    return name if _UUID.fullmatch(unique) else ""
