"""Texts from the network, for errors and logs.

Another process chose such a text. It may be long, and may contain escape sequences of terminals, or line breaks that
forge lines of a log.

Law of this file: text in, text out.
"""

from __future__ import annotations

from typing import Final

__all__ = ["TEXT_MOST", "printable"]

TEXT_MOST: Final = 400
"""Maximum number of characters of a text."""


def printable(text: bytes | str) -> str:
    """Return a text from the network in one line, without control characters, cut to TEXT_MOST characters."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[: TEXT_MOST + 1])
    return shown if len(shown) <= TEXT_MOST else f"{shown[: TEXT_MOST - 1]}…"
