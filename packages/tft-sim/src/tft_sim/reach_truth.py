"""The bad links that members of a job report, and the check that its quorums fit them (R2).

The check sees messages alone. It tries all sets of members, and the core searches.

Law of this file: one life of a lighthouse. Nothing here comes from the core that it checks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations, product
from typing import Final, final

from tft_coord.core.types import Member, Quorum, QuorumKey, Via

REPORT_LIFETIME_MS: Final = 300_000  # the longest time for which a report counts
BOTH_ENDS_MS: Final = 1_000
MAX_EXHAUSTIVE: Final = 10  # for up to this many members all sets are tried


@final
class ReachTruth:
    """The reported bad links. A report may count for less time in the core, and never for more."""

    def __init__(self) -> None:
        # time of the last report, and its quorum
        self._bad_links: dict[frozenset[str], tuple[int, QuorumKey | None]] = {}
        # members that reported no bad link in this quorum
        self._healthy_in: tuple[QuorumKey | None, set[str]] = (None, set())
        self._trials: dict[str, int] = {}  # number of each newcomer's unanswered trial
        self._failed: dict[str, set[str]] = {}  # peers that a newcomer did not reach in its last trial

    def asked(self, member: Member, held: QuorumKey | None, newest: Quorum | None, now_ms: int) -> None:
        """Record a request and the bad links that it reports."""
        for report in member.unreached:
            if report.via is not Via.STATE:
                self._bad_links[frozenset((member.replica_id, report.replica_id))] = now_ms, held
        works = not member.needs_configure and member.commit_failures == 0 and not member.unreached
        if self._bad_links and newest is not None and held == newest.key and works:
            if self._healthy_in[0] != held:
                self._healthy_in = held, set()
            healthy = self._healthy_in[1]
            healthy.add(member.replica_id)
            self._bad_links = {
                pair: report for pair, report in self._bad_links.items() if report[1] == held or not pair <= healthy
            }

    def trial_started(self, replica_id: str, number: int) -> None:
        """Record that a newcomer is asked to try its peers."""
        self._trials[replica_id] = number

    def trial_ended(self, replica_id: str, number: int, unreached: Collection[str]) -> None:
        """Record the result of a newcomer's trial. A stale result is ignored."""
        if self._trials.get(replica_id) == number:
            del self._trials[replica_id]
            self._failed[replica_id] = set(unreached)

    def lost(self, replica_id: str) -> None:
        """Forget the trial of a lost replica. Its result does not count when it comes back."""
        self._trials.pop(replica_id, None)
        self._failed.pop(replica_id, None)

    def formed(self, ids: Collection[str]) -> None:
        """Record a new quorum. Its members are no newcomers any more."""
        for name in ids:
            self._trials.pop(name, None)
            self._failed.pop(name, None)

    def untried(self) -> set[str]:
        """Return the replicas that are asked to try their peers, and have not answered."""
        return set(self._trials)

    def waits_for_both_ends(self, now_ms: int, tick_ms: int) -> bool:
        """Return whether a bad link was reported just now."""
        return any(now_ms - at_ms <= BOTH_ENDS_MS + tick_ms for at_ms, _ in self._bad_links.values())

    def has_bad_link(self, ids: Collection[str]) -> bool:
        """Return whether a bad link between two of these is reported. Then no quorum has all of them."""
        return any(pair <= set(ids) for pair in self._bad_links)

    def excused(self, ids: Collection[str], now_ms: int) -> set[str]:
        """Return the replicas that may be left out of a quorum of `ids`, and need not be waited for.

        Each of them has a bad link to a member, or has not yet shown that it has none. A newcomer with the newest state
        may replace a member that it did not reach.
        """
        tried = {name for name, unreached in self._failed.items() if unreached.intersection(ids)} | self.untried()
        tried.update(*(unreached for name, unreached in self._failed.items() if name in ids))
        return tried.difference(ids) | {
            name
            for pair, (at_ms, _) in self._bad_links.items()
            if now_ms - at_ms <= REPORT_LIFETIME_MS and (len(pair) == 1 or pair & set(ids))
            for name in pair.difference(ids)
        }

    def num_bad_links_outside(self, alive: Collection[str], ids: Collection[str], now_ms: int) -> int:
        """Return the number of bad links between live replicas outside `ids`. For each, one replica may not count."""
        outside = set(alive).difference(ids)
        bad_links = {pair for pair, (at_ms, _) in self._bad_links.items() if now_ms - at_ms <= REPORT_LIFETIME_MS}
        bad_links.update(frozenset((name, other)) for name, unreached in self._failed.items() for other in unreached)
        return sum(pair <= outside for pair in bad_links)

    def needless(
        self,
        ids: Collection[str],
        waiting: Mapping[str, Member],
        before: Collection[str],
        min_replicas: int,
        now_ms: int,
    ) -> str | None:
        """Return why a waiting replica outside `ids` is left out without need, or None."""
        left_out = set(waiting).difference(ids)
        unexcused = left_out - self.excused(ids, now_ms)
        if unexcused:
            return f"{sorted(unexcused)} wait, reach all of {sorted(ids)}, and are left out"
        newest = max((each.step for each in waiting.values() if not each.torn), default=0)
        holders = {name for name, each in waiting.items() if not each.torn and each.step == newest}
        if holders and not holders.intersection(ids):
            return f"{sorted(ids)} continue without any of {sorted(holders)}, which hold step {newest}"
        needed = [each for each in (holders, set(before).intersection(waiting)) if each]
        pairs = [pair for pair in self._bad_links if pair <= set(waiting)]
        newcomers = {name for name in set(ids).difference(before) if self._failed.get(name, set()).intersection(ids)}
        rest = set(ids) - newcomers
        if newcomers and not pairs and len(rest) >= min_replicas and all(each & rest for each in needed):
            return f"{sorted(newcomers)} did not reach all of {sorted(rest)}, and could have been left out"
        # A newcomer that has not passed its trial is left out before any other replica.
        removable = {name for name in left_out if name in self._trials or self._failed.get(name)}
        # A newcomer in the quorum despite a failed trial holds the newest state. The peers that it did not reach are
        # left out instead of it, but never if the newcomer itself could be left out.
        admitted = sorted(name for name in ids if self._failed.get(name))
        pairs += [frozenset((name, other)) for name in admitted for other in self._failed[name].intersection(waiting)]
        left_out -= removable
        if not left_out or len(waiting) > MAX_EXHAUSTIVE:
            return None
        others = sorted(waiting.keys() - removable - set(admitted))
        member_choices = (each for number in range(len(left_out)) for each in combinations(others, number))
        newcomer_choices = [each for number in range(len(admitted) + 1) for each in combinations(admitted, number)]
        for chosen, newcomer in product(member_choices, newcomer_choices):
            gone = removable.union(chosen, newcomer)
            covers = all(pair & gone for pair in pairs)
            fits = len(waiting) - len(gone) >= min_replicas and not any(each <= gone for each in needed)
            if covers and fits:
                return f"{sorted(left_out)} are left out, and leaving out {[*chosen, *newcomer]} would be enough"
        return None
