"""When syncs begin and end: golden timetables, and what must hold for every schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tft_algos import ConfigError
from tft_algos.local_sgd.schedule import Due, Schedule, fragment_of


def timetable(num_fragments: int, sync_every: int, delay: int, *, inner_steps: int, joins_at: int | None = None) -> str:
    """One word an inner step, of the syncs that begin (S) and end (E) there, each with its fragment; all commit."""
    schedule = Schedule(num_fragments, sync_every, delay)
    step = 1 if joins_at is None else joins_at
    flight: list[int] = []
    if joins_at is not None:
        schedule.joined()
        flight.append(fragment_of(step, 0, num_fragments))
    words = []
    for _ in range(inner_steps):
        word = ""
        for due in schedule.inner_step():
            if due is Due.START:
                flight.append(fragment_of(step, len(flight), num_fragments))
                schedule.started()
                word += f"S{flight[-1]}"
            else:
                word += f"E{flight.pop(0)}"
                schedule.ended()
                step += 1
        words.append(word or "_")
        assert schedule.num_in_flight == len(flight)
    return " ".join(words)


@pytest.mark.parametrize(
    ("num_fragments", "sync_every", "delay", "expected"),
    [
        (1, 1, 0, "S0E0 S0E0 S0E0"),
        (1, 3, 0, "_ _ S0E0 _ _ S0E0"),
        (1, 3, 1, "_ S0 E0 _ S0 E0"),
        (1, 3, 2, "S0 _ E0 S0 _ E0"),
        (2, 4, 0, "_ S0E0 _ S1E1 _ S0E0 _ S1E1"),
        (2, 4, 1, "S0 E0 S1 E1 S0 E0 S1 E1"),
        (2, 4, 2, "_ S0 _ E0S1 _ E1S0 _ E0S1"),
        (2, 4, 3, "S0 _ S1 E0 S0 E1 S1 E0"),
        (4, 8, 5, "S0 _ S1 _ S2 E0 S3 E1 S0 E2 S1 E3"),
        (4, 8, 7, "S0 _ S1 _ S2 _ S3 E0 S0 E1 S1 E2"),
        (4, 4, 3, "S0 S1 S2 E0S3 E1S0 E2S1 E3S2"),
    ],
)
def test_timetables(num_fragments: int, sync_every: int, delay: int, expected: str) -> None:
    assert timetable(num_fragments, sync_every, delay, inner_steps=len(expected.split())) == expected


def test_who_joins_is_at_the_others_place_in_the_period() -> None:
    """At the start of the sync of fragment 1, which ends two inner steps later."""
    assert timetable(2, 6, 2, inner_steps=6, joins_at=2) == "_ E1 S0 _ E0 S1"
    assert timetable(2, 6, 2, inner_steps=12) == "S0 _ E0 S1 _ E1 S0 _ E0 S1 _ E1"


def test_a_member_that_is_half_as_fast_does_the_same_syncs() -> None:
    fast = timetable(2, 8, 2, inner_steps=16).replace("_", "").split()
    slow = timetable(2, 4, 1, inner_steps=8).replace("_", "").split()
    assert fast == slow


def test_after_a_failure_the_next_one_begins_where_it_would_have() -> None:
    schedule = Schedule(2, 4, 3)
    for _ in range(3):
        if Due.START in schedule.inner_step():
            schedule.started()
    assert schedule.num_in_flight == 2
    schedule.failed()
    assert [schedule.inner_step() for _ in range(4)] == [(), (Due.START,), (), (Due.START,)]


def test_a_new_quorum_leaves_the_latest() -> None:
    schedule = Schedule(2, 4, 3)
    for _ in range(3):
        if Due.START in schedule.inner_step():
            schedule.started()
    schedule.failed(latest_succeeded=True)
    assert schedule.num_in_flight == 1
    assert [schedule.inner_step() for _ in range(3)] == [(), (Due.START,), (Due.END,)]


@given(st.data())
def test_each_fragment_is_synchronized_once_in_sync_every_steps_and_never_twice_at_once(data: st.DataObject) -> None:
    num_fragments = data.draw(st.integers(1, 5))
    sync_every = num_fragments * data.draw(st.integers(1, 6))
    delay = data.draw(st.integers(0, sync_every - 1))
    schedule = Schedule(num_fragments, sync_every, delay)
    step, flight, begun = 1, [], []
    for now in range(1, 4 * sync_every + 1):
        for due in schedule.inner_step():
            if due is Due.START:
                fragment = fragment_of(step, len(flight), num_fragments)
                assert fragment not in [other for other, _ in flight]
                flight.append((fragment, now))
                schedule.started()
                begun.append(fragment)
            else:
                _, since = flight.pop(0)
                assert now - since == delay
                assert now % (sync_every // num_fragments) == 0
                schedule.ended()
                step += 1
        assert len(flight) <= schedule.num_overlapping + 1
    assert begun == [number % num_fragments for number in range(len(begun))]
    assert len(begun) == 4 * num_fragments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 0, 0), "sync_every is 0; give a whole number of inner steps, at least 1"),
        ((1, True, 0), "sync_every is True"),
        ((1, 2.0, 0), "sync_every is 2.0"),
        ((1, 2, -1), "fragment_sync_delay is -1"),
        ((3, 2, 0), "sync_every is 2 and there are 3 fragments"),
        ((2, 3, 0), "which 2 fragments don't divide; give a multiple of 2"),
        ((2, 4, 4), "fragment_sync_delay is 4 and sync_every 4"),
    ],
)
def test_what_can_not_be_is_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule(*arguments)
    assert issubclass(ConfigError, ValueError)
