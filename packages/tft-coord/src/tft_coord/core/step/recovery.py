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
_COULD_NOT = {
    Purpose.STAGED: "fetch",
    Purpose.SPREAD: "take over",
    Purpose.MATCHED: "find the meshes for",
    Purpose.LOADED: "load",
}
# The loss of a rank makes these a no as well; this process can't go on then, and heals no more.
_LOST_RANK_SHOWS = (Purpose.SPREAD, Purpose.WITHOUT_OWN, Purpose.LOADED)


@final
class Recovery:
    """The exchange of state, as one rank takes part in it.

    Args:
        books: what the rank knows.
    """

    def __init__(self, books: StepState) -> None:
        self._books = books
        self._awaits: Stage | Purpose | None = None  # the next report that the shell owes
        self._error: Exception | None = None  # of this rank, in the stage under vote
        self._again = ""
        self._in_vain = False
        self._own: Mapping[str, Any] | None = None  # the source's part
        self._needs_own = False
        self._unloadable = Repeats()

    # --- beginning ----------------------------------------------------------------------------------------------------

    def strategy_exchanges(self, event: on.StrategyExchanges, now_ms: int) -> Effects:
        """Note that a strategy exchanges state. Raises: UsageError: no attempt is open."""
        self._check_open()
        self._books.by_strategy = True
        return ()

    def _check_open(self) -> None:
        if self._books.flights.phase is Phase.IDLE:
            raise UsageError("exchange_state was called outside a step; call it after start_quorum")

    def exchange_asked(self, event: on.ExchangeAsked, now_ms: int) -> Effects:
        """Begin the exchange of state. Raises: UsageError: no attempt is open."""
        self._check_open()
        books, last = self._books, self._books.flights.last
        plan = last.plan
        if plan is None or last.exchanged or last.abandoned is not None or books.fatal_of(last) is not None:
            return ()
        if plan.serve and not event.offers:
            own = own_state(plan.step, plan.lineage, books.own.batches_committed, books.own.check)
            return (do.Serve(last.name.attempt, plan, own),)
        if plan.serve or last.healing is not Healing.FETCHING:
            last.exchanged = True
            return ()
        return self._stage(plan)

    def state_served(self, event: on.StateServed, now_ms: int) -> Effects:
        last = self._books.flights.last
        if last.name.attempt == event.attempt:
            last.exchanged = True
        return ()

    def _stage(self, plan: Plan) -> Effects:
        self._own, self._needs_own, self._again = None, False, ""
        self._awaits = Stage.FETCH
        self._in_vain = self._books.is_awaited
        why = None
        if self._in_vain:
            why = HealingError(
                f"replica {plan.replica_id} does not wait for the state of step {plan.step}, because its source "
                "waits for a process group that could not be configured here; the next quorum tries again",
                sources=_sources(plan),
            )
        return (do.StageState(plan, why),)

    # --- the stages ---------------------------------------------------------------------------------------------------

    def stage_ended(self, event: on.StageEnded, now_ms: int) -> Effects:
        plan = self._books.flights.last.plan
        if self._awaits is not event.stage or plan is None:
            return ()
        error = event.error
        if event.own is not None:
            self._own, self._needs_own = event.own, event.needs_own
            error = error or mismatch(plan, event.own)
        self._again = event.again if event.error is not None else ""
        return self._agree(plan, VOTE_OF[event.stage], error)

    def _agree(self, plan: Plan, purpose: Purpose, error: Exception | None, *, yes: bool = True) -> Effects:
        """Go on if all ranks of this group can."""
        self._error = error
        self._awaits = purpose
        yes = yes and error is None
        if self._books.settings.world_size == 1:
            return self._agreed(plan, purpose, yes=yes)
        return (do.Agree(plan, purpose, yes),)

    def agreed(self, event: on.Agreed, now_ms: int) -> Effects:
        plan = self._books.flights.last.plan
        if self._awaits is not event.purpose or plan is None:
            return ()
        return self._agreed(plan, event.purpose, yes=event.yes)

    def _agreed(self, plan: Plan, purpose: Purpose, *, yes: bool) -> Effects:
        if not yes and purpose in _LOST_RANK_SHOWS:
            fatal = self._books.fatal_of(self._books.flights.last)
            if fatal is not None:
                self._awaits = None
                return (do.Raise(fatal),)
        if purpose is Purpose.WITHOUT_OWN:
            return self._load(plan) if yes else self._match(plan)
        if not yes:
            return self._failed(plan, self._error or self._other_rank_failed(plan, _COULD_NOT[purpose]))
        if purpose is Purpose.STAGED and self._books.settings.is_island and self._books.settings.world_size > 1:
            self._awaits = Stage.SPREAD
            return (do.SpreadState(plan),)
        if purpose is Purpose.STAGED or purpose is Purpose.SPREAD:
            return self._place(plan)
        return self._load(plan) if purpose is Purpose.MATCHED else self._healed(plan)

    def _place(self, plan: Plan) -> Effects:
        """Find where the fetched parts belong. The user's functions may run collectives for that: all ranks, or none.

        The whole state of a rank0-only group does not say how it is cut here, so every rank there needs its own state.
        """
        if not self._books.settings.is_island:
            return self._agree(plan, Purpose.WITHOUT_OWN, None, yes=not self._needs_own)
        fatal = self._books.fatal_of(self._books.flights.last)
        return (do.Raise(fatal),) if fatal is not None else self._match(plan)

    def _match(self, plan: Plan) -> Effects:
        self._awaits = Stage.MATCH
        return (do.MatchState(plan),)

    def _load(self, plan: Plan) -> Effects:
        """Load the state, unless a comparison found it different from this rank's own and the settings say stop."""
        books = self._books
        own = books.own
        assert self._own is not None, "a state without the source's own part"
        if own.diverges_from(self._own):
            again = own.divergences > 1
            stops = again or not books.settings.heals_divergence
            self._awaits = None if stops else Stage.LOAD
            return (do.ExplainDivergence(plan, stops, again),)
        return self._loads(plan)

    def divergence_explained(self, event: on.DivergenceExplained, now_ms: int) -> Effects:
        plan = self._books.flights.last.plan
        if self._awaits is not Stage.LOAD or plan is None:
            return ()
        return self._loads(plan)

    def _loads(self, plan: Plan) -> Effects:
        self._awaits = Stage.LOAD
        self._books.own.torn = True  # from here to the end the state is neither the old nor the new one
        return (do.LoadState(plan),)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _healed(self, plan: Plan) -> Effects:
        books, flights = self._books, self._books.flights
        assert self._own is not None, "a state without the source's own part"
        books.own.healed(plan, self._own)
        books.failed_heals = 0
        flights.healed(books.own.step)
        books.healed_in = flights.last.name.attempt
        self._unloadable.forget()
        self._over()
        return (do.ReportHealed(plan),)

    def _failed(self, plan: Plan, error: Exception) -> Effects:
        """Fail the attempt, and end this process if the next one would fail in the same way."""
        books, last = self._books, self._books.flights.last
        last.healing = Healing.FAILED
        books.failed_heals += not self._in_vain  # the sources may be at fault: the next quorum names others first
        last.note(error)
        if books.own.torn:
            # The attempts in flight began from a state that is gone.
            books.flights.fail_deferred(error)
        is_over = bool(self._again) and self._unloadable.again(self._again)
        self._over()
        orders: list[do.Effect] = [do.ReportHealFailed(last.name, error, is_over)]
        if not last.is_asynchronous:
            # The others count on this group's gradients: the abort ends the reduction for them, so that they do not
            # wait.
            orders.append(do.AbortGroup())
        if is_over:
            settings = books.settings
            ends = UserStateError(
                f"replica {settings.replica_id}, rank {settings.rank}, could not take over step {plan.step} for the "
                f"same reason as the last time: {error}. It ends, so that the others are not disturbed by further "
                "attempts; mend what is named, and start this replica again"
            )
            last.exchanged = False
            orders.append(do.Raise(ends, error))
        return tuple(orders)

    def _over(self) -> None:
        self._awaits = None
        self._own = None
        self._books.flights.last.exchanged = True

    def _other_rank_failed(self, plan: Plan, what: str) -> HealingError:
        return HealingError(
            f"another rank of replica {self._books.settings.replica_id} could not {what} step {plan.step}; a group "
            "heals whole, so the next quorum tries again",
            sources=_sources(plan),
        )

    # --- the user's state ---------------------------------------------------------------------------------------------

    def state_torn(self, event: on.StateTorn, now_ms: int) -> Effects:
        self._books.own.torn = True
        return ()

    def state_registered(self, event: on.StateRegistered, now_ms: int) -> Effects:
        """Heal once more if the replica has healed in this attempt, because it has not received this piece."""
        books = self._books
        attempt = books.flights.last.name.attempt
        if attempt > 0 and books.healed_in == attempt:
            books.own.torn = True
            return (do.HealAgain(),)
        return (do.WarnLateState(),) if attempt > 1 and event.compared else ()

    def state_loaded(self, event: on.StateLoaded, now_ms: int) -> Effects:
        """Take over a state from outside. Raises: UserStateError: it is no state of a Manager. Nothing has changed
        then."""
        own, flights = self._books.own, self._books.flights
        own.loaded(event.state)
        self._books.changed = "a state was loaded by hand"
        if flights.phase is not Phase.IDLE or flights.deferred:
            flights.fail_own(
                UserStateError(f"the state of step {own.step} was loaded while a step ran; that step fails")
            )
        return ()


def _sources(plan: Plan) -> tuple[str, ...]:
    return tuple(source.replica_id for source in plan.sources)
