"""The quorum rule against a dumb oracle: every case of up to three replicas, and what a table can't show."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tft_coord.core.quorum import Form, Situation, Wait, decide, reason_for_new_id
from tft_coord.core.types import Member, Quorum, QuorumKey

JOIN_MS = 1_000


def quorum_of(*ids: str) -> Quorum | None:
    return Quorum(QuorumKey(7, 1), tuple(Member(each) for each in sorted(ids))) if ids else None


def oracle(situation: Situation) -> tuple[str, ...] | None:
    """The rule of docs/protocol/sessions-and-quorums.md, line by line, without any care for speed or for reasons."""
    before = set(situation.previous.replica_ids) if situation.previous else set()
    before -= set(situation.left)
    eligible = {each for each in situation.healthy if each not in situation.ineligible}
    eligible -= set(situation.left_out)
    if any(each in before and situation.waiting[each].shrink_only for each in situation.waiting):
        eligible = {each for each in eligible if each in before}
    waiting = {each for each in situation.waiting if each in eligible}
    if not waiting or len(waiting) < situation.min_replicas:
        return None
    awaited = before - set(situation.left_out)
    if awaited and awaited <= waiting:
        return tuple(sorted(waiting))
    if situation.fast_only:
        return None
    if not len(waiting) > len(eligible) / 2:
        return None
    if (before & set(situation.healthy)) and not (before & waiting):
        return None
    late = eligible - waiting
    if late & set(situation.healing):
        return None
    first_ms = min(situation.asked_ms[each] for each in waiting)
    if late and situation.now_ms < first_ms + situation.join_timeout_ms:
        return None
    if situation.lost_sources and all(situation.waiting[each].step < situation.reference_step for each in waiting):
        return None
    return tuple(sorted(waiting))


def answer(situation: Situation) -> tuple[str, ...] | None:
    decision = decide(situation)
    if isinstance(decision, Wait):
        assert decision.reason
        return None
    return tuple(member.replica_id for member in decision.members)


def every_case(ids: tuple[str, ...]) -> Iterator[Situation]:
    """Each replica: absent, gone, healthy, waiting early or late, shrinking, …; in the previous quorum or not."""
    roles = ("absent", "left", "healthy", "healing", "early", "late", "shrinking", "ineligible", "left out")
    for chosen in itertools.product(roles, repeat=len(ids)):
        role = dict(zip(ids, chosen, strict=True))
        waiting = {
            each: Member(each, shrink_only=role[each] == "shrinking")
            for each in ids
            if role[each] in ("early", "late", "shrinking", "ineligible", "left out")
        }
        asked_ms = {each: 0 if role[each] in ("early", "ineligible") else 500 for each in waiting}
        for before in itertools.chain.from_iterable(itertools.combinations((*ids, "z"), n) for n in range(3)):
            for min_replicas, now_ms, fast_only in (
                (1, 999, False),
                (1, 1_200, False),
                (1, 1_500, True),
                (2, 1_500, False),
            ):
                yield Situation(
                    waiting=waiting,
                    healthy={each for each in ids if role[each] not in ("absent", "left")},
                    healing={each for each in ids if role[each] == "healing"},
                    ineligible={each for each in ids if role[each] == "ineligible"},
                    left={each for each in ids if role[each] == "left"},
                    left_out={each for each in ids if role[each] == "left out"},
                    previous=quorum_of(*before),
                    min_replicas=min_replicas,
                    join_timeout_ms=JOIN_MS,
                    asked_ms=asked_ms,
                    fast_only=fast_only,
                    now_ms=now_ms,
                )


def test_where_a_member_is_gone_the_survivors_are_not_blamed() -> None:
    previous = Quorum(QuorumKey(1, 1), (Member("a"), Member("b")), 0)
    after = (Member("a", commit_failures=1, needs_configure=True),)
    assert reason_for_new_id(previous, after, None) == "b is gone"


def test_a_straggler_is_named_where_it_is_gone() -> None:
    previous = Quorum(QuorumKey(1, 1), (Member("a"), Member("b"), Member("c")), 0)
    reason = reason_for_new_id(previous, (Member("a"),), None, ["c"], left_out=["b"])
    assert reason == "b is left out as a straggler, c has left"


def test_the_sentence_says_for_how_long_a_state_is_waited_for() -> None:
    waits = Situation(
        waiting={"b": Member("b")},
        healthy={"b"},
        previous=quorum_of("a", "b"),
        min_replicas=1,
        join_timeout_ms=JOIN_MS,
        asked_ms={"b": 0},
        now_ms=5_000,
        reference_step=7,
        lost_sources={"a": 1_000},
        lost_state_ms=30_000,
    )
    assert decide(waits) == Wait(
        "the state of step 7, which a held until it was lost 4 s ago; continue or restart that replica, or the others "
        "resume from an older step in 26 s"
    )


def test_every_case_of_three_replicas() -> None:
    formed = waited = 0
    for situation in every_case(("a", "b", "c")):
        expected = oracle(situation)
        assert answer(situation) == expected, situation
        formed += expected is not None
        waited += expected is None
    assert formed > 1_000
    assert waited > 1_000


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    ids = [f"r{index}" for index in range(draw(st.integers(1, 7)))]
    some = st.sets(st.sampled_from(ids))
    left = draw(some) if draw(st.booleans()) else set()
    healthy = draw(some) - left
    asking = draw(some) & healthy
    before = draw(st.sets(st.sampled_from([*ids, "gone"]), max_size=6))
    steps = st.integers(0, 3)
    shrinking = draw(some) if draw(st.booleans()) else set()
    return Situation(
        waiting={each: Member(each, step=draw(steps), shrink_only=each in shrinking) for each in sorted(asking)},
        healthy=healthy,
        healing=draw(some) & healthy,
        ineligible=draw(some) if draw(st.integers(0, 3)) == 0 else set(),
        left_out=draw(some) if draw(st.integers(0, 2)) == 0 else set(),
        left=left | ({"gone"} if draw(st.booleans()) else set()),
        previous=quorum_of(*before),
        min_replicas=draw(st.integers(1, 3)),
        join_timeout_ms=JOIN_MS,
        asked_ms={each: draw(st.integers(0, 1_500)) for each in sorted(asking)},
        fast_only=draw(st.integers(0, 5)) == 0,
        reference_step=draw(steps),
        lost_sources={"gone": 1_400} if "gone" in before else {},
        now_ms=1_500,
    )


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(situations())
def test_larger_clusters_too(situation: Situation) -> None:
    assert answer(situation) == oracle(situation)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(situations())
def test_what_is_formed_is_sound(situation: Situation) -> None:
    decision = decide(situation)
    if isinstance(decision, Form):
        ids = [member.replica_id for member in decision.members]
        assert ids == sorted(set(ids))
        assert len(ids) >= situation.min_replicas
        assert set(ids) <= set(situation.waiting)


def situation(**changes: object) -> Situation:
    base: dict[str, object] = {
        "waiting": {"a": Member("a"), "b": Member("b")},
        "healthy": {"a", "b", "c"},
        "previous": quorum_of("a", "b", "c"),
        "min_replicas": 1,
        "join_timeout_ms": JOIN_MS,
        "asked_ms": {"a": 100, "b": 400},
        "now_ms": 500,
    }
    return Situation(**{**base, **changes})  # type: ignore[arg-type]


def test_it_says_what_it_waits_for() -> None:
    assert decide(situation()) == Wait("c is healthy and has not asked; join_timeout ends in 600 ms")
    assert decide(situation(healing={"c"}, now_ms=9_000)) == Wait("c is healing and receives data")
    assert decide(situation(min_replicas=3)) == Wait("2 of min_replicas 3 have asked")
    assert decide(situation(fast_only=True)) == Wait(
        "the lighthouse has just started and waits for running replicas to reconnect"
    )
    assert decide(situation(healthy={"a", "b", "c", "d"}, now_ms=9_000)) == Wait(
        "2 of 4 healthy replicas have asked, and a majority is needed"
    )
    assert decide(situation(previous=quorum_of("c"), now_ms=9_000)) == Wait(
        "a survivor of the last quorum is healthy and has not asked: c"
    )


def test_a_lost_member_is_waited_for_by_nobody() -> None:
    assert decide(situation(healthy={"a", "b"})) == Form((Member("a"), Member("b")))


def test_newcomers_come_in_on_the_fast_path_without_a_majority() -> None:
    """The old are back; three that have not asked hold nobody up."""
    decision = decide(situation(previous=quorum_of("a"), healthy={"a", "b", "x", "y", "z"}))
    assert decision == Form((Member("a"), Member("b")))


def test_who_may_not_take_part_does_not_hurry_the_others() -> None:
    """An ineligible replica has asked long ago; join_timeout counts from the first that may take part."""
    decision = decide(
        situation(
            waiting={"a": Member("a"), "b": Member("b"), "x": Member("x")},
            healthy={"a", "b", "c", "x"},
            ineligible={"x"},
            asked_ms={"a": 100, "b": 400, "x": -5_000},
        )
    )
    assert decision == Wait("c is healthy and has not asked; join_timeout ends in 600 ms")


@pytest.mark.parametrize(
    ("after", "broken", "reason"),
    [
        (("a", "b"), None, None),
        (("a",), None, "b is gone"),
        (("a", "b", "c"), None, "c joined"),
        (("a", "c"), "b was lost", "c joined, b is gone"),
        (("a", "b"), "b did not receive it", "b did not receive it"),
    ],
)
def test_why_an_id_rises(after: tuple[str, ...], broken: str | None, reason: str | None) -> None:
    members = tuple(Member(each) for each in after)
    assert reason_for_new_id(quorum_of("a", "b"), members, broken) == reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (Member("b", step=9, lineage=3), None),
        (Member("b", torn=True, data="{}", shrink_only=True), None),
        (Member("b", session=2), "b has a newer session"),
        (Member("b", address="h:1"), "b has other addresses or another world size"),
        (Member("b", store_address="h:1"), "b has other addresses or another world size"),
        (Member("b", world_size=2), "b has other addresses or another world size"),
        (Member("b", reconfigure_handles=("x",)), None),
        (Member("b", reconfigure_handles=("x",), world_size=2), "b has other addresses or another world size"),
        (Member("b", commit_failures=2), "b failed to commit (2 in a row)"),
        (Member("b", needs_configure=True), "b asks for a new process group"),
    ],
)
def test_what_a_member_may_change_without_a_new_id(changed: Member, reason: str | None) -> None:
    assert reason_for_new_id(quorum_of("a", "b"), (Member("a"), changed), None) == reason


def test_the_first_quorum_has_a_reason_too() -> None:
    assert reason_for_new_id(None, (Member("a"),), None) == "it is the first quorum"
