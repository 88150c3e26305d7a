"""Mutants of the step: a core with one small mistake is caught by the transcript that is named here.

There is at least one for each rule of the step. A mutant that survives would show that a transcript is missing.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from tft_coord.core.lineage import fold_lineage
from tft_coord.core.step import Phase, Stage, StepStatus, losses, recovery, reducing
from tft_coord.core.step import effects as do
from tft_coord.core.step.attempt import Attempt
from tft_coord.core.step.ending import Ending
from tft_coord.core.step.in_flight import StepsInFlight
from tft_coord.core.step.leaving import GracefulShutdown
from tft_coord.core.step.losses import Losses
from tft_coord.core.step.own_state import OwnState
from tft_coord.core.step.recovery import Recovery
from tft_coord.core.step.reducing import Reducing
from tft_coord.core.step.repeats import Repeats
from tft_coord.core.step.starting import Starting
from tft_coord.core.step.state import StepState
from tft_coord.core.types import LossNotice, Plan, Purpose, QuorumKey

TRANSCRIPTS = runpy.run_path(str(Path(__file__).with_name("test_step.py")))


@dataclass(frozen=True)
class Mutant:
    """A mistake.

    Args:
        target, name, mistake: what is patched, and with what.
        seen_by: the transcript that fails then; `test_` is left out.
        case: its parameters, if it has some.
    """

    target: Any
    name: str
    mistake: Any
    seen_by: str
    case: tuple[Any, ...] = ()


def right_of(target: Any, name: str) -> Callable[..., Any]:
    right = vars(target)[name]
    return cast("Callable[..., Any]", right.fget if isinstance(right, property) else right)


def must_be_seen(
    mutant: Mutant, transcripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *more: type[Exception]
) -> None:
    """Play a mutant's transcript without the mistake, and with it: it fails then. `more`: it may fail by these, too."""
    transcript = transcripts[f"test_{mutant.seen_by}"]
    transcript(*mutant.case)
    right = vars(mutant.target)[mutant.name]
    mistake = property(mutant.mistake) if isinstance(right, property) else mutant.mistake
    monkeypatch.setattr(mutant.target, mutant.name, mistake)
    with pytest.raises((AssertionError, pytest.fail.Exception, ValueError, *more)):
        transcript(*mutant.case)


right_planned = right_of(Starting, "_use_plan")
right_cast = right_of(Ending, "_cast_vote")
right_failed = right_of(Recovery, "_failed")
right_committed = right_of(OwnState, "committed")
right_healed = right_of(OwnState, "healed")
right_plan_of_state = right_of(OwnState, "planned")
right_diverges = right_of(OwnState, "diverges_from")
right_enters = right_of(Reducing, "_weight_part")
right_open_ended = right_of(StepsInFlight, "open_ended")
right_begin = right_of(StepsInFlight, "begin")
right_wished = right_of(GracefulShutdown, "requested")
right_reductions_ended = right_of(Ending, "reductions_ended")


def does_nothing(*_: object, **__: object) -> None:
    return None


def orders_nothing(*_: object) -> tuple[()]:
    return ()


def says_yes(*_: object, **__: object) -> bool:
    return True


def says_no(*_: object, **__: object) -> bool:
    return False


# --- the state --------------------------------------------------------------------------------------------------------


def counts_one_participant(self: OwnState, plan: Plan) -> None:
    right_committed(self, replace(plan, participants=plan.participants[:1]))


def folds_no_quorum(self: OwnState, plan: Plan) -> None:
    before = self.lineage
    right_committed(self, plan)
    self.lineage = fold_lineage(before or 0, QuorumKey(1, 1), self.step)


def takes_the_lineage_of_any_plan(self: OwnState, plan: Plan) -> None:
    self.lineage = plan.lineage


def forgets_no_divergence(self: OwnState, plan: Plan) -> None:
    before = self.divergences
    right_plan_of_state(self, plan)
    self.divergences = before


def stays_torn(self: OwnState, plan: Plan, own: Any) -> None:
    right_healed(self, plan, own)
    self.torn = True


def keeps_its_batches(self: OwnState, plan: Plan, own: Any) -> None:
    right_healed(self, plan, {**own, "batches_committed": self.batches_committed})


def is_due_again_and_again(self: OwnState, every: int) -> bool:
    return every > 0 and self.step > 0 and self.step % every == 0


def counts_each_look(self: OwnState, own: Any) -> bool:
    self._diverged_step = 0
    return bool(right_diverges(self, own))


def looks_at_no_history(self: OwnState, own: Any) -> bool:
    return self.check is not None and "check" in own and own["check"][2] != f"{self.check.after:016x}"


def never_counts_a_divergence(self: OwnState, own: Any) -> bool:
    found = bool(right_diverges(self, own))
    self.divergences = 0
    return found


def saves_the_lineage_after_the_check(self: StepStatus) -> dict[str, Any]:
    return {"step": self.step, "batches_committed": self.batches_committed, "lineage": f"{self.lineage:016x}"}


# --- asking -----------------------------------------------------------------------------------------------------------


def asks_as_if_it_had_left_nobody(self: StepsInFlight, step: int, *, is_asynchronous: bool) -> bool:
    right_begin(self, step, is_asynchronous=is_asynchronous)
    return False


def counts_no_steps_in_flight(self: StepsInFlight, step: int, *, is_asynchronous: bool) -> bool:
    return bool(right_begin(self, step - len(self.deferred), is_asynchronous=is_asynchronous))


def says_its_failure_each_time(self: Starting, plan: Plan) -> Any:
    effects = right_planned(self, plan)
    self._state.attempts.has_unreported_failure = True
    return effects


def excuses_nobody(self: Starting, plan: Plan) -> Any:
    effects = right_planned(self, plan)
    self._state.excused = False
    return effects


def stays_left_out(self: Starting, plan: Plan) -> Any:
    before = self._state.is_left_out
    effects = right_planned(self, plan)
    self._state.is_left_out = before
    return effects


def aborts_nothing_that_was_told_early(self: Starting, plan: Plan) -> Any:
    return tuple(effect for effect in right_planned(self, plan) if not isinstance(effect, do.BreakQuorum))


def builds_each_time(self: Starting, plan: Plan) -> Any:
    self._state.configured = None
    return right_planned(self, plan)


def begins_beside_an_open_step(self: Starting, event: Any, now_ms: int) -> Any:
    self._state.failed_between = True
    return (do.EndLoop(""),) if self._state.leaving.left else ()


def begins_after_the_end(self: Starting, event: Any, now_ms: int) -> Any:
    return ()


def waits_though_there_is_news(self: Starting, event: Any, now_ms: int) -> Any:
    pause_ms = self._state.attempts.pause_ms
    return (do.Pause(pause_ms),) if pause_ms else ()


# --- errors, votes and attempts in flight -----------------------------------------------------------------------------


def keeps_every_error(self: Attempt, error: Exception) -> None:
    self._errors.append(error)


def knows_no_fatal_error(self: Attempt, error: Exception) -> None:
    self._errors.append(error)
    del self._errors[16:]


def blames_the_newest(self: StepsInFlight, name: Any) -> Attempt | None:
    return self.last


def blames_the_open_one_only(self: StepsInFlight, name: Any) -> Attempt | None:
    is_it = self.phase is not Phase.IDLE and (name is None or name.attempt == self.last.name.attempt)
    return self.last if is_it else None


def forgets_that_the_group_is_lost(self: StepState, attempt: Attempt) -> Exception | None:
    return attempt.fatal


def counts_the_abandoned(self: StepsInFlight, attempt: Attempt, *, yes: bool, planned: bool, is_left_out: bool) -> None:
    self.commit_failures = 0 if yes else self.commit_failures + 1


def counts_who_is_left_out(
    self: StepsInFlight, attempt: Attempt, *, yes: bool, planned: bool, is_left_out: bool
) -> None:
    self.failed_quorums += not yes


def forgives_nothing(self: StepsInFlight, attempt: Attempt, *, yes: bool, planned: bool, is_left_out: bool) -> None:
    self.commit_failures += not yes


def votes_with_too_few(self: Ending, number: int, attempt: Attempt, now_ms: int) -> Any:
    *rest, vote = right_cast(self, number, attempt, now_ms)
    return (*rest, replace(vote, yes=vote.error is None))


def votes_in_spite_of_an_error(self: Ending, number: int, attempt: Attempt, now_ms: int) -> Any:
    *rest, vote = right_cast(self, number, attempt, now_ms)
    return (*rest, replace(vote, yes=vote.enough_replicas))


def says_too_few_each_time(self: Ending, number: int, attempt: Attempt, now_ms: int) -> Any:
    self._reported_too_few = None
    return right_cast(self, number, attempt, now_ms)


def wishes_nothing(self: Ending, number: int, attempt: Attempt, now_ms: int) -> Any:
    *rest, vote = right_cast(self, number, attempt, now_ms)
    return (*rest, replace(vote, leaving=False))


def blames_every_abort(self: Ending, event: Any, now_ms: int) -> Any:
    attempt = self._attempt(event.attempt)
    assert attempt is not None
    if event.group_error is not None:
        attempt.note(event.group_error)
        return (do.ReportError(attempt.name, event.group_error, True), *self._cast_vote(event.attempt, attempt, now_ms))
    return self._cast_vote(event.attempt, attempt, now_ms)


def commits_twice(self: Ending, event: Any, now_ms: int) -> Any:
    self._state.attempts.phase = Phase.PLANNED
    return self._conclude(event.attempt, yes=event.yes, leaves=event.leaves, now_ms=now_ms)


def ends_in_any_order(self: Ending, event: Any, now_ms: int) -> Any:
    return ()


def votes_on_the_abandoned(self: Ending, event: Any, now_ms: int) -> Any:
    attempt = self._attempt(event.attempt)
    return (do.SynchronizeDevice(),) if attempt is not None else right_reductions_ended(self, event, now_ms)


def goes_on_in_another_quorum(self: StepsInFlight, key: QuorumKey) -> None:
    return None


def abandons_what_only_this_rank_lost(self: StepsInFlight, error: Exception) -> None:
    self.abandon_all(error)


def drops_the_living(self: StepsInFlight, numbers: Any) -> None:
    for number in numbers:
        self.aside.pop(number, None)


def gives_up_in_silence(self: StepsInFlight, error: Exception) -> None:
    for attempt in self.deferred:
        attempt.abandoned = error
    self.deferred.clear()


# --- reductions -------------------------------------------------------------------------------------------------------


def participates_whenever_it_has_a_place(self: Attempt) -> bool:
    return self.plan is not None


def divides_before_the_sum(num_participants: int) -> tuple[float, float]:
    return 1.0 / num_participants, 1.0


def weighs_what_it_does_not_give(self: Reducing, weight: Any, plan: Plan, *, gives: bool, inside: bool) -> Any:
    return right_enters(self, weight, plan, gives=True, inside=inside)


def weighs_unscaled(self: Reducing, weight: Any, plan: Plan, *, gives: bool, inside: bool) -> Any:
    weight = right_enters(self, weight, plan, gives=gives, inside=inside)
    return None if weight is None else weight / reducing.WEIGHT_SCALE


def goes_on_after_it_lost_a_reduction(self: Reducing, error: Exception, name: Any, *, inside: bool) -> Any:
    return do.ReportError(name, error, inside), do.LoseReduction()


def believes_every_weight(self: Reducing, event: Any, now_ms: int) -> Any:
    self._state.attempts.last.weight = event.weight
    return ()


# --- recovery ---------------------------------------------------------------------------------------------------------


def finds_every_state_right(plan: Plan, own: Any) -> None:
    return None


def loads_without_a_word(self: Recovery, plan: Plan) -> Any:
    self._expected_report = Stage.LOAD
    return (do.LoadState(plan),)


def agrees_with_itself(self: Recovery, plan: Plan, purpose: Purpose, error: Any, *, yes: bool = True) -> Any:
    self._error = error
    return self._agreed(plan, purpose, yes=yes and error is None)


def leaves_the_others_waiting(self: Recovery, plan: Plan, error: Exception) -> Any:
    return tuple(effect for effect in right_failed(self, plan, error) if not isinstance(effect, do.AbortGroup))


def blames_the_source_for_its_own(self: Recovery, plan: Plan, error: Exception) -> Any:
    self._in_vain = False
    return right_failed(self, plan, error)


def goes_on_unhealed(self: Recovery, event: Any, now_ms: int) -> Any:
    return ()


def heals_for_ever(self: Recovery, plan: Plan) -> Any:
    assert self._own is not None
    if self._state.own.diverges_from(self._own):
        self._expected_report = Stage.LOAD
        return (do.ExplainDivergence(plan, False, False),)
    return self._start_load(plan)


# --- losses -----------------------------------------------------------------------------------------------------------


def tells_losses_by_their_words(notice: LossNotice) -> Any:
    return notice


def hears_only_of_its_own_quorum(self: Losses, notice: LossNotice) -> bool:
    if notice.key == self._current:
        return right_heard(self, notice)
    return False


def breaks_by_any_loss(self: Losses, notice: LossNotice) -> bool:
    right_heard(self, notice)
    return True


right_heard = cast("Callable[[Losses, LossNotice], bool]", right_of(Losses, "add"))


# --- leaving ----------------------------------------------------------------------------------------------------------


def leaves_with_the_only_state(self: GracefulShutdown, now_ms: int) -> bool:
    return self._group_left or self._reason is not None


def believes_the_last_wish(self: GracefulShutdown, reason: str, by_ms: int) -> None:
    self._reason, self._by_ms = reason, by_ms


def gives_up_again_and_again(self: GracefulShutdown, now_ms: int, *, is_left_out: bool) -> bool:
    return self._reason is not None and now_ms >= self._by_ms


def waits_though_it_is_left_out(self: GracefulShutdown, now_ms: int, *, is_left_out: bool) -> bool:
    return self._reason is not None and now_ms >= self._by_ms


def leaves_what_is_in_flight(self: Ending, now_ms: int, finished_step: int | None = None) -> Any:
    self._state.leaving.left = True
    return (do.TellLeaving(self._state.leaving.reason, 0, finished_step),)


def has_finished_whatever_happened(self: Ending) -> bool:
    return True


ONE_NO = "one_no_fails_all_that_were_begun_after_it"
ANOTHER = "another_quorum_fails_all_that_are_in_flight_and_counts_once"
GIVEN = "a_state_is_given_once_and_refused_where_its_step_ends_before"
NOT_FINISHED = "a_loop_that_ends_otherwise_has_not_finished"
LEAVES = "a_wish_travels_in_the_vote_and_the_group_leaves_after_the_step"
NO_QUORUM_LEAVES = "a_quorum_that_does_not_come_before_the_deadline_is_waited_for_no_more"
HEALS = "who_heals_gives_zeros_and_takes_the_sources_step_batches_and_lineage"
COMMIT = "a_commit_counts_the_step_adds_the_participants_and_folds_the_lineage"

MUTANTS = [
    # the state
    Mutant(OwnState, "committed", counts_one_participant, COMMIT),
    Mutant(OwnState, "committed", folds_no_quorum, COMMIT),
    Mutant(
        OwnState,
        "planned",
        takes_the_lineage_of_any_plan,
        "a_member_that_holds_another_state_and_may_not_heal_never_folds_the_references_lineage",
    ),
    Mutant(OwnState, "planned", does_nothing, "a_state_without_a_lineage_takes_the_one_that_its_first_quorum_gives_it"),
    Mutant(OwnState, "planned", forgets_no_divergence, "a_check_that_finds_no_difference_forgives_the_one_before"),
    Mutant(
        OwnState,
        "healed",
        stays_torn,
        "an_optimizer_that_raised_after_the_commit_leaves_a_torn_state_until_it_heals",
    ),
    Mutant(OwnState, "healed", keeps_its_batches, HEALS),
    Mutant(OwnState, "is_due", is_due_again_and_again, "a_check_is_due_once_at_every_multiple"),
    Mutant(OwnState, "diverges_from", counts_each_look, "a_divergence_is_counted_once_after_a_failed_fetch"),
    Mutant(OwnState, "diverges_from", looks_at_no_history, "only_what_a_check_told_apart_has_diverged"),
    Mutant(
        OwnState,
        "diverges_from",
        never_counts_a_divergence,
        "who_diverges_heals_once_and_stops_where_that_has_not_cured_it",
    ),
    Mutant(
        StepStatus,
        "state_dict",
        saves_the_lineage_after_the_check,
        "a_durable_checkpoint_has_the_lineage_from_before_the_check",
    ),
    # asking
    Mutant(StepsInFlight, "begin", asks_as_if_it_had_left_nobody, ONE_NO),
    Mutant(
        StepsInFlight, "begin", counts_no_steps_in_flight, "steps_in_flight_are_named_after_the_step_that_they_will_be"
    ),
    Mutant(
        Starting,
        "_use_plan",
        says_its_failure_each_time,
        "a_failed_commit_is_said_once_while_others_are_in_flight_that_were_begun_since",
    ),
    Mutant(
        Starting,
        "_use_plan",
        excuses_nobody,
        "the_first_attempt_of_a_quorum_is_excused_and_those_of_a_recovery_and_after",
    ),
    Mutant(Starting, "_use_plan", stays_left_out, "a_quorum_that_does_not_come_for_a_straggler_is_no_failure"),
    Mutant(
        Starting,
        "_use_plan",
        aborts_nothing_that_was_told_early,
        "a_notice_that_comes_before_its_quorum_is_kept_for_it_and_one_of_an_older_is_not",
    ),
    Mutant(Starting, "_use_plan", builds_each_time, "the_group_is_configured_once_for_each_key"),
    Mutant(Starting, "_is_asked", says_yes, "an_answer_to_an_earlier_attempt_changes_nothing"),
    Mutant(Starting, "_configuring_ended", says_no, "a_rank_waits_for_its_quorum_until_the_group_is_built"),
    Mutant(Starting, "group_configured", orders_nothing, "the_group_is_configured_once_for_each_key"),
    Mutant(Starting, "configure_failed", orders_nothing, "a_group_that_could_not_be_configured_asks_for_a_new_id"),
    Mutant(Starting, "server_restarted", orders_nothing, "a_new_manager_server_holds_no_quorum_and_is_asked_again"),
    Mutant(
        Starting,
        "start_asked",
        begins_beside_an_open_step,
        "a_step_that_is_open_beside_others_is_put_aside_before_the_next",
    ),
    Mutant(Starting, "start_asked", begins_after_the_end, LEAVES),
    Mutant(
        Starting, "start_ready", waits_though_there_is_news, "what_fails_again_and_again_is_asked_for_ever_more_slowly"
    ),
    Mutant(Starting, "attempt_settled", orders_nothing, GIVEN),
    Mutant(Starting, "attempt_settled", orders_nothing, "a_fetch_ends_with_its_attempt"),
    Mutant(StepsInFlight, "pause_ms", says_no, "what_fails_again_and_again_is_asked_for_ever_more_slowly"),
    # errors and votes
    Mutant(Attempt, "note", keeps_every_error, "an_attempt_keeps_a_bounded_number_of_errors"),
    Mutant(
        Attempt,
        "note",
        knows_no_fatal_error,
        "what_this_process_cant_go_on_with_is_raised_before_the_vote_whatever_came_before",
    ),
    Mutant(StepsInFlight, "find", blames_the_newest, "an_error_of_an_earlier_attempt_comes_too_late_to_count"),
    Mutant(StepsInFlight, "find", blames_the_open_one_only, "an_error_of_one_in_flight_fails_that_one"),
    Mutant(
        StepState,
        "fatal_of",
        forgets_that_the_group_is_lost,
        "a_lost_group_fails_this_and_every_later_attempt_with_the_words_of_the_manager_server",
    ),
    Mutant(StepsInFlight, "_count", counts_the_abandoned, ONE_NO),
    Mutant(
        StepsInFlight, "_count", counts_who_is_left_out, "a_quorum_that_does_not_come_for_a_straggler_is_no_failure"
    ),
    Mutant(StepsInFlight, "_count", forgives_nothing, "a_commit_ends_the_row_of_failures"),
    Mutant(
        Ending,
        "_cast_vote",
        votes_with_too_few,
        "too_few_participants_vote_no_without_an_error_and_are_reported_once",
    ),
    Mutant(
        Ending,
        "_cast_vote",
        says_too_few_each_time,
        "too_few_participants_vote_no_without_an_error_and_are_reported_once",
    ),
    Mutant(Ending, "_cast_vote", votes_in_spite_of_an_error, "an_error_fails_its_own_attempt"),
    Mutant(Ending, "_cast_vote", wishes_nothing, LEAVES),
    Mutant(
        Ending,
        "device_synchronized",
        blames_every_abort,
        "a_group_that_failed_fails_the_step_unless_a_loss_has_aborted_it_after_the_reductions",
        (True, False, 0),
    ),
    Mutant(Ending, "verdict_arrived", commits_twice, "a_verdict_that_comes_twice_counts_once"),
    # in flight
    Mutant(
        Ending,
        "end_asked",
        ends_in_any_order,
        "steps_in_flight_end_in_order_each_as_the_step_that_it_was_named_after",
    ),
    Mutant(Ending, "end_asked", ends_in_any_order, "the_open_step_does_not_end_before_those_in_flight"),
    Mutant(Ending, "reductions_ended", votes_on_the_abandoned, ONE_NO),
    Mutant(StepsInFlight, "_abandon_those_of_other_quorums", goes_on_in_another_quorum, ANOTHER),
    Mutant(StepsInFlight, "abandon_all", does_nothing, ONE_NO),
    Mutant(
        StepsInFlight,
        "fail_deferred",
        abandons_what_only_this_rank_lost,
        "without_a_quorum_those_in_flight_fail_here_alone_and_the_others_are_told",
    ),
    Mutant(StepsInFlight, "fail_deferred", does_nothing, "a_state_loaded_by_hand_fails_what_is_in_flight"),
    Mutant(StepsInFlight, "drop", drops_the_living, "one_that_may_still_commit_is_not_dropped"),
    Mutant(StepsInFlight, "give_up", gives_up_in_silence, "what_a_strategy_gives_up_breaks_the_quorum_of_the_others"),
    # reductions
    Mutant(
        Attempt,
        "is_participating",
        participates_whenever_it_has_a_place,
        "who_heals_and_a_spare_give_nothing_and_divide_as_the_others_do",
    ),
    Mutant(
        reducing,
        "mean_factors",
        divides_before_the_sum,
        "a_mean_is_scaled_by_a_power_of_two_before_the_sum",
        (3, 0.25, 0.75),
    ),
    Mutant(
        Reducing,
        "_weight_part",
        weighs_what_it_does_not_give,
        "between_two_steps_those_give_that_committed",
        (False, 0.0),
    ),
    Mutant(Reducing, "_weight_part", weighs_unscaled, "a_weight_is_said_once_a_step_before_it_is_used"),
    Mutant(
        reducing,
        "_ABORTED_RESULT",
        (do.LoseReduction(),),
        "after_an_error_of_the_step_it_stays_out_and_ends_it_for_the_others",
    ),
    Mutant(
        Reducing,
        "_lose",
        goes_on_after_it_lost_a_reduction,
        "nothing_is_started_in_a_broken_quorum_and_the_step_fails_by_it",
    ),
    Mutant(Reducing, "weight_set", believes_every_weight, "a_weight_is_said_once_a_step_before_it_is_used"),
    # recovery
    Mutant(recovery, "mismatch", finds_every_state_right, "a_fetched_state_of_another_lineage_is_refused"),
    Mutant(Recovery, "state_served", orders_nothing, GIVEN),
    Mutant(Recovery, "exchange_asked", goes_on_unhealed, HEALS),
    Mutant(
        Recovery, "_start_load", loads_without_a_word, "a_load_that_broke_off_leaves_a_torn_state_that_asks_to_heal"
    ),
    Mutant(Recovery, "_agree", agrees_with_itself, "a_group_heals_whole_in_four_votes"),
    Mutant(
        recovery,
        "_FAILED_BY_LOST_RANK",
        (),
        "a_group_that_was_lost_meanwhile_heals_no_more",
        (Purpose.LOADED,),
    ),
    Mutant(
        Recovery,
        "_failed",
        leaves_the_others_waiting,
        "a_failed_recovery_in_a_synchronous_step_ends_the_reduction_for_the_others",
    ),
    Mutant(Recovery, "_failed", blames_the_source_for_its_own, "a_source_is_not_waited_for_that_waits_for_this_rank"),
    Mutant(StepState, "is_awaited", says_no, "a_source_is_not_waited_for_that_waits_for_this_rank"),
    Mutant(StepState, "has_group", says_yes, "a_state_over_the_process_group_is_not_waited_for_without_the_group"),
    Mutant(Repeats, "again", says_no, "a_load_that_fails_twice_for_the_same_reason_ends_the_process"),
    Mutant(Recovery, "_load", heals_for_ever, "who_diverges_heals_once_and_stops_where_that_has_not_cured_it"),
    Mutant(
        Recovery,
        "state_torn",
        orders_nothing,
        "an_optimizer_that_raised_after_the_commit_leaves_a_torn_state_until_it_heals",
    ),
    Mutant(
        Recovery, "state_registered", orders_nothing, "state_that_is_registered_after_a_recovery_is_healed_once_more"
    ),
    # losses
    Mutant(losses, "_identity", tells_losses_by_their_words, "the_same_loss_in_other_words_is_the_same_loss"),
    Mutant(
        Losses,
        "add",
        hears_only_of_its_own_quorum,
        "a_notice_that_comes_before_its_quorum_is_kept_for_it_and_one_of_an_older_is_not",
    ),
    Mutant(
        Losses,
        "add",
        breaks_by_any_loss,
        "a_notice_that_comes_before_its_quorum_is_kept_for_it_and_one_of_an_older_is_not",
    ),
    Mutant(Losses, "_update_broken", does_nothing, "a_loss_in_a_quorum_breaks_it_and_asks_for_another"),
    # leaving
    Mutant(
        GracefulShutdown,
        "is_due",
        leaves_with_the_only_state,
        "who_alone_holds_the_state_stays_until_others_do_or_its_time_is_over",
    ),
    Mutant(GracefulShutdown, "requested", believes_the_last_wish, LEAVES),
    Mutant(GracefulShutdown, "group_left", does_nothing, "a_rank_whose_group_has_left_without_it_leaves_too"),
    Mutant(GracefulShutdown, "gives_up", gives_up_again_and_again, NO_QUORUM_LEAVES),
    Mutant(
        GracefulShutdown,
        "gives_up",
        waits_though_it_is_left_out,
        "a_straggler_that_is_left_out_leaves_without_a_step_of_its_own",
    ),
    Mutant(
        GracefulShutdown,
        "serves_until_ms",
        does_nothing,
        "who_leaves_serves_those_that_heal_from_it_for_the_rest_of_its_time",
    ),
    Mutant(Ending, "_leave", leaves_what_is_in_flight, "who_leaves_fails_what_it_has_in_flight"),
    *(
        Mutant(Ending, "_has_finished", has_finished_whatever_happened, NOT_FINISHED, (case,))
        for case in ("no step", "a no", "an error since", "a start that failed", "torn", "lost", "in flight")
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.name}-{mutant.seen_by}"[:70])
def test_a_mistake_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_seen(mutant, TRANSCRIPTS, monkeypatch)
