"""One rank's steps as a state machine: events in, effects out.

A step is a transaction. It starts when the trainer asks for a quorum, runs under a plan, and ends with a verdict. Only
a yes changes the state. An error belongs to exactly one attempt; an error of an earlier attempt comes too late to
count.

A strategy that trains on while it reduces may put the open attempt aside and begin another. Attempts that are in flight
together belong to one quorum and end in the order of their start.

Law of this folder: decisions only. No tensors, no threads, no clock, no I/O. The shell reports one event at a time, and
performs the decisions in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

from tft_coord.core.step import events as on
from tft_coord.core.step.effects import Effects
from tft_coord.core.step.ending import Ending
from tft_coord.core.step.events import Event
from tft_coord.core.step.failures import Failures
from tft_coord.core.step.recovery import Recovery
from tft_coord.core.step.reducing import Reducing
from tft_coord.core.step.rounds import Rounds
from tft_coord.core.step.starting import Starting
from tft_coord.core.step.state import StepState
from tft_coord.core.step.status import StepStatus
from tft_coord.core.step.values import StepSettings

Handler = Callable[[Any, int], Effects]

# These events leave the status unchanged.
_QUIET: Final = frozenset({on.StartAsked, on.AttemptSettled, on.StartReady, on.EndAsked, on.Looked, on.BeatDue})


@final
class StepCore:
    """The steps of one rank.

    Args:
        settings: the decisions depend on them.
    Attributes:
        known_status: the status, if it was made since the last event that changed it; else None.
    """

    def __init__(self, settings: StepSettings) -> None:
        self._state = StepState(settings)
        self.known_status: StepStatus | None = None
        self._handlers = _handlers_of(self._state)

    def handle(self, event: Event, now_ms: int) -> Effects:
        """Handle one event.

        Args:
            event: what happened.
            now_ms: milliseconds of a monotonic clock.
        Returns: the effects, to be performed in this order.
        Raises: UsageError, UserStateError, StaleQuorumError: the rules forbid the event; nothing has changed.
        """
        effects = self._handlers[type(event)](event, now_ms)
        if type(event) not in _QUIET:
            self.known_status = None
        return effects

    @property
    def status(self) -> StepStatus:
        """Return the current status of the step as a frozen value, made on demand."""
        status = self.known_status
        if status is None:
            status = self.known_status = self._state.status()
        return status


def _handlers_of(state: StepState) -> dict[type, Handler]:
    starting, reducing, recovery = Starting(state), Reducing(state), Recovery(state)
    ending, failures, rounds = Ending(state), Failures(state), Rounds(state)
    return {
        on.StartAsked: starting.start_asked,
        on.AttemptSettled: starting.attempt_settled,
        on.StartReady: starting.start_ready,
        on.StateCompared: starting.state_compared,
        on.StepStarted: starting.step_started,
        on.PlanArrived: starting.plan_arrived,
        on.UnchangedArrived: starting.unchanged_arrived,
        on.QuorumFailed: starting.quorum_failed,
        on.GroupConfigured: starting.group_configured,
        on.ConfigureFailed: starting.configure_failed,
        on.ServerRestarted: starting.server_restarted,
        on.WeightSet: reducing.weight_set,
        on.ReductionAsked: reducing.reduction_asked,
        on.DeferAsked: ending.defer_asked,
        on.EndAsked: ending.end_asked,
        on.ReductionsEnded: ending.reductions_ended,
        on.DeviceSynchronized: ending.device_synchronized,
        on.WordAsked: ending.word_asked,
        on.WordEnded: ending.word_ended,
        on.VoteAsked: ending.vote_asked,
        on.VerdictArrived: ending.verdict_arrived,
        on.FlightsDropped: ending.flights_dropped,
        on.FlightsGivenUp: ending.flights_given_up,
        on.StrategyExchanges: recovery.strategy_exchanges,
        on.ExchangeAsked: recovery.exchange_asked,
        on.StateServed: recovery.state_served,
        on.StageEnded: recovery.stage_ended,
        on.Agreed: recovery.agreed,
        on.DivergenceExplained: recovery.divergence_explained,
        on.StateTorn: recovery.state_torn,
        on.StateRegistered: recovery.state_registered,
        on.StateLoaded: recovery.state_loaded,
        on.ErrorReported: failures.error_reported,
        on.UserReportedError: failures.user_reported_error,
        on.LossNoticed: failures.loss_noticed,
        on.GroupWasLost: failures.group_was_lost,
        on.PaceHeard: failures.pace_heard,
        on.LeaveWished: ending.leave_wished,
        on.Looked: ending.looked,
        on.EndingAsked: ending.ending_asked,
        on.WordsRefused: rounds.words_refused,
        on.BeatDue: rounds.beat_due,
        on.QuorumNamed: rounds.quorum_named,
    }
