"""Failures that have come twice in a row, so that a third attempt would fail in the same way.

Law of this file: sentences only; other files decide what a repeated failure means.
"""

from __future__ import annotations

import re
from typing import final

_CHANGES = re.compile(r"0x[0-9a-fA-F]+")  # the address of an object, in its repr


@final
class Repeats:
    """A memory of the last failure.

    Failures of another kind, such as a lost peer, are not reported here and do not count.
    """

    def __init__(self) -> None:
        self._last: str | None = None

    def again(self, sentence: str) -> bool:
        """Note a failure. Returns: whether it equals the last one, apart from the addresses of objects."""
        before, self._last = self._last, _CHANGES.sub("0x", sentence)
        return before == self._last

    def forget(self) -> None:
        """Note that an attempt has succeeded."""
        self._last = None
