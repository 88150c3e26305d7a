"""The end of a step: what it waits for, this rank's vote, and the effect of a verdict; also the end of the job for this
rank.

A step is a transaction. Only a yes changes the state: one more step, the participants added, the lineage folded. Every
error on the way belongs to exactly one attempt.

Law of this file: the events from the end of the reductions to the verdict, and leaving.
"""

from __future__ import annotations

from typing import final

from tft_coord.core.standing import State
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.step.attempt import Attempt
from tft_coord.core.step.effects import Effects
from tft_coord.core.step.errors import StepAbandonedError, SyncAbandonedError, UsageError
from tft_coord.core.step.rounds import ERROR_WORD_WITHIN_MS, Rounds
from tft_coord.core.step.state import StepState
from tft_coord.core.step.values import Healing, Phase, StepName


@final
class Ending:
    """The ends of one rank's steps, and of the rank.

    Args:
        state: the facts about the rank's steps, which all handlers share.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._rounds = Rounds(state)
        self._reported_too_few: int | None = None  # the number of participants in the last such log line

    # --- the open attempt, and those that were put aside --------------------------------------------------------------

    def defer_asked(self, event: on.DeferAsked, now_ms: int) -> Effects:
        """Put the open attempt aside. Raises: UsageError: no attempt is open."""
        attempts = self._state.attempts
        if attempts.phase is Phase.IDLE:
            raise UsageError(
                "defer was called outside a step; call it after start_quorum, when its reductions have begun"
            )
        return (do.PutAside(attempts.defer().name),)

    def end_asked(self, event: on.EndAsked, now_ms: int) -> Effects:
        """Check that the attempt may end. Raises: UsageError: no attempt is open, or there are older ones in flight."""
        state, attempts = self._state, self._state.attempts
        if event.attempt == 0:
            if attempts.phase is Phase.IDLE:
                raise UsageError("should_commit was called without a start_quorum before it; call start_quorum first")
            if attempts.deferred:
                raise UsageError(
                    f"should_commit was called while {len(attempts.deferred)} earlier steps are in flight; end those "
                    "first"
                )
            return ()
        attempt = attempts.aside.get(event.attempt)
        if attempt is None:
            return ()
        fatal = state.fatal_of(attempt)
        if fatal is not None:
            return (do.Raise(fatal),)
        if attempt.abandoned is None and attempts.deferred[0] is not attempt:
            raise UsageError(f"{attempt.name} is not the oldest step in flight; end the older ones first")
        return ()

    def reductions_ended(self, event: on.ReductionsEnded, now_ms: int) -> Effects:
        """Synchronize the device before the vote; an attempt that has failed with others, or has no quorum, ends
        without one."""
        state = self._state
        attempt = self._attempt(event.attempt)
        if attempt is None:
            return self._conclude(event.attempt, yes=False, leaves=False, now_ms=now_ms)
        fatal = state.fatal_of(attempt)
        if fatal is not None:
            return (do.Raise(fatal),)
        if attempt.abandoned is not None:
            reports = (do.ReportAbandoned(attempt.abandoned),) if event.attempt else ()
            return (*reports, *self._conclude(event.attempt, yes=False, leaves=False, now_ms=now_ms))
        if attempt.plan is None:
            leaves = state.leaving.is_due(now_ms)
            return self._conclude(event.attempt, yes=False, leaves=leaves, now_ms=now_ms)
        return (do.SynchronizeDevice(),)

    def device_synchronized(self, event: on.DeviceSynchronized, now_ms: int) -> Effects:
        attempt = self._attempt(event.attempt)
        if attempt is None:
            return ()
        reports: Effects = ()
        # On the CPU each reduction has reported its own end by now. The abort of a broken quorum leaves the gradients
        # of the successful ones intact. On a device the abort may have torn reductions that were only queued.
        counts = event.on_device or (event.attempt == 0 and self._state.losses.broken is None)
        if event.group_error is not None and attempt.error is None and counts:
            attempt.note(event.group_error)
            reports = (do.ReportError(attempt.name, event.group_error, True),)
        if attempt.sends_word and attempt.agreed is None:
            if attempt.sent_word is not None and attempt.plan is not None:
                return (*reports, do.HearWord(event.attempt, attempt.plan.key, attempt.sent_word))
            return (*reports, *self._send_word(event, attempt, now_ms))
        return (*reports, *self._after_word(event.attempt, attempt, now_ms))

    def _send_word(self, event: on.DeviceSynchronized, attempt: Attempt, now_ms: int) -> Effects:
        """Send this rank's control word to all members, before it waits for any state."""
        plan, rounds = attempt.plan, self._rounds
        assert plan is not None, "a word without a quorum"
        word, step = rounds.word(attempt, now_ms), self._state.standing.round_step
        is_alone = plan.replica_world_size == 1
        if word is not None and step is not None and not is_alone:
            leaves_others = rounds.has_left_reductions(attempt)
            if event.group_error is None and rounds.can_send(plan) and not leaves_others:
                within_ms = None if attempt.error is None else ERROR_WORD_WITHIN_MS
                return (do.SendWord(event.attempt, plan.key, word.values(), step, word.ask, within_ms),)
            rounds.summed(attempt, None)
            aborts = rounds.abort_incomplete(attempt) if leaves_others else ()
            return (*aborts, *self._after_word(event.attempt, attempt, now_ms))
        rounds.summed(attempt, word.values() if word is not None else None)
        return self._after_word(event.attempt, attempt, now_ms)

    def word_asked(self, event: on.WordAsked, now_ms: int) -> Effects:
        """Send the control word of the open attempt now. The attempt's end handles anything that prevents it."""
        state, attempt = self._state, self._state.attempts.last
        plan, step = attempt.plan, state.standing.round_step
        if not state.status().speaks_first or attempt.sent_word is not None or plan is None or step is None:
            return ()
        if event.group_error is not None or not self._rounds.can_send(plan):
            return ()
        word = self._rounds.word(attempt, now_ms)
        if word is None:
            return ()
        attempt.sent_word = step
        return (do.SendWord(0, plan.key, word.values(), step, word.ask, hears=False),)

    def word_ended(self, event: on.WordEnded, now_ms: int) -> Effects:
        attempt = self._attempt(event.attempt)
        if attempt is None or not attempt.sends_word or attempt.agreed is not None:
            return ()
        reports: Effects = ()
        if event.error is not None and attempt.error is None:
            attempt.note(event.error)
            reports = (do.ReportError(attempt.name, event.error, True),)
        self._rounds.summed(attempt, event.sums)
        aborts = self._rounds.abort_incomplete(attempt) if event.sums is None else ()
        return (*aborts, *reports, *self._after_word(event.attempt, attempt, now_ms))

    def _after_word(self, number: int, attempt: Attempt, now_ms: int) -> Effects:
        if number == 0 and not attempt.exchanged and attempt.has_to_exchange:
            return (do.ExchangeState(),)
        return self._cast_vote(number, attempt, now_ms)

    def vote_asked(self, event: on.VoteAsked, now_ms: int) -> Effects:
        state, attempts = self._state, self._state.attempts
        if attempts.phase is not Phase.PLANNED:
            return ()
        fatal = state.fatal_of(attempts.last)
        return (do.Raise(fatal),) if fatal is not None else self._cast_vote(0, attempts.last, now_ms)

    def _cast_vote(self, number: int, attempt: Attempt, now_ms: int) -> Effects:
        plan = attempt.plan
        assert plan is not None, "a vote without a quorum"
        # The plan's number is this group's own, except at step 0, where a healing member would otherwise never count.
        enough = plan.num_participants >= plan.min_replica_size
        reports: Effects = ()
        if enough:
            self._reported_too_few = None
        elif self._reported_too_few != plan.num_participants:
            self._reported_too_few = plan.num_participants
            reports = (do.ReportTooFew(plan),)
        error = attempt.error
        agreed = attempt.agreed
        if agreed is None:
            yes, leaving = enough and error is None, self._state.leaving.is_due(now_ms)
            return (*reports, do.CastVote(number, attempt.name.step, plan.key, yes, leaving, enough, error))
        # An error after the word is not reported, because the others commit by the word. But a recovering rank needs
        # its state.
        yes = agreed.yes and (not plan.heal or attempt.healing is Healing.LOADED)
        step, leaving = attempt.name.step, attempt.wants_leave
        stands = yes and agreed.stands and self._state.standing.state is not State.BROKEN
        vote = do.CastVote(number, step, plan.key, yes, leaving, enough, error, stands, agreed.why)
        return (*reports, vote)

    def verdict_arrived(self, event: on.VerdictArrived, now_ms: int) -> Effects:
        if event.attempt == 0 and self._state.attempts.phase is Phase.IDLE:
            return ()
        return self._conclude(event.attempt, yes=event.yes, leaves=event.leaves, stands=event.stands, now_ms=now_ms)

    def _conclude(self, number: int, *, yes: bool, leaves: bool, now_ms: int, stands: bool = False) -> Effects:
        state, attempts = self._state, self._state.attempts
        attempt = self._attempt(number)
        name, plan, error = StepName(number, state.own.step), None, None  # for a dropped attempt
        if attempt is not None:
            name, plan, error = attempt.name, attempt.plan, attempt.error
        committed = yes and plan is not None
        aborts = self._rounds.decided(attempt, yes=committed, stands=stands)
        if yes and plan is not None:
            state.own.committed(plan)
            state.num_reductions = attempt.num_reductions if attempt is not None else 0
        if number:
            attempts.aside_ended(attempt, yes=committed, is_left_out=state.is_left_out)
        else:
            attempts.open_ended(yes=committed, is_left_out=state.is_left_out)
        orders: list[do.Effect] = [*aborts, do.RecordCommit(name, plan, committed, state.excused)]
        if leaves:
            orders += self._leave(now_ms)
        limit = state.settings.max_retries
        exhausted = limit is not None and attempts.failures > limit
        orders.append(do.Concluded(committed, attempts.failures, exhausted, error, plan))
        return tuple(orders)

    def _attempt(self, number: int) -> Attempt | None:
        """Return the attempt of that number; 0: the open one. None: it is over."""
        attempts = self._state.attempts
        if number:
            return attempts.aside.get(number)
        return attempts.last if attempts.phase is not Phase.IDLE else None

    def flights_dropped(self, event: on.FlightsDropped, now_ms: int) -> Effects:
        self._state.attempts.drop(event.attempts)
        return ()

    def flights_given_up(self, event: on.FlightsGivenUp, now_ms: int) -> Effects:
        replica_id = self._state.settings.replica_id
        aborts = self._rounds.given_up()
        self._state.attempts.give_up(SyncAbandonedError(f"replica {replica_id} discarded its steps in flight"))
        return aborts

    # --- leaving ------------------------------------------------------------------------------------------------------

    def leave_wished(self, event: on.LeaveWished, now_ms: int) -> Effects:
        self._state.leaving.requested(event.reason, event.by_ms)
        return ()

    def looked(self, event: on.Looked, now_ms: int) -> Effects:
        """Leave without waiting for a quorum that does not come; the manager server refuses the waiting request."""
        state = self._state
        if event.waits_ms is not None:
            late = state.standing.late(now_ms, now_ms - event.waits_ms)
            return () if late is None else (do.TellLate(late.key, late.step),)
        if not state.pends or not state.leaving.gives_up(now_ms, is_left_out=event.hears_left_out):
            return ()
        return (do.TellLeaving(state.leaving.reason, state.leaving.serve_ms(now_ms), waits=False),)

    def ending_asked(self, event: on.EndingAsked, now_ms: int) -> Effects:
        state, leaving = self._state, self._state.leaving
        finished = event.clean and self._has_finished()
        if finished:
            leaving.requested(f"finished at step {state.own.step}", now_ms + event.serve_ms)
        orders: list[do.Effect] = []
        if leaving.is_requested and not leaving.left and state.attempts.phase is Phase.IDLE:
            orders += self._leave(now_ms, state.own.step if finished else None)
        if leaving.left:
            until_ms = leaving.serves_until_ms() or 0
            serves = until_ms > now_ms
            meets = state.settings.world_size > 1 and (serves or not finished)
            orders.append(do.ServeOn(until_ms if serves else 0, meets))
        return tuple(orders)

    def _has_finished(self) -> bool:
        """Return whether the training loop has ended normally, as far as the core can see."""
        state, attempts, own = self._state, self._state.attempts, self._state.own
        return (
            not state.leaving.is_requested
            and not state.leaving.left
            and not state.failed_between
            and attempts.phase is Phase.IDLE
            and not attempts.deferred
            and own.step > 0
            and attempts.verdict is True
            and state.fatal_of(attempts.last) is None
            and not own.torn
        )

    def _leave(self, now_ms: int, finished_step: int | None = None) -> Effects:
        state, leaving = self._state, self._state.leaving
        leaving.left = True
        state.attempts.abandon_all(
            StepAbandonedError(f"replica {state.settings.replica_id} has left the job while this step was in flight")
        )
        reason = leaving.reason
        return do.ReportLeft(reason), do.TellLeaving(reason, leaving.serve_ms(now_ms), finished_step)
