"""Random bad links: the links of a simulated job that fail, and for how long.

In some of these jobs a few links are still bad when all other faults have stopped. The job must still make progress
(R1).

Law of this file: random choice, from its own stream of random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from itertools import combinations
from typing import Final, final

from tft_coord.core.types import Via
from tft_sim.cluster import Cluster
from tft_sim.links import Link, all_of, both_ways

PERMANENT_SHARE: Final = 0.5  # of the jobs with bad links
DURATION_MS: Final = (500, 9_000)
INTERVAL_MS: Final = (300, 4_000)


@final
class LinkFaults:
    """The bad links of one job.

    Args:
        cluster: of the job.
        rng: makes the random choices.
        is_calm: whether faults have stopped.
    """

    def __init__(self, cluster: Cluster, rng: random.Random, is_calm: Callable[[], bool]) -> None:
        self._cluster = cluster
        self._rng = rng
        self._is_calm = is_calm
        self._names = cluster.config.names
        self._first_ms: int | None = None
        self._kinds = (self._one_way, self._pair, self._pair, self._star, self._two_pairs, self._store, self._flap)
        self._transient_kinds = (self._one_store, self._state)

    def begin(self) -> None:
        """Schedule the first bad link."""
        self._cluster.clock.after(self._rng.randint(1_000, 6_000), self._next)

    def lasted_ms(self) -> int:
        """Return the time since the first bad link. No pause is longer than this plus the first pause."""
        return self._cluster.clock.now_ms - self._first_ms if self._first_ms is not None else 0

    def leave_some_bad(self) -> bool:
        """Mend all links, and perhaps cut a few for good.

        Returns: whether links stay bad and the job can go on. It can if every possible holder of its state is in a
            large enough set of replicas that all reach one another.
        """
        self._cluster.links.mend()
        if self._rng.random() >= PERMANENT_SHARE:
            return False
        links = self._rng.choice(self._kinds[:-1])()
        if not is_connected_enough(self._names, links, self._cluster.config.min_replicas):
            return False
        self._cut(links)
        self._cluster.marks.hit("links stayed bad")
        return True

    def _next(self) -> None:
        if self._is_calm():
            return
        links = self._rng.choice((*self._kinds, *self._transient_kinds))()
        self._cut(links)
        self._cluster.clock.after(self._rng.randint(*DURATION_MS), lambda: self._cluster.links.mend(links))
        self._cluster.clock.after(self._rng.randint(*INTERVAL_MS), self._next)

    def _cut(self, links: Collection[Link]) -> None:
        self._first_ms = self._cluster.clock.now_ms if self._first_ms is None else self._first_ms
        shown = [f"{one}-{other} {via.value}" for one, other, via in links]
        self._cluster.trace("links", f"cut {', '.join(sorted(shown))}")
        self._cluster.links.cut(links)

    # Each kind of fault is a method below.

    def _random_pair(self) -> tuple[str, str]:
        one, other = self._rng.sample(self._names, 2)
        return one, other

    def _one_way(self) -> list[Link]:
        self._cluster.marks.hit("links: one way")
        return [(*self._random_pair(), Via.GROUP)]

    def _pair(self) -> list[Link]:
        self._cluster.marks.hit("links: a pair")
        return both_ways(*self._random_pair())

    def _star(self) -> list[Link]:
        self._cluster.marks.hit("links: a star")
        return all_of(self._rng.choice(self._names), self._names)

    def _two_pairs(self) -> list[Link]:
        names = self._rng.sample(self._names, min(4, len(self._names) // 2 * 2))
        self._cluster.marks.hit("links: two pairs" if len(names) == 4 else "links: a pair")
        return [link for first in range(0, len(names), 2) for link in both_ways(names[first], names[first + 1])]

    def _store(self) -> list[Link]:
        self._cluster.marks.hit("links: a dead store")
        return all_of(self._rng.choice(self._names), self._names, Via.STORE)

    def _one_store(self) -> list[Link]:
        self._cluster.marks.hit("links: a store that one does not reach")
        return [(*self._random_pair(), Via.STORE)]

    def _state(self) -> list[Link]:
        self._cluster.marks.hit("links: a state server")
        return [(*self._random_pair(), Via.STATE)]

    def _flap(self) -> list[Link]:
        """Let a link fail several times, each time for a moment."""
        self._cluster.marks.hit("links: one that flaps")
        links = both_ways(*self._random_pair())
        for number in range(1, 4):
            at_ms = 1_500 * number
            self._cluster.clock.after(at_ms, lambda: self._cluster.links.mend(links))
            self._cluster.clock.after(at_ms + self._rng.randint(100, 1_000), lambda: self._cut_unless_calm(links))
        return links

    def _cut_unless_calm(self, links: Collection[Link]) -> None:
        if not self._is_calm():
            self._cut(links)
            self._cluster.clock.after(1_000, lambda: self._cluster.links.mend(links))


def is_connected_enough(names: Collection[str], links: Collection[Link], min_replicas: int) -> bool:
    """Return whether each member, as the holder of the state, has enough others that all reach one another."""
    bad = {frozenset((one, other)) for one, other, via in links if via is Via.GROUP}
    for name in names:
        others = [other for other in sorted(names) if other != name]
        found = (
            not any(frozenset(pair) in bad for pair in combinations((name, *chosen), 2))
            for chosen in combinations(others, min_replicas - 1)
        )
        if not any(found):
            return False
    return True
