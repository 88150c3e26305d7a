"""Time limits of one `configure` for its store, for the other ranks and for the connections to them.

An unreachable member must not cost the other members the ordinary timeout of an operation. So a `configure` of a quorum
waits only seconds in each of these phases, and the next quorum is another chance. A phase may need longer, on a slow
machine or with a slow resolver. Then its limit doubles for the next time, up to the ordinary timeout.

A success reduces the limit to what that success needed. The success of a smaller group does not, because that group may
lack the slow rank. The slow rank needs the time as soon as it is in a quorum again.

Law of this file: numbers only; no clock, no I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final, final

__all__ = ["SHORTEST_S", "Patience", "Phase"]


class Phase(enum.Enum):
    """The phases in which a `configure` waits."""

    STORE = "store"  # a connection to the rendezvous store, and its first answer
    RANKS = "ranks"  # all ranks put their addresses into the store
    CONNECTIONS = "connections"  # to all other ranks


SHORTEST_S: Final = {Phase.STORE: 2.0, Phase.RANKS: 2.5, Phase.CONNECTIONS: 2.0}
# A limit near the time of the last success would fail the next time.
_SPARE: Final = 2.0
# After this many smaller groups in a row, the slow rank is considered gone.
_SMALLER_GROUPS_MAX: Final = 10


@final
class Patience:
    """The limits of one process group, from one `configure` to the next."""

    def __init__(self) -> None:
        self._bounds_s = dict(SHORTEST_S)
        self._failed_sizes: dict[Phase, int] = {}  # the largest group that took longer, while the limit is raised
        self._smaller: dict[Phase, int] = {}  # successes of smaller groups since then

    def state(self) -> dict[str, list[float]]:
        """Return the limits in a form that `restore` takes, in another process too."""
        return {
            phase.value: [self._bounds_s[phase], self._failed_sizes.get(phase, 0), self._smaller.get(phase, 0)]
            for phase in Phase
        }

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue with the limits that `state` returned. An empty state changes nothing."""
        for name, (bound_s, failed_size, smaller) in state.items():
            phase = Phase(name)
            self._bounds_s[phase] = bound_s
            self._failed_sizes[phase] = int(failed_size)
            self._smaller[phase] = int(smaller)

    def bound_s(self, phase: Phase, ordinary_s: float) -> float:
        """Return how long this phase may take, in seconds; at most the ordinary timeout."""
        return min(self._bounds_s[phase], ordinary_s)

    def timed_out(self, phase: Phase, ordinary_s: float, world_size: int) -> None:
        """Double the limit of a phase that exceeded it, up to the ordinary timeout."""
        self._bounds_s[phase] = max(SHORTEST_S[phase], min(2 * self._bounds_s[phase], ordinary_s))
        self._failed_sizes[phase] = max(world_size, self._failed_sizes.get(phase, 0))
        self._smaller[phase] = 0

    def succeeded(self, phase: Phase, took_s: float, world_size: int) -> None:
        """Reduce the limit of a phase to the shortest one with room for the time that it took."""
        if self._bounds_s[phase] == SHORTEST_S[phase]:
            return
        if phase is not Phase.STORE and world_size < self._failed_sizes[phase]:
            self._smaller[phase] += 1
            if self._smaller[phase] < _SMALLER_GROUPS_MAX:
                return
        bound_s = SHORTEST_S[phase]
        while bound_s < min(_SPARE * took_s, self._bounds_s[phase]):
            bound_s *= 2
        self._bounds_s[phase] = min(bound_s, self._bounds_s[phase])
        self._failed_sizes[phase] = world_size
        self._smaller[phase] = 0
