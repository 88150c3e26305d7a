"""The start of a step: what must end before it, what to ask for, and what the answer means.

Law of this file: the events from the wish to begin a step to a process group that is built for its quorum.
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
from tft_coord.core.types import Plan, RankRequest, Refusal, Unreached
from tft_coord.errors import RefusedError, StaleQuorumError

# A new or healed replica makes all others wait in its first step, and in the step in which it catches up. It must not
# spend that time on preparations to serve the state that it has just received.
PREPARED_AFTER_ATTEMPTS: Final = 4


@final
class Asking:
    """The starts of one rank's steps.

    Args:
        books: what the rank knows.
    """

    def __init__(self, books: StepState) -> None:
        self._books = books
        self._request: RankRequest | None = None  # of the open attempt
        self._stands: Plan | None = None  # the plan of the held key
        self._rounds = Rounds(books)
        self._unsaid: tuple[Unreached, ...] = ()  # reports that came in a step without a request

    # --- before the request -------------------------------------------------------------------------------------------

    def start_asked(self, event: on.StartAsked, now_ms: int) -> Effects:
        """Check that a step may begin.

        Raises: UsageError: an attempt is open beside others that are in flight.
        """
        books = self._books
        if books.leaving.left:
            return (do.EndLoop(books.leaving.reason),)
        if books.flights.deferred and books.flights.phase is not Phase.IDLE:
            raise UsageError(
                "start_quorum was called in a step that is open, beside others that are in flight; call defer() first"
            )
        books.failed_between = True  # an error before the attempt has begun counts as one between steps
        return ()

    def attempt_settled(self, event: on.AttemptSettled, now_ms: int) -> Effects:
        last = self._books.flights.last
        plan = last.plan
        if plan is None:
            return ()
        if plan.heal:
            return (do.EndFetch(),)
        if plan.serve and not last.exchanged and not event.offers:
            return (do.RefuseState(plan, f"its step {plan.step} ended before it took its state"),)
        return ()

    def start_ready(self, event: on.StartReady, now_ms: int) -> Effects:
        books = self._books
        own, last = books.own, books.flights.last
        # The lighthouse hears at once which peers are unreachable: the next quorum may go without them.
        pause_ms = 0 if event.urgent else books.flights.pause_ms
        pauses = (do.Pause(pause_ms),) if pause_ms else ()
        if own.is_due(books.settings.check_every):
            return (*pauses, do.CompareState(f"check {own.step}, attempt {last.name.attempt + 1}"))
        return pauses

    def state_compared(self, event: on.StateCompared, now_ms: int) -> Effects:
        self._books.own.compared(event.digest)
        return ()

    # --- the request --------------------------------------------------------------------------------------------------

    def step_started(self, event: on.StepStarted, now_ms: int) -> Effects:
        books, settings = self._books, self._books.settings
        own, flights = books.own, books.flights
        aborts = self._rounds.left_open()
        asynchronous = settings.use_async_quorum if event.use_async_quorum is None else event.use_async_quorum
        left_others = flights.begin(own.step, is_asynchronous=asynchronous)
        books.pends = True
        books.failed_between = False
        # Without a key no process group could be unusable: the first plan configures it.
        built = books.configured == books.held and not books.is_aborted
        usable = event.group_usable and built and books.losses.broken is None
        unfit = self._unfit(usable=usable and not left_others)
        # All ranks of a group load a state by hand alike, so all of them ask.
        together = settings.world_size > 1 and not books.changed and self._knows_its_quorum
        going = books.standing.next_round(now_ms, unfit, together=together)
        books.changed = ""
        if isinstance(going, GoOn):
            return self._goes_on(event, going)
        if going.breaks:
            # The others have begun the next round, in which no member may wait for this rank.
            usable = False
            books.abort()
            aborts = (do.AbortGroup(),)
        books.asks_next = ""
        books.standing.asked(now_ms)
        self._request = RankRequest(
            step=own.step,
            lineage=own.lineage,
            live=own.live,
            torn=own.torn,
            held=books.held,
            checkpoint_metadata=event.checkpoint_metadata,
            # This is reported once if attempts that began since are in flight: each report raises the id, and fails
            # them.
            commit_failures=flights.commit_failures if flights.failure_is_news or not flights.deferred else 0,
            needs_configure=books.held is not None and (left_others or not usable),
            failed_heals=books.failed_heals,
            poor_sources=event.poor_sources,
            shrink_only=event.shrink_only,
            init_sync=settings.init_sync,
            allow_heal=event.allow_heal,
            use_async_quorum=asynchronous,
            fixed_with_spares=settings.fixed_with_spares,
            min_replica_size=settings.min_replica_size,
            attempt=flights.last.name.attempt,
            fingerprint=event.fingerprint,
            unreached=self._unsaid + event.unreached,
            lease_ms=books.lease_ms,
        )
        self._unsaid = ()
        attempt = flights.last.name.attempt
        breaks = going.why if going.breaks else ""
        return (*aborts, do.Ask(attempt, self._request, self._may_take_early, self._prepares, breaks))

    @property
    def _may_take_early(self) -> bool:
        """Return whether the state may be taken before it is known which replicas heal from it.

        The ranks of a larger group can't all know of a newcomer at the same time. A synchronous quorum serves before
        the reductions anyway, and so does a strategy that exchanges state as soon as the plan arrives.
        """
        books = self._books
        return books.flights.last.is_asynchronous and not books.by_strategy and books.settings.world_size == 1

    @property
    def _prepares(self) -> bool:
        """Return whether the open attempt is the one in which this rank prepares to serve its state."""
        books = self._books
        return books.flights.last.name.attempt - (books.healed_in or 1) == PREPARED_AFTER_ATTEMPTS

    def _unfit(self, *, usable: bool) -> str:
        """Return why this rank can't go on in its quorum without asking, one phrase; empty: it can."""
        books = self._books
        if books.own.torn:
            return "its state is torn"
        if books.changed:
            return books.changed
        if not usable:
            return "its process group is unusable"
        if not self._knows_its_quorum:
            return "it does not know its state, or its quorum, any more"
        return ""

    @property
    def _knows_its_quorum(self) -> bool:
        books = self._books
        return books.own.lineage is not None and self._stands is not None and self._stands.key == books.held

    def _goes_on(self, event: on.StepStarted, going: GoOn) -> Effects:
        """Begin the next round of the standing quorum: the plan is known, and no request is needed."""
        books = self._books
        own, before = books.own, self._stands
        assert before is not None, "a quorum that stands has a plan"
        assert own.lineage is not None, "a quorum stands for a known state"
        if event.fingerprint or event.unreached:
            self._unsaid += event.unreached
            books.asks_next = "it has news for the lighthouse"
        plan = standing_plan(before, own.step, own.lineage, books.settings)
        if going.fails:
            return (*self._fails_with_its_group(plan, going.fails), do.GoOn())
        return (do.GoOn(self._may_take_early, self._prepares), *self._planned(plan))

    def _fails_with_its_group(self, plan: Plan, why: str) -> Effects:
        """Begin a round that this rank can't commit, because the other ranks of its group begin it."""
        books = self._books
        orders = self._planned(plan)
        books.abort()
        last = books.flights.last
        error = StepAbandonedError(
            f"this rank can't go on in quorum {plan.key} ({why}); the next step asks for another"
        )
        last.note(error)
        return (do.AbortGroup(), *orders, do.ReportError(last.name, error, True))

    def server_restarted(self, event: on.ServerRestarted, now_ms: int) -> Effects:
        """Drop the held quorum, because a new manager server holds none.

        Only a group of one rank gets a new server. The old server took the end of its stream for the end of the group,
        but this rank lives.
        """
        books = self._books
        books.group_lost = None
        books.hold(None)
        books.configured = None
        self._stands = None
        if books.flights.phase is not Phase.ASKED or self._request is None:
            return ()
        self._request = replace(self._request, held=None, needs_configure=False)
        return (do.Ask(books.flights.last.name.attempt, self._request),)

    # --- the answer ---------------------------------------------------------------------------------------------------

    def plan_arrived(self, event: on.PlanArrived, now_ms: int) -> Effects:
        return self._answered(event.plan, now_ms) if self._is_asked(event.attempt) else ()

    def unchanged_arrived(self, event: on.UnchangedArrived, now_ms: int) -> Effects:
        """Handle the short answer.

        Raises: StaleQuorumError: this rank does not hold that quorum. Nothing has changed then.
        """
        if not self._is_asked(event.attempt):
            return ()
        books, before = self._books, self._stands
        if before is None or before.key != event.key or books.own.lineage is None:
            raise StaleQuorumError(
                f"the answer names quorum {event.key} and this rank holds {books.held}; the next step asks again"
            )
        return self._answered(standing_plan(before, books.own.step, books.own.lineage, books.settings), now_ms)

    def _is_asked(self, attempt: int) -> bool:
        flights = self._books.flights
        return flights.phase is Phase.ASKED and flights.last.name.attempt == attempt

    def _answered(self, plan: Plan, now_ms: int) -> Effects:
        flights, standing = self._books.flights, self._books.standing
        in_flight = sum(each.plan is not None and each.plan.key == plan.key for each in flights.deferred)
        standing.planned(plan, now_ms, in_flight)
        orders = self._planned(plan)
        # The news that the quorum is over may have come before the plan.
        return (*orders, *self._rounds.broken()) if standing.state is State.BROKEN else orders

    def _planned(self, plan: Plan) -> Effects:
        books, flights = self._books, self._books.flights
        flights.failure_is_news = flights.failure_is_news and plan.key == books.held
        books.hold(plan.key)
        books.own.planned(plan)
        books.is_left_out = False
        books.leaving.planned(plan)
        self._stands = plan
        flights.planned(plan, books.own.step)
        last = flights.last
        # The group is never configured twice under one key, because a rendezvous is used once.
        configures = books.configured != plan.key
        books.pends = configures
        books.excused = configures or plan.heal or books.healed_in == last.name.attempt - 1
        orders: list[do.Effect] = [do.UsePlan(last.name, plan)]
        if books.excused:
            orders.append(do.ForgetPace())
        if plan.heal:
            last.healing = Healing.FETCHING
            if not books.settings.stands_by:
                orders.append(do.Fetch(last.name.attempt, plan))
        orders += [do.BreakQuorum(notice) for notice in books.losses.of_held]  # the notice came before its quorum
        if configures:
            orders.append(do.Configure(last.name.attempt, plan))
        return tuple(orders)

    def quorum_failed(self, event: on.QuorumFailed, now_ms: int) -> Effects:
        """Fail the attempt and those in flight; the next one asks again."""
        books, flights, error = self._books, self._books.flights, event.error
        if flights.phase is Phase.IDLE or flights.last.name.attempt != event.attempt:
            return ()
        if isinstance(error, RefusedError) and error.code == Refusal.LEFT.value:
            # Another rank of this group had no quorum to go on in, and has left with all of them.
            books.leaving.told()
            error = StepAbandonedError(str(error))
        flights.without_quorum(error, others_go_on=books.by_strategy)
        books.pends = False
        books.excused = True
        return (do.ForgetPace(), do.ReportNoQuorum(flights.last.name, error))

    # --- the process group --------------------------------------------------------------------------------------------

    def group_configured(self, event: on.GroupConfigured, now_ms: int) -> Effects:
        books = self._books
        if event.key == books.held:
            books.configured, books.is_aborted = event.key, False
            books.flights.left_others = False
            self._is_built(event.attempt)
        return ()

    def configure_failed(self, event: on.ConfigureFailed, now_ms: int) -> Effects:
        """Note that the process group is unusable; the next request reports that, and the id rises."""
        books = self._books
        books.configured = None
        if self._is_built(event.attempt):
            books.flights.last.note(event.error)
        return ()

    def _is_built(self, attempt: int) -> bool:
        if self._books.flights.last.name.attempt != attempt:
            return False
        self._books.pends = False
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
