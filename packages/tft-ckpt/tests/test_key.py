"""A key's spelling is exact, and its order says what may still come."""

from __future__ import annotations

import pytest

from tft_ckpt import ConfigError, StateKey

KEY = StateKey(quorum_id=7, nonce=0xAB, step=120, lineage=2**64 - 1)


def test_spelling_comes_back() -> None:
    assert str(KEY) == "7.00000000000000ab.120.ffffffffffffffff"
    assert StateKey.parse(str(KEY)) == KEY


@pytest.mark.parametrize(
    "text", ["", "7.ab.120.ff", str(KEY).upper(), f"{KEY}.", f"0{KEY}", "-1" + str(KEY)[1:], "\u0667" + str(KEY)[1:]]
)
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        StateKey.parse(text)


@pytest.mark.parametrize("field", ["quorum_id", "nonce", "step", "lineage"])
@pytest.mark.parametrize("value", [-1, 2**64, True, 1.0, "1", None])
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    fields = {"quorum_id": 1, "nonce": 1, "step": 1, "lineage": 1, field: value}
    with pytest.raises(ConfigError, match=field):
        StateKey(**fields)  # type: ignore[arg-type]


def test_order_is_by_quorum_then_step() -> None:
    later_step = StateKey(quorum_id=7, nonce=1, step=121, lineage=0)
    later_quorum = StateKey(quorum_id=8, nonce=1, step=1, lineage=0)
    assert later_step.comes_after(KEY)
    assert later_quorum.comes_after(later_step)
    assert not KEY.comes_after(later_step)
    assert not KEY.comes_after(StateKey(quorum_id=7, nonce=0, step=120, lineage=0))
