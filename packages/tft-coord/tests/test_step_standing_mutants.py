"""Mutants of the step in a standing quorum: one mistake for each of its rules is seen by the transcript named here."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tft_coord.core.standing import StandingQuorum, Vote, Word
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.step import state as step_state
from tft_coord.core.step.attempt import Attempt
from tft_coord.core.step.effects import Effects
from tft_coord.core.step.ending import Ending
from tft_coord.core.step.own_state import OwnState
from tft_coord.core.step.rounds import Rounds
from tft_coord.core.step.starting import Starting
from tft_coord.core.step.state import StepState
from tft_coord.core.step.status import StepStatus
from tft_coord.core.types import Plan

TRANSCRIPTS = runpy.run_path(str(Path(__file__).with_name("test_step_standing.py")))
HARNESS = runpy.run_path(str(Path(__file__).with_name("test_step_mutants.py")))
Mutant, right_of, must_be_seen = (HARNESS[name] for name in ("Mutant", "right_of", "must_be_seen"))


right_started = right_of(Starting, "step_started")
right_goes_on = right_of(Starting, "_continue_standing")
right_word = right_of(Rounds, "word")
right_asked = right_of(Ending, "word_asked")
right_said = right_of(Ending, "_send_word")
right_cast = right_of(Ending, "_cast_vote")
right_unfit = right_of(Starting, "_why_not_continue")
right_summed = right_of(Rounds, "summed")
right_decided = right_of(Rounds, "decided")
right_planned = right_of(StandingQuorum, "planned")
right_next_round = right_of(StandingQuorum, "next_round")
right_fails = right_of(Starting, "_fail_with_group")


def nothing(*_: object, **__: object) -> tuple[()]:
    return ()


def no(*_: object, **__: object) -> bool:
    return False


def yes(*_: object, **__: object) -> bool:
    return True


def same(timeouts: Any) -> Any:
    return timeouts


def asks_without_an_abort(self: Starting, event: on.StepStarted, now_ms: int) -> Effects:
    return tuple(each for each in right_started(self, event, now_ms) if not isinstance(each, do.AbortGroup))


def asks_in_every_step(self: Starting, event: on.StepStarted, now_ms: int) -> Effects:
    self._state.changed = "of no reason"
    return cast("Effects", right_started(self, event, now_ms))


def says_no_lease(self: Starting, event: on.StepStarted, now_ms: int) -> Effects:
    effects = right_started(self, event, now_ms)
    return tuple(
        replace(each, request=replace(each.request, lease_ms=None)) if isinstance(each, do.Ask) else each
        for each in effects
    )


def goes_on_as_it_is(self: Starting, *, usable: bool) -> str:
    return ""


def forgets_what_it_has_to_say(self: Starting, event: on.StepStarted, going: Any) -> Effects:
    return cast("Effects", right_goes_on(self, replace(event, unreached=()), going))


def waits_for_the_state_first(self: Ending, event: on.DeviceSynchronized, attempt: Attempt, now_ms: int) -> Effects:
    if attempt.has_to_exchange and not attempt.exchanged:
        return (do.ExchangeState(),)
    return cast("Effects", right_said(self, event, attempt, now_ms))


def sends_over_a_failed_group(self: Ending, event: on.DeviceSynchronized, attempt: Attempt, now_ms: int) -> Effects:
    return cast("Effects", right_said(self, replace(event, group_error=None), attempt, now_ms))


def votes_by_its_errors(self: Ending, number: int, attempt: Attempt, now_ms: int) -> Effects:
    (*reports, vote) = right_cast(self, number, attempt, now_ms)
    return (*reports, replace(vote, yes=vote.error is None))


def votes_without_its_state(self: Ending, number: int, attempt: Attempt, now_ms: int) -> Effects:
    (*reports, vote) = right_cast(self, number, attempt, now_ms)
    return (*reports, replace(vote, yes=attempt.agreed is not None and attempt.agreed.yes))


def leaves_by_its_vote(self: Ending, number: int, attempt: Attempt, now_ms: int) -> Effects:
    (*reports, vote) = right_cast(self, number, attempt, now_ms)
    return (*reports, replace(vote, leaving=self._state.leaving.is_due(now_ms)))


def says_it_is_well(self: Rounds, attempt: Attempt, now_ms: int) -> Word | None:
    word = right_word(self, attempt, now_ms)
    return None if word is None else replace(word, ok=True)


def speaks_twice(self: Ending, event: on.WordAsked, now_ms: int) -> Effects:
    effects = right_asked(self, event, now_ms)
    self._state.attempts.last.sent_word = None
    return effects


def speaks_over_a_failed_group(self: Ending, event: on.WordAsked, now_ms: int) -> Effects:
    return right_asked(self, on.WordAsked(), now_ms)


def never_speaks_first(self: Ending, event: on.WordAsked, now_ms: int) -> Effects:
    return ()


def always_speaks_first(self: StepStatus) -> bool:
    return self.plan is not None and self.plan.lease_ms is not None and self.by_strategy


def takes_its_own_lineage(self: Rounds, attempt: Attempt, plan: Plan) -> int | None:
    return self._state.own.lineage


def agrees_in_any_case(self: Rounds, attempt: Attempt, sums: Any) -> None:
    attempt.agreed = Vote(yes=True, stands=True)


def aborts_at_the_verdict(self: Rounds, attempt: Attempt | None, **verdict: bool) -> Effects:
    if attempt is not None:
        attempt.has_failed_member = False
    return cast("Effects", right_decided(self, attempt, **verdict))


def forgets_those_in_flight(self: StandingQuorum, plan: Plan, now_ms: int, in_flight: int = 0) -> None:
    right_planned(self, plan, now_ms, 0)


def asks_alone(self: StandingQuorum, now_ms: int, unfit: str = "", *, together: bool = False) -> Any:
    return right_next_round(self, now_ms, unfit)


def fails_what_all_ask_about(self: StandingQuorum, now_ms: int, unfit: str = "", *, together: bool = False) -> Any:
    return right_next_round(self, now_ms, unfit, together=True)


def fails_in_silence(self: Starting, plan: Plan, why: str) -> Effects:
    return tuple(each for each in right_fails(self, plan, why) if not isinstance(each, do.AbortGroup))


def stands_by_the_word_alone(self: Ending, number: int, attempt: Attempt, now_ms: int) -> Effects:
    (*reports, vote) = right_cast(self, number, attempt, now_ms)
    return (*reports, replace(vote, stands=attempt.agreed is not None and attempt.agreed.stands))


ERROR = "an_error_anywhere_is_a_no_everywhere"
CHANGED = "a_rank_that_has_changed_asks_and_breaks_the_quorum"
TOGETHER = "a_rank_of_a_larger_group_begins_what_the_others_begin_and_fails_it"
KNEW = "all_ranks_of_a_larger_group_ask_where_one_knew_of_the_break_when_it_voted"
LEFT = "after_an_error_between_two_reductions_nobody_is_kept_waiting_in_the_second"
MUTANTS = [
    # rule 1: the word
    Mutant(Ending, "_send_word", waits_for_the_state_first, "the_word_comes_before_the_state_of_who_recovers"),
    Mutant(Ending, "_send_word", sends_over_a_failed_group, "where_the_group_is_gone_no_word_is_sent", ("failed",)),
    Mutant(Rounds, "can_send", yes, "where_the_group_is_gone_no_word_is_sent", ("lost",)),
    Mutant(Rounds, "can_send", yes, "where_the_group_is_gone_no_word_is_sent", ("unbuilt",)),
    Mutant(Rounds, "has_left_reductions", no, LEFT),
    Mutant(Rounds, "has_left_reductions", yes, "who_has_an_error_after_its_reductions_says_so_for_a_moment"),
    Mutant(Rounds, "abort_incomplete", nothing, LEFT),
    Mutant(Rounds, "abort_incomplete", nothing, "a_word_that_does_not_complete_is_a_no"),
    Mutant(Rounds, "word", says_it_is_well, "an_error_here_is_told_by_the_word"),
    Mutant(Ending, "word_asked", never_speaks_first, "who_recovers_in_a_sync_speaks_before_it_waits_for_its_state"),
    Mutant(Ending, "word_asked", speaks_twice, "who_recovers_in_a_sync_speaks_before_it_waits_for_its_state"),
    Mutant(Ending, "word_asked", speaks_over_a_failed_group, "a_word_that_the_group_can_not_send_is_left_to_the_end"),
    Mutant(StepStatus, "speaks_first", always_speaks_first, "nobody_else_speaks_before_the_end"),
    Mutant(Rounds, "word", says_it_is_well, "too_few_participants_are_a_no"),
    Mutant(Rounds, "_lineage", takes_its_own_lineage, "who_recovers_votes_by_the_word_and_its_state", (True,)),
    Mutant(Attempt, "sends_word", no, "a_thousand_steady_steps_ask_nobody"),
    Mutant(Attempt, "sends_word", yes, "without_a_lease_in_the_plan_there_is_no_word_and_each_step_asks"),
    Mutant(Rounds, "words_refused", nothing, "whoever_can_not_exchange_words_says_no_lease"),
    Mutant(OwnState, "is_due_next", no, "all_ask_before_the_state_is_compared"),
    # rule 2: the vote
    Mutant(Ending, "_cast_vote", votes_by_its_errors, ERROR),
    Mutant(Ending, "_cast_vote", votes_by_its_errors, "an_error_that_comes_after_the_word_changes_no_vote"),
    Mutant(Ending, "_cast_vote", votes_without_its_state, "who_recovers_votes_by_the_word_and_its_state", (False,)),
    Mutant(Rounds, "summed", agrees_in_any_case, "members_that_hold_different_states_commit_nothing"),
    Mutant(Rounds, "summed", agrees_in_any_case, "a_word_that_does_not_complete_is_a_no"),
    # rule 3: the next round
    Mutant(Starting, "step_started", asks_in_every_step, "a_thousand_steady_steps_ask_nobody"),
    Mutant(Starting, "step_started", says_no_lease, "a_request_says_the_lease"),
    *(
        Mutant(Starting, "_why_not_continue", goes_on_as_it_is, CHANGED, (case,))
        for case in ("torn", "loaded", "unusable")
    ),
    Mutant(
        Starting, "_why_not_continue", goes_on_as_it_is, "a_new_manager_server_is_asked_and_hears_of_the_newest_quorum"
    ),
    Mutant(
        Starting,
        "_continue_standing",
        forgets_what_it_has_to_say,
        "news_for_the_lighthouse_goes_with_the_request_after_the_next_word",
    ),
    *(
        Mutant(StandingQuorum, "next_round", asks_alone, TOGETHER, (case,))
        for case in ("torn", "unusable", "lost", "lease")
    ),
    Mutant(StandingQuorum, "next_round", fails_what_all_ask_about, CHANGED, ("torn",)),
    Mutant(Starting, "_fail_with_group", fails_in_silence, TOGETHER, ("torn",)),
    Mutant(
        Ending,
        "_cast_vote",
        stands_by_the_word_alone,
        KNEW,
    ),
    # rules 4 and 5: who aborts, and who leaves
    Mutant(Rounds, "decided", nothing, ERROR),
    Mutant(Rounds, "decided", nothing, "a_no_of_another_rank_of_the_group_aborts_at_once"),
    Mutant(Rounds, "decided", aborts_at_the_verdict, ERROR),
    Mutant(Rounds, "close_open", nothing, "an_open_step_that_is_left_is_a_no"),
    Mutant(Rounds, "given_up", nothing, "a_strategy_that_gives_up_aborts_what_the_others_wait_in"),
    Mutant(Starting, "step_started", asks_without_an_abort, CHANGED, ("torn",)),
    Mutant(StepState, "abort", nothing, CHANGED, ("torn",)),
    Mutant(StepState, "abort", nothing, ERROR),
    Mutant(Ending, "_cast_vote", leaves_by_its_vote, "a_group_leaves_by_its_word_and_a_later_wish_waits_for_the_next"),
    # rules 6 to 10: news
    Mutant(StandingQuorum, "told", no, "a_recall_is_told_by_the_next_word"),
    Mutant(Rounds, "broken", nothing, "news_of_a_quorum_that_overtook_its_plan_end_it"),
    Mutant(StandingQuorum, "speaks", yes, "news_mean_nothing_to_a_rank_without_words"),
    Mutant(StandingQuorum, "late", nothing, "a_round_that_waits_for_too_long_is_reported_once"),
    Mutant(step_state, "_round_timeouts", same, "a_round_is_late_before_its_reductions_end_by_their_own_time_out"),
    # rule 13: syncs in flight
    Mutant(
        StandingQuorum, "planned", forgets_those_in_flight, "a_word_asks_for_the_next_start_and_those_in_flight_go_on"
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.name}-{mutant.seen_by}"[:70])
def test_a_mistake_is_seen(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_seen(mutant, TRANSCRIPTS, monkeypatch, AttributeError)
