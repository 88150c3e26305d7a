"""The events of a step: facts from the shell, frozen, handled one at a time in the order of their arrival.

An event names its attempt. An event about an attempt that is over changes nothing. An event that the rules forbid
raises `UsageError` and changes nothing.

Law of this file: frozen dataclasses without behaviour. They contain no tensor, group, future or file; a mapping is the
Manager's own part of a state, plain numbers and text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tft_coord.core.fingerprint import Fingerprint
from tft_coord.core.step.values import Stage, StepName
from tft_coord.core.types import LossNotice, Plan, Purpose, QuorumKey, QuorumNews, Unreached
from tft_coord.errors import ReplicaGroupLostError

# --- a step begins: the training thread -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartAsked:
    """The training loop wants to begin a step."""


@dataclass(frozen=True, slots=True)
class AttemptSettled:
    """The last attempt has settled: its request was answered, and its reductions have ended.

    `offers`: the state that its plan wants was offered to healing replicas before the reductions ended.
    """

    offers: bool = False


@dataclass(frozen=True, slots=True)
class StartReady:
    """The last attempt is settled, and the next may begin. `urgent`: the lighthouse needs a report, so do not pause."""

    urgent: bool = False


@dataclass(frozen=True, slots=True)
class StateCompared:
    """The user's state was reduced to a digest.

    `digest`: of the whole group's state; None: a rank could not give its own. In that case the lineage stays, and this
    group heals from groups that have one.
    """

    digest: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStarted:
    """The next attempt begins; what an earlier one left open is over.

    Args:
        checkpoint_metadata: where this rank's live state can be fetched.
        group_usable: the process group has not failed since it was configured.
        allow_heal, shrink_only, use_async_quorum: as in `Manager.start_quorum`.
        poor_sources: replicas that were silent, wrong or slow when this one healed from them.
        unreached: peers that this rank could not reach since its last request.
        fingerprint: the part that the manager server does not know yet.
    """

    checkpoint_metadata: str = ""
    group_usable: bool = True
    allow_heal: bool = True
    shrink_only: bool = False
    use_async_quorum: bool | None = None
    poor_sources: tuple[str, ...] = ()
    unreached: tuple[Unreached, ...] = ()
    fingerprint: Fingerprint = ()


# --- the quorum: the thread that asks ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanArrived:
    """The whole answer came."""

    attempt: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class UnchangedArrived:
    """The short answer came: the quorum of that key stands, every member is at this rank's step, and none heals."""

    attempt: int
    key: QuorumKey


@dataclass(frozen=True, slots=True)
class QuorumFailed:
    """The request for a quorum failed."""

    attempt: int
    error: Exception


@dataclass(frozen=True, slots=True)
class GroupConfigured:
    """The process group was built for that quorum."""

    attempt: int
    key: QuorumKey


@dataclass(frozen=True, slots=True)
class ConfigureFailed:
    """The process group could not be built."""

    attempt: int
    error: Exception


@dataclass(frozen=True, slots=True)
class ServerRestarted:
    """A new manager server speaks for this group; it holds no quorum."""


# --- reductions: whichever thread reduces -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightSet:
    """The user set the weight of this replica group in the means of the open step."""

    weight: float


@dataclass(frozen=True, slots=True)
class ReductionAsked:
    """A tensor must be reduced; the plan is known, or there is none.

    Args:
        average: the result is a mean.
        weight: of this replica group in this mean alone; None: the step's, if it has one.
    """

    average: bool = True
    weight: float | None = None


# --- the end of a step: the training thread ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeferAsked:
    """The open attempt must be deferred: it continues while later ones run."""


@dataclass(frozen=True, slots=True)
class EndAsked:
    """The training loop wants to end an attempt. `attempt`: one that was put aside; 0: the open one."""

    attempt: int = 0


@dataclass(frozen=True, slots=True)
class ReductionsEnded:
    """All reductions of that attempt have ended on the CPU."""

    attempt: int = 0


@dataclass(frozen=True, slots=True)
class DeviceSynchronized:
    """The device has finished the work of that attempt.

    Args:
        attempt: as in `EndAsked`.
        group_error: why the process group is unusable, or None.
        on_device: reductions run on a device, where the end of a call is not the end of the work.
    """

    attempt: int = 0
    group_error: Exception | None = None
    on_device: bool = False


@dataclass(frozen=True, slots=True)
class WordAsked:
    """The reductions of the open attempt have ended long before its end: `StepStatus.speaks_first`.

    Args:
        group_error: as in `DeviceSynchronized`.
    """

    group_error: Exception | None = None


@dataclass(frozen=True, slots=True)
class WordEnded:
    """The exchange of the word is over.

    Args:
        attempt: as in `EndAsked`.
        sums: of all members' control words; None: the exchange did not complete.
        error: of an incomplete exchange.
    """

    attempt: int = 0
    sums: tuple[int, ...] | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class VoteAsked:
    """The exchange of state is done where it was needed; the open attempt is ready for its vote."""


@dataclass(frozen=True, slots=True)
class VerdictArrived:
    """The group has decided.

    Args:
        attempt: as in `EndAsked`.
        yes: the verdict that all ranks of the group got.
        leaves: the group leaves the job after this step.
        stands: by the words of the group's ranks, no replica asked, left or recovered.
    """

    attempt: int
    yes: bool
    leaves: bool = False
    stands: bool = False


@dataclass(frozen=True, slots=True)
class FlightsDropped:
    """Deferred attempts that failed with others will never end; none of their reductions runs."""

    attempts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlightsGivenUp:
    """A strategy ends: no attempt in flight may commit, the open one included."""


# --- live state: the training thread ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StrategyExchanges:
    """A strategy wants state to be exchanged in the open attempt as soon as its plan arrives.

    Such a strategy begins steps before earlier ones have ended, on every member.
    """


@dataclass(frozen=True, slots=True)
class ExchangeAsked:
    """State must be served or received now, if the plan requires it and it is not done yet. `offers`: see
    AttemptSettled."""

    offers: bool = False


@dataclass(frozen=True, slots=True)
class StateServed:
    """The state was offered, or the waiting replicas were told that they can't get it here."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StageEnded:
    """A stage of the recovery has ended on this rank.

    Args:
        stage: the stage.
        error: why it failed; None: it succeeded.
        own: the source's own part of the state (`StepStatus.own_state` there); of FETCH and SPREAD.
        needs_own: only this rank's own state shows where the fetched parts belong; of FETCH and SPREAD.
        again: a sentence; if the next failure has the same one, a further attempt would fail in the same way. Empty:
            the failure may pass.
    """

    stage: Stage
    error: Exception | None = None
    own: Mapping[str, Any] | None = None
    needs_own: bool = False
    again: str = ""


@dataclass(frozen=True, slots=True)
class Agreed:
    """The ranks of this group have decided on a stage. `yes`: all said yes."""

    purpose: Purpose
    yes: bool


@dataclass(frozen=True, slots=True)
class DivergenceExplained:
    """The log now shows the differences between this replica's state and the source's."""


@dataclass(frozen=True, slots=True)
class StateTorn:
    """The state here is torn: what was committed could not be applied in full."""


@dataclass(frozen=True, slots=True)
class StateRegistered:
    """The user registered a piece of state. `compared`: it is the same on every replica."""

    compared: bool = True


@dataclass(frozen=True, slots=True)
class StateLoaded:
    """The user loaded a state from outside this job, such as a durable checkpoint."""

    state: Mapping[str, Any]


# --- errors and losses: any thread ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ErrorReported:
    """An operation of an attempt failed. `name`: of the attempt; None: the open one."""

    error: Exception
    name: StepName | None = None


@dataclass(frozen=True, slots=True)
class UserReportedError:
    """The user reports that the open step has failed, or an error between two steps."""

    error: Exception


@dataclass(frozen=True, slots=True)
class LossNoticed:
    """A member of a quorum was lost, or can't continue in it."""

    notice: LossNotice


@dataclass(frozen=True, slots=True)
class GroupWasLost:
    """This replica group was lost, for this and every attempt to come."""

    error: ReplicaGroupLostError


@dataclass(frozen=True, slots=True)
class WordsRefused:
    """This rank can't exchange control words any longer, because they would mix with reductions of steps in flight."""


@dataclass(frozen=True, slots=True)
class BeatDue:
    """A beat to the manager server is sent now."""


@dataclass(frozen=True, slots=True)
class QuorumNamed:
    """The manager server named the newest quorum of the job."""

    news: QuorumNews


@dataclass(frozen=True, slots=True)
class PaceHeard:
    """The lighthouse judged this replica's pace. `left_out`: as a straggler, it gets no quorum."""

    left_out: bool


# --- leaving: any thread, and signal handlers -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaveWished:
    """A request that this replica leave.

    Args:
        reason: one phrase.
        by_ms: the time after which it waits for no other replica.
    """

    reason: str
    by_ms: int


@dataclass(frozen=True, slots=True)
class Looked:
    """The periodic check, once a beat.

    Args:
        hears_left_out: the lighthouse has just reported that the others train without this replica.
        waits_ms: for how long this rank has waited in the reductions or the word of its round; None: it does not wait.
    """

    hears_left_out: bool = False
    waits_ms: int | None = None


@dataclass(frozen=True, slots=True)
class EndingAsked:
    """The user shuts this rank down.

    Args:
        clean: no error is being raised, as far as the shell sees.
        serve_ms: for how long a finished replica serves its state to healing replicas.
    """

    clean: bool
    serve_ms: int


Event: TypeAlias = (
    StartAsked
    | AttemptSettled
    | StartReady
    | StateCompared
    | StepStarted
    | PlanArrived
    | UnchangedArrived
    | QuorumFailed
    | GroupConfigured
    | ConfigureFailed
    | ServerRestarted
    | WeightSet
    | ReductionAsked
    | DeferAsked
    | EndAsked
    | ReductionsEnded
    | DeviceSynchronized
    | WordAsked
    | WordEnded
    | VoteAsked
    | VerdictArrived
    | FlightsDropped
    | FlightsGivenUp
    | StrategyExchanges
    | ExchangeAsked
    | StateServed
    | StageEnded
    | Agreed
    | DivergenceExplained
    | StateTorn
    | StateRegistered
    | StateLoaded
    | ErrorReported
    | UserReportedError
    | LossNoticed
    | GroupWasLost
    | WordsRefused
    | BeatDue
    | QuorumNamed
    | PaceHeard
    | LeaveWished
    | Looked
    | EndingAsked
)
