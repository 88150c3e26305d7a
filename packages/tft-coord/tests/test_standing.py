"""One rank's side of standing quorums: when a round asks, what the word says, what its sum means, and the lease."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tft_coord.core.lineage import state_check
from tft_coord.core.standing import (
    NUM_WORDS,
    UNANSWERED_MOST,
    Ask,
    GoOn,
    Late,
    Lease,
    StandingQuorum,
    State,
    Vote,
    Word,
)
from tft_coord.core.types import MAX_INT64, Plan, QuorumKey, QuorumNews
from tft_coord.errors import ProtocolError
from tft_coord.timeouts import Timeouts

Q, NEXT = QuorumKey(7, 1), QuorumKey(8, 2)
LEASE_MS = 60_000
LINEAGE = 99


def plan(**changes: object) -> Plan:
    """Return a plan of three members that are all up to date."""
    standard = Plan(
        key=Q,
        replica_id="b",
        replica_rank=1,
        replica_world_size=3,
        replica_ids=("a", "b", "c"),
        step=10,
        lineage=LINEAGE,
        heal=False,
        sources=(),
        recover_dst_replica_ranks=(),
        serve=False,
        store_address="",
        up_to_date=(0, 1, 2),
        participants=(0, 1, 2),
        participating_rank=1,
        lease_ms=LEASE_MS,
    )
    return replace(standard, **changes)


class Rank:
    """A rank, and the time."""

    def __init__(self, **changes: object) -> None:
        self.now_ms = 1_000
        self.core = StandingQuorum(Timeouts(join_timeout_ms=5_000))
        self.ask(**changes)

    def ask(self, **changes: object) -> None:
        self.core.asked(self.now_ms)
        self.now_ms += 10
        self.core.planned(plan(**changes), self.now_ms)

    def word(self, *, ok: bool = True, leave: bool = False, ask: str = "", participates: bool = True) -> Word:
        return self.core.word(self.now_ms, ok=ok, lineage=LINEAGE, participates=participates, leave=leave, ask=ask)

    def ends(self, *others: Word) -> Vote:
        """Let the round end; the others say the same as this rank unless they are given."""
        own = self.word()
        words = [own, *(others or (replace(own, ask=False), replace(own, ask=False)))]
        vote = self.core.summed([sum(each) for each in zip(*(one.values() for one in words), strict=True)], LINEAGE)
        self.core.decided(yes=vote.yes, stands=vote.stands)
        self.now_ms += 200
        return vote

    def stands(self) -> Rank:
        """Go through a round that all commit."""
        assert self.ends() == Vote(yes=True, stands=True)
        assert self.core.state is State.STANDS
        return self


# --- rule 1: the word -----------------------------------------------------------------------------------------------


def test_a_word_is_five_integers_that_members_add_up() -> None:
    assert Rank().word() == Word(ok=True, ask="", leave=False, recovering=False, check=state_check(10, LINEAGE))
    assert len(Rank().word().values()) == NUM_WORDS
    assert Rank().word(leave=True, ask="its state is to be loaded").values() == (1, 1, 1, 0, state_check(10, LINEAGE))


def test_the_largest_quorum_fits_into_63_bits() -> None:
    assert MAX_INT64 > 100_000 * (2**40 - 1)
    assert all(0 < state_check(step, LINEAGE) < 2**40 for step in range(100))


def test_a_rank_with_an_error_is_not_ok() -> None:
    assert not Rank().word(ok=False).ok
    assert not Rank().core.word(1_000, ok=True, lineage=None, participates=True).ok


def test_a_rank_whose_quorum_is_broken_is_not_ok() -> None:
    rank = Rank()
    assert rank.core.broke(Q)
    assert not rank.word().ok


def test_one_that_recovers_says_so_and_gives_no_check() -> None:
    rank = Rank(heal=True, up_to_date=(0, 2), participants=(0, 2), participating_rank=None)
    assert rank.word(participates=False) == Word(ok=True, ask="", leave=False, recovering=True, check=0)


def test_no_word_is_spoken_beside_a_member_that_knows_none() -> None:
    rank = Rank(lease_ms=None)
    assert not rank.core.speaks
    assert rank.core.beat(rank.now_ms) == 0
    assert Rank(lease_ms=0).core.speaks


# --- rule 2: the vote ------------------------------------------------------------------------------------------------


def test_all_ok_at_one_state_is_a_yes() -> None:
    assert Rank().ends() == Vote(yes=True, stands=True)


def test_a_word_that_does_not_complete_is_a_no() -> None:
    vote = Rank().core.summed(None, LINEAGE)
    assert (vote.yes, vote.why) == (False, "the exchange of words in this round did not complete")


def test_one_error_fails_the_round_for_all() -> None:
    rank = Rank()
    own = rank.word()
    vote = rank.ends(own, replace(own, ok=False))
    assert (vote.yes, vote.why) == (False, "1 of 3 members did not complete this round")
    assert rank.core.state is State.ASKS


def test_participants_of_different_states_fail_the_round() -> None:
    rank = Rank()
    own = rank.word()
    other = replace(own, check=state_check(10, LINEAGE + 1))
    assert rank.ends(own, other).why == "the participants of step 10 hold different states"
    rank = Rank()
    # One that gives no check although its gradients count is no member of this plan.
    assert not rank.ends(own, replace(own, check=0)).yes


def test_spares_and_those_that_recover_check_the_participants() -> None:
    rank = Rank(participants=(0, 2), participating_rank=None)
    own = rank.word(participates=False)
    taking_part = replace(own, check=state_check(10, LINEAGE))
    total = [sum(each) for each in zip(own.values(), *2 * [taking_part.values()], strict=True)]
    assert rank.core.summed(total, LINEAGE) == Vote(yes=True, stands=True)
    assert not rank.core.summed(total, LINEAGE + 1).yes


@pytest.mark.parametrize("what", ["ask", "leave", "recovering"])
def test_a_wish_of_one_ends_the_standing_of_all(what: str) -> None:
    rank = Rank()
    own = rank.word()
    assert rank.ends(own, replace(own, **{what: True})) == Vote(yes=True, stands=False)
    assert rank.core.state is State.ASKS
    assert rank.core.next_round(rank.now_ms) == Ask("a member asked, left or recovered in the last round")


def test_a_sum_of_another_length_is_refused() -> None:
    with pytest.raises(ProtocolError, match="has 5 integers, not 4"):
        Rank().core.summed([3, 0, 0, 0], LINEAGE)


# --- rule 3: the next round -----------------------------------------------------------------------------------------


def test_a_thousand_rounds_ask_nobody_while_beats_are_answered() -> None:
    rank = Rank()
    for step in range(11, 1_011):
        rank.stands()
        assert rank.core.next_round(rank.now_ms) == GoOn(step)
        if step % 5 == 0:
            number = rank.core.beat(rank.now_ms)
            assert not rank.core.told(QuorumNews(Q, beat=number, age_ms=900))


def test_a_rank_without_a_plan_asks() -> None:
    core = StandingQuorum(Timeouts())
    assert core.state is State.ASKS
    assert core.next_round(0) == Ask("it has no quorum yet")
    assert core.key is None


def test_a_round_in_which_a_member_recovered_is_followed_by_a_request() -> None:
    rank = Rank(up_to_date=(0, 1), participants=(0, 1))
    own = rank.word()
    total = [sum(each) for each in zip(own.values(), own.values(), (1, 0, 0, 0, 0), strict=True)]
    vote = rank.core.summed(total, LINEAGE)
    assert vote == Vote(yes=True, stands=True), "that member's word may have been wrong"
    assert not rank.core.decided(yes=True, stands=True)
    assert rank.core.next_round(rank.now_ms) == Ask("a member recovered in the last round")


def test_members_that_ask_in_every_step_never_stand() -> None:
    rank = Rank(lease_ms=0)
    assert rank.word().ask
    assert not rank.ends().stands
    rank.ask(lease_ms=0)
    rank.core.decided(yes=True, stands=True)
    assert rank.core.next_round(rank.now_ms) == Ask("a member of its quorum asks in every step")


def test_a_group_whose_verdict_does_not_stand_asks() -> None:
    rank = Rank()
    rank.core.decided(yes=True, stands=False)  # another rank of it had a wish in its word
    assert rank.core.state is State.ASKS


def test_what_changed_outside_of_the_rounds_breaks_the_quorum() -> None:
    rank = Rank().stands()
    assert rank.core.next_round(rank.now_ms, "a state was loaded by hand") == Ask(
        "a state was loaded by hand", breaks=True
    )
    assert rank.core.state is State.ASKS


@pytest.mark.parametrize("trouble", ["unfit", "lease", "broken", "broken before the verdict"])
def test_the_ranks_of_a_group_go_on_together_and_fail_what_one_of_them_can_not(trouble: str) -> None:
    rank = Rank()
    if trouble == "broken before the verdict":
        rank.core.broke(Q)
        rank.core.decided(yes=True, stands=True)
    else:
        rank.stands()
    if trouble == "broken":
        rank.core.broke(Q)
    if trouble == "lease":
        rank.now_ms += LEASE_MS
    going = rank.core.next_round(rank.now_ms, "torn" if trouble == "unfit" else "", together=True)
    assert isinstance(going, GoOn)
    assert (going.step, going.fails.split()[0]) == (11, {"unfit": "torn", "lease": "the"}.get(trouble, "its"))
    assert rank.core.decided(yes=False, stands=False), "the process group is aborted"
    assert isinstance(rank.core.next_round(rank.now_ms, together=True), Ask), "and then all ask"


def test_the_ranks_of_a_group_ask_together_where_the_verdict_said_so() -> None:
    for stands, broken in [(False, False), (False, True)]:
        rank = Rank()
        rank.core.decided(yes=True, stands=stands)
        if broken:
            rank.core.broke(Q)
        assert rank.core.next_round(rank.now_ms, "torn", together=True) == Ask("torn")
    rank = Rank().stands()
    rank.core.asked(rank.now_ms)
    rank.core.broke(Q)
    assert isinstance(rank.core.next_round(rank.now_ms, together=True), Ask)


def test_a_rank_that_asks_anyway_breaks_nothing() -> None:
    rank = Rank()
    rank.core.decided(yes=True, stands=False)
    assert rank.core.next_round(rank.now_ms, "a state was loaded by hand") == Ask("a state was loaded by hand")


# --- rule 4: who does not commit aborts --------------------------------------------------------------------------


def test_a_no_aborts_the_process_group() -> None:
    rank = Rank()
    assert rank.core.decided(yes=False, stands=False)
    assert rank.core.next_round(rank.now_ms) == Ask("its group did not commit the last round")
    assert not Rank().core.decided(yes=True, stands=True)


# --- rule 6: recall ------------------------------------------------------------------------------------------------


def test_a_recall_is_said_in_the_next_word() -> None:
    rank = Rank().stands()
    assert rank.core.state is State.STANDS
    assert not rank.core.told(QuorumNews(Q, recalled=True))
    assert rank.core.state is State.RECALLED
    assert rank.core.next_round(rank.now_ms) == GoOn(11), "it goes on with the others until the word"
    assert rank.word().ask
    assert rank.ends() == Vote(yes=True, stands=False)
    assert rank.core.state is State.ASKS


def test_a_recall_of_another_quorum_is_no_news() -> None:
    rank = Rank().stands()
    assert not rank.core.told(QuorumKeyNews(QuorumKey(6, 0)))
    assert rank.core.state is State.STANDS


def QuorumKeyNews(key: QuorumKey) -> QuorumNews:
    return QuorumNews(key, recalled=True, broken=True)


def test_an_answer_ends_the_recall() -> None:
    rank = Rank().stands()
    rank.core.told(QuorumNews(Q, recalled=True))
    rank.ask(step=11)
    assert not rank.word().ask


# --- rules 7, 8: a broken quorum, and the newest --------------------------------------------------------------------


def test_a_broken_quorum_is_aborted_and_asked_for_anew() -> None:
    rank = Rank().stands()
    rank.core.next_round(rank.now_ms)
    assert rank.core.told(QuorumNews(Q, broken=True))
    assert rank.core.state is State.BROKEN
    assert not rank.core.told(QuorumNews(Q, broken=True)), "it is aborted once"
    assert rank.core.decided(yes=False, stands=False)
    assert rank.core.next_round(rank.now_ms) == Ask("its quorum is broken")


def test_a_round_that_all_committed_counts_in_a_quorum_that_broke_meanwhile() -> None:
    rank = Rank()
    own = rank.word()
    rank.core.broke(Q)
    assert rank.core.summed([3 * value for value in own.values()], LINEAGE).yes
    assert not rank.core.decided(yes=True, stands=True)
    assert rank.core.next_round(rank.now_ms) == Ask("its quorum is broken")


def test_a_newer_quorum_breaks_the_one_that_is_held() -> None:
    rank = Rank().stands()
    assert rank.core.told(QuorumNews(NEXT, beat=rank.core.beat(rank.now_ms)))
    assert rank.core.state is State.BROKEN


def test_an_older_quorum_and_none_break_nothing() -> None:
    rank = Rank().stands()
    assert not rank.core.told(QuorumNews(QuorumKey(6, 0), broken=True, recalled=True))
    assert not rank.core.told(QuorumNews(None, beat=rank.core.beat(rank.now_ms)))
    assert not rank.core.broke(QuorumKey(6, 0))
    assert rank.core.state is State.STANDS


def test_news_that_overtakes_its_plan_is_kept() -> None:
    rank = Rank().stands()
    rank.core.asked(rank.now_ms)
    assert not rank.core.broke(NEXT)
    rank.core.planned(plan(key=NEXT), rank.now_ms)
    assert rank.core.state is State.BROKEN
    assert not rank.word().ok


def test_of_quorums_to_come_few_are_kept() -> None:
    rank = Rank()
    for number in range(1_000):
        rank.core.broke(QuorumKey(100 + number, 0))
    assert len(rank.core._broken) == 16


def test_a_break_while_it_asks_does_not_outlive_the_next_quorum() -> None:
    rank = Rank().stands()
    rank.core.asked(rank.now_ms)
    assert not rank.core.broke(Q)
    rank.core.planned(plan(key=NEXT), rank.now_ms)
    assert rank.core.state is State.RUNS


# --- rule 9: late members ------------------------------------------------------------------------------------------


def test_a_standing_round_that_waits_for_join_timeout_is_late_once() -> None:
    rank = Rank().stands()
    rank.core.next_round(rank.now_ms)
    waits_since_ms = rank.now_ms + 1_000
    assert rank.core.late(waits_since_ms + 4_999, waits_since_ms) is None
    assert rank.core.late(waits_since_ms + 5_000, waits_since_ms) == Late(Q, 11)
    assert rank.core.late(waits_since_ms + 9_000, waits_since_ms) is None


def test_a_wait_of_the_round_before_does_not_count() -> None:
    rank = Rank().stands()
    rank.now_ms += 10_000
    rank.core.next_round(rank.now_ms)
    assert rank.core.late(rank.now_ms + 4_999, 0) is None


def test_a_round_that_was_asked_for_is_never_late() -> None:
    """The lighthouse has waited for everybody before it gave that round."""
    rank = Rank()
    assert rank.core.late(rank.now_ms + 60_000, rank.now_ms) is None
    assert StandingQuorum(Timeouts()).late(100_000, 0) is None
    rank.stands()
    rank.core.next_round(rank.now_ms)
    rank.core.broke(Q)
    assert rank.core.late(rank.now_ms + 60_000, rank.now_ms) is None


# --- rule 10: the lease ---------------------------------------------------------------------------------------------


def test_without_an_answer_the_lease_ends() -> None:
    rank = Rank().stands()
    assert isinstance(rank.core.next_round(1_000 + LEASE_MS - 1), GoOn)
    rank = Rank().stands()
    over = rank.core.next_round(1_000 + LEASE_MS)
    assert over == Ask("the lease of its quorum expired: the lighthouse has not answered its heartbeats", breaks=True)


def test_the_lease_counts_from_the_sending_of_the_beat() -> None:
    """Not from the hearing of its answer, nor from the sending of the beat to the manager server alone."""
    rank = Rank().stands()
    number = rank.core.beat(20_000)
    rank.now_ms = 35_000
    rank.core.told(QuorumNews(Q, beat=number, age_ms=900))
    assert isinstance(rank.core.next_round(19_100 + LEASE_MS - 1), GoOn)
    rank.core.decided(yes=True, stands=True)
    assert isinstance(rank.core.next_round(19_100 + LEASE_MS), Ask)


def test_a_late_answer_to_an_old_beat_renews_nothing() -> None:
    lease = Lease(2_000)
    lease.begin(LEASE_MS, 0)
    old, new = lease.beat(1_000), lease.beat(30_000)
    lease.answered(new, 0, renews=True)
    lease.answered(old, 0, renews=True)
    lease.answered(new, 0, renews=True)
    lease.answered(1_234, 0, renews=True)
    lease.answered(lease.beat(40_000), 20_000, renews=True)  # the manager server had heard nothing since
    assert lease.holds(30_000 + LEASE_MS - 1)
    assert not lease.holds(30_000 + LEASE_MS)


@pytest.mark.parametrize("key", [None, QuorumKey(6, 0)])
def test_an_answer_that_names_another_quorum_renews_nothing(key: QuorumKey | None) -> None:
    """A lighthouse that was started anew does not know the quorum yet."""
    rank = Rank().stands()
    rank.core.told(QuorumNews(key, beat=rank.core.beat(50_000)))
    assert isinstance(rank.core.next_round(1_000 + LEASE_MS), Ask)


def test_news_that_answers_no_beat_renews_nothing() -> None:
    rank = Rank().stands()
    rank.core.told(QuorumNews(Q))
    assert isinstance(rank.core.next_round(1_000 + LEASE_MS), Ask)


def test_the_lease_is_looked_at_when_a_round_begins_and_not_in_its_word() -> None:
    rank = Rank().stands()
    rank.now_ms = 1_000 + LEASE_MS - 1
    assert isinstance(rank.core.next_round(rank.now_ms), GoOn)
    rank.now_ms += 100_000
    assert rank.word().ok


def test_the_others_are_asked_to_ask_when_the_lease_runs_out() -> None:
    rank = Rank().stands()
    for at_ms in range(2_000, 60_000, 1_000):
        rank.core.beat(at_ms)
        rank.now_ms = at_ms
        rank.core.next_round(at_ms)
        assert bool(rank.word().ask) == (at_ms - 1_000 > LEASE_MS * 2 / 3), at_ms
        rank.core.decided(yes=True, stands=True)


def test_a_lease_that_runs_out_while_no_beat_failed_asks_nobody() -> None:
    """A rank that held its interpreter's lock for a while has sent no beat."""
    lease = Lease(2_000)
    lease.begin(LEASE_MS, 0)
    assert not lease.runs_out(55_000)
    lease.beat(55_000)
    assert not lease.runs_out(56_999)
    assert lease.runs_out(57_000)


def test_answers_that_come_each_beat_leave_no_failure_behind() -> None:
    lease = Lease(2_000)
    lease.begin(8_000, 0)
    for at_ms in range(0, 100_000, 1_000):
        number = lease.beat(at_ms)
        assert not lease.runs_out(at_ms + 500)
        lease.answered(number, 999, renews=True)
        assert lease.holds(at_ms + 6_000)


def test_unanswered_beats_are_kept_up_to_a_bound_and_the_oldest_stays() -> None:
    lease = Lease(2_000)
    lease.begin(LEASE_MS, 0)
    for at_ms in range(1_000, 1_000_000, 1_000):
        lease.beat(at_ms)
    assert len(lease._beats) == UNANSWERED_MOST
    assert next(iter(lease._beats.values())) == 1_000


# --- syncs in flight (rule 13) ------------------------------------------------------------------------------------


def test_syncs_in_flight_end_in_the_order_in_which_they_began() -> None:
    rank = Rank()
    rank.core.asked(rank.now_ms)
    rank.core.planned(plan(), rank.now_ms, in_flight=1)
    assert rank.word().check == state_check(10, LINEAGE)
    rank.core.decided(yes=True, stands=True)
    assert rank.core.next_round(rank.now_ms) == GoOn(12)
    assert rank.word().check == state_check(11, LINEAGE)


def test_a_failed_sync_fails_all_that_are_in_flight() -> None:
    rank = Rank()
    rank.core.asked(rank.now_ms)
    rank.core.planned(plan(), rank.now_ms, in_flight=1)
    assert rank.core.decided(yes=False, stands=False)
    with pytest.raises(ProtocolError, match="no round is running"):
        rank.word()


def test_another_quorum_fails_what_is_in_flight() -> None:
    rank = Rank()
    rank.core.asked(rank.now_ms)
    rank.core.planned(plan(key=NEXT, step=20), rank.now_ms)
    assert rank.word().check == state_check(20, LINEAGE)


def test_one_that_recovers_in_a_sync_in_flight_is_waited_for_with_a_request() -> None:
    rank = Rank()
    rank.core.asked(rank.now_ms)
    rank.core.planned(plan(up_to_date=(0, 1)), rank.now_ms, in_flight=1)
    rank.core.decided(yes=True, stands=True)
    assert rank.core.next_round(rank.now_ms) == Ask("a member recovered in the last round")
