"""The peers that fetch a state at the same time, so that they can give each other their chunks.

A receiver that relays sends its address with each request. It learns of other recent relays, and then asks those too.

Law of this file: pure decisions about addresses and times; no I/O, no clock. The number of records is bounded.
"""

from __future__ import annotations

from collections.abc import Container
from typing import final

from tft_ckpt.key import StateKey
from tft_ckpt.transfer.routes import PEERS_MAX

__all__ = ["Tracker"]

_FORGOTTEN_AFTER_S = 30.0
_RELAYS_MAX = 64


@final
class Tracker:
    """The relays of each state, the most recent last."""

    def __init__(self) -> None:
        self._relays: dict[StateKey, dict[str, float]] = {}

    def record(self, key: StateKey, url: str, now_s: float) -> None:
        """Record the address of a receiver of that state. Above the maximum, the least recent one is forgotten."""
        relays = self._relays.setdefault(key, {})
        relays.pop(url, None)
        relays[url] = now_s
        if len(relays) > _RELAYS_MAX:
            del relays[next(iter(relays))]

    def peers(self, key: StateKey, requester: str | None, now_s: float) -> list[str]:
        """Return the other receivers of that state, the most recent first, without the asking one."""
        relays = self._relays.get(key, {})
        for url in [url for url, heard_s in relays.items() if now_s - heard_s > _FORGOTTEN_AFTER_S]:
            del relays[url]
        return [url for url in reversed(relays) if url != requester][:PEERS_MAX]

    def keep_only(self, keys: Container[StateKey]) -> None:
        """Forget the relays of all other states."""
        for key in [key for key in self._relays if key not in keys]:
            del self._relays[key]
