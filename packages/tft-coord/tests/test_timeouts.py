"""Timeouts: checked as a whole at construction, and two that clash are named."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tft_coord.errors import ConfigError
from tft_coord.timeouts import Timeouts

NAMES = [item.name for item in fields(Timeouts)]
WEEK_MS = 7 * 24 * 3_600_000


def test_the_defaults_stand() -> None:
    timeouts = Timeouts()
    assert timeouts.quorum_timeout_ms == 70_000  # as the documentation says
    assert timeouts.forget_after_ms == 50_000
    assert timeouts.redial_fast_for_ms == 1_000
    assert timeouts.flap_window_ms == 600_000


@pytest.mark.parametrize(
    ("changes", "small", "large"),
    [
        ({"beat_interval_ms": 3_000}, "beat_interval_ms", "heartbeat_timeout_ms"),
        ({"quorum_tick_ms": 5_001}, "quorum_tick_ms", "heartbeat_timeout_ms"),
        ({"reconnect_grace_ms": 6_000}, "reconnect_grace_ms", "heartbeat_timeout_ms"),
        ({"heartbeat_timeout_ms": 200, "reconnect_grace_ms": 201}, "reconnect_grace_ms", "heartbeat_timeout_ms"),
        ({"slowest_step_ms": 999, "beat_interval_ms": 1_000}, "beat_interval_ms", "slowest_step_ms"),
        ({"lease_ms": 3_999, "beat_interval_ms": 1_000}, "beat_interval_ms", "lease_ms"),
    ],
)
def test_two_that_clash_are_named(changes: dict[str, int], small: str, large: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Timeouts(**changes)
    assert small in str(caught.value)
    assert large in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [-1, WEEK_MS + 1, 1.5, True, "100"])
def test_a_wrong_number_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        Timeouts(**{name: value})  # type: ignore[arg-type]


def test_zero_is_for_three_alone() -> None:
    """A quorum may wait for nobody, a step may take any time, and a replica may ask in every step."""
    assert Timeouts(lease_ms=0).lease_ms == 0
    assert Timeouts(join_timeout_ms=0).join_timeout_ms == 0
    assert Timeouts(slowest_step_ms=0).slowest_step_ms == 0
    for name in NAMES:
        if name not in ("join_timeout_ms", "slowest_step_ms", "lease_ms"):
            with pytest.raises(ConfigError, match=name):
                Timeouts(**{name: 0})


def test_what_is_not_said_follows_from_what_is() -> None:
    quick = Timeouts(heartbeat_timeout_ms=100)
    assert (quick.beat_interval_ms, quick.reconnect_grace_ms, quick.quorum_tick_ms) == (50, 100, 100)
    slow = Timeouts(timeout_ms=600_000, join_timeout_ms=300_000)
    assert (slow.quorum_timeout_ms, slow.heal_timeout_ms) == (600_000, 6_000_000)
    assert Timeouts(join_timeout_ms=300_000).quorum_timeout_ms == 310_000
    said = Timeouts(quorum_timeout_ms=5_000, heal_timeout_ms=70_000, beat_interval_ms=20)
    assert (said.quorum_timeout_ms, said.heal_timeout_ms, said.beat_interval_ms) == (5_000, 70_000, 20)
    assert said.lease_ms == 60_000
    assert Timeouts(heartbeat_timeout_ms=50_000, beat_interval_ms=20_000).lease_ms == 80_000


def test_silence_outlasts_the_lease_on_a_slower_clock() -> None:
    timeouts = Timeouts()
    assert timeouts.silence_after_lease_ms(60_000) == 68_000
    assert timeouts.silence_after_lease_ms(0) == timeouts.heartbeat_timeout_ms


def test_the_defaults_give_no_warning() -> None:
    assert Timeouts().warnings() == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quorum_timeout_ms": 60_000}, ["quorum_timeout_ms", "join_timeout_ms"]),
        ({"quorum_timeout_ms": 2_000, "join_timeout_ms": 0}, ["quorum_timeout_ms", "heartbeat_timeout_ms"]),
        ({"heal_timeout_ms": 59_999}, ["heal_timeout_ms", "timeout_ms"]),
    ],
)
def test_what_works_and_hardly_anybody_wants_is_said(changes: dict[str, int], named: list[str]) -> None:
    (warning,) = Timeouts(**changes).warnings()
    assert all(name in warning for name in named)


def test_a_lighthouse_from_which_a_stream_is_not_back_in_time_is_too_far() -> None:
    timeouts = Timeouts(heartbeat_timeout_ms=6_000)
    assert timeouts.too_far(2_000) == ""
    said = timeouts.too_far(2_001)
    assert said.startswith("answers after 2001 ms: ")
    assert "heartbeat_timeout_ms (6000)" in said
    assert "--heartbeat-timeout-ms to at least 6003, and" in said
    assert "TFT_HEARTBEAT_TIMEOUT_SEC to at least 6.003," in said
    assert Timeouts(heartbeat_timeout_ms=6_003).too_far(2_001) == "", "what it says helps"


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "timeout_ms": st.integers(1, WEEK_MS),
            "heartbeat_timeout_ms": st.integers(2, WEEK_MS),
            "join_timeout_ms": st.integers(0, WEEK_MS),
        },
    )
)
def test_who_says_only_the_few_meets_no_clash(said: dict[str, int]) -> None:
    timeouts = Timeouts(**said)
    again = Timeouts(**{name: getattr(timeouts, name) for name in NAMES})
    assert again == timeouts
    if timeouts.join_timeout_ms + timeouts.heartbeat_timeout_ms < WEEK_MS:
        assert timeouts.warnings() == ()


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.dictionaries(st.sampled_from(NAMES), st.integers(-5, 2 * WEEK_MS) | st.integers(0, 10_000)))
def test_constructed_or_refused_by_name(changes: dict[str, int]) -> None:
    try:
        timeouts = Timeouts(**changes)
    except ConfigError as refused:
        words = set(re.findall(r"\w+_ms", str(refused)))
        named = [name for name in NAMES if name in words]
        assert len(named) in (1, 2)
        assert any(name in changes for name in named)
        if len(named) == 1:
            least = 2 if named[0] == "heartbeat_timeout_ms" else 1
            assert not least <= changes[named[0]] <= WEEK_MS
        return
    assert 2 * timeouts.beat_interval_ms <= timeouts.heartbeat_timeout_ms
    assert timeouts.reconnect_grace_ms <= timeouts.heartbeat_timeout_ms
    assert timeouts.quorum_tick_ms <= timeouts.heartbeat_timeout_ms
    assert timeouts.forget_after_ms > timeouts.heartbeat_timeout_ms
    assert timeouts.lease_ms == 0 or 4 * timeouts.beat_interval_ms <= timeouts.lease_ms
    assert timeouts.slowest_step_ms == 0 or timeouts.beat_interval_ms <= timeouts.slowest_step_ms
