"""A process group across replicas without tensors: the members that were configured with one key.

Law of this file: the members of a group, the results of its reductions, and the links that fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, permutations

from tft_coord.core.types import QuorumKey, Unreached, Via
from tft_sim.clock import VirtualClock
from tft_sim.invariants import Contribution, Invariants, Reduced
from tft_sim.links import FAILS_AFTER_MS, Links
from tft_sim.waiting import Waiter
from tft_sim.words import ControlWords


@dataclass(slots=True)
class _Reduction:
    given: dict[str, Contribution] = field(default_factory=dict)
    waiting: dict[str, Waiter] = field(default_factory=dict)
    complete: bool = False


class SimulatedGroup:
    """The group of the ranks that were configured with one (key, group rank).

    Its traffic uses the network: across a cut nothing is reduced, and no member hears that another has left. Each two
    of its members need a link. A member that finds a bad link gives up, and can report the peers that it did not reach.

    Args:
        key, group_rank: the name of the group.
        members: replica ids of its members.
        clock, invariants: of the simulation.
        spread_ms: returns the time after which a member learns that a reduction is complete.
        is_cut: whether the network is cut between two of the members.
        links: between the members. None: all work.
        store: replica id of the member whose rendezvous store is used.
    """

    def __init__(
        self,
        key: QuorumKey,
        group_rank: int,
        members: tuple[str, ...],
        clock: VirtualClock,
        invariants: Invariants,
        spread_ms: Callable[[], int],
        is_cut: Callable[[str, str], bool],
        links: Links | None = None,
        store: str = "",
    ) -> None:
        self.key = key
        self._group_rank = group_rank
        self._members = members
        self._clock = clock
        self._invariants = invariants
        self._spread_ms = spread_ms
        self._is_cut = is_cut
        self._links = links or Links()
        self._store = store
        self._unreached: dict[str, list[Unreached]] = {}
        self._has_link_timer = False  # a timer runs after which members notice a bad link
        self._joined: dict[str, Waiter] = {}
        self._met = False
        self._left: set[str] = set()
        self._reductions: dict[int, _Reduction] = {}
        self.is_blocked = False  # a network fault that lets no reduction end
        self._words = ControlWords(members, clock, spread_ms, self._carries_words, self._record_lost_word)

    def join(self, replica_id: str) -> Waiter:
        """Join the group. The waiter resolves to True when all members are here."""
        waiter = Waiter()
        if self._met or replica_id in self._left:
            waiter.resolve(False)
            return waiter
        if self._links.is_bad(replica_id, self._store, Via.STORE):
            report = Unreached(self._store, Via.STORE, "no connection")
            self._unreached.setdefault(replica_id, []).append(report)
            self._clock.after(FAILS_AFTER_MS, lambda: waiter.resolve(False))
            return waiter
        self._joined[replica_id] = waiter
        self.update()
        return waiter

    def unreached_by(self, replica_id: str) -> list[Unreached]:
        """Return the bad links that the member has found."""
        return self._unreached.get(replica_id, [])

    def abort(self, replica_id: str) -> None:
        """End the member's own waits, in the rendezvous or in a reduction."""
        self._words.abort(replica_id)
        waiting = [reduction.waiting.get(replica_id) for reduction in self._reductions.values()]
        for waiter in (self._joined.get(replica_id), *waiting):
            if waiter is not None:
                waiter.resolve(None)

    def leave(self, replica_id: str) -> None:
        """Remove a member that aborts, shuts down or dies. Members that met it here can't go on without it."""
        self._left.add(replica_id)
        if self._met:
            self.update()
        else:
            self._joined.pop(replica_id, None)

    def reduce(self, number: int, contribution: Contribution) -> Waiter:
        """Reduce. The waiter resolves to `Reduced` when all members have contributed, or to None on failure.

        After the last contribution each member learns the result a little later. A member that is cut off in between
        fails the reduction for those that have not learned it yet. So one member may commit a step that another has
        lost.
        """
        waiter = Waiter()
        reduction = self._reductions.setdefault(number, _Reduction())
        reduction.waiting[contribution.replica_id] = waiter
        if self._sees_departure(contribution.replica_id):
            waiter.resolve(None)
        else:
            reduction.given[contribution.replica_id] = contribution
            self.update()
        return waiter

    def exchange_word(self, step: int, replica_id: str, values: Sequence[int]) -> Waiter:
        """Exchange the word of a round. The waiter resolves to the sum, or to None if it fails for this member."""
        waiter = Waiter()
        if self._sees_departure(replica_id):
            waiter.resolve(None)
        else:
            self._words.exchange(step, replica_id, values, waiter)
        return waiter

    @property
    def words_delivered(self) -> bool:
        """Return whether every member that waits for a word has it."""
        return self._words.is_delivered()

    def _carries_words(self, one: str, other: str) -> bool:
        cut = self._is_cut(one, other) or self._is_cut(other, one)
        return not cut and not self._links.loses_word(one, other, self._group_rank)

    def _record_lost_word(self, replica_id: str, other: str) -> bool:
        """Record a link that loses words, and return whether the link does. Across a cut everything waits."""
        lost = self._links.loses_word(replica_id, other, self._group_rank)
        if lost and other not in self._left:
            self._unreached.setdefault(replica_id, []).append(Unreached(other, Via.GROUP, "no word"))
        return lost

    def update(self) -> None:
        """Resolve all waits that a change ends: a member came, left, or can be reached again."""
        self._words.update(self._sees_departure)
        self._start_link_timer()
        if not self._met and self._all_joined and not self._is_partitioned():
            self._met = True
            for waiter in list(self._joined.values()):
                waiter.resolve(True)
        for number, reduction in list(self._reductions.items()):
            for replica_id, waiter in list(reduction.waiting.items()):
                if not waiter.done and self._sees_departure(replica_id):
                    waiter.resolve(None)
            if reduction.complete:
                if all(waiter.done for waiter in reduction.waiting.values()):
                    self._reductions.pop(number, None)  # a callback of a waiter may have called `update` in between
            elif len(reduction.given) == len(self._members) and not self._is_partitioned() and not self.is_blocked:
                self._complete(number, reduction)

    def _complete(self, number: int, reduction: _Reduction) -> None:
        reduction.complete = True
        self._invariants.reduced(self.key, self._group_rank, reduction.given)
        gradients = tuple(sorted(each.gradient for each in reduction.given.values() if each.gradient is not None))
        result = Reduced(self.key, self._group_rank, (number,), gradients)
        for replica_id, waiter in reduction.waiting.items():
            self._clock.after(self._spread_ms(), partial(self._deliver, replica_id, waiter, result))

    def _deliver(self, replica_id: str, waiter: Waiter, result: Reduced) -> None:
        if not waiter.done:
            self._invariants.delivered(replica_id, result)
            waiter.resolve(result)

    def _sees_departure(self, replica_id: str) -> bool:
        """Return whether the member sees that another one has left."""
        return any(gone == replica_id or not self._is_cut(gone, replica_id) for gone in self._left)

    def _is_partitioned(self) -> bool:
        return bool(self._bad_links()) or any(self._is_cut(one, other) for one, other in combinations(self._members, 2))

    # --- bad links --------------------------------------------------------------------------------------------------

    @property
    def _all_joined(self) -> bool:
        return len(self._joined) == len(self._members)

    def _bad_links(self) -> list[tuple[str, str]]:
        if not self._links.bad:
            return []
        return [pair for pair in permutations(self._members, 2) if self._links.is_bad(*pair, Via.GROUP)]

    def _start_link_timer(self) -> None:
        """Start a timer if all members have come or reduce, and a link is bad: its users notice it after a while."""
        used = self._all_joined if not self._met else any(not each.complete for each in self._reductions.values())
        if used and not self._has_link_timer and self._bad_links():
            self._has_link_timer = True
            self._clock.after(FAILS_AFTER_MS, self._fail_bad_links)

    def _fail_bad_links(self) -> None:
        self._has_link_timer = False
        found: dict[str, list[Unreached]] = {}
        for one, other in self._bad_links():
            if other not in self._left and one not in self._left:
                found.setdefault(one, []).append(Unreached(other, Via.GROUP, "no connection"))
        waits: list[Waiter] = []
        for one, reports in found.items():
            waiting = [each.waiting.get(one) for each in self._reductions.values() if not each.complete]
            waiting += [self._joined.get(one)] if not self._met else []
            open_now = [waiter for waiter in waiting if waiter is not None and not waiter.done]
            if open_now:
                self._unreached[one] = reports
            waits += open_now
        for waiter in waits:
            waiter.resolve(None)
