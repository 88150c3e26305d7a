"""Whom to ask next, and what is still missing: without sockets."""

from __future__ import annotations

from typing import Any

import pytest

from tft_ckpt.errors import CheckpointError, StateCorrupt, StateMismatch, StateUnavailable
from tft_ckpt.http.plan import BREAKS_MAX, DAMAGES_MAX, FetchPlan
from tft_ckpt.key import StateKey
from tft_ckpt.manifest import Layout, Manifest, Segment

KEY = StateKey(quorum_id=1, nonce=2, step=3, lineage=4)
CHUNK = 4096


def manifest(*sums: int, chunk_bytes: int = CHUNK, last_bytes: int = 100) -> Manifest:
    length = (len(sums) - 1) * chunk_bytes + last_bytes
    layout = Layout(key=KEY, chunk_bytes=chunk_bytes, segments=(Segment(0, length),), root=None)
    return Manifest(layout, sums)


def gone(source: str) -> StateUnavailable:
    return StateUnavailable(f"{source} is gone", source=source)


def damage(source: str) -> StateCorrupt:
    return StateCorrupt(f"{source} is damaged", part="chunk 0", source=source)


def order(plan: FetchPlan, act: Any, times: int) -> list[str | None]:
    asked = []
    for _ in range(times):
        source = plan.next_source()
        asked.append(source)
        if source is not None:
            act(source)
    return asked


def test_sources_take_turns_and_count_once() -> None:
    plan = FetchPlan(KEY, ["a", "b", "a"])
    assert plan.num_sources == 2
    assert order(plan, plan.not_yet, 4) == ["a", "b", "a", "b"]
    assert plan.preferred == "a"


def test_a_source_that_breaks_too_often_is_given_up() -> None:
    plan = FetchPlan(KEY, ["a", "b"])
    asked = order(plan, lambda source: plan.broke(source, gone(source)), 2 * BREAKS_MAX + 1)
    assert asked == ["a", "b"] * BREAKS_MAX + [None]
    error = plan.verdict()
    assert isinstance(error, StateUnavailable)
    assert "a is gone" in str(error)
    assert error.source == "a, b"


def test_a_good_chunk_forgives_breaks_but_not_damage() -> None:
    plan = FetchPlan(KEY, ["a"])
    plan.adopt(manifest(*range(20)))
    for chunk in range(10):
        plan.broke("a", gone("a"))
        plan.arrived("a", chunk)
        assert plan.breaks_of("a") == 0
    for chunk in range(10, 10 + DAMAGES_MAX):
        assert plan.next_source() == "a"
        plan.damaged("a", damage("a"))
        plan.arrived("a", chunk)
    assert plan.next_source() is None
    assert isinstance(plan.verdict(), StateCorrupt)


def test_a_refusal_is_final_and_the_next_is_preferred() -> None:
    plan = FetchPlan(KEY, ["a", "b"])
    plan.refused("a", gone("a"))
    assert (plan.next_source(), plan.preferred, plan.num_sources) == ("b", "b", 1)


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ([gone("a")], StateUnavailable),
        ([gone("a"), damage("b")], StateCorrupt),
        ([StateMismatch("a", wanted=KEY), StateMismatch("b", wanted=KEY)], StateMismatch),
        ([StateMismatch("a", wanted=KEY), gone("b")], StateUnavailable),
        ([], StateUnavailable),
    ],
)
def test_the_verdict_is_the_worst_that_was_seen(errors: list[CheckpointError], kind: type[CheckpointError]) -> None:
    plan = FetchPlan(KEY, [f"s{index}" for index in range(len(errors))])
    for index, error in enumerate(errors):
        plan.refused(f"s{index}", error)
    verdict = plan.verdict()
    assert type(verdict) is kind
    assert all(str(error) in str(verdict) for error in errors)


def test_what_is_missing_shrinks() -> None:
    plan = FetchPlan(KEY, ["a"])
    assert not plan.complete
    assert not plan.adopt(manifest(*range(6)))
    assert plan.missing(1) == [range(6)]
    plan.arrived("a", 0)
    plan.arrived("a", 3)
    assert plan.missing(1) == [range(1, 3), range(4, 6)]
    assert plan.good_bytes == 2 * CHUNK
    for chunk in (1, 2, 4, 5):
        plan.arrived("a", chunk)
    assert plan.complete
    assert plan.missing(1) == plan.missing(3) == []
    assert plan.good_bytes == 5 * CHUNK + 100


def test_parts_for_several_connections_cover_what_is_missing() -> None:
    plan = FetchPlan(KEY, ["a"])
    plan.adopt(manifest(*range(100)))
    for chunk in range(10, 30):
        plan.arrived("a", chunk)
    parts = plan.missing(4)
    assert [chunk for part in parts for chunk in part] == [*range(10), *range(30, 100)]
    assert max(map(len, parts)) == 5


def test_the_next_source_confirms_what_is_here() -> None:
    plan = FetchPlan(KEY, ["a", "b"])
    plan.adopt(manifest(1, 2, 3, 4))
    for chunk in (0, 1, 3):
        plan.arrived("a", chunk)
    assert plan.adopt(manifest(1, 99, 3, 4))
    assert plan.missing(1) == [range(1, 3)]
    assert plan.good_bytes == CHUNK + 100


def test_another_layout_starts_over() -> None:
    plan = FetchPlan(KEY, ["a", "b"])
    plan.adopt(manifest(1, 2))
    plan.arrived("a", 0)
    assert not plan.adopt(manifest(1, 2, chunk_bytes=2 * CHUNK))
    assert plan.missing(1) == [range(2)]
    assert plan.good_bytes == 0
