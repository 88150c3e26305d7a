"""Who else is fetching a state, so that newcomers can give each other what they have.

A receiver that relays says where it can be reached whenever it asks for something. It is told of the others that did so
lately, and then asks those as well.

Law of this file: pure decisions about addresses and times; no I/O, no clock. Bounded, whoever asks.
"""

from __future__ import annotations

from collections.abc import Container
from typing import final

from tft_ckpt.http.routes import FELLOWS_MAX
from tft_ckpt.key import StateKey

__all__ = ["Tracker"]

_FORGOTTEN_AFTER_S = 30.0
_RELAYS_MAX = 64


@final
class Tracker:
    """The relays of each state, those heard of last at the end."""

    def __init__(self) -> None:
        self._relays: dict[StateKey, dict[str, float]] = {}

    def heard(self, key: StateKey, url: str, now_s: float) -> None:
        """A receiver of that state named its own address; with too many, the one longest unheard of is forgotten."""
        relays = self._relays.setdefault(key, {})
        relays.pop(url, None)
        relays[url] = now_s
        if len(relays) > _RELAYS_MAX:
            del relays[next(iter(relays))]

    def fellows(self, key: StateKey, asker: str | None, now_s: float) -> list[str]:
        """The others that fetch that state, those heard of last first, and never the asker."""
        relays = self._relays.get(key, {})
        for url in [url for url, heard_s in relays.items() if now_s - heard_s > _FORGOTTEN_AFTER_S]:
            del relays[url]
        return [url for url in reversed(relays) if url != asker][:FELLOWS_MAX]

    def keep_only(self, keys: Container[StateKey]) -> None:
        """Forget the relays of all other states."""
        for key in [key for key in self._relays if key not in keys]:
            del self._relays[key]
