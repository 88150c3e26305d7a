"""How long one `configure` waits in each of its phases, from one to the next."""

from __future__ import annotations

import pytest

from tft_pg.backends.patience import SHORTEST_S, Patience, Phase

ORDINARY_S = 60.0


def bounds(patience: Patience) -> dict[Phase, float]:
    return {phase: patience.bound_s(phase, ORDINARY_S) for phase in Phase}


def test_each_phase_begins_with_seconds() -> None:
    assert bounds(Patience()) == {Phase.STORE: 2.0, Phase.RANKS: 2.5, Phase.CONNECTIONS: 2.0}


@pytest.mark.parametrize("phase", list(Phase))
def test_a_phase_that_was_too_short_is_doubled_by_itself_up_to_the_ordinary_time_out(phase: Phase) -> None:
    patience = Patience()
    found = []
    for _ in range(8):
        patience.timed_out(phase, ORDINARY_S, 3)
        found.append(patience.bound_s(phase, ORDINARY_S))
    shortest_s = SHORTEST_S[phase]
    assert found == [min(shortest_s * 2**times, ORDINARY_S) for times in range(1, 9)]
    others = {other: bound_s for other, bound_s in bounds(patience).items() if other is not phase}
    assert others == {other: SHORTEST_S[other] for other in others}


def test_a_quick_success_brings_it_back() -> None:
    patience = Patience()
    for _ in range(3):
        patience.timed_out(Phase.RANKS, ORDINARY_S, 3)
    patience.succeeded(Phase.RANKS, 0.01, 3)
    assert bounds(patience) == SHORTEST_S


@pytest.mark.parametrize(("took_s", "bound_s"), [(1.0, 2.0), (1.5, 4.0), (3.0, 8.0), (30.0, 16.0)])
def test_a_slow_success_leaves_room_for_the_next_one(took_s: float, bound_s: float) -> None:
    patience = Patience()
    for _ in range(3):
        patience.timed_out(Phase.STORE, ORDINARY_S, 3)
    patience.succeeded(Phase.STORE, took_s, 3)
    assert patience.bound_s(Phase.STORE, ORDINARY_S) == bound_s


def test_a_success_never_makes_a_bound_longer() -> None:
    patience = Patience()
    patience.succeeded(Phase.CONNECTIONS, 1.9, 3)
    assert bounds(patience) == SHORTEST_S


def test_an_ordinary_time_out_below_a_bound_counts() -> None:
    patience = Patience()
    assert patience.bound_s(Phase.STORE, 0.5) == 0.5
    patience.timed_out(Phase.STORE, 0.5, 3)
    assert patience.bound_s(Phase.STORE, ORDINARY_S) == 2.0


@pytest.mark.parametrize("phase", [Phase.RANKS, Phase.CONNECTIONS])
def test_a_success_without_the_slow_rank_proves_nothing(phase: Phase) -> None:
    patience = Patience()
    for times in range(1, 4):
        patience.timed_out(phase, ORDINARY_S, 3)
        patience.succeeded(phase, 0.01, 2)
        assert patience.bound_s(phase, ORDINARY_S) == 2**times * SHORTEST_S[phase]
    patience.succeeded(phase, 0.01, 3)
    assert patience.bound_s(phase, ORDINARY_S) == SHORTEST_S[phase]


def test_a_slow_rank_that_stays_away_is_forgotten() -> None:
    patience = Patience()
    patience.timed_out(Phase.RANKS, ORDINARY_S, 3)
    for _ in range(9):
        patience.succeeded(Phase.RANKS, 0.01, 2)
    assert patience.bound_s(Phase.RANKS, ORDINARY_S) == 5.0
    patience.succeeded(Phase.RANKS, 0.01, 2)
    assert patience.bound_s(Phase.RANKS, ORDINARY_S) == 2.5


def test_a_store_is_as_quick_for_a_small_group() -> None:
    patience = Patience()
    patience.timed_out(Phase.STORE, ORDINARY_S, 3)
    patience.succeeded(Phase.STORE, 0.01, 1)
    assert patience.bound_s(Phase.STORE, ORDINARY_S) == 2.0
