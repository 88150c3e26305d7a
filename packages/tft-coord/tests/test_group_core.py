"""The manager server's core: one voice of a group's ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from tft_coord.core import effects, events
from tft_coord.core.commit import MAX_ROUNDS
from tft_coord.core.effects import GroupEffect
from tft_coord.core.merge import rules_of
from tft_coord.core.replica_group import MAX_NOTICES_KEPT, ReplicaGroupCore
from tft_coord.core.types import LossNotice, Member, Purpose, Quorum, QuorumKey, RankRequest, Refusal, Verdict
from tft_coord.errors import ProtocolError
from tft_coord.timeouts import Timeouts

KEY = QuorumKey(7, 9)
SESSION = 100


def group(world_size: int = 2) -> ReplicaGroupCore:
    core = ReplicaGroupCore(
        replica_id="a", address="a:1", store_address="a:2", world_size=world_size, timeouts=Timeouts()
    )
    for rank in range(world_size):
        core.handle(events.RankConnected(rank, rank + 1, SESSION), 0)
    return core


def request(step: int = 3, **changes: object) -> RankRequest:
    return RankRequest(**{"step": step, "lineage": 100 + step, "held": KEY, **changes})  # type: ignore[arg-type]


def asked(
    core: ReplicaGroupCore, rank: int, call: int, said: RankRequest, deadline_ms: int = 60_000
) -> list[GroupEffect]:
    return core.handle(events.RankAsked(rank, call, said, deadline_ms), 0)


def both(core: ReplicaGroupCore, first: RankRequest, second: RankRequest) -> effects.AskLighthouse:
    asked(core, 0, 10, first)
    (order,) = asked(core, 1, 11, second)
    assert isinstance(order, effects.AskLighthouse)
    return order


def other(name: str, step: int = 3, **changes: object) -> Member:
    return Member(name, address=f"{name}:1", store_address=f"{name}:2", step=step, lineage=100 + step, **changes)  # type: ignore[arg-type]


def quorum(*members: Member) -> Quorum:
    return Quorum(KEY, members)


def test_one_rank_can_not_open_votes_without_end() -> None:
    """A no is decided at once, and kept for the other ranks until all have asked for the next quorum."""
    core = group()

    def voted(call: int, step: int) -> GroupEffect:
        (order,) = core.handle(events.RankVoted(0, call, KEY, step, Purpose.COMMIT, False, 60_000), 0)
        return order

    for step in range(MAX_ROUNDS):
        assert isinstance(voted(step, step), effects.AnswerVote)
    refused = voted(998, MAX_ROUNDS)
    assert isinstance(refused, effects.FailRank)
    assert "has 64 undecided votes, so rank 0 can't vote on step 64" in refused.message
    assert isinstance(voted(999, 5), effects.AnswerVote)  # of a round that is kept
    both(core, request(), request())
    assert isinstance(voted(1_000, MAX_ROUNDS), effects.AnswerVote)


class TestMerge:
    """needs.md section 4, fault 12: not the last rank that joined counts, but all of them."""

    def test_it_asks_when_all_ranks_have(self) -> None:
        core = group(3)
        assert asked(core, 2, 12, request()) == []
        assert asked(core, 0, 10, request()) == []
        (order,) = asked(core, 1, 11, request())
        assert isinstance(order, effects.AskLighthouse)
        assert (order.member.replica_id, order.member.address, order.member.store_address) == ("a", "a:1", "a:2")
        assert (order.member.step, order.member.lineage, order.member.world_size) == (3, 103, 3)
        assert (order.held, order.member.torn) == (KEY, False)

    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize(
        ("name", "values", "merged"),
        [
            ("commit_failures", (0, 2), 2),
            ("failed_heals", (1, 0), 1),
            ("poor_sources", (("b",), ("b", "c")), ("b", "c")),
            ("shrink_only", (False, True), True),
            ("needs_configure", (True, False), True),
            ("torn", (False, True), True),
            ("live", (True, False), False),
            ("allow_heal", (True, False), False),
            ("init_sync", (False, True), True),
            ("min_replica_size", (1, 2), 2),
            ("lease_ms", (5, 3), 3),
            ("lease_ms", (5, None), None),
        ],
    )
    def test_of_every_rank(self, name: str, values: tuple[object, object], merged: object, turned: bool) -> None:
        first, second = (values[1], values[0]) if turned else values
        order = both(group(), request(**{name: first}), request(**{name: second}))
        assert getattr(order.member, name) == merged

    def test_a_field_without_a_rule_is_named(self) -> None:
        @dataclasses.dataclass(frozen=True)
        class Asks:
            torn: bool = False

        with pytest.raises(TypeError, match=r"Asks\.torn has no rule, and Member has it too; give it a Merge"):
            rules_of(Asks, Member)

    def test_settings_are_those_of_rank_0(self) -> None:
        member = both(group(), request(data="x", use_async_quorum=False), request(data="y")).member
        assert (member.data, member.use_async_quorum) == ("x", False)

    @pytest.mark.parametrize("odd", [request(4), request(lineage=1), request(lineage=None)], ids=str)
    def test_ranks_with_different_states_are_torn(self, odd: RankRequest) -> None:
        order = both(group(), request(), odd)
        assert order.member.torn
        assert order.member.step == 3
        assert order.member.lineage is None

    @pytest.mark.parametrize("older", [None, QuorumKey(6, 1)])
    @pytest.mark.parametrize("turned", [False, True])
    def test_a_quorum_in_which_only_some_ranks_have_begun_runs_no_more(
        self, older: QuorumKey | None, turned: bool
    ) -> None:
        """Given it again, those that have begun would take it for their next step."""
        ranks = [request(), request(held=older)]
        order = both(group(), *reversed(ranks)) if turned else both(group(), *ranks)
        assert (order.held, order.member.needs_configure) == (KEY, True)

    def test_ranks_that_loaded_one_step_are_one_state(self) -> None:
        member = both(group(), request(lineage=None), request(lineage=None)).member
        assert (member.torn, member.lineage) == (False, None)

    def test_handles_go_by_rank(self) -> None:
        order = both(group(), request(reconfigure_handle="x"), request())
        assert order.member.reconfigure_handles == ("x", "")
        assert both(group(), request(), request()).member.reconfigure_handles == ()

    def test_a_rank_out_of_range_is_told_what_to_check(self) -> None:
        (order,) = asked(group(), 2, 10, request())
        assert isinstance(order, effects.FailRank)
        assert order.code == "malformed"
        assert "rank 2 asks in replica a, which has world size 2" in order.message

    def test_a_group_has_a_rank(self) -> None:
        with pytest.raises(ProtocolError, match="world_size 0; give at least 1"):
            group(0)


class TestAnswers:
    def test_every_rank_gets_its_plan(self) -> None:
        core = group()
        order = both(core, request(), request())
        answers = core.handle(events.QuorumArrived(order.request, quorum(order.member, other("b"))), 0)
        plans = [each for each in answers if isinstance(each, effects.AnswerPlan)]
        assert [(each.call, each.rank, each.plan.replica_id) for each in plans] == [(10, 0, "a"), (11, 1, "a")]
        assert [each.plan.store_address for each in plans] == ["a:2", "b:2"]

    def test_an_answer_to_another_request_is_ignored(self) -> None:
        core = group()
        order = both(core, request(), request())
        late = quorum(order.member)
        assert core.handle(events.QuorumArrived(order.request + 1, late), 0) == []
        assert core.handle(events.QuorumArrived(order.request, late), 0) != []
        assert core.handle(events.QuorumArrived(order.request, late), 0) == []

    def test_a_refusal_reaches_every_rank(self) -> None:
        core = group()
        order = both(core, request(), request())
        orders = core.handle(events.RequestRefused(order.request, "ahead", "load an older one"), 0)
        fails = [each for each in orders if isinstance(each, effects.FailRank)]
        assert [(each.rank, each.code, each.message) for each in fails] == [
            (0, "ahead", "load an older one"),
            (1, "ahead", "load an older one"),
        ]
        assert core.handle(events.RequestRefused(order.request, "ahead", "again"), 0) == []

    def test_a_quorum_without_a_state_to_go_on_from_fails_with_a_sentence(self) -> None:
        core = group()
        order = both(core, request(torn=True), request(torn=True))
        orders = core.handle(events.QuorumArrived(order.request, quorum(order.member)), 0)
        (first, second) = [each for each in orders if isinstance(each, effects.FailRank)]
        assert "restart the job from its last durable checkpoint" in first.message
        assert (first.code, second.code) == ("malformed", "malformed")


class TestUnchanged:
    def after(self, *others: Member) -> ReplicaGroupCore:
        """A group that holds a quorum with these."""
        core = group()
        order = both(core, request(), request())
        core.handle(events.QuorumArrived(order.request, quorum(order.member, *others)), 0)
        return core

    def next(self, core: ReplicaGroupCore) -> list[GroupEffect]:
        order = both(core, request(4), request(4))
        return core.handle(events.UnchangedArrived(order.request, KEY), 0)

    def test_a_plan_in_which_all_held_the_state_stands(self) -> None:
        assert self.next(self.after(other("b"))) == [
            effects.AnswerRankUnchanged(10, 0, KEY),
            effects.AnswerRankUnchanged(11, 1, KEY),
        ]

    def test_after_a_healing_the_plan_is_a_new_one(self) -> None:
        """Who healed counts now. The plan that the ranks hold still has it giving zeros, and dividing by one less."""
        core = self.after(other("b", 1))
        orders = self.next(core)
        plans = [each.plan for each in orders if isinstance(each, effects.AnswerPlan)]
        assert len(plans) == 2
        assert all(plan.participants == (0, 1) for plan in plans)
        assert all((plan.heal, plan.serve, plan.step, plan.lineage) == (False, False, 4, 104) for plan in plans)
        # From then on it stands.
        order = both(core, request(5), request(5))
        assert [type(each) for each in core.handle(events.UnchangedArrived(order.request, KEY), 0)] == [
            effects.AnswerRankUnchanged,
            effects.AnswerRankUnchanged,
        ]

    def test_a_lighthouse_without_memory_is_told_where_all_were_last(self) -> None:
        core = self.after(other("b", 1))
        self.next(core)
        order = both(core, request(5), request(5))
        core.handle(events.UnchangedArrived(order.request, KEY), 0)
        told = core.report()
        assert told is not None
        assert (told.key, {(member.step, member.lineage, member.live) for member in told.members}) == (
            KEY,
            {(5, request(5).lineage, True)},
        )

    def test_ranks_that_have_not_gone_on_are_given_their_plan_again(self) -> None:
        """The answer was lost: what they hold is the plan before it, in which somebody heals."""
        core = self.after(other("b", 1))
        self.next(core)
        orders = self.next(core)  # the same step once more
        assert [type(each) for each in orders] == [effects.AnswerPlan] * 2
        assert all(each.plan.participants == (0, 1) for each in orders if isinstance(each, effects.AnswerPlan))

    def test_settings_survive(self) -> None:
        core = self.after(replace(other("b", 1), data="x", fixed_with_spares=True))
        self.next(core)
        assert core.quorum is not None
        assert core.quorum.members[1].data == "x"

    def test_of_a_quorum_that_it_does_not_hold_it_is_an_error(self) -> None:
        core = group()
        order = both(core, request(), request())
        orders = core.handle(events.UnchangedArrived(order.request, KEY), 0)
        assert {each.code for each in orders if isinstance(each, effects.FailRank)} == {"malformed"}


class TestWithdrawal:
    """needs.md section 4, fault 5."""

    def test_a_rank_that_goes_away_takes_the_groups_request_with_it(self) -> None:
        core = group()
        order = both(core, request(), request())
        assert core.handle(events.RankWithdrew(1, 11), 0) == [effects.WithdrawFromLighthouse(order.request)]
        assert core.handle(events.QuorumArrived(order.request, quorum(order.member)), 0) == []
        (again,) = asked(core, 1, 12, request())
        assert isinstance(again, effects.AskLighthouse)
        assert again.request > order.request

    def test_another_call_of_that_rank_is_not_meant(self) -> None:
        core = group()
        both(core, request(), request())
        assert core.handle(events.RankWithdrew(1, 99), 0) == []

    def test_a_rank_that_asks_again_voids_its_older_call(self) -> None:
        core = group()
        order = both(core, request(), request())
        orders = asked(core, 0, 12, request(4))
        assert orders[0] == effects.WithdrawFromLighthouse(order.request)
        assert isinstance(orders[1], effects.FailRank)
        assert (orders[1].call, orders[1].code) == (10, "stale")
        assert isinstance(orders[2], effects.AskLighthouse)

    def test_an_answer_that_a_rank_has_not_heard_is_given_again(self) -> None:
        """Asked of the lighthouse it would be the answer to the next start, and the others wait in this one."""
        core = group()
        order = both(core, request(attempt=5), request(attempt=5))
        plans = core.handle(events.QuorumArrived(order.request, quorum(other("a"), other("b"))), 0)
        (again,) = asked(core, 1, 12, request(attempt=5))
        assert again == replace(plans[1], call=12)  # type: ignore[type-var]
        order = both(core, request(4, attempt=6), request(4, attempt=6))
        core.handle(events.UnchangedArrived(order.request, KEY), 0)
        assert asked(core, 0, 13, request(4, attempt=6)) == [effects.AnswerRankUnchanged(13, 0, KEY)]
        assert asked(core, 0, 14, request(5, attempt=7)) == []  # the next is another one

    def test_a_request_that_comes_after_a_newer_one_voids_nothing(self) -> None:
        core = group()
        asked(core, 0, 10, request(attempt=6))
        (order,) = asked(core, 0, 11, request(attempt=5))
        assert isinstance(order, effects.FailRank)
        assert (order.call, order.code) == (11, "stale")
        (order,) = asked(core, 1, 12, request(attempt=6))
        assert isinstance(order, effects.AskLighthouse)

    def test_a_deadline_says_what_it_waited_for(self) -> None:
        core = group()
        asked(core, 0, 10, request(), deadline_ms=500)
        assert core.next_deadline_ms() == 500
        (order,) = core.tick(500)
        assert isinstance(order, effects.FailRank)
        assert order.code == "deadline"
        assert order.message == (
            "timed out waiting for a quorum; rank 1 of the group has not asked; check whether it hangs"
        )

    def test_a_deadline_of_one_rank_leaves_the_other_waiting(self) -> None:
        core = group()
        asked(core, 0, 10, request(), deadline_ms=500)
        (ask,) = asked(core, 1, 11, request(), deadline_ms=900)
        orders = core.tick(500)
        assert [type(each) for each in orders] == [effects.WithdrawFromLighthouse, effects.FailRank]
        assert isinstance(ask, effects.AskLighthouse)
        assert core.next_deadline_ms() == 900


class TestAttempts:
    """A rank whose request failed is in its next step; who waits in the one before must come after it."""

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_who_waits_in_an_older_one_fails_in_it_too(self, order: tuple[int, int]) -> None:
        core = group()
        attempts = {0: 4, 1: 5}
        told = [each for rank in order for each in asked(core, rank, 10 + rank, request(attempt=attempts[rank]))]
        (failed,) = told
        assert isinstance(failed, effects.FailRank)
        assert (failed.call, failed.rank, failed.code) == (10, 0, "stale")
        assert "attempt 4" in failed.message
        (together,) = asked(core, 0, 12, request(attempt=5))
        assert isinstance(together, effects.AskLighthouse)

    def test_after_a_deadline_the_ranks_meet_again(self) -> None:
        core = group()
        asked(core, 0, 10, request(attempt=1), deadline_ms=500)
        asked(core, 1, 11, request(attempt=1), deadline_ms=510)
        core.tick(500)
        (failed,) = asked(core, 0, 12, request(attempt=2))
        assert isinstance(failed, effects.FailRank)
        assert failed.call == 11

    def test_ranks_that_do_not_say_are_taken_as_they_come(self) -> None:
        core = group()
        asked(core, 0, 10, request())
        (order,) = asked(core, 1, 11, request(attempt=5))
        assert isinstance(order, effects.AskLighthouse)


class TestLoss:
    def test_a_rank_whose_stream_is_not_back_within_the_grace_ends_the_group(self) -> None:
        core = group()
        asked(core, 0, 10, request())
        core.handle(events.RankDisconnected(1, 2), 1_000)
        assert core.next_deadline_ms() == 1_300
        assert core.tick(1_299) == []
        report, fail, told = core.tick(1_300)
        assert report == effects.ReportDeath("rank 1's stream disconnected and did not return within 300 ms")
        assert isinstance(fail, effects.FailRank)
        assert (fail.rank, fail.code) == (0, "group_lost")
        assert isinstance(told, effects.TellGroupLost)
        assert (told.rank, told.message) == (0, fail.message)
        (later,) = asked(core, 0, 12, request())
        assert isinstance(later, effects.FailRank)
        assert "end this process and start the group again" in later.message
        assert core.lost is not None

    def test_one_that_is_back_in_time_was_never_away(self) -> None:
        core = group()
        core.handle(events.RankDisconnected(1, 2), 1_000)
        core.handle(events.RankConnected(1, 5, SESSION), 1_299)
        assert core.tick(2_000) == []
        core.handle(events.RankDisconnected(1, 2), 2_000)  # the older stream, late
        assert core.tick(9_000) == []

    @pytest.mark.parametrize("session", [SESSION - 1, SESSION + 1])
    @pytest.mark.parametrize("broken", [False, True])
    def test_another_process_does_not_take_its_place_while_it_lives(self, session: int, broken: bool) -> None:
        core = group()
        if broken:
            core.handle(events.RankDisconnected(1, 2), 1_000)
        says = "rank 1 of replica a is already running (session 100); give each process of the group its own RANK"
        refusal = effects.RefuseSession(9, Refusal.DUPLICATE, says)
        assert core.handle(events.RankConnected(1, 9, session), 1_100) == [refusal]
        core.handle(events.RankDisconnected(1, 9), 1_100)  # the end of the refused stream changes nothing
        assert core.handle(events.RankConnected(1, 5, SESSION), 1_200) == []
        assert core.tick(9_000) == []

    def test_after_its_end_an_older_process_is_refused_and_a_newer_one_told_that_the_group_is_lost(self) -> None:
        core = group()
        core.handle(events.RankDied(1, "signal 9"), 0)
        (refusal,) = core.handle(events.RankConnected(1, 9, SESSION - 1), 0)
        says = "rank 1 of replica a has session 100, and 99 is older; end this process"
        assert refusal == effects.RefuseSession(9, Refusal.STALE, says)
        (told,) = core.handle(events.RankConnected(1, 10, SESSION + 1), 0)
        assert isinstance(told, effects.TellGroupLost)

    def test_a_death_needs_no_grace_and_seals_the_vote(self) -> None:
        core = group()
        core.handle(events.RankVoted(0, 20, KEY, 3, Purpose.COMMIT, True, 60_000), 0)
        report, verdict, told = core.handle(events.RankDied(1, "signal 9"), 0)
        assert report == effects.ReportDeath("rank 1 ended: signal 9")
        assert verdict == effects.AnswerVote(20, 0, Verdict(False))
        assert isinstance(told, effects.TellGroupLost)
        assert told.rank == 0
        assert core.handle(events.RankDied(0, "signal 9"), 0) == []  # reported once

    def test_a_clean_goodbye_is_a_loss_at_once(self) -> None:
        orders = group().handle(events.RankDisconnected(1, 2, left=True), 0)
        assert orders[0] == effects.ReportDeath("rank 1 shut down")


class TestNotices:
    """A loss in the quorum that is held is told on to the ranks; whatever it overtakes, and however often it comes."""

    NEXT = QuorumKey(8, 3)

    def holds(self, key: QuorumKey = KEY, world_size: int = 2) -> ReplicaGroupCore:
        core = group(world_size)
        self.gets(core, key)
        return core

    def gets(self, core: ReplicaGroupCore, key: QuorumKey, *, session: int = 5) -> list[GroupEffect]:
        """All ranks ask, and are given this quorum."""
        for rank in range(len(core._streams)):
            orders = asked(core, rank, 10 + rank, request())
        order = orders[-1]
        assert isinstance(order, effects.AskLighthouse)
        member = replace(order.member, session=session)
        return core.handle(events.QuorumArrived(order.request, Quorum(key, (member, other("b"), other("c")))), 0)

    def notice(self, key: QuorumKey = KEY, name: str = "b") -> LossNotice:
        return LossNotice(key, name, 1, "its stream broke")

    def noticed(self, core: ReplicaGroupCore, notice: LossNotice) -> list[GroupEffect]:
        return core.handle(events.LossNoticed(notice), 0)

    def test_each_rank_with_a_stream_is_told(self) -> None:
        core, notice = self.holds(world_size=3), self.notice()
        core.handle(events.RankDisconnected(1, 2), 0)
        assert self.noticed(core, notice) == [effects.NotifyRank(0, notice), effects.NotifyRank(2, notice)]

    def test_a_rank_whose_stream_was_broken_hears_it_when_it_is_back(self) -> None:
        core, notice = self.holds(), self.notice()
        core.handle(events.RankDisconnected(1, 2), 0)
        self.noticed(core, notice)
        assert core.handle(events.RankConnected(1, 7, SESSION), 100) == [effects.NotifyRank(1, notice)]

    def test_what_comes_twice_is_told_once(self) -> None:
        core = self.holds()
        self.noticed(core, self.notice())
        assert self.noticed(core, self.notice()) == []
        assert self.noticed(core, replace(self.notice(), reason="silent for 5000 ms")) == []
        assert len(self.noticed(core, replace(self.notice(), session=2))) == 2
        assert len(self.noticed(core, replace(self.notice(), lives=True))) == 2
        assert len(self.noticed(core, self.notice(name="c"))) == 2

    def test_of_an_older_quorum_it_is_ignored(self) -> None:
        core = self.holds(self.NEXT)
        assert self.noticed(core, self.notice()) == []
        assert core.handle(events.RankConnected(1, 7, SESSION), 100) == []

    def test_one_of_the_same_id_and_another_nonce_is_another_quorums(self) -> None:
        core = self.holds(QuorumKey(7, 5))
        assert self.noticed(core, self.notice(QuorumKey(7, 9))) == []
        assert core.handle(events.RankConnected(1, 7, SESSION), 100) == []

    def test_one_that_overtakes_its_quorum_is_kept_and_told_after_the_plan(self) -> None:
        core, notice = self.holds(), self.notice(self.NEXT)
        assert self.noticed(core, notice) == []
        orders = self.gets(core, self.NEXT)
        assert [type(order) for order in orders] == [effects.AnswerPlan] * 2 + [effects.NotifyRank] * 2
        assert orders[2:] == [effects.NotifyRank(0, notice), effects.NotifyRank(1, notice)]

    def test_one_that_comes_before_any_quorum_is_kept_too(self) -> None:
        core = group()
        assert self.noticed(core, self.notice()) == []
        assert self.gets(core, KEY)[2:] == [effects.NotifyRank(0, self.notice()), effects.NotifyRank(1, self.notice())]

    def test_the_next_quorum_ends_it(self) -> None:
        core = self.holds()
        self.noticed(core, self.notice())
        assert [type(order) for order in self.gets(core, self.NEXT)] == [effects.AnswerPlan] * 2
        assert core.handle(events.RankConnected(1, 7, SESSION), 100) == []

    def test_its_own_session_that_was_taken_for_lost_breaks_its_quorum(self) -> None:
        core = self.holds()
        orders = core.handle(events.SessionLost(5, "silent for 5000 ms"), 0)
        notice = LossNotice(KEY, "a", 5, "silent for 5000 ms")
        assert orders == [effects.NotifyRank(0, notice), effects.NotifyRank(1, notice)]
        assert core.lost is None  # the group lives

    def test_but_not_the_quorum_of_a_newer_session(self) -> None:
        core = self.holds()
        assert core.handle(events.SessionLost(4, "silent for 5000 ms"), 0) == []
        assert group().handle(events.SessionLost(5, "silent for 5000 ms"), 0) == []

    def test_what_is_kept_for_quorums_to_come_is_bounded(self) -> None:
        core = self.holds()
        self.noticed(core, self.notice())
        for number in range(2 * MAX_NOTICES_KEPT):
            assert self.noticed(core, self.notice(QuorumKey(8 + number, 1))) == []
        assert len(core._notices) == MAX_NOTICES_KEPT
        # What is said of quorums to come does not push out what the held one's ranks must hear.
        assert core.handle(events.RankConnected(1, 7, SESSION), 100) == [effects.NotifyRank(1, self.notice())]

    def test_ranks_hear_that_their_group_is_lost_whenever_they_come(self) -> None:
        core = self.holds(world_size=3)
        core.handle(events.RankDisconnected(2, 3), 0)
        orders = core.handle(events.RankDied(0, "signal 9"), 0)
        (told,) = [order for order in orders if isinstance(order, effects.TellGroupLost)]
        assert told.rank == 1
        assert "lost a rank (rank 0 ended: signal 9); end this process" in told.message
        assert core.handle(events.RankConnected(2, 9, SESSION), 100) == [effects.TellGroupLost(2, told.message)]

    @pytest.mark.parametrize(
        "goodbye", [events.RankDisconnected(1, 2, left=True), events.RankDied(1, "it was shut down", left=True)]
    )
    def test_a_clean_goodbye_alarms_nobody(self, goodbye: events.GroupEvent) -> None:
        core = self.holds()
        told = [order for order in core.handle(goodbye, 0) if isinstance(order, effects.TellGroupLost)]
        assert told
        assert all(order.left for order in told)
        again = effects.TellGroupLost(0, told[0].message, left=True)
        assert core.handle(events.RankConnected(0, 9, SESSION), 100) == [again]
        (refusal,) = asked(core, 0, 12, request())  # who asks is told
        assert isinstance(refusal, effects.FailRank)
        assert refusal.code == "group_lost"


class TestVotes:
    def vote(self, core: ReplicaGroupCore, rank: int, call: int, yes: bool = True, step: int = 3) -> list[GroupEffect]:
        return core.handle(events.RankVoted(rank, call, KEY, step, Purpose.COMMIT, yes, 500), 0)

    def test_all_get_the_verdict(self) -> None:
        core = group()
        assert self.vote(core, 0, 20) == []
        assert self.vote(core, 1, 21) == [
            effects.AnswerVote(20, 0, Verdict(True)),
            effects.AnswerVote(21, 1, Verdict(True)),
        ]

    def test_it_stays_until_every_rank_has_asked_for_the_next_quorum(self) -> None:
        core = group()
        self.vote(core, 0, 20)
        self.vote(core, 1, 21)
        asked(core, 0, 10, request(4))
        assert self.vote(core, 1, 22, yes=False) == [effects.AnswerVote(22, 1, Verdict(True))]
        asked(core, 1, 11, request(4))
        assert self.vote(core, 1, 23, yes=False) == [effects.AnswerVote(23, 1, Verdict(False))]

    def test_a_deadline_is_kept_by_tick(self) -> None:
        core = group()
        self.vote(core, 0, 20)
        assert core.next_deadline_ms() == 500
        assert core.tick(500) == [effects.AnswerVote(20, 0, Verdict(False))]
        assert core.next_deadline_ms() is None

    def test_a_rank_out_of_range_is_told(self) -> None:
        (order,) = self.vote(group(), 7, 20)
        assert isinstance(order, effects.FailRank)
        assert "rank 7 votes in replica a" in order.message


def test_where_a_ranks_state_can_be_fetched() -> None:
    core = group()
    assert core.checkpoint_metadata(0) is None
    asked(core, 0, 10, request(checkpoint_metadata="http://a:5"))
    assert core.checkpoint_metadata(0) == "http://a:5"
