"""How long one `configure` waits for its store, for the other ranks and for connections to them.

A member that some others can't reach must not cost them the ordinary time-out of an operation. So a `configure` that
belongs to a quorum waits for seconds in each of these phases; the next quorum is another chance. Where a phase does
need longer, on a slow machine or with a slow resolver, its own bound is twice as long the next time, up to the ordinary
time-out. A success brings the bound back to what that success needed.

The law of this file: numbers only; no clock, no I/O.
"""

from __future__ import annotations

import enum
from typing import Final, final

__all__ = ["SHORTEST_S", "Patience", "Phase"]


class Phase(enum.Enum):
    """What a `configure` waits for."""

    STORE = "store"  # a connection to the rendezvous store, and its first answer
    RANKS = "ranks"  # all ranks put their addresses into the store
    CONNECTIONS = "connections"  # to all other ranks


SHORTEST_S: Final = {Phase.STORE: 2.0, Phase.RANKS: 2.5, Phase.CONNECTIONS: 2.0}
# A success that took nearly all of its time would fail the next time.
_SPARE: Final = 2.0


@final
class Patience:
    """The bounds of one process group, from one `configure` to the next."""

    def __init__(self) -> None:
        self._bounds_s = dict(SHORTEST_S)

    def bound_s(self, phase: Phase, ordinary_s: float) -> float:
        """Return how long this phase may take, in seconds; at most the ordinary time-out."""
        return min(self._bounds_s[phase], ordinary_s)

    def passed(self, phase: Phase, ordinary_s: float) -> None:
        """Double the bound of a phase that took longer than it, up to the ordinary time-out."""
        self._bounds_s[phase] = max(SHORTEST_S[phase], min(2 * self._bounds_s[phase], ordinary_s))

    def succeeded(self, phase: Phase, took_s: float) -> None:
        """Bring the bound of a phase back to the shortest one that leaves room for what it took."""
        if self._bounds_s[phase] == SHORTEST_S[phase]:
            return
        bound_s = SHORTEST_S[phase]
        while bound_s < min(_SPARE * took_s, self._bounds_s[phase]):
            bound_s *= 2
        self._bounds_s[phase] = min(bound_s, self._bounds_s[phase])
