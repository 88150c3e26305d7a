"""Whom to ask next, without sockets."""

from __future__ import annotations

from typing import Any

import pytest

from tft_ckpt.errors import (
    CheckpointError,
    StateCorruptError,
    StateLayoutError,
    StateMismatchError,
    StateUnavailableError,
    StateUnsupportedError,
)
from tft_ckpt.key import StateKey
from tft_ckpt.transfer.plan import (
    ABSENCES_MAX,
    BREAKS_MAX,
    DAMAGES_MAX,
    HELPER_FAILURES_MAX,
    PAUSE_S,
    PEERS_MAX,
    FetchPlan,
)

KEY = StateKey(quorum_id=1, nonce=2, step=3, lineage=4)


def gone(source: str) -> StateUnavailableError:
    return StateUnavailableError(f"{source} is gone", source=source)


def damage(source: str) -> StateCorruptError:
    return StateCorruptError(f"{source} is damaged", part="chunk 0", source=source)


def order(plan: FetchPlan, act: Any, times: int) -> list[str | None]:
    asked = []
    for now_s in range(times):
        source = plan.next_source()
        asked.append(source)
        if source is not None:
            act(source, float(now_s))
    return asked


def test_sources_take_turns_and_count_once() -> None:
    plan = FetchPlan(KEY, ["a", "b", "a"])
    assert plan.num_sources == 2
    assert order(plan, plan.not_yet, 4) == ["a", "b", "a", "b"]


def test_a_source_that_breaks_too_often_is_given_up() -> None:
    plan = FetchPlan(KEY, ["a", "b"])
    asked = order(plan, lambda source, now_s: plan.connection_lost(source, gone(source), now_s), 2 * BREAKS_MAX + 1)
    assert asked == ["a", "b"] * BREAKS_MAX + [None]
    error = plan.verdict()
    assert isinstance(error, StateUnavailableError)
    assert "a is gone" in str(error)
    assert error.source == "a, b"


def test_a_good_chunk_forgives_breaks_but_not_damage() -> None:
    plan = FetchPlan(KEY, ["a"])
    for now_s in range(10):
        plan.connection_lost("a", gone("a"), float(now_s))
        plan.delivered("a")
    for _ in range(DAMAGES_MAX):
        assert plan.next_source() == "a"
        plan.damaged("a", damage("a"))
        plan.delivered("a")
    assert plan.next_source() is None
    assert isinstance(plan.verdict(), StateCorruptError)


def test_each_break_makes_the_pause_longer_and_a_pause_is_waited_for() -> None:
    plan = FetchPlan(KEY, ["a", "b"])
    assert plan.pause_s("a", 0.0) == 0
    plan.connection_lost("a", gone("a"), 0.0)
    assert plan.pause_s("a", 0.0) == PAUSE_S
    assert plan.due(0.0) == ["b"]
    assert plan.due(PAUSE_S) == ["b", "a"]
    plan.connection_lost("a", gone("a"), 1.0)
    assert plan.pause_s("a", 1.0) == pytest.approx(2 * PAUSE_S)


def test_several_connections_that_break_at_once_are_one_break() -> None:
    plan = FetchPlan(KEY, ["a"])
    for _ in range(2 * BREAKS_MAX):
        plan.connection_lost("a", gone("a"), 0.0)
    assert plan.next_source() == "a"


def test_a_refusal_is_final_and_the_next_is_preferred() -> None:
    plan = FetchPlan(KEY, ["a", "b"])
    plan.refused("a", gone("a"))
    plan.refused("a", gone("a"))  # of another connection
    assert (plan.next_source(), plan.num_sources) == ("b", 1)


def test_a_helper_that_does_not_match_is_set_aside_until_another_leads() -> None:
    plan = FetchPlan(KEY, ["a", "b"])
    for _ in range(HELPER_FAILURES_MAX):
        assert plan.due(0.0) == ["a", "b"]
        plan.helper_failed("b")
    assert plan.due(0.0) == ["a"]
    plan.refused("a", gone("a"))
    assert plan.next_source() == "b"
    plan.primary_changed()
    assert plan.due(0.0) == ["b"]


def test_fellows_are_met_once_and_lost_for_good() -> None:
    plan = FetchPlan(KEY, ["a"], own="m")
    plan.add_peers(["x", "b", "a", "m", "x"])
    assert plan.due_peers(0.0) == ["x", "b"], "in a ring, from the own address on"
    assert plan.due(0.0) == ["a"]
    plan.connection_lost("x", gone("x"), 0.0)
    plan.helper_failed("b")
    plan.add_peers(["x", "b"])
    assert plan.due_peers(9.0) == []
    assert [plan.is_source(name) for name in ("a", "x")] == [True, False]


def test_a_fellow_with_nothing_is_forgotten_in_the_end() -> None:
    plan = FetchPlan(KEY, ["a"], own="m")
    plan.add_peers(["x"])
    for now_s in range(ABSENCES_MAX):
        assert plan.due_peers(float(now_s)) == ["x"]
        plan.not_yet("x", float(now_s))
    assert plan.due_peers(100.0) == []


def test_fellows_are_bounded() -> None:
    plan = FetchPlan(KEY, ["a"], own="m")
    plan.add_peers(f"f{number}" for number in range(10 * PEERS_MAX))
    assert len(plan.due_peers(0.0)) == PEERS_MAX


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ([gone("a")], StateUnavailableError),
        ([gone("a"), damage("b")], StateCorruptError),
        ([StateMismatchError("a", wanted=KEY), StateMismatchError("b", wanted=KEY)], StateMismatchError),
        ([StateMismatchError("a", wanted=KEY), gone("b")], StateUnavailableError),
        ([], StateUnavailableError),
    ],
)
def test_the_verdict_is_the_worst_that_was_seen(errors: list[CheckpointError], kind: type[CheckpointError]) -> None:
    plan = FetchPlan(KEY, [f"s{index}" for index in range(len(errors))])
    for index, error in enumerate(errors):
        plan.refused(f"s{index}", error)
    verdict = plan.verdict()
    assert type(verdict) is kind
    assert all(str(error) in str(verdict) for error in errors)


@pytest.mark.parametrize("kind", [StateLayoutError, StateUnsupportedError])
def test_what_the_caller_can_mend_is_named_before_what_may_pass(
    kind: type[StateLayoutError | StateUnsupportedError],
) -> None:
    plan = FetchPlan(KEY, ["a", "b", "c"])
    plan.refused("a", gone("a"))
    plan.refused("b", kind("state.x is wrong at b", path="state.x"))
    plan.refused("c", gone("c"))
    error = plan.verdict()
    assert type(error) is kind
    assert isinstance(error, StateLayoutError | StateUnsupportedError)
    assert error.path == "state.x"
    assert "a is gone" in str(error)


def hangs(plan: FetchPlan, source: str, now_s: float) -> None:
    plan.hung(source, gone(source), now_s, 60.0)


def test_a_source_that_is_silent_is_asked_last_and_given_more_time() -> None:
    plan = FetchPlan(KEY, ["a", "b"])
    assert (plan.silence_s("a", 60.0), plan.has_hung) == (1.0, False)
    hangs(plan, "a", 0.0)
    assert (plan.next_source(), plan.silence_s("a", 60.0), plan.silence_s("b", 60.0)) == ("b", 2.0, 1.0)
    assert list(plan.poor) == ["a"]
    assert plan.has_hung
    assert plan.silence_s("a", 0.5) == 0.5, "never more than one source alone"


def test_several_connections_that_are_silent_at_once_are_one_hang() -> None:
    plan = FetchPlan(KEY, ["a", "b"])
    for _ in range(3):
        hangs(plan, "a", 0.0)
    assert plan.silence_s("a", 60.0) == 2.0


def test_a_pause_of_all_sources_gives_none_of_them_up_before_its_time() -> None:
    plan = FetchPlan(KEY, ["a", "b"])
    for turn in range(6):
        for source in ("a", "b"):
            hangs(plan, source, 100.0 * turn)
    assert plan.num_sources == 2
    assert plan.silence_s("a", 60.0) == 60.0
    for turn in range(BREAKS_MAX):
        hangs(plan, "a", 1_000.0 + 100.0 * turn)
    assert (plan.num_sources, plan.next_source()) == (1, "b")


def test_one_source_alone_has_all_the_time() -> None:
    plan = FetchPlan(KEY, ["a"])
    assert plan.silence_s("a", 60.0) == 60.0
    for turn in range(BREAKS_MAX):
        hangs(plan, "a", float(turn))
    assert plan.next_source() is None


def test_who_failed_before_is_asked_last() -> None:
    plan = FetchPlan(KEY, ["a", "b", "c"], poor=["a", "x"])
    assert (plan.next_source(), plan.candidates(0.0)) == ("b", ["b", "c", "a"])
    assert plan.poor == {}, "what it did now is not known yet"


def test_lies_and_slowness_are_kept_in_mind_and_a_break_is_not() -> None:
    plan = FetchPlan(KEY, ["a", "b", "c", "d"], own="m")
    plan.add_peers(["x"])
    plan.damaged("a", damage("a"))
    plan.was_slow("b", "b is slow")
    plan.was_slow("x", "no source")
    plan.connection_lost("c", gone("c"), 0.0)
    assert plan.poor == {"a": "a is damaged", "b": "b is slow"}
