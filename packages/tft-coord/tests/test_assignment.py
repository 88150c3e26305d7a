"""The plan: a function of the quorum alone. A dumb oracle for small quorums, properties for larger ones, and the cases
of docs/protocol/the-step.md by name."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tft_coord.core.assignment import Assignment, all_at, assign, plan_for
from tft_coord.core.lineage import adopted_lineage
from tft_coord.core.types import Member, Quorum, QuorumKey
from tft_coord.errors import ProtocolError

KEY = QuorumKey(1_000, 42)
NAMES = "abcdefgh"


def quorum(*members: Member) -> Quorum:
    return Quorum(KEY, members)


def at(name: str, step: int, lineage: int | None = 1, **changes: object) -> Member:
    return Member(
        name, step=step, lineage=lineage, address=f"{name}:1", store_address=f"{name}:2", init_sync=False, **changes
    )  # type: ignore[arg-type]


def oracle_holders(members: tuple[Member, ...]) -> tuple[int, ...]:
    """Who holds the reference, in words: highest step, most shared lineage, smallest replica id."""
    whole = [rank for rank, member in enumerate(members) if not member.torn]
    top = [rank for rank in whole if members[rank].step == max(members[other].step for other in whole)]
    best: tuple[int, ...] = ()
    for rank in top:
        lineage = members[rank].lineage
        same = (rank,) if lineage is None else tuple(other for other in top if members[other].lineage == lineage)
        if len(same) > len(best):
            best = same
    return best


def test_every_quorum_of_three() -> None:
    states = [(0, 1), (0, 2), (1, 1), (1, 2), (1, None)]
    for chosen in itertools.product(states, repeat=3):
        for torn in itertools.product((False, True), repeat=3):
            members = tuple(
                at(name, step, lineage, torn=is_torn)
                for name, (step, lineage), is_torn in zip("abc", chosen, torn, strict=True)
            )
            if all(torn):
                with pytest.raises(
                    ProtocolError, match=r"the ranks of every member of quorum .* are in different states"
                ):
                    assign(quorum(*members))
                continue
            found = assign(quorum(*members))
            assert found.up_to_date == oracle_holders(members), members
            assert set(found.recovering) == {0, 1, 2} - set(found.up_to_date)
            assert found.participants == found.up_to_date  # asynchronous: who heals gives zeros


@st.composite
def quorums(draw: st.DrawFn) -> Quorum:
    size = draw(st.integers(1, 8))
    asynchronous = draw(st.booleans())
    spares = draw(st.booleans())
    least = draw(st.integers(1, 4))
    members = tuple(
        Member(
            NAMES[index],
            step=draw(st.sampled_from([0, 1, 7])),
            lineage=draw(st.sampled_from([None, 1, 2])),
            address=f"{NAMES[index]}:1",
            store_address=f"{NAMES[index]}:2",
            torn=draw(st.integers(0, 5)) == 0,
            init_sync=draw(st.integers(0, 9)) > 0,
            allow_heal=draw(st.integers(0, 9)) > 0,
            use_async_quorum=asynchronous,
            fixed_with_spares=spares,
            min_replica_size=least,
        )
        for index in range(size)
    )
    return Quorum(KEY, members)


def sources_of(quorum: Quorum, replica_id: str) -> list[str]:
    return [source.replica_id for source in plan_for(quorum, replica_id, 0).sources]


def served_by(quorum: Quorum) -> dict[str, tuple[int, ...]]:
    """Replica ranks that each member serves first."""
    names = quorum.replica_ids
    return {name: served for name in names if (served := plan_for(quorum, name, 0).recover_dst_replica_ranks)}


def test_a_source_that_a_member_found_poor_is_asked_last_by_all() -> None:
    accuser = at("d", 0, poor_sources=("a", "gone"))
    found = quorum(at("a", 7), at("b", 7), at("c", 7), accuser, at("e", 0), at("f", 0))
    assert [sources_of(found, name) for name in ("d", "e", "f")] == [["b", "c", "a"], ["c", "b", "a"], ["b", "c", "a"]]
    assert served_by(found) == {"b": (3, 5), "c": (4,)}
    assert plan_for(found, "a", 0).serve, "it is a further source still"


def test_where_all_sources_are_poor_each_is_as_good_as_the_others() -> None:
    found = quorum(at("a", 7, poor_sources=("b",)), at("b", 7, poor_sources=("a",)), at("c", 0))
    assert sources_of(found, "c") == ["a", "b"]
    assert sources_of(quorum(at("a", 7, poor_sources=("a",)), at("b", 7), at("c", 0)), "c") == ["a", "b"], "not itself"


def oracle(quorum: Quorum) -> tuple[int, set[int], set[int], set[int]] | None:
    """The plan of docs/protocol/the-step.md, sentence by sentence.

    Returns: the step, and the ranks that hold it, heal and take part.
    """
    members = dict(enumerate(quorum.members))
    whole = [rank for rank in members if not members[rank].torn]
    if not whole:
        return None
    step = max(members[rank].step for rank in whole)
    top = [rank for rank in whole if members[rank].step == step]

    def who_shares(rank: int) -> list[int]:
        """An unknown lineage equals nothing, not even another unknown one."""
        if members[rank].lineage is None:
            return [rank]
        return [other for other in top if members[other].lineage == members[rank].lineage]

    # That lineage which most members share; among equals, that of the smallest replica id.
    most = max(len(who_shares(rank)) for rank in top)
    first = min((rank for rank in top if len(who_shares(rank)) == most), key=lambda rank: members[rank].replica_id)
    holders = set(who_shares(first))
    if step == 0 and members[first].init_sync:
        holders = {first}
    may_heal = all(member.allow_heal for member in members.values())
    heal = set(members) - holders if may_heal else set()
    part = set(holders)
    for rank in heal:
        if not members[rank].use_async_quorum:
            part.add(rank)
    if members[first].fixed_with_spares:
        kept = sorted(part, key=lambda rank: (rank not in holders, rank))
        part = set(kept[: members[first].min_replica_size])
    return step, holders, heal, part


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(quorums())
def test_the_plan_is_the_oracles(given_quorum: Quorum) -> None:
    wanted = oracle(given_quorum)
    if wanted is None:
        with pytest.raises(ProtocolError, match=r"the ranks of every member of quorum .* are in different states"):
            assign(given_quorum)
        return
    found = assign(given_quorum)
    assert (found.step, set(found.up_to_date), set(found.recovering), set(found.participants)) == wanted


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(quorums())
def test_what_holds_for_every_plan(given_quorum: Quorum) -> None:
    members = given_quorum.members
    if all(member.torn for member in members):
        return
    common = assign(given_quorum)
    may_heal = all(member.allow_heal for member in members)
    up_to_date, recovering = set(common.up_to_date), set(common.recovering)
    assert up_to_date
    assert not up_to_date & recovering
    assert not any(members[rank].torn for rank in up_to_date)
    # Exactly those heal that do not hold the reference, if anybody may.
    assert recovering == (set(range(len(members))) - up_to_date if may_heal else set())
    top = max(member.step for member in members if not member.torn)
    assert common.step == top
    assert all(members[rank].step == top for rank in up_to_date)
    assert len({members[rank].lineage for rank in up_to_date}) == 1
    if members[common.up_to_date[0]].lineage is None:
        assert len(up_to_date) == 1  # an unknown lineage equals nothing
    # Nobody's gradients count from another state; in a synchronous quorum those who heal first do count.
    assert set(common.participants) <= up_to_date | (set() if members[0].use_async_quorum else recovering)
    if members[0].fixed_with_spares:
        assert len(common.participants) <= members[0].min_replica_size
    assert list(common.participants) == sorted(set(common.participants))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(quorums(), st.integers(0, 3))
def test_all_members_make_plans_that_fit(given_quorum: Quorum, group_rank: int) -> None:
    members = given_quorum.members
    if all(member.torn for member in members):
        return
    plans = [plan_for(given_quorum, member.replica_id, group_rank) for member in members]
    shared = {
        (plan.key, plan.step, plan.lineage, plan.up_to_date, plan.participants, plan.store_address, plan.replica_ids)
        for plan in plans
    }
    assert len(shared) == 1
    assert [plan.replica_rank for plan in plans] == list(range(len(members)))
    served = Counter(rank for plan in plans for rank in plan.recover_dst_replica_ranks)
    for plan in plans:
        assert plan.heal == bool(plan.sources)
        assert served[plan.replica_rank] == plan.heal
        assert {source.replica_rank for source in plan.sources} == (set(plan.up_to_date) if plan.heal else set())
        if plan.heal:
            first = plans[plan.sources[0].replica_rank]
            assert plan.replica_rank in first.recover_dst_replica_ranks
            assert first.serve
        assert plan.serve == (plan.replica_rank in plan.up_to_date and any(other.heal for other in plans))
        mine = plan.participating_rank
        assert (mine is not None) == (plan.replica_rank in plan.participants)
        assert mine is None or plan.participants[mine] == plan.replica_rank


def test_a_group_heals_from_one_source_with_all_its_ranks() -> None:
    """Rank g takes its state from rank g of the same group; what turns with g is only the rendezvous store."""
    given_quorum = quorum(at("a", 5), at("b", 5), at("c", 2), at("d", 1))
    by_rank = [plan_for(given_quorum, "d", group_rank) for group_rank in range(3)]
    assert {plan.sources for plan in by_rank} == {by_rank[0].sources}
    assert [source.replica_id for source in by_rank[0].sources] == ["b", "a"]
    assert [plan.store_address for plan in by_rank] == ["a:2", "b:2", "a:2"]
    assert [plan.store_replica_id for plan in by_rank] == ["a", "b", "a"]


def test_a_store_that_failed_is_avoided_where_another_one_is_left() -> None:
    def stores(*members: Member) -> list[str]:
        return [plan_for(quorum(*members), "c", group_rank).store_replica_id for group_rank in range(3)]

    failed = at("a", 5, store_failed=True)
    assert stores(failed, at("b", 5), at("c", 5)) == ["b", "c", "b"]
    assert stores(failed, at("b", 2), at("c", 2)) == ["b", "c", "b"]  # one that heals serves as well
    every = [at(name, 5, store_failed=True) for name in "abc"]
    assert stores(*every) == ["a", "b", "c"]


def test_lineages_l1_l2_l2_at_the_top_step() -> None:
    common = assign(quorum(at("a", 9, 1), at("b", 9, 2), at("c", 9, 2)))
    assert (common.lineage, common.up_to_date, common.recovering) == (2, (1, 2), (0,))
    assert common.participants == (1, 2)  # the mean is over two


def test_unknown_lineages_at_the_top_step_leave_the_first_alone() -> None:
    common = assign(quorum(at("a", 9, None), at("b", 9, None), at("c", 9, None)))
    assert (common.up_to_date, common.recovering) == ((0,), (1, 2))
    assert common.lineage == adopted_lineage(KEY, 9, "a")  # all have it after this


def test_a_known_lineage_of_two_beats_an_unknown_one() -> None:
    assert assign(quorum(at("a", 9, None), at("b", 9, 2), at("c", 9, 2))).up_to_date == (1, 2)


def test_a_torn_member_heals_and_is_no_source() -> None:
    common = assign(quorum(at("a", 9, None, torn=True), at("b", 8), at("c", 8)))
    assert (common.step, common.up_to_date, common.recovering, common.participants) == (8, (1, 2), (0,), (1, 2))


def test_nobody_heals_unless_all_allow_it() -> None:
    common = assign(quorum(at("a", 9), at("b", 8, allow_heal=False), at("c", 7)))
    assert (common.recovering, common.participants) == ((), (0,))
    assert plan_for(quorum(at("a", 9), at("b", 8, allow_heal=False)), "a", 0).serve is False


def test_init_sync_at_step_0_makes_the_first_one_count() -> None:
    fresh = [Member(name, lineage=1) for name in "abc"]
    common = assign(quorum(*fresh))
    assert (common.up_to_date, common.recovering, common.participants) == ((0,), (1, 2), (0,))


def test_without_init_sync_all_are_alike_at_step_0() -> None:
    common = assign(quorum(at("a", 0), at("b", 0)))
    assert (common.up_to_date, common.recovering, common.participants) == ((0, 1), (), (0, 1))


def test_step_0_is_committed_though_only_the_first_has_a_gradient() -> None:
    """Else min_replica_size 2 would never be reached: who healed at step 0 would heal again the next time."""
    fresh = [Member(name, lineage=1, min_replica_size=2) for name in "abc"]
    assert assign(quorum(*fresh)).min_replica_size == 1
    assert assign(quorum(fresh[0])).min_replica_size == 2  # alone it is not enough
    later = [Member(name, lineage=1, step=step, min_replica_size=2) for name, step in (("a", 3), ("b", 0))]
    assert assign(quorum(*later)).min_replica_size == 2  # b has healed by the next step


def test_synchronous_members_heal_first_and_count() -> None:
    common = assign(quorum(at("a", 9, use_async_quorum=False), at("b", 8, use_async_quorum=False)))
    assert (common.recovering, common.participants) == ((1,), (0, 1))


def test_spares_are_cut_and_holders_come_first() -> None:
    spare = {"fixed_with_spares": True, "min_replica_size": 2}
    assert assign(quorum(*(at(name, 9, **spare) for name in "abc"))).participants == (0, 1)
    synchronous = {**spare, "use_async_quorum": False}
    common = assign(quorum(at("a", 8, **synchronous), at("b", 9, **synchronous), at("c", 9, **synchronous)))
    assert common.participants == (1, 2)  # a heals, and two others need not


def test_who_is_not_in_the_quorum_is_told() -> None:
    with pytest.raises(ProtocolError, match=r"replica z is not in quorum 1000\.000000000000002a; ask for the next"):
        plan_for(quorum(at("a", 1)), "z", 0)


def test_handles_and_failures_are_forwarded() -> None:
    given_quorum = quorum(at("a", 1, reconfigure_handles=("a0", "a1"), commit_failures=3), at("b", 1))
    plan = plan_for(given_quorum, "b", 1)
    assert plan.reconfigure_handles == ("a1", "")
    assert plan.commit_failures == 3


def test_all_at_says_whether_nothing_needs_to_be_told() -> None:
    assert all_at((at("a", 3), at("b", 3)), 3, 1)
    assert not all_at((at("a", 3), at("b", 3)), 3, None)
    assert not all_at((at("a", 3), at("b", 2)), 3, 1)
    assert not all_at((at("a", 3), at("b", 3, 2)), 3, 1)
    assert not all_at((at("a", 3), at("b", 3, torn=True)), 3, 1)
    assert all_at((Member("a", lineage=1),), 0, 1)
    assert not all_at((Member("a", lineage=1), Member("b", lineage=1)), 0, 1)  # b heals from a


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(quorums())
def test_all_at_never_hides_a_healing(given_quorum: Quorum) -> None:
    members = given_quorum.members
    if all_at(members, members[0].step, members[0].lineage):
        common: Assignment = assign(given_quorum)
        assert common.recovering == ()
        assert len(common.up_to_date) == len(members)
