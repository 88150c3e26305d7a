"""Steps in a quorum that stands, event by event: the start that asks nobody, the word, the vote, and what ends it."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tft_coord.core.lineage import fold_lineage, state_check
from tft_coord.core.step import Effects, Stage
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.step.errors import UsageError
from tft_coord.core.step.rounds import ERROR_WORD_WITHIN_MS
from tft_coord.core.types import LossNotice, Plan, QuorumKey, QuorumNews, Unreached, Via
from tft_coord.timeouts import Timeouts

TRANSCRIPTS = runpy.run_path(str(Path(__file__).with_name("test_step.py")))
FRESH, Rank, none, one, plan_of = (TRANSCRIPTS[name] for name in ("FRESH", "Rank", "none", "one", "plan_of"))
LEASE_MS = 10_000
TIMEOUTS = Timeouts(lease_ms=LEASE_MS, beat_interval_ms=1_000, join_timeout_ms=5_000)
SEVEN = QuorumKey(7, 7)


class Speaker(Rank):  # type: ignore[misc]
    """A rank that speaks the word. The other members are the test: they say what `others` says."""

    def __init__(self, size: int = 2, **settings: Any) -> None:
        super().__init__(**{"lease_ms": LEASE_MS, "timeouts": TIMEOUTS, **settings})
        self.size = size

    def plan_here(self, quorum_id: int = 7, **plan: Any) -> Plan:
        status = self.status
        here = {"step": status.step, "lineage": status.lineage, "size": self.size, **plan}
        return replace(plan_of(quorum_id, **here), lease_ms=LEASE_MS)

    def first(self, quorum_id: int = 7, **plan: Any) -> None:
        """One whole step that the lighthouse gave."""
        self.begin(self.plan_here(quorum_id, **plan))
        assert self.end_word(self.say()).yes

    def goes_on(self, **facts: Any) -> Effects:
        """The next step begins, and asks nobody."""
        effects = self.tell(on.StepStarted(**facts))
        assert none(do.Ask, effects), effects
        one(do.UsePlan, effects)
        return effects

    def say(self, number: int = 0, **facts: Any) -> do.SendWord:
        """To the word of an attempt."""
        self.tell(on.EndAsked(number))
        assert self.tell(on.ReductionsEnded(number)) == (do.SynchronizeDevice(),)
        return one(do.SendWord, self.tell(on.DeviceSynchronized(number, **facts)))

    def hears(self, word: do.SendWord, *others: Sequence[int]) -> Effects:
        """The others' words come; those that are not given are all well, as participants."""
        well = (1, 0, 0, 0, word.values[4] or state_check(word.round_number, self.status.plan.lineage))
        given = [*others, *[well] * (self.size - 1 - len(others))]
        sums = tuple(sum(each) for each in zip(word.values, *given, strict=True))
        return self.tell(on.WordEnded(word.attempt, sums))

    def end_word(self, word: do.SendWord, *others: Sequence[int]) -> do.CastVote:
        """To the end of an attempt whose vote is the verdict."""
        vote = one(do.CastVote, self.hears(word, *others))
        self.concluded = self.tell(on.VerdictArrived(word.attempt, vote.yes, vote.leaving, vote.stands))
        return vote

    def word_of(self, *, ok: int = 1, ask: int = 0, leave: int = 0, recovering: int = 0) -> tuple[int, ...]:
        """Another participant's word in the step that runs."""
        return ok, ask, leave, recovering, state_check(self.status.step, self.status.lineage)

    def asks(self, **facts: Any) -> do.Ask:
        return one(do.Ask, self.tell(on.StepStarted(**facts)))


# --- the start --------------------------------------------------------------------------------------------------------


def test_a_thousand_steady_steps_ask_nobody() -> None:
    rank = Speaker()
    rank.first()
    for step in range(1, 1_001):
        rank.now_ms += 10
        if step % 100 == 0:
            beat = one(do.NumberBeat, rank.tell(on.BeatDue()))
            rank.tell(on.QuorumNamed(QuorumNews(SEVEN, beat=beat.number)))
        effects = rank.goes_on()
        plan = one(do.UsePlan, effects).plan
        assert (plan.step, plan.lineage, plan.heal, plan.lease_ms) == (step, rank.status.lineage, False, LEASE_MS)
        assert none(do.Configure, effects)
        assert not rank.status.pends
        assert rank.end_word(rank.say()).stands
    assert rank.status.step == 1_001


def test_a_request_says_the_lease() -> None:
    assert Speaker().ask().lease_ms == LEASE_MS
    assert Rank().ask().lease_ms is None


def test_whoever_can_not_exchange_words_says_no_lease() -> None:
    rank = Speaker()
    rank.tell(on.WordsRefused())
    assert rank.ask().lease_ms is None


def test_without_a_lease_in_the_plan_there_is_no_word_and_each_step_asks() -> None:
    rank = Speaker()
    rank.begin(replace(rank.plan_here(), lease_ms=None))
    assert rank.vote().yes
    assert rank.end(True).committed
    rank.asks()


def test_with_a_lease_of_zero_each_step_has_a_word_and_asks() -> None:
    rank = Speaker(lease_ms=0)
    rank.begin(replace(rank.plan_here(), lease_ms=0))
    word = rank.say()
    assert word.values[1] == 1
    assert rank.end_word(word).yes
    assert not rank.asks().request.needs_configure


@pytest.mark.parametrize("wish", ["ask", "leave", "recovering"])
def test_a_word_that_wishes_makes_the_next_step_ask(wish: str) -> None:
    rank = Speaker()
    rank.first()
    rank.goes_on()
    vote = rank.end_word(rank.say(), rank.word_of(**{wish: 1}))
    assert (vote.yes, vote.stands) == (True, False)
    ask = rank.asks()
    assert (ask.breaks, ask.request.needs_configure) == ("", False)


def test_a_quorum_does_not_stand_after_a_round_in_which_somebody_recovered() -> None:
    rank = Speaker()
    rank.begin(rank.plan_here(healing=[1]))
    word = rank.say()
    effects = rank.hears(word, (1, 0, 0, 0, 0))
    one(do.ExchangeState, effects)
    rank.tell(on.ExchangeAsked(True))
    vote = one(do.CastVote, rank.tell(on.VoteAsked()))
    rank.tell(on.VerdictArrived(0, vote.yes, False, True))
    rank.asks()


def test_another_ranks_wish_comes_with_the_verdict() -> None:
    rank = Speaker(world_size=2)
    rank.first()
    rank.goes_on()
    vote = one(do.CastVote, rank.hears(rank.say()))
    assert vote.stands
    rank.tell(on.VerdictArrived(0, True, False, False))
    rank.asks()


@pytest.mark.parametrize("what", ["torn", "loaded", "unusable"])
def test_a_rank_that_has_changed_asks_and_breaks_the_quorum(what: str) -> None:
    rank = Speaker()
    rank.first()
    if what == "torn":
        rank.tell(on.StateTorn())
    elif what == "loaded":
        rank.tell(on.StateLoaded(rank.status.state_dict()))
    effects = rank.tell(on.StepStarted(group_usable=what != "unusable"))
    assert isinstance(effects[0], do.AbortGroup), "before it asks"
    ask = one(do.Ask, effects)
    assert ask.breaks
    assert (ask.request.needs_configure, ask.request.held) == (True, SEVEN)
    answer = rank.tell(on.PlanArrived(rank.number, rank.plan_here()))  # an answer to what it has asked before
    assert none(do.Configure, answer), "a rendezvous is used once"
    rank.tell(on.EndAsked(0))
    rank.tell(on.ReductionsEnded(0))
    assert none(do.SendWord, rank.tell(on.DeviceSynchronized(0))), "over a group that it has aborted"


@pytest.mark.parametrize("what", ["torn", "unusable", "lost", "lease"])
def test_a_rank_of_a_larger_group_begins_what_the_others_begin_and_fails_it(what: str) -> None:
    """The others of its group compute with it in the round that they have begun: one that asked would wait for them in
    vain, until quorum_timeout."""
    rank = Speaker(world_size=2)
    rank.first()
    if what == "torn":
        rank.tell(on.StateTorn())
    elif what == "lost":
        rank.tell(on.LossNoticed(LossNotice(SEVEN, "replica_1", 1, "silent")))
    elif what == "lease":
        rank.now_ms = LEASE_MS
    effects = rank.goes_on(group_usable=what != "unusable")
    assert isinstance(effects[0], do.AbortGroup), "nobody waits for it"
    assert none(do.Configure, effects)
    report = one(do.ReportError, effects)
    assert (report.counts, report.name.step) == (True, 1)
    assert "can't continue in quorum" in str(report.error)
    assert not rank.status.pends
    assert rank.tell(on.ReductionAsked()) == (do.LoseReduction(aborts=True),)
    rank.tell(on.EndAsked())
    rank.tell(on.ReductionsEnded())
    vote = one(do.CastVote, rank.tell(on.DeviceSynchronized()))
    assert (vote.yes, vote.stands) == (False, False)
    rank.tell(on.VerdictArrived(0, False))
    ask = rank.asks()
    assert (ask.breaks, ask.request.needs_configure, ask.request.torn) == ("", True, what == "torn")


def test_all_ranks_of_a_larger_group_ask_where_one_knew_of_the_break_when_it_voted() -> None:
    rank = Speaker(world_size=2)
    rank.first()
    rank.goes_on()
    word = rank.say()
    rank.tell(on.QuorumNamed(QuorumNews(SEVEN, broken=True)))
    vote = one(do.CastVote, rank.hears(word))
    assert (vote.yes, vote.stands) == (True, False)
    rank.tell(on.VerdictArrived(0, True, False, vote.stands))
    assert not rank.asks().breaks


def test_a_state_that_is_loaded_by_hand_is_asked_about_by_all_ranks_of_a_group() -> None:
    rank = Speaker(world_size=2)
    rank.first()
    rank.tell(on.StateLoaded(rank.status.state_dict()))
    assert rank.asks().breaks


@pytest.mark.parametrize(("now_ms", "holds"), [(13_400, True), (13_600, False)])
def test_the_lease_counts_from_the_sending_of_a_beat(now_ms: int, holds: bool) -> None:
    rank = Speaker()
    rank.first()
    rank.now_ms = 4_000
    beat = one(do.NumberBeat, rank.tell(on.BeatDue()))
    rank.now_ms = 9_000
    rank.tell(on.QuorumNamed(QuorumNews(SEVEN, beat=beat.number, age_ms=500)))
    rank.now_ms = now_ms
    if holds:
        rank.goes_on()
    else:
        assert "lease" in rank.asks().breaks


def test_a_lease_that_runs_out_makes_all_ask() -> None:
    rank = Speaker()
    rank.first()
    for rank.now_ms in range(0, 8_000, 1_000):
        rank.tell(on.BeatDue())
    rank.goes_on()
    word = rank.say()
    assert word.values[1] == 1
    assert rank.end_word(word).yes
    assert not rank.asks().breaks


def test_an_open_step_that_is_left_is_a_no() -> None:
    rank = Speaker()
    rank.first()
    rank.goes_on()
    effects = rank.tell(on.StepStarted())
    assert isinstance(effects[0], do.AbortGroup)
    assert one(do.Ask, effects).request.needs_configure


def test_a_new_manager_server_is_asked_and_hears_of_the_newest_quorum() -> None:
    """Seed 211641: the new server reached another lighthouse, which gave a lower quorum id."""
    rank = Speaker()
    rank.first()
    rank.tell(on.ServerRestarted())
    request = rank.asks().request
    assert request.held == SEVEN
    assert not request.needs_configure


def test_news_for_the_lighthouse_goes_with_the_request_after_the_next_word() -> None:
    rank = Speaker()
    rank.first()
    gone = Unreached("replica_1", Via.GROUP, "no connection")
    rank.goes_on(unreached=(gone,))
    word = rank.say()
    assert word.values[1] == 1
    rank.end_word(word)
    assert rank.asks().request.unreached == (gone,)


def test_all_ask_before_the_state_is_compared() -> None:
    rank = Speaker(check_every=3)
    rank.first()
    rank.goes_on()
    assert rank.say().values[1] == 0
    rank.hears(do.SendWord(0, SEVEN, (1, 0, 0, 0, state_check(1, rank.status.lineage)), 1))
    rank.tell(on.VerdictArrived(0, True, False, True))
    rank.goes_on()
    word = rank.say()
    assert word.values[1] == 1
    rank.end_word(word)
    one(do.CompareState, rank.tell(on.StartReady()))
    rank.tell(on.StateCompared(b"digest"))
    assert not rank.asks().breaks


def test_a_rank_gets_ready_to_serve_in_a_step_that_asks_nobody() -> None:
    rank = Speaker()
    rank.first()
    prepares = []
    for _ in range(6):
        prepares.append(one(do.GoOn, rank.tell(on.StepStarted())).prepares_to_serve)
        rank.end_word(rank.say())
    assert prepares == [False, False, False, True, False, False]


# --- the word and the vote --------------------------------------------------------------------------------------------


def test_the_word_comes_before_the_state_of_who_recovers() -> None:
    rank = Speaker()
    rank.begin(rank.plan_here(rank=1, healing=[1], step=9, lineage=99))
    word = rank.say()
    assert word.values == (1, 0, 0, 1, 0)
    assert word.round_number == 9
    one(do.ExchangeState, rank.hears(word, (1, 0, 0, 0, state_check(9, 99))))
    assert none(do.CastVote, rank.tell(on.ExchangeAsked()))


@pytest.mark.parametrize("loads", [True, False])
def test_who_recovers_votes_by_the_word_and_its_state(loads: bool) -> None:
    rank = Speaker()
    rank.begin(rank.plan_here(rank=1, healing=[1], step=9, lineage=99))
    rank.hears(rank.say(), (1, 0, 0, 0, state_check(9, 99)))
    if loads:
        TRANSCRIPTS["heals"](rank)
    else:
        rank.tell(on.ExchangeAsked())
        rank.tell(on.StageEnded(Stage.FETCH, RuntimeError("no source")))
    vote = one(do.CastVote, rank.tell(on.VoteAsked()))
    assert vote.yes is loads
    effects = rank.tell(on.VerdictArrived(0, vote.yes, False, vote.stands))
    assert none(do.AbortGroup, effects) is loads
    rank.asks()


def test_an_error_anywhere_is_a_no_everywhere() -> None:
    rank = Speaker()
    rank.first()
    rank.goes_on()
    vote = rank.end_word(rank.say(), rank.word_of(ok=0))
    assert (vote.yes, vote.error, vote.why) == (False, None, "1 of 2 members did not complete this round")
    assert none(do.AbortGroup, rank.concluded), "all know it, and may reduce what is said of the step that is over"
    assert not none(do.Reduce, rank.tell(on.ReductionAsked()))
    effects = rank.tell(on.StepStarted())
    assert isinstance(effects[0], do.AbortGroup), "before it asks"
    assert one(do.Ask, effects).request.needs_configure


def test_a_no_of_another_rank_of_the_group_aborts_at_once() -> None:
    rank = Speaker(world_size=2)
    rank.first()
    rank.goes_on()
    assert one(do.CastVote, rank.hears(rank.say())).yes
    effects = rank.tell(on.VerdictArrived(0, False))
    assert isinstance(effects[0], do.AbortGroup), "the others have committed, and begin the next round"


def test_an_error_here_is_told_by_the_word() -> None:
    rank = Speaker()
    rank.first()
    rank.goes_on()
    rank.tell(on.ErrorReported(RuntimeError("here")))
    word = rank.say()
    assert word.values[0] == 0
    assert not rank.end_word(word).yes


def test_an_error_that_comes_after_the_word_changes_no_vote() -> None:
    rank = Speaker()
    rank.begin(rank.plan_here(healing=[1]))
    rank.hears(rank.say(), (1, 0, 0, 1, 0))
    rank.tell(on.ErrorReported(RuntimeError("late")))
    rank.tell(on.ExchangeAsked(True))
    assert one(do.CastVote, rank.tell(on.VoteAsked())).yes


def test_too_few_participants_are_a_no() -> None:
    rank = Speaker(min_replica_size=3)
    rank.begin(rank.plan_here(min_replica_size=3))
    word = rank.say()
    assert word.values[0] == 0
    assert not rank.end_word(word).yes


def test_a_word_that_does_not_complete_is_a_no() -> None:
    rank = Speaker()
    rank.first()
    rank.goes_on()
    rank.say()
    effects = rank.tell(on.WordEnded(0, None, RuntimeError("the connection has ended")))
    assert one(do.ReportError, effects).counts
    assert isinstance(effects[0], do.AbortGroup), "nobody waits for this rank, whatever the vote still waits for"
    assert not one(do.CastVote, effects).yes
    assert none(do.AbortGroup, rank.tell(on.VerdictArrived(0, False)))
    assert rank.asks().request.needs_configure


def test_after_an_error_between_two_reductions_nobody_is_kept_waiting_in_the_second() -> None:
    """A backward pass raised in one replica: its word would reach nobody before timeout."""
    rank = Speaker()
    rank.begin(rank.plan_here())
    for _ in range(2):
        one(do.Reduce, rank.tell(on.ReductionAsked()))
    rank.end_word(rank.say())
    rank.goes_on()
    one(do.Reduce, rank.tell(on.ReductionAsked()))
    rank.tell(on.UserReportedError(RuntimeError("no room")))
    rank.tell(on.EndAsked())
    rank.tell(on.ReductionsEnded())
    effects = rank.tell(on.DeviceSynchronized())
    assert isinstance(effects[0], do.AbortGroup)
    assert none(do.SendWord, effects)
    assert not one(do.CastVote, effects).yes


def test_who_has_an_error_after_its_reductions_says_so_for_a_moment() -> None:
    rank = Speaker()
    rank.begin(rank.plan_here())
    one(do.Reduce, rank.tell(on.ReductionAsked()))
    word = rank.say()
    assert word.within_ms is None
    rank.end_word(word)
    rank.goes_on()
    one(do.Reduce, rank.tell(on.ReductionAsked()))
    rank.tell(on.UserReportedError(RuntimeError("no room")))
    word = rank.say()
    assert (word.values[0], word.within_ms) == (0, ERROR_WORD_WITHIN_MS)


@pytest.mark.parametrize("what", ["lost", "failed", "unbuilt"])
def test_where_the_group_is_gone_no_word_is_sent(what: str) -> None:
    rank = Speaker()
    rank.first()
    if what == "unbuilt":
        rank.asks(group_usable=False)
        rank.plan(rank.plan_here(8), builds=False)
        rank.tell(on.ConfigureFailed(rank.number, RuntimeError("nobody came")))
    else:
        rank.goes_on()
    if what == "lost":
        rank.tell(on.LossNoticed(LossNotice(SEVEN, "replica_1", 1, "silent")))
    rank.tell(on.EndAsked())
    rank.tell(on.ReductionsEnded())
    effects = rank.tell(on.DeviceSynchronized(0, RuntimeError("aborted") if what == "failed" else None))
    assert none(do.SendWord, effects)
    assert not one(do.CastVote, effects).yes


def test_members_that_hold_different_states_commit_nothing() -> None:
    rank = Speaker()
    rank.first()
    rank.goes_on()
    vote = rank.end_word(rank.say(), (1, 0, 0, 0, 12345))
    assert (vote.yes, vote.why) == (False, "the participants of step 1 hold different states")


def test_a_member_alone_needs_no_exchange() -> None:
    rank = Speaker(size=1)
    for _ in range(3):
        if rank.status.step == 0:
            rank.begin(rank.plan_here())
        else:
            rank.goes_on()
        rank.tell(on.EndAsked())
        rank.tell(on.ReductionsEnded())
        vote = one(do.CastVote, rank.tell(on.DeviceSynchronized()))
        rank.tell(on.VerdictArrived(0, vote.yes, False, vote.stands))
    assert rank.status.step == 3


def test_a_spare_speaks_and_stands() -> None:
    rank = Speaker(size=3, fixed_with_spares=True, min_replica_size=2)
    spare = {"rank": 2, "participants": [0, 1], "min_replica_size": 2}
    rank.begin(rank.plan_here(**spare))
    word = rank.say()
    assert word.values == (1, 0, 0, 0, 0)
    assert rank.end_word(word).stands
    rank.goes_on()
    assert not rank.status.is_participating


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_a_group_leaves_by_its_word_and_a_later_wish_waits_for_the_next() -> None:
    rank = Speaker()
    rank.first()
    rank.goes_on()
    word = rank.say()
    rank.tell(on.LeaveWished("told to", 60_000))
    vote = rank.end_word(word)
    assert (word.values[2], vote.leaving, vote.stands) == (0, False, True)
    rank.goes_on()
    word = rank.say()
    vote = rank.end_word(word)
    assert (word.values[2], vote.leaving, vote.stands) == (1, True, False)
    assert not none(do.TellLeaving, rank.concluded)
    assert none(do.AbortGroup, rank.concluded), "its last word has to pass"


# --- news -------------------------------------------------------------------------------------------------------------


def test_a_recall_is_told_by_the_next_word() -> None:
    rank = Speaker()
    rank.first()
    rank.goes_on()
    rank.tell(on.QuorumNamed(QuorumNews(SEVEN, recalled=True)))
    word = rank.say()
    assert word.values[1] == 1
    rank.end_word(word)
    assert not rank.asks().breaks


@pytest.mark.parametrize("news", [QuorumNews(SEVEN, broken=True), QuorumNews(QuorumKey(8, 8))])
def test_news_that_the_quorum_is_over_ends_what_runs(news: QuorumNews) -> None:
    rank = Speaker()
    rank.first()
    rank.goes_on()
    assert one(do.EndQuorum, rank.tell(on.QuorumNamed(news))).key == SEVEN
    assert rank.tell(on.QuorumNamed(news)) == ()
    assert not none(do.LoseReduction, rank.tell(on.ReductionAsked()))
    rank.tell(on.EndAsked())
    rank.tell(on.ReductionsEnded())
    assert not one(do.CastVote, rank.tell(on.DeviceSynchronized())).yes
    rank.tell(on.VerdictArrived(0, False))
    assert rank.asks().request.needs_configure
    rank.plan(rank.plan_here(9))
    assert rank.status.broken is None


def test_news_of_a_quorum_that_overtook_its_plan_end_it() -> None:
    rank = Speaker()
    rank.ask()
    assert rank.tell(on.QuorumNamed(QuorumNews(SEVEN, broken=True))) == ()
    effects = rank.tell(on.PlanArrived(rank.number, rank.plan_here()))
    assert one(do.EndQuorum, effects).key == SEVEN


def test_news_mean_nothing_to_a_rank_without_words() -> None:
    rank = Speaker()
    rank.begin(replace(rank.plan_here(), lease_ms=None))
    assert rank.tell(on.QuorumNamed(QuorumNews(QuorumKey(8, 8)))) == ()
    assert rank.tell(on.BeatDue()) == ()
    assert rank.status.broken is None


def test_a_loss_is_a_break() -> None:
    rank = Speaker()
    rank.first()
    rank.tell(on.LossNoticed(LossNotice(SEVEN, "replica_1", 1, "silent")))
    ask = rank.asks()
    assert ask.request.needs_configure


def test_a_round_that_waits_for_too_long_is_reported_once() -> None:
    rank = Speaker()
    rank.first()
    assert rank.tell(on.Looked(waits_ms=60_000)) == (), "no round runs"
    rank.goes_on()
    rank.now_ms = 4_999
    assert rank.tell(on.Looked(waits_ms=4_999)) == ()
    rank.now_ms = 5_000
    assert rank.tell(on.Looked()) == (), "it does not wait"
    assert rank.tell(on.Looked(waits_ms=5_000)) == (do.TellLate(SEVEN, 1),)
    assert rank.tell(on.Looked(waits_ms=5_100)) == ()


def test_a_round_is_late_before_its_reductions_end_by_their_own_time_out() -> None:
    rank = Speaker(timeouts=Timeouts(lease_ms=60_000, timeout_ms=60_000, join_timeout_ms=60_000))
    rank.first()
    rank.goes_on()
    rank.now_ms = 55_000
    assert rank.tell(on.Looked(waits_ms=55_000)) == (do.TellLate(SEVEN, 1),)


# --- steps in flight --------------------------------------------------------------------------------------------------


def begin_aside(rank: Speaker) -> int:
    rank.goes_on()
    return int(rank.defer())


def test_steps_in_flight_have_one_word_each_in_the_order_of_their_ends() -> None:
    rank = Speaker()
    rank.first()
    first, second = begin_aside(rank), begin_aside(rank)
    word = rank.say(first)
    assert (word.attempt, word.round_number) == (first, 1)
    assert rank.end_word(word).stands
    third = begin_aside(rank)
    for number, step in ((second, 2), (third, 3)):
        word = rank.say(number)
        assert word.round_number == step
        assert word.values[4] == state_check(step, rank.status.lineage)
        rank.end_word(word)
    assert rank.status.step == 4


def test_a_word_asks_for_the_next_start_and_those_in_flight_go_on() -> None:
    rank = Speaker()
    rank.first()
    first, second = begin_aside(rank), begin_aside(rank)
    rank.end_word(rank.say(first), rank.word_of(ask=1))
    assert not rank.asks().request.needs_configure
    lineage = fold_lineage(rank.status.lineage, SEVEN, 3)
    rank.plan(replace(rank.plan_here(), lineage=rank.status.lineage))
    third = rank.defer()
    assert rank.end_word(rank.say(second)).yes
    assert rank.status.lineage == lineage
    word = rank.say(third)
    assert word.round_number == 3
    assert rank.end_word(word).yes


def test_a_no_fails_all_that_are_in_flight_and_aborts_once() -> None:
    rank = Speaker()
    rank.first()
    first, second = begin_aside(rank), begin_aside(rank)
    rank.end_word(rank.say(first), rank.word_of(ok=0))
    effects = rank.tell(on.ReductionsEnded(second))
    assert not one(do.Concluded, effects).committed
    assert none(do.AbortGroup, (*rank.concluded, *effects))
    effects = rank.tell(on.StepStarted())
    one(do.AbortGroup, effects)
    assert one(do.Ask, effects).request.needs_configure


def test_a_strategy_that_gives_up_aborts_what_the_others_wait_in() -> None:
    rank = Speaker()
    rank.first()
    begin_aside(rank)
    assert rank.tell(on.FlightsGivenUp()) == (do.AbortGroup(),)
    assert rank.asks().request.needs_configure


# --- a word that is sent before its step ends -------------------------------------------------------------------------


def recovering_in_a_sync() -> Speaker:
    """A rank that is behind, in a sync whose others train on: it takes state as soon as the plan is here."""
    rank = Speaker()
    rank.begin(rank.plan_here(step=4, lineage=44, rank=1, healing=[1]))
    rank.tell(on.StrategyExchanges())
    return rank


def test_who_recovers_in_a_sync_speaks_before_it_waits_for_its_state() -> None:
    rank = recovering_in_a_sync()
    assert rank.status.speaks_first
    word = one(do.SendWord, rank.tell(on.WordAsked()))
    assert not word.hears
    assert word.values == (1, 0, 0, 1, 0)
    assert rank.tell(on.WordAsked()) == (), "a round has one word"
    one(do.ReportHealed, TRANSCRIPTS["heals"](rank))
    assert not rank.status.speaks_first
    rank.tell(on.EndAsked(0))
    rank.tell(on.ReductionsEnded(0))
    assert rank.tell(on.DeviceSynchronized(0)) == (do.HearWord(0, SEVEN, word.round_number),)
    vote = rank.end_word(word, (1, 0, 0, 0, state_check(4, 44)))
    assert vote.yes
    assert not vote.stands, "somebody recovered"


def test_who_spoke_and_then_got_no_state_votes_no() -> None:
    rank = recovering_in_a_sync()
    word = one(do.SendWord, rank.tell(on.WordAsked()))
    one(do.StageState, rank.tell(on.ExchangeAsked()))
    one(do.ReportHealFailed, rank.tell(on.StageEnded(Stage.FETCH, RuntimeError("the source is gone"))))
    rank.tell(on.EndAsked(0))
    rank.tell(on.ReductionsEnded(0))
    assert one(do.HearWord, rank.tell(on.DeviceSynchronized(0)))
    assert not rank.end_word(word, (1, 0, 0, 0, state_check(4, 44))).yes


def test_no_reduction_begins_after_the_word_about_the_reductions() -> None:
    """A replica that recovered committed a sync that was not reduced (seed 209566), through a strategy's own order."""
    rank = recovering_in_a_sync()
    assert one(do.Reduce, rank.tell(on.ReductionAsked())).number == 1
    one(do.SendWord, rank.tell(on.WordAsked()))
    with pytest.raises(UsageError, match="call exchange_state after the last reduction of a step"):
        rank.tell(on.ReductionAsked())


def test_a_word_that_the_group_can_not_send_is_left_to_the_end() -> None:
    rank = recovering_in_a_sync()
    assert rank.tell(on.WordAsked(RuntimeError("the group is broken"))) == ()
    rank.tell(on.LossNoticed(LossNotice(SEVEN, "replica_0", 1, "silent")))
    assert rank.tell(on.WordAsked()) == ()


def test_nobody_else_speaks_before_the_end() -> None:
    rank = Speaker()
    rank.first()
    rank.goes_on()
    rank.tell(on.StrategyExchanges())
    assert not rank.status.speaks_first
    assert rank.tell(on.WordAsked()) == ()
