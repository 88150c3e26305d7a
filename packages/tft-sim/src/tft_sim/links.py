"""The links between the members of a simulated job, which fail one by one.

A link is directed, from a member to a port of another one: its rendezvous store, its place in the process group, or its
state server. All else of both members works, and so does each one's connection to the lighthouse. A link belongs to the
names of replica groups, so it stays bad when one of them restarts.

Law of this file: the set of bad links. The trainer decides what a bad link does to a member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias, final

from tft_coord.core.types import Via

Link: TypeAlias = tuple[str, str, Via]  # source, target, purpose

FAILS_AFTER_MS: Final = 1_000  # time after which a connection attempt without an answer fails


def name_of(replica_id: str) -> str:
    """Return the name of the replica group that the replica is a life of."""
    return replica_id.partition(":")[0]


@final
class Links:
    """The set of bad links."""

    def __init__(self) -> None:
        self._bad: set[Link] = set()
        self._bad_words: set[frozenset[str]] = set()
        self.on_change: Callable[[], None] = lambda: None

    @property
    def bad(self) -> frozenset[Link]:
        """Return the bad links, by the names of replica groups."""
        return frozenset(self._bad)

    def cut(self, links: Iterable[Link]) -> None:
        """Make these links fail from now on."""
        self._bad.update(links)
        self.on_change()

    def mend(self, links: Iterable[Link] | None = None) -> None:
        """Make these links work again. None: all links."""
        self._bad.difference_update(self.bad if links is None else links)
        if links is None:
            self._bad_words.clear()
        self.on_change()

    def cut_word(self, one: str, other: str) -> None:
        """Lose the words of rounds between these two, `a` and `b` or their ranks `a/1` and `b/1`. All else comes
        through."""
        self._bad_words.add(frozenset((one, other)))
        self.on_change()

    def mend_word(self, one: str, other: str) -> None:
        """End `cut_word`."""
        self._bad_words.discard(frozenset((one, other)))
        self.on_change()

    def loses_word(self, one: str, other: str, group_rank: int) -> bool:
        """Return whether the word of a round gets lost between that rank of two replicas."""
        if not self._bad_words:
            return False
        names = name_of(one), name_of(other)
        ranks = frozenset(f"{name}/{group_rank}" for name in names)
        return frozenset(names) in self._bad_words or ranks in self._bad_words

    def is_bad(self, source: str, target: str, via: Via) -> bool:
        """Return whether the source can't reach that port of the target."""
        return bool(self._bad) and (name_of(source), name_of(target), via) in self._bad


def both_ways(one: str, other: str, via: Via = Via.GROUP) -> list[Link]:
    """List the links between two replica groups, in both directions."""
    return [(one, other, via), (other, one, via)]


def all_of(hub: str, others: Iterable[str], via: Via = Via.GROUP) -> list[Link]:
    """List the links between the hub and all others. A dead store is unreachable for its owner too."""
    found = [link for other in others if other != hub for link in both_ways(hub, other, via)]
    if via is Via.STORE:
        return [*(link for link in found if link[1] == hub), (hub, hub, via)]
    return found
