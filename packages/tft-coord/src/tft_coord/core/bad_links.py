"""Bad links: the pairs of replicas that can't reach one another by report, and for how long a report counts.

A thousand members may name 64 peers each. A report therefore costs the same however many others there are. The set of
pairs that count now is cached until a report, a proof or the end of a pause changes it.

Law of this file: the pairs of one job; other files decide what follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias, final

from tft_coord.core.names import base_name
from tft_coord.core.types import QuorumKey

PAUSE_FIRST_MS: Final = 5_000
PAUSE_MOST_MS: Final = 300_000
NEVER_MS: Final = 2**63

Pair: TypeAlias = tuple[str, str]  # sorted
Around: TypeAlias = Mapping[str, Collection[str]]  # end -> the ends at the other side


def pair_of(one: str, other: str) -> Pair:
    """Return the two in order."""
    return (one, other) if one < other else (other, one)


def around_of(pairs: Collection[Pair]) -> dict[str, set[str]]:
    """Return for each end of these pairs the ends at the other side."""
    around: dict[str, set[str]] = {}
    for one, other in pairs:
        around.setdefault(one, set()).add(other)
        around.setdefault(other, set()).add(one)
    return around


@dataclass(slots=True)
class Pause:
    """The time for which a report counts. The next report after that time counts for twice as long."""

    key: QuorumKey | None  # of the quorum that the report was about
    since_ms: int
    length_ms: int = PAUSE_FIRST_MS
    is_over: bool = False

    def again(self, key: QuorumKey | None, now_ms: int) -> bool:
        """Note a repeated report about another quorum. Returns: whether it was another."""
        if key == self.key:
            return False
        if now_ms - self.since_ms >= self.length_ms:
            self.length_ms = min(2 * self.length_ms, PAUSE_MOST_MS)
        self.key, self.since_ms, self.is_over = key, now_ms, False
        return True

    def lasts(self, now_ms: int) -> bool:
        """Return whether the report counts."""
        return not self.is_over and now_ms - self.since_ms < self.length_ms

    @property
    def end_ms(self) -> int:
        """Return until when the report counts."""
        return self.since_ms + self.length_ms

    def remaining_ms(self, now_ms: int) -> int:
        """Return for how long the report still counts."""
        return max(0, self.end_ms - now_ms) if not self.is_over else 0

    def is_old(self, now_ms: int) -> bool:
        """Return whether the report was not repeated for long after its end."""
        return now_ms - self.since_ms > 2 * self.length_ms + PAUSE_MOST_MS


@dataclass(slots=True)
class BadLink:
    """The reports about one pair.

    Args:
        pause: for how long they count.
        reports: the reporting end -> its reason.
        fresh: since when both ends are waited for, and in which round.
    """

    pause: Pause
    reports: dict[str, str] = field(default_factory=dict)
    fresh: tuple[int, int] = (0, -1)


@final
class BadLinks:
    """The pairs of one job that are reported to have a bad link."""

    def __init__(self) -> None:
        self._links: dict[Pair, BadLink] = {}
        self._ends: dict[str, set[str]] = {}
        # These are kept across all lives of a name. A replica that is unreachable and restarts again and again would
        # otherwise begin at the shortest pause.
        self._pauses: dict[str, dict[str, Pause]] = {}
        self._counted: dict[str, set[str]] | None = {}
        self._counted_until_ms = NEVER_MS
        self._round = 0
        self._newest: dict[str, int] = {}  # end -> the time of its last fresh report in this round
        self.version = 0  # a new version means that the pairs that count have changed

    def __len__(self) -> int:
        return len(self._links)

    def changed(self) -> None:
        """Recompute on the next call which pairs count."""
        self._counted = None
        self.version += 1

    def next_round(self) -> None:
        """Begin a round: no end is waited for any more because of earlier reports."""
        self._round += 1
        self._newest.clear()

    def report(self, one: str, other: str, why: str, key: QuorumKey | None, now_ms: int) -> None:
        """Record a report that one can't reach the other."""
        pair = pair_of(one, other)
        link = self._links.get(pair)
        if link is None:
            link = self._links[pair] = BadLink(self._pause(one, other, key, now_ms), fresh=(now_ms, self._round))
            self._ends.setdefault(one, set()).add(other)
            self._ends.setdefault(other, set()).add(one)
        elif link.pause.again(key, now_ms):
            link.reports.clear()
            link.fresh = (now_ms, self._round)
        if link.fresh == (now_ms, self._round):
            self._newest[one] = self._newest[other] = now_ms
        link.reports[one] = why
        self._remember(one, other, link.pause)
        self.version += 1
        if self._counted is not None and link.pause.lasts(now_ms):
            self._counted.setdefault(one, set()).add(other)
            self._counted.setdefault(other, set()).add(one)
            self._counted_until_ms = min(self._counted_until_ms, link.pause.end_ms)

    def counted(self, now_ms: int, is_explained: Callable[[Pair, BadLink], bool] | None) -> dict[str, set[str]]:
        """Return the pairs that count, by each end. `is_explained`: a pair does not count, for another reason."""
        if self._counted is None or now_ms >= self._counted_until_ms:
            found = {pair: link for pair, link in self._links.items() if link.pause.lasts(now_ms)}
            self._counted_until_ms = min((link.pause.end_ms for link in found.values()), default=NEVER_MS)
            if is_explained is not None:
                found = {pair: link for pair, link in found.items() if not is_explained(pair, link)}
            self._counted = around_of(found)
            self.version += 1
        return self._counted

    def link(self, one: str, other: str) -> BadLink | None:
        """Return the reports about these two."""
        return self._links.get(pair_of(one, other))

    def ends_of(self, name: str) -> Collection[str]:
        """Return the replicas that have a bad link to it, whether it counts or not."""
        return self._ends.get(name, ())

    def is_fresh(self, one: str, others: Collection[str], now_ms: int, for_ms: int) -> bool:
        """Return whether a bad link to one of these others was reported in this round, within the last `for_ms`."""
        newest_ms = self._newest.get(one)
        if newest_ms is None or now_ms - newest_ms >= for_ms:
            return False
        links = (self.link(one, other) for other in others)
        return any(each.fresh[1] == self._round and now_ms - each.fresh[0] < for_ms for each in links if each)

    def end_pause(self, one: str, other: str) -> None:
        """End the pause of the two, so that they try one another again at once."""
        link = self.link(one, other)
        if link is not None:
            link.pause.is_over = True
            self.changed()

    def prove(self, one: str, others: Collection[str], key: QuorumKey) -> None:
        """Forget the reports about this replica and these others, because they have built the group of a quorum.

        `others` may contain the replica itself. Reports about that very quorum stay.
        """
        for other in self._ends.get(one, set()).intersection(others):
            if self._links[pair_of(one, other)].pause.key != key:
                self._forget(pair_of(one, other))
        known = self._pauses.get(base_name(one) or one)
        for other in others if known else ():
            if self.link(one, other) is None:
                self._forget_pause(one, other)

    def forget_gone(self, known: Collection[str], now_ms: int) -> None:
        """Forget reports about replicas that are gone, and old ones."""
        for pair, link in list(self._links.items()):
            if pair[0] not in known or pair[1] not in known or link.pause.is_old(now_ms):
                self._forget(pair)
        for one, pauses in list(self._pauses.items()):
            for other in [other for other, pause in pauses.items() if pause.is_old(now_ms)]:
                self._forget_pause(one, other)

    def _pause(self, one: str, other: str, key: QuorumKey | None, now_ms: int) -> Pause:
        before = self._pauses.get(base_name(one) or one, {}).get(base_name(other) or other)
        if before is None:
            return Pause(key, now_ms)
        pause = replace(before)
        pause.again(key, now_ms)
        return pause

    def _remember(self, one: str, other: str, pause: Pause) -> None:
        one_name, other_name = base_name(one), base_name(other)
        if (one_name or other_name) and one_name != other_name:  # another life of these could not be recognized
            one_name, other_name = one_name or one, other_name or other
            self._pauses.setdefault(one_name, {})[other_name] = pause
            self._pauses.setdefault(other_name, {})[one_name] = pause

    def _forget_pause(self, one: str, other: str) -> None:
        one, other = base_name(one) or one, base_name(other) or other
        for this, that in ((one, other), (other, one)):
            pauses = self._pauses.get(this)
            if pauses is not None and pauses.pop(that, None) is not None and not pauses:
                del self._pauses[this]

    def _forget(self, pair: Pair) -> None:
        del self._links[pair]
        for this, that in dict.fromkeys((pair, pair[::-1])):  # a replica that misses its own store is both ends
            self._ends[this].discard(that)
            if not self._ends[this]:
                del self._ends[this]
            if self._counted is not None and this in self._counted:
                self._counted[this].discard(that)
                if not self._counted[this]:
                    del self._counted[this]
        self.version += 1
