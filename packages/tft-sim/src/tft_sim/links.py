"""The links between the members of a simulated job, which fail one by one.

A link goes one way, from a member to a port of another one: its rendezvous store, its place in the process group, or
its state server. All else of both members works, and so does the way of each to the lighthouse. A link belongs to the
names of replica groups, so it stays bad when one of them is started again.

Law of this file: which links are bad. What a bad one does to a member is the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias, final

from tft_coord.core.types import Via

Link: TypeAlias = tuple[str, str, Via]  # from, to, and for what

FAILS_AFTER_MS: Final = 1_000  # a connection attempt that gets no answer


def name_of(replica_id: str) -> str:
    """Return the name of the replica group that a replica is a life of."""
    return replica_id.partition(":")[0]


@final
class Links:
    """Which links are bad."""

    def __init__(self) -> None:
        self._bad: set[Link] = set()
        self._bad_words: set[frozenset[str]] = set()
        self.on_change: Callable[[], None] = lambda: None

    @property
    def bad(self) -> frozenset[Link]:
        """Those that are, by the names of replica groups."""
        return frozenset(self._bad)

    def cut(self, links: Iterable[Link]) -> None:
        """These fail from now on."""
        self._bad.update(links)
        self.on_change()

    def mend(self, links: Iterable[Link] | None = None) -> None:
        """These work again; None: all do."""
        self._bad.difference_update(self.bad if links is None else links)
        if links is None:
            self._bad_words.clear()
        self.on_change()

    def cut_word(self, one: str, other: str) -> None:
        """The words of rounds get lost between these two, `a` and `b` or their ranks `a/1` and `b/1`; all else comes
        through."""
        self._bad_words.add(frozenset((one, other)))
        self.on_change()

    def mend_word(self, one: str, other: str) -> None:
        """End of `cut_word`."""
        self._bad_words.discard(frozenset((one, other)))
        self.on_change()

    def loses_word(self, one: str, other: str, group_rank: int) -> bool:
        """Whether the word of a round gets lost between that rank of two replicas."""
        if not self._bad_words:
            return False
        names = name_of(one), name_of(other)
        ranks = frozenset(f"{name}/{group_rank}" for name in names)
        return frozenset(names) in self._bad_words or ranks in self._bad_words

    def is_bad(self, source: str, target: str, via: Via) -> bool:
        """Whether that replica gets nowhere at that port of the other one."""
        return bool(self._bad) and (name_of(source), name_of(target), via) in self._bad


def both_ways(one: str, other: str, via: Via = Via.GROUP) -> list[Link]:
    """List both links between two."""
    return [(one, other, via), (other, one, via)]


def all_of(hub: str, others: Iterable[str], via: Via = Via.GROUP) -> list[Link]:
    """List the links between one and all others. A store that is dead is not reached by its owner either."""
    found = [link for other in others if other != hub for link in both_ways(hub, other, via)]
    if via is Via.STORE:
        return [*(link for link in found if link[1] == hub), (hub, hub, via)]
    return found
