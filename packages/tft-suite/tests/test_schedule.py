"""The rng of the kills, and what settings are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tft_suite.demo.schedule import Kill, draw_kills, kill_window
from tft_suite.demo.settings import DemoSettings
from tft_suite.errors import ConfigError


def test_the_same_seed_asks_for_the_same_faults() -> None:
    first, again, other = (draw_kills(replicas=3, steps=400, kills=2, seed=seed) for seed in (7, 7, 8))
    assert first == again != other


def test_the_default_run_kills_where_it_is_known_to() -> None:
    kills = draw_kills(replicas=3, steps=400, kills=2, seed=0)
    assert kills == draw_kills(replicas=3, steps=400, kills=2, seed=0)
    assert [type(kill) for kill in kills] == [Kill, Kill]


@given(steps=st.integers(2, 2_000), replicas=st.integers(2, 16), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_kills_are_within_15_and_50_percent_and_in_order(
    steps: int, replicas: int, seed: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, min(len(kill_window(steps)), 10)))
    kills = draw_kills(replicas=replicas, steps=steps, kills=count, seed=seed)
    at = [kill.step for kill in kills]
    assert len(at) == count
    assert at == sorted(set(at))
    assert all(0.15 * steps <= step <= 0.5 * steps and step > 0 for step in at)
    assert all(0 <= kill.replica < replicas for kill in kills)


def test_the_default_settings_are_valid() -> None:
    settings = DemoSettings()
    assert (settings.replicas, settings.steps, settings.kills, settings.seed, str(settings.out)) == (
        3,
        400,
        2,
        0,
        "tft-demo",
    )


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"replicas": 0}, "--replicas is 0"),
        ({"replicas": 17}, "--replicas is 17"),
        ({"steps": 0}, "--steps is 0"),
        ({"kills": -1}, "--kills is -1"),
        ({"seed": -1}, "--seed is -1"),
        ({"replicas": 1}, "--kills needs --replicas 2"),
        ({"steps": 4, "kills": 3}, "--kills 3 does not fit into 2 steps"),
        ({"steps": 1, "kills": 1}, "--kills 1 does not fit into 0 steps"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(wrong: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        DemoSettings(**wrong)  # type: ignore[arg-type]
    assert str(refused.value).startswith(named)
    assert "\n" not in str(refused.value)


def test_one_replica_without_kills_is_allowed() -> None:
    assert DemoSettings(replicas=1, kills=0, steps=1).replicas == 1
