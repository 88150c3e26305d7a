"""Whom the members of a job say that they can't reach, and whether its quorums fit that (R2).

It looks at messages alone, and tries all sets of members where the core searches.

Law of this file: one life of a lighthouse; nothing of the core that it checks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations, product
from typing import Final, final

from tft_coord.core.types import Member, Quorum, QuorumKey, Via

COUNTS_MS: Final = 300_000  # no report counts for longer
BOTH_ENDS_MS: Final = 1_000
ALL_SETS_MOST: Final = 10  # of so many members all sets are tried


@final
class ReachTruth:
    """What was said of bad links. A report may count for less long in the core, and never for longer."""

    def __init__(self) -> None:
        self._said: dict[frozenset[str], tuple[int, QuorumKey | None]] = {}  # when last, and of which quorum
        self._built: tuple[QuorumKey | None, set[str]] = (None, set())  # whose members have said so
        self._trials: dict[str, int] = {}  # of newcomers: the number of one that has not been answered
        self._failed: dict[str, set[str]] = {}  # whom a newcomer did not reach in its last trial

    def asked(self, member: Member, held: QuorumKey | None, newest: Quorum | None, now_ms: int) -> None:
        """A request came in."""
        for report in member.unreached:
            if report.via is not Via.STATE:
                self._said[frozenset((member.replica_id, report.replica_id))] = now_ms, held
        works = not member.needs_configure and member.commit_failures == 0 and not member.unreached
        if self._said and newest is not None and held == newest.key and works:
            if self._built[0] != held:
                self._built = held, set()
            built = self._built[1]
            built.add(member.replica_id)
            self._said = {pair: said for pair, said in self._said.items() if said[1] == held or not pair <= built}

    def tries(self, replica_id: str, number: int) -> None:
        """A newcomer is asked to try its peers."""
        self._trials[replica_id] = number

    def tried(self, replica_id: str, number: int, unreached: Collection[str]) -> None:
        """It has."""
        if self._trials.get(replica_id) == number:
            del self._trials[replica_id]
            self._failed[replica_id] = set(unreached)

    def lost(self, replica_id: str) -> None:
        """What it has found counts no more when it comes again."""
        self._trials.pop(replica_id, None)
        self._failed.pop(replica_id, None)

    def formed(self, ids: Collection[str]) -> None:
        """Who is in a quorum is no newcomer any more."""
        for name in ids:
            self._trials.pop(name, None)
            self._failed.pop(name, None)

    def in_trial(self) -> set[str]:
        """Who is asked to try its peers, and has not answered."""
        return set(self._trials)

    def waits_for_both_ends(self, now_ms: int, tick_ms: int) -> bool:
        """Whether a bad link was named just now."""
        return any(now_ms - at_ms <= BOTH_ENDS_MS + tick_ms for at_ms, _ in self._said.values())

    def is_torn_apart(self, ids: Collection[str]) -> bool:
        """Whether two of these were said not to reach each other: no quorum has all of them."""
        return any(pair <= set(ids) for pair in self._said)

    def excused(self, ids: Collection[str], now_ms: int) -> set[str]:
        """Who need not be in a quorum of these, nor be waited for: it has a bad link to one of them, or has not shown
        that it has none. A newcomer that holds the newest state may have been taken in place of whom it did not reach.
        """
        tried = {name for name, unreached in self._failed.items() if unreached.intersection(ids)} | self.in_trial()
        tried.update(*(unreached for name, unreached in self._failed.items() if name in ids))
        return tried.difference(ids) | {
            name
            for pair, (at_ms, _) in self._said.items()
            if now_ms - at_ms <= COUNTS_MS and (len(pair) == 1 or pair & set(ids))
            for name in pair.difference(ids)
        }

    def num_outside(self, living: Collection[str], ids: Collection[str], now_ms: int) -> int:
        """How many bad links are between two that live and are in no quorum of these: of each, one may not count."""
        outside = set(living).difference(ids)
        said = {pair for pair, (at_ms, _) in self._said.items() if now_ms - at_ms <= COUNTS_MS}
        said.update(frozenset((name, other)) for name, unreached in self._failed.items() for other in unreached)
        return sum(pair <= outside for pair in said)

    def needless(
        self,
        ids: Collection[str],
        waiting: Mapping[str, Member],
        before: Collection[str],
        min_replicas: int,
        now_ms: int,
    ) -> str | None:
        """Why those of the waiting that are in no quorum of `ids` should not all have been left out, or None."""
        left_out = set(waiting).difference(ids)
        for_nothing = left_out - self.excused(ids, now_ms)
        if for_nothing:
            return f"{sorted(for_nothing)} waits, has no bad link to any of {sorted(ids)}, and is left out"
        newest = max((each.step for each in waiting.values() if not each.torn), default=0)
        holders = {name for name, each in waiting.items() if not each.torn and each.step == newest}
        if holders and not holders.intersection(ids):
            return f"{sorted(ids)} go on without any of {sorted(holders)}, which hold step {newest}"
        needed = [each for each in (holders, set(before).intersection(waiting)) if each]
        pairs = [pair for pair in self._said if pair <= set(waiting)]
        newcomers = {name for name in set(ids).difference(before) if self._failed.get(name, set()).intersection(ids)}
        rest = set(ids) - newcomers
        if newcomers and not pairs and len(rest) >= min_replicas and all(each & rest for each in needed):
            return f"{sorted(newcomers)} did not reach all of {sorted(rest)}, and could have been left out"
        # Who has not passed its trial is left out before any other one is.
        free = {name for name in left_out if name in self._trials or self._failed.get(name)}
        # One that is in the quorum all the same holds the newest state, and whom it did not reach goes in its place:
        # never where it could have gone itself.
        came = sorted(name for name in ids if self._failed.get(name))
        pairs += [frozenset((name, other)) for name in came for other in self._failed[name].intersection(waiting)]
        left_out -= free
        if not left_out or len(waiting) > ALL_SETS_MOST:
            return None
        others = sorted(waiting.keys() - free - set(came))
        dear = (each for number in range(len(left_out)) for each in combinations(others, number))
        cheap = [each for number in range(len(came) + 1) for each in combinations(came, number)]
        for chosen, newcomer in product(dear, cheap):
            gone = free.union(chosen, newcomer)
            covers = all(pair & gone for pair in pairs)
            fits = len(waiting) - len(gone) >= min_replicas and not any(each <= gone for each in needed)
            if covers and fits:
                return f"{sorted(left_out)} are left out, where {[*chosen, *newcomer]} would do"
        return None
