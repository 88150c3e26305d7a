"""How long one `configure` waits for its store, for the other ranks and for connections to them.

A member that some others can't reach must not cost them the ordinary time-out of an operation. So a `configure` that
belongs to a quorum waits for seconds in each of these phases; the next quorum is another chance. Where a phase does
need longer, on a slow machine or with a slow resolver, its own bound is twice as long the next time, up to the ordinary
time-out. A success brings the bound back to what that success needed. The success of a smaller group does not: the rank
that was slow may be the one that it left out, and that one needs the time as soon as it is in a quorum again.

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
# So many smaller groups in a row, and the slow rank is taken to be gone.
_SMALLER_MOST: Final = 10


@final
class Patience:
    """The bounds of one process group, from one `configure` to the next."""

    def __init__(self) -> None:
        self._bounds_s = dict(SHORTEST_S)
        self._failed_sizes: dict[Phase, int] = {}  # the largest group that took longer, while the bound is raised
        self._smaller: dict[Phase, int] = {}  # successes of smaller groups since

    def bound_s(self, phase: Phase, ordinary_s: float) -> float:
        """Return how long this phase may take, in seconds; at most the ordinary time-out."""
        return min(self._bounds_s[phase], ordinary_s)

    def passed(self, phase: Phase, ordinary_s: float, world_size: int) -> None:
        """Double the bound of a phase that took longer than it, up to the ordinary time-out."""
        self._bounds_s[phase] = max(SHORTEST_S[phase], min(2 * self._bounds_s[phase], ordinary_s))
        self._failed_sizes[phase] = max(world_size, self._failed_sizes.get(phase, 0))
        self._smaller[phase] = 0

    def succeeded(self, phase: Phase, took_s: float, world_size: int) -> None:
        """Bring the bound of a phase back to the shortest one that leaves room for what it took."""
        if self._bounds_s[phase] == SHORTEST_S[phase]:
            return
        if phase is not Phase.STORE and world_size < self._failed_sizes[phase]:
            self._smaller[phase] += 1
            if self._smaller[phase] < _SMALLER_MOST:
                return
        bound_s = SHORTEST_S[phase]
        while bound_s < min(_SPARE * took_s, self._bounds_s[phase]):
            bound_s *= 2
        self._bounds_s[phase] = min(bound_s, self._bounds_s[phase])
        self._failed_sizes[phase] = world_size
        self._smaller[phase] = 0
