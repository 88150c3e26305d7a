"""Every order of a few events on the lighthouse's core and on the group's, and that the search finds what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tft_coord.core.commit import Votes
from tft_coord.core.lighthouse import Job
from tft_coord.core.types import Verdict
from tft_coord.testing.explore import ExplorationFailed, GroupWorld, LighthouseWorld, explore

STARTS = ("fresh", "trained", "joining", "restarted")


@pytest.mark.parametrize("start", STARTS)
def test_two_replicas_in_every_order_of_three_events(start: str) -> None:
    seen = explore(lambda: LighthouseWorld("ab", start=start), 3)
    assert seen.num_states > 200


@pytest.mark.parametrize("start", STARTS)
def test_three_replicas_in_every_order_of_two_events(start: str) -> None:
    seen = explore(lambda: LighthouseWorld("abc", start=start, min_replicas=2), 2)
    assert seen.num_states > 50


def test_a_group_in_every_order_of_three_events() -> None:
    assert explore(GroupWorld, 3).num_states > 200


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("names", "num_events"), [("a", 6), ("ab", 6), ("abc", 6)])
def test_up_to_three_replicas_in_every_order_of_six_events(names: str, num_events: int, start: str) -> None:
    explore(lambda: LighthouseWorld(names, start=start), num_events)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_group_in_every_order_of_six_events() -> None:
    explore(GroupWorld, 6)


def test_the_shortest_sequence_that_breaks_something_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def tells_nobody(self: Job, *_: object, **__: object) -> list[Any]:
        return []

    monkeypatch.setattr(Job, "_break_quorum", tells_nobody)
    with pytest.raises(ExplorationFailed, match=r"P3: a holds .*, which b has left, and was not told") as caught:
        explore(lambda: LighthouseWorld("ab", start="trained"), 3)
    assert caught.value.path == ("die b",)


def test_a_verdict_that_changes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = Votes.cast

    def always_yes(self: Votes, *arguments: Any, leaving: bool) -> list[tuple[int, int, Verdict]]:
        return [(call, rank, Verdict(yes=True)) for call, rank, _ in cast(self, *arguments, leaving=leaving)]

    monkeypatch.setattr(Votes, "cast", always_yes)
    with pytest.raises(ExplorationFailed, match="I5: a yes of votes"):
        explore(GroupWorld, 5)
