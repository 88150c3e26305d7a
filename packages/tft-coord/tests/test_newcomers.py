"""The news of a newcomer: who is told that somebody asks who will heal, and when."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from tft_coord.core import effects, events
from tft_coord.core.effects import AnnounceNewcomer, LighthouseEffect
from tft_coord.core.lighthouse import LighthouseConfig, LighthouseCore
from tft_coord.core.replica_group import ReplicaGroupCore
from tft_coord.core.types import Hello, Member, QuorumKey
from tft_coord.timeouts import Timeouts

STARTED_MS = 1_000_000


class Table:
    """A lighthouse and replicas; the stream of each is its place in the alphabet."""

    def __init__(self) -> None:
        self.core = LighthouseCore(
            LighthouseConfig(min_replicas=2),
            started_ms=STARTED_MS,
            cluster_id="c",
            nonces=itertools.count(1).__next__,
            now_ms=0,
        )
        self.now_ms = 1_000
        self.key: QuorumKey | None = None
        self.numbers = itertools.count(1)

    def comes(self, *names: str) -> None:
        for name in names:
            hello = Hello(job="job", replica_id=name, session=1, address=f"{name}:1")
            self.give(events.HelloReceived(ord(name), hello))

    def asks(
        self, name: str, step: int = 0, *, torn: bool = False, use_async_quorum: bool = True, failed_heals: int = 0
    ) -> list[str]:
        """One request; returns who is told of it as of a newcomer's."""
        member = Member(
            name,
            step=step,
            lineage=step,
            live=True,
            torn=torn,
            use_async_quorum=use_async_quorum,
            failed_heals=failed_heals,
        )
        held = self.key if name in self.members else None
        return self.told(self.give(events.QuorumRequested(ord(name), next(self.numbers), member, held)), name)

    @property
    def members(self) -> tuple[str, ...]:
        quorum = self.core.quorum("job")
        return quorum.replica_ids if quorum is not None else ()

    def give(self, event: events.LighthouseEvent) -> list[LighthouseEffect]:
        self.now_ms += 1
        out = self.core.handle(event, self.now_ms, STARTED_MS + self.now_ms)
        quorum = self.core.quorum("job")
        self.key = quorum.key if quorum is not None else None
        return out

    @staticmethod
    def told(orders: Iterable[LighthouseEffect], newcomer: str) -> list[str]:
        announced = [order for order in orders if isinstance(order, AnnounceNewcomer)]
        assert all(order.replica_id == newcomer for order in announced)
        return sorted(chr(order.stream) for order in announced)


@pytest.fixture
def table() -> Table:
    """A quorum of a and b."""
    table = Table()
    table.comes("a", "b")
    assert table.asks("a") == []
    assert table.asks("b") == []
    assert table.members == ("a", "b")
    return table


def test_the_members_are_told_when_a_newcomer_asks(table: Table) -> None:
    table.comes("c")
    assert table.asks("c") == ["a", "b"]


def test_nobody_is_told_of_the_first_to_come() -> None:
    table = Table()
    table.comes("a", "b")
    assert table.asks("a") == table.asks("b") == []


def test_who_waits_already_is_not_told(table: Table) -> None:
    table.comes("c")
    table.asks("a", 2)
    assert table.asks("c") == ["b"]


def test_one_word_is_enough_for_all_newcomers_of_a_round(table: Table) -> None:
    table.comes("c", "d")
    assert table.asks("c") == ["a", "b"]
    assert table.asks("d") == []
    table.asks("a", 2)
    table.asks("b", 2)
    assert table.members == ("a", "b", "c", "d")
    table.comes("e")
    assert table.asks("e") == ["a", "b", "c", "d"]


def test_a_member_that_is_torn_or_behind_is_a_newcomer(table: Table) -> None:
    table.comes("c")
    table.asks("c")
    table.asks("a", 2)
    table.asks("b", 2)
    assert table.members == ("a", "b", "c")
    assert table.asks("a", 3) == []
    assert table.asks("b", 2) == ["c"]  # a waits


def test_the_torn_are_newcomers_and_give_nothing(table: Table) -> None:
    assert table.asks("a", 2, torn=True) == ["b"]
    table.asks("b", 2)
    table.comes("c")
    assert table.asks("c") == ["b"]


def test_the_synchronous_are_not_told() -> None:
    table = Table()
    table.comes("a", "b", "c")
    table.asks("a", use_async_quorum=False)
    table.asks("b", use_async_quorum=False)
    assert table.members == ("a", "b")
    assert table.asks("c", use_async_quorum=False) == []


def test_nobody_is_told_of_one_that_may_not_heal_yet(table: Table) -> None:
    table.comes("c")
    assert table.asks("c", failed_heals=3) == []


def test_those_whose_stream_is_broken_are_not_told(table: Table) -> None:
    table.give(events.StreamClosed(ord("a")))
    table.comes("c")
    assert table.asks("c") == ["b"]


def group(world_size: int) -> ReplicaGroupCore:
    core = ReplicaGroupCore(
        replica_id="a", address="a:1", store_address="a:2", world_size=world_size, timeouts=Timeouts()
    )
    for rank in range(world_size):
        core.handle(events.RankConnected(rank, stream=rank + 1, session=1), 0)
    return core


def test_the_rank_of_a_group_of_one_is_told() -> None:
    told = group(1).handle(events.NewcomerAnnounced("c"), 0)
    assert told == [effects.TellNewcomer(0, "c")]


def test_a_rank_without_a_stream_misses_it() -> None:
    core = group(1)
    core.handle(events.RankDisconnected(0, stream=1), 0)
    assert core.handle(events.NewcomerAnnounced("c"), 0) == []


def test_of_several_ranks_none_is_told_alone() -> None:
    assert group(2).handle(events.NewcomerAnnounced("c"), 0) == []
