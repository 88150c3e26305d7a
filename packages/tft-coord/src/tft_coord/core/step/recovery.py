"""Live state between replicas: which serve, which heal, and in which stages, a whole group at a time.

All ranks of a group have staged the fetched state, and found where it belongs, before one of them loads it. All have
loaded it before one goes on. From the first load to the last, the state is torn: neither the old nor the new one.

Law of this file: the stages and their votes. The shell knows what a state is, and transfers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.step.effects import Effects
from tft_coord.core.step.errors import HealingError, UsageError, UserStateError
from tft_coord.core.step.own_state import mismatch
from tft_coord.core.step.repeats import Repeats
from tft_coord.core.step.state import StepState
from tft_coord.core.step.status import own_state
from tft_coord.core.step.values import Healing, Phase, Stage
from tft_coord.core.types import Plan, Purpose

VOTE_OF = {Stage.FETCH: Purpose.STAGED, Stage.SPREAD: Purpose.SPREAD, Stage.MATCH: Purpose.MATCHED}
VOTE_OF[Stage.LOAD] = Purpose.LOADED
# The operation that another rank failed to do, where this one succeeded.
_FAILED_TO = {
    Purpose.STAGED: "fetch",
    Purpose.SPREAD: "receive",
    Purpose.MATCHED: "find the meshes for",
    Purpose.LOADED: "load",
}
# The loss of a rank also makes these votes a no. This process then can't continue, and does not heal.
_FAILED_BY_LOST_RANK = (Purpose.SPREAD, Purpose.WITHOUT_OWN, Purpose.LOADED)


@final
class Recovery:
    """The exchange of state, as one rank takes part in it.

    Args:
        state: the facts about the rank's steps, which all handlers share.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._expected_report: Stage | Purpose | None = None  # the next report that the shell owes
        self._error: Exception | None = None  # of this rank, in the stage under vote
        self._repeat_key = ""
        self._in_vain = False
        self._own: Mapping[str, Any] | None = None  # the source's part
        self._needs_own = False
        self._load_failures = Repeats()

    # --- beginning ----------------------------------------------------------------------------------------------------

    def strategy_exchanges(self, event: on.StrategyExchanges, now_ms: int) -> Effects:
        """Note that a strategy exchanges state. Raises: UsageError: no attempt is open."""
        self._check_open()
        self._state.by_strategy = True
        return ()

    def _check_open(self) -> None:
        if self._state.attempts.phase is Phase.IDLE:
            raise UsageError("exchange_state was called outside a step; call it after start_quorum")

    def exchange_asked(self, event: on.ExchangeAsked, now_ms: int) -> Effects:
        """Begin the exchange of state. Raises: UsageError: no attempt is open."""
        self._check_open()
        state, last = self._state, self._state.attempts.last
        plan = last.plan
        if plan is None or last.exchanged or last.abandoned is not None or state.fatal_of(last) is not None:
            return ()
        if plan.serve and not event.offers:
            own = own_state(plan.step, plan.lineage, state.own.batches_committed, state.own.check)
            return (do.Serve(last.name.attempt, plan, own),)
        if plan.serve or last.healing is not Healing.FETCHING:
            last.exchanged = True
            return ()
        return self._stage(plan)

    def state_served(self, event: on.StateServed, now_ms: int) -> Effects:
        last = self._state.attempts.last
        if last.name.attempt == event.attempt:
            last.exchanged = True
        return ()

    def _stage(self, plan: Plan) -> Effects:
        self._own, self._needs_own, self._repeat_key = None, False, ""
        self._expected_report = Stage.FETCH
        self._in_vain = self._state.is_awaited
        why = None
        if self._in_vain:
            why = HealingError(
                f"replica {plan.replica_id} does not wait for the state of step {plan.step}, because its source "
                "waits for a process group that could not be configured here; the next quorum tries again",
                sources=_sources(plan),
            )
        elif self._state.settings.heals_over_group and not self._state.has_group:
            self._in_vain = True
            why = HealingError(
                f"replica {plan.replica_id} can't receive the state of step {plan.step}, because the process group of "
                f"quorum {plan.key}, over which it travels, has ended; the next quorum tries again",
                sources=_sources(plan),
            )
        return (do.StageState(plan, why),)

    # --- the stages ---------------------------------------------------------------------------------------------------

    def stage_ended(self, event: on.StageEnded, now_ms: int) -> Effects:
        plan = self._state.attempts.last.plan
        if self._expected_report is not event.stage or plan is None:
            return ()
        error = event.error
        if event.own is not None:
            self._own, self._needs_own = event.own, event.needs_own
            error = error or mismatch(plan, event.own)
        self._repeat_key = event.again if event.error is not None else ""
        return self._agree(plan, VOTE_OF[event.stage], error)

    def _agree(self, plan: Plan, purpose: Purpose, error: Exception | None, *, yes: bool = True) -> Effects:
        """Go on if all ranks of this group can."""
        self._error = error
        self._expected_report = purpose
        yes = yes and error is None
        if self._state.settings.world_size == 1:
            return self._agreed(plan, purpose, yes=yes)
        return (do.Agree(plan, purpose, yes),)

    def agreed(self, event: on.Agreed, now_ms: int) -> Effects:
        plan = self._state.attempts.last.plan
        if self._expected_report is not event.purpose or plan is None:
            return ()
        return self._agreed(plan, event.purpose, yes=event.yes)

    def _agreed(self, plan: Plan, purpose: Purpose, *, yes: bool) -> Effects:
        if not yes and purpose in _FAILED_BY_LOST_RANK:
            fatal = self._state.fatal_of(self._state.attempts.last)
            if fatal is not None:
                self._expected_report = None
                return (do.Raise(fatal),)
        if purpose is Purpose.WITHOUT_OWN:
            return self._load(plan) if yes else self._match(plan)
        if not yes:
            return self._failed(plan, self._error or self._other_rank_failed(plan, _FAILED_TO[purpose]))
        if purpose is Purpose.STAGED and self._state.settings.is_rank0_only and self._state.settings.world_size > 1:
            self._expected_report = Stage.SPREAD
            return (do.SpreadState(plan),)
        if purpose is Purpose.STAGED or purpose is Purpose.SPREAD:
            return self._place_parts(plan)
        return self._load(plan) if purpose is Purpose.MATCHED else self._healed(plan)

    def _place_parts(self, plan: Plan) -> Effects:
        """Find where the fetched parts belong. The user's functions may run collectives for that: all ranks, or none.

        The whole state of a rank0-only group does not show how it is sharded here, so every rank needs its own state.
        """
        if not self._state.settings.is_rank0_only:
            return self._agree(plan, Purpose.WITHOUT_OWN, None, yes=not self._needs_own)
        fatal = self._state.fatal_of(self._state.attempts.last)
        return (do.Raise(fatal),) if fatal is not None else self._match(plan)

    def _match(self, plan: Plan) -> Effects:
        self._expected_report = Stage.MATCH
        return (do.MatchState(plan),)

    def _load(self, plan: Plan) -> Effects:
        """Load the state, unless a comparison found it different from this rank's own and the settings forbid it."""
        state = self._state
        own = state.own
        assert self._own is not None, "a state without the source's own part"
        if own.diverges_from(self._own):
            again = own.divergences > 1
            stops = again or not state.settings.heals_divergence
            self._expected_report = None if stops else Stage.LOAD
            return (do.ExplainDivergence(plan, stops, again),)
        return self._start_load(plan)

    def divergence_explained(self, event: on.DivergenceExplained, now_ms: int) -> Effects:
        plan = self._state.attempts.last.plan
        if self._expected_report is not Stage.LOAD or plan is None:
            return ()
        return self._start_load(plan)

    def _start_load(self, plan: Plan) -> Effects:
        self._expected_report = Stage.LOAD
        self._state.own.torn = True  # until the end of the load the state is neither the old nor the new one
        return (do.LoadState(plan),)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _healed(self, plan: Plan) -> Effects:
        state, attempts = self._state, self._state.attempts
        assert self._own is not None, "a state without the source's own part"
        state.own.healed(plan, self._own)
        state.failed_heals = 0
        attempts.healed(state.own.step)
        state.healed_in = attempts.last.name.attempt
        self._load_failures.forget()
        self._finish()
        return (do.ReportHealed(plan),)

    def _failed(self, plan: Plan, error: Exception) -> Effects:
        """Fail the attempt, and end this process if the next one would fail in the same way."""
        state, last = self._state, self._state.attempts.last
        last.healing = Healing.FAILED
        state.failed_heals += not self._in_vain  # the sources may be at fault: the next quorum names others first
        last.note(error)
        if state.own.torn:
            # The attempts in flight began from a state that is gone.
            state.attempts.fail_deferred(error)
        is_over = bool(self._repeat_key) and self._load_failures.again(self._repeat_key)
        self._finish()
        orders: list[do.Effect] = [do.ReportHealFailed(last.name, error, is_over)]
        if not last.is_asynchronous:
            # The others count on this group's gradients: the abort ends the reduction for them, so that they do not
            # wait.
            orders.append(do.AbortGroup())
        if is_over:
            settings = state.settings
            fatal = UserStateError(
                f"replica {settings.replica_id}, rank {settings.rank}, failed to recover step {plan.step} twice for "
                f"the same reason: {error}. It ends, because further attempts would disturb the other replicas; fix "
                "the cause, and restart this replica"
            )
            last.exchanged = False
            orders.append(do.Raise(fatal, error))
        return tuple(orders)

    def _finish(self) -> None:
        self._expected_report = None
        self._own = None
        self._state.attempts.last.exchanged = True

    def _other_rank_failed(self, plan: Plan, what: str) -> HealingError:
        return HealingError(
            f"another rank of replica {self._state.settings.replica_id} could not {what} step {plan.step}; all "
            "ranks of a group heal together, so the next quorum tries again",
            sources=_sources(plan),
        )

    # --- the user's state ---------------------------------------------------------------------------------------------

    def state_torn(self, event: on.StateTorn, now_ms: int) -> Effects:
        self._state.own.torn = True
        return ()

    def state_registered(self, event: on.StateRegistered, now_ms: int) -> Effects:
        """Heal once more if the replica has healed in this attempt, because it has not received this piece."""
        state = self._state
        attempt = state.attempts.last.name.attempt
        if attempt > 0 and state.healed_in == attempt:
            state.own.torn = True
            return (do.HealAgain(),)
        return (do.WarnLateState(),) if attempt > 1 and event.compared else ()

    def state_loaded(self, event: on.StateLoaded, now_ms: int) -> Effects:
        """Take over a state from outside. Raises: UserStateError: it is no state of a Manager. Nothing has changed
        then."""
        own, attempts = self._state.own, self._state.attempts
        own.loaded(event.state)
        self._state.changed = "a state was loaded by hand"
        if attempts.phase is not Phase.IDLE or attempts.deferred:
            attempts.fail_own(
                UserStateError(f"the state of step {own.step} was loaded while a step was running; that step fails")
            )
        return ()


def _sources(plan: Plan) -> tuple[str, ...]:
    return tuple(source.replica_id for source in plan.sources)
