"""The start of a step: what must end before it, what to ask for, and what the answer means.

Law of this file: the events from the request to begin a step to the process group that is configured for its quorum.
"""

from __future__ import annotations

from dataclasses import fields, replace
from operator import attrgetter
from typing import Final, final

from tft_coord.core.standing import GoOn, State
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.step.effects import Effects
from tft_coord.core.step.errors import StepAbandonedError, UsageError
from tft_coord.core.step.rounds import Rounds
from tft_coord.core.step.state import StepState
from tft_coord.core.step.values import Healing, Phase, StepSettings
from tft_coord.core.types import Plan, QuorumKey, RankRequest, Refusal, Unreached
from tft_coord.errors import RefusedError, StaleQuorumError

# A new or healed replica makes all others wait in its first step, and in the step in which it catches up. It must not
# spend that time on preparations to serve the state that it has just received.
PREPARED_AFTER_ATTEMPTS: Final = 4


@final
class Starting:
    """The starts of one rank's steps.

    Args:
        state: the facts about the rank's steps, which all handlers share.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._request: RankRequest | None = None  # of the open attempt
        self._current_plan: Plan | None = None  # the plan of the held key
        self._newest_key: QuorumKey | None = None  # that this rank has held
        self._rounds = Rounds(state)
        self._unsent_reports: tuple[Unreached, ...] = ()  # reports that came in a step without a request

    # --- before the request -------------------------------------------------------------------------------------------

    def start_asked(self, event: on.StartAsked, now_ms: int) -> Effects:
        """Check that a step may begin.

        Raises: UsageError: an attempt is open while earlier ones are in flight.
        """
        state = self._state
        if state.leaving.left:
            return (do.EndLoop(state.leaving.reason),)
        if state.attempts.deferred and state.attempts.phase is not Phase.IDLE:
            raise UsageError(
                "start_quorum was called while a step is open and earlier steps are in flight; call defer() first"
            )
        state.failed_between = True  # an error before the attempt has begun counts as one between steps
        return ()

    def attempt_settled(self, event: on.AttemptSettled, now_ms: int) -> Effects:
        last = self._state.attempts.last
        plan = last.plan
        if plan is None:
            return ()
        if plan.heal:
            return (do.EndFetch(),)
        if plan.serve and not last.exchanged and not event.offers:
            return (do.RefuseState(plan, f"its step {plan.step} ended before the snapshot of its state"),)
        return ()

    def start_ready(self, event: on.StartReady, now_ms: int) -> Effects:
        state = self._state
        own, last = state.own, state.attempts.last
        # The lighthouse must learn at once which peers are unreachable: the next quorum may form without them.
        pause_ms = 0 if event.urgent else state.attempts.pause_ms
        pauses = (do.Pause(pause_ms),) if pause_ms else ()
        if own.is_due(state.settings.check_every):
            return (*pauses, do.CompareState(f"check {own.step}, attempt {last.name.attempt + 1}"))
        return pauses

    def state_compared(self, event: on.StateCompared, now_ms: int) -> Effects:
        self._state.own.compared(event.digest)
        return ()

    # --- the request --------------------------------------------------------------------------------------------------

    def step_started(self, event: on.StepStarted, now_ms: int) -> Effects:
        state, settings = self._state, self._state.settings
        own, attempts = state.own, state.attempts
        aborts = self._rounds.close_open()
        asynchronous = settings.use_async_quorum if event.use_async_quorum is None else event.use_async_quorum
        peers_may_wait = attempts.begin(own.step, is_asynchronous=asynchronous)
        state.pends = True
        state.failed_between = False
        # Without a quorum there is no process group yet: the first plan configures it.
        built = state.configured == state.held and not state.is_aborted
        usable = event.group_usable and built and state.losses.broken is None
        why = self._why_not_continue(usable=usable and not peers_may_wait)
        # All ranks of a group load a state by hand in the same step, so all of them ask.
        group_asks = settings.world_size > 1 and not state.changed and self._knows_its_quorum
        decision = state.standing.next_round(now_ms, why, together=group_asks)
        state.changed = ""
        if isinstance(decision, GoOn):
            return self._continue_standing(event, decision)
        if decision.breaks:
            # The others have begun the next round, in which no member may wait for this rank.
            usable = False
            state.abort()
            aborts = (do.AbortGroup(),)
        state.ask_reason = ""
        state.standing.asked(now_ms)
        self._request = RankRequest(
            step=own.step,
            lineage=own.lineage,
            live=own.live,
            torn=own.torn,
            held=self._newest_key,
            checkpoint_metadata=event.checkpoint_metadata,
            # This is reported once if attempts that began since are in flight: each report raises the id, and fails
            # them.
            commit_failures=attempts.commit_failures if attempts.has_unreported_failure or not attempts.deferred else 0,
            needs_configure=state.held is not None and (peers_may_wait or not usable),
            failed_heals=state.failed_heals,
            poor_sources=event.poor_sources,
            shrink_only=event.shrink_only,
            init_sync=settings.init_sync,
            allow_heal=event.allow_heal,
            use_async_quorum=asynchronous,
            fixed_with_spares=settings.fixed_with_spares,
            min_replica_size=settings.min_replica_size,
            attempt=attempts.last.name.attempt,
            fingerprint=event.fingerprint,
            unreached=self._unsent_reports + event.unreached,
            lease_ms=state.lease_ms,
        )
        self._unsent_reports = ()
        attempt = attempts.last.name.attempt
        breaks = decision.why if decision.breaks else ""
        return (*aborts, do.Ask(attempt, self._request, self._may_snapshot_early, self._may_prepare, breaks))

    @property
    def _may_snapshot_early(self) -> bool:
        """Return whether the snapshot may be taken before it is known which replicas heal from it.

        The ranks of a larger group can't all know of a newcomer at the same time. A synchronous quorum serves before
        the reductions anyway, and so does a strategy that exchanges state as soon as the plan arrives.
        """
        state = self._state
        return state.attempts.last.is_asynchronous and not state.by_strategy and state.settings.world_size == 1

    @property
    def _may_prepare(self) -> bool:
        """Return whether the open attempt is the one in which this rank prepares to serve its state."""
        state = self._state
        return state.attempts.last.name.attempt - (state.healed_in or 1) == PREPARED_AFTER_ATTEMPTS

    def _why_not_continue(self, *, usable: bool) -> str:
        """Return why this rank must ask for a quorum before it continues, one phrase; empty if it need not."""
        state = self._state
        if state.own.torn:
            return "its state is torn"
        if state.changed:
            return state.changed
        if not usable:
            return "its process group is unusable"
        if not self._knows_its_quorum:
            return "its state or its quorum is unknown"
        return ""

    @property
    def _knows_its_quorum(self) -> bool:
        state = self._state
        return state.own.lineage is not None and self._current_plan is not None and self._current_plan.key == state.held

    def _continue_standing(self, event: on.StepStarted, decision: GoOn) -> Effects:
        """Begin the next round of the standing quorum: the plan is known, and no request is needed."""
        state = self._state
        own, before = state.own, self._current_plan
        assert before is not None, "a quorum that stands has a plan"
        assert own.lineage is not None, "a quorum stands for a known state"
        if event.fingerprint or event.unreached:
            self._unsent_reports += event.unreached
            state.ask_reason = "it has a report for the lighthouse"
        plan = standing_plan(before, own.step, own.lineage, state.settings)
        if decision.fails:
            return (*self._fail_with_group(plan, decision.fails), do.GoOn())
        return (do.GoOn(self._may_snapshot_early, self._may_prepare), *self._use_plan(plan))

    def _fail_with_group(self, plan: Plan, why: str) -> Effects:
        """Begin a round that this rank can't commit, because the other ranks of its group begin it."""
        state = self._state
        orders = self._use_plan(plan)
        state.abort()
        last = state.attempts.last
        error = StepAbandonedError(
            f"this rank can't continue in quorum {plan.key} ({why}); the next step asks for another quorum"
        )
        last.note(error)
        return (do.AbortGroup(), *orders, do.ReportError(last.name, error, True))

    def server_restarted(self, event: on.ServerRestarted, now_ms: int) -> Effects:
        """Drop the held quorum, because a new manager server holds none.

        Only a group of one rank gets a new server. The old server took the end of its stream for the end of the group,
        but this rank is alive. Its requests still name the quorum. The new server may reach another lighthouse, whose
        ids must rise above this one.
        """
        state = self._state
        state.group_lost = None
        state.hold(None)
        state.configured = None
        self._current_plan = None
        if state.attempts.phase is not Phase.ASKED or self._request is None:
            return ()
        self._request = replace(self._request, needs_configure=False)
        return (do.Ask(state.attempts.last.name.attempt, self._request),)

    # --- the answer ---------------------------------------------------------------------------------------------------

    def plan_arrived(self, event: on.PlanArrived, now_ms: int) -> Effects:
        return self._plan_received(event.plan, now_ms) if self._is_asked(event.attempt) else ()

    def unchanged_arrived(self, event: on.UnchangedArrived, now_ms: int) -> Effects:
        """Handle the short answer.

        Raises: StaleQuorumError: this rank does not hold that quorum. Nothing has changed then.
        """
        if not self._is_asked(event.attempt):
            return ()
        state, before = self._state, self._current_plan
        if before is None or before.key != event.key or state.own.lineage is None:
            raise StaleQuorumError(
                f"the answer names quorum {event.key}, but this rank has {state.held}; the next step asks again"
            )
        return self._plan_received(standing_plan(before, state.own.step, state.own.lineage, state.settings), now_ms)

    def _is_asked(self, attempt: int) -> bool:
        attempts = self._state.attempts
        return attempts.phase is Phase.ASKED and attempts.last.name.attempt == attempt

    def _plan_received(self, plan: Plan, now_ms: int) -> Effects:
        attempts, standing = self._state.attempts, self._state.standing
        in_flight = sum(each.plan is not None and each.plan.key == plan.key for each in attempts.deferred)
        standing.planned(plan, now_ms, in_flight)
        orders = self._use_plan(plan)
        # The report that the quorum is over may have come before the plan.
        return (*orders, *self._rounds.broken()) if standing.state is State.BROKEN else orders

    def _use_plan(self, plan: Plan) -> Effects:
        state, attempts = self._state, self._state.attempts
        attempts.has_unreported_failure = attempts.has_unreported_failure and plan.key == state.held
        state.hold(plan.key)
        self._newest_key = plan.key
        state.own.planned(plan)
        state.is_left_out = False
        state.leaving.planned(plan)
        self._current_plan = plan
        attempts.planned(plan, state.own.step)
        last = attempts.last
        # The group is never configured twice under one key, because a rendezvous is used once.
        configures = state.configured != plan.key
        state.pends = configures
        state.excused = configures or plan.heal or state.healed_in == last.name.attempt - 1
        orders: list[do.Effect] = [do.UsePlan(last.name, plan)]
        if state.excused:
            orders.append(do.ForgetPace())
        if plan.heal:
            last.healing = Healing.FETCHING
            if not (configures and state.settings.heals_over_group):
                orders += self._fetch(plan)
        orders += [
            do.BreakQuorum(notice) for notice in state.losses.of_current_quorum
        ]  # the notice came before its quorum
        if configures:
            orders.append(do.Configure(last.name.attempt, plan))
        return tuple(orders)

    def _fetch(self, plan: Plan) -> Effects:
        state = self._state
        return () if state.settings.is_passive_rank else (do.Fetch(state.attempts.last.name.attempt, plan),)

    def quorum_failed(self, event: on.QuorumFailed, now_ms: int) -> Effects:
        """Fail the attempt and those in flight; the next one asks again."""
        state, attempts, error = self._state, self._state.attempts, event.error
        if attempts.phase is Phase.IDLE or attempts.last.name.attempt != event.attempt:
            return ()
        if isinstance(error, RefusedError) and error.code == Refusal.LEFT.value:
            # Another rank of this group got no quorum, and has left the job for the whole group.
            state.leaving.group_left()
            error = StepAbandonedError(str(error))
        attempts.without_quorum(error, others_go_on=state.by_strategy)
        state.pends = False
        state.excused = True
        return (do.ForgetPace(), do.ReportNoQuorum(attempts.last.name, error))

    # --- the process group --------------------------------------------------------------------------------------------

    def group_configured(self, event: on.GroupConfigured, now_ms: int) -> Effects:
        state = self._state
        if event.key != state.held:
            return ()
        state.configured, state.is_aborted = event.key, False
        state.attempts.peers_may_wait = False
        plan = state.attempts.last.plan
        if not self._configuring_ended(event.attempt) or plan is None or not state.settings.heals_over_group:
            return ()
        return self._fetch(plan) if plan.heal and state.has_group else ()

    def configure_failed(self, event: on.ConfigureFailed, now_ms: int) -> Effects:
        """Note that the process group is unusable; the next request reports that, and the id rises."""
        state = self._state
        state.configured = None
        if self._configuring_ended(event.attempt):
            state.attempts.last.note(event.error)
        return ()

    def _configuring_ended(self, attempt: int) -> bool:
        if self._state.attempts.last.name.attempt != attempt:
            return False
        self._state.pends = False
        return True


_standing_fields: Final = attrgetter(*(field.name for field in fields(Plan) if not field.kw_only))


def standing_plan(before: Plan, step: int, lineage: int, settings: StepSettings) -> Plan:
    """Return the plan of a standing quorum: every member is at this rank's step, and none heals.

    Args:
        before: any earlier plan of that quorum.
        step, lineage: of this rank's state.
        settings: give the number of participants.
    """
    size, place = before.replica_world_size, before.replica_rank
    everyone = before.up_to_date if len(before.up_to_date) == size else tuple(range(size))
    needed = settings.min_replica_size
    counted = everyone[:needed] if settings.fixed_with_spares else everyone
    return Plan(
        *_standing_fields(before),  # `replace` looks up each field by its name, and this runs in every step
        step=step,
        lineage=lineage,
        heal=False,
        sources=(),
        recover_dst_replica_ranks=(),
        serve=False,
        up_to_date=everyone,
        participants=counted,
        participating_rank=place if place < len(counted) else None,
        min_replica_size=needed,
        commit_failures=0,
    )
