"""The decisions of the step: orders to the shell, frozen, performed in the order given.

An effect names its subject by an id: the attempt, the quorum's key, the reduction's number. Two threads may perform
their effects in another order than that of the decisions. A thread therefore skips an effect about a quorum or an
attempt that is over.

Law of this file: frozen dataclasses without behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tft_coord.core.step.values import StepName
from tft_coord.core.types import LossNotice, Plan, Purpose, QuorumKey, RankRequest

Effects: TypeAlias = "tuple[Effect, ...]"

# --- a step begins ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EndLoop:
    """The order to begin no step, because this replica has left the job."""

    reason: str


@dataclass(frozen=True, slots=True)
class RefuseState:
    """The order to tell the replicas that wait for this replica's state that they can't get it here."""

    plan: Plan
    why: str


@dataclass(frozen=True, slots=True)
class EndFetch:
    """The order to end the fetch of the last attempt, if it still runs."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The order to wait before the next request, so that a repeated failure does not retry in a busy loop."""

    ms: int


@dataclass(frozen=True, slots=True)
class CompareState:
    """The order to reduce the user's state to a digest on all ranks of this group, and to report `StateCompared`.

    `name`: of this comparison, a new one each time and the same on every rank.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Ask:
    """The order to send the request to the manager server, and report its answer.

    Args:
        attempt: that begins.
        request: the request.
        may_take_early: a snapshot may be taken while the request runs, for a newcomer that the plan may name.
        prepares_to_serve: this rank has time to prepare for serving its state to others.
        breaks: why this rank leaves a quorum that stands for the others, one phrase; or empty.
    """

    attempt: int
    request: RankRequest
    may_take_early: bool = False
    prepares_to_serve: bool = False
    breaks: str = ""


@dataclass(frozen=True, slots=True)
class GoOn:
    """The order to begin the step in the standing quorum, without a request.

    Args:
        looks_at_state: the shell may look at the state, to learn whether a step with a request could take it early.
        prepares_to_serve: as in `Ask`.
    """

    looks_at_state: bool = False
    prepares_to_serve: bool = False


# --- the quorum -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UsePlan:
    """The order to use the plan of this attempt, and to pass it to all that need it."""

    name: StepName
    plan: Plan


@dataclass(frozen=True, slots=True)
class Fetch:
    """The order to fetch the plan's reference from its sources, in the background.

    With `heals_over_group` this order comes when the process group is configured for the plan. Otherwise it comes with
    the plan. After the start the shell must check the losses of the meantime (`StepStatus.losses`), because a fetch
    that has not started receives no notice.
    """

    attempt: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Configure:
    """The order to build the process group for the plan's key, and report `GroupConfigured` or `ConfigureFailed`.

    If the quorum is broken by then (`StepStatus.broken`), report that as the failure, and build nothing.
    """

    attempt: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class ForgetPace:
    """The order to forget the measured pace of this rank's own part of a step."""


@dataclass(frozen=True, slots=True)
class BreakQuorum:
    """The order to abort everything that runs in the notice's quorum. A fetch from the lost member ends."""

    notice: LossNotice


@dataclass(frozen=True, slots=True)
class EndQuorum:
    """The order to abort everything that runs in that quorum, because it is over. `why`: a sentence."""

    key: QuorumKey
    why: str


@dataclass(frozen=True, slots=True)
class ReportLateLoss:
    """The order to log a loss in a quorum that is over or still to come, where it explains a failure."""

    notice: LossNotice


@dataclass(frozen=True, slots=True)
class BreakAll:
    """The order to abort everything that runs, because this replica group is lost."""


@dataclass(frozen=True, slots=True)
class AbortGroup:
    """The order to abort the process group, so that the others do not wait for this rank."""


# --- reductions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reduce:
    """The order to start a reduction.

    Args:
        name: of the attempt that fails with it.
        number: of the reduction in its attempt, from 1.
        gives: this rank gives its tensor; otherwise values that change nothing.
        factor: the tensor is multiplied by this before a mean's sum; 1.0 for any other operation.
        divide_by: the sum is divided by this; 1.0 where the sum of the weights divides it, and for other operations.
        weight: this rank's part of the sum of the weights; None: the mean has no weights.
        shared: the sum of the weights is that of the step, reduced once for all its means.
        inside: it belongs to the open attempt. Otherwise it fails no attempt, and a failed process group loses it.
        num_others: the number of the other members.
    """

    name: StepName
    number: int
    gives: bool
    factor: float
    divide_by: float
    weight: float | None
    shared: bool
    inside: bool
    num_others: int


@dataclass(frozen=True, slots=True)
class ReduceAlone:
    """The order to use the tensor as the result, because this group is the only member. With a weight of zero there is
    no mean."""

    name: StepName
    weight: float | None


@dataclass(frozen=True, slots=True)
class KeepTensor:
    """The order to leave the tensor as it is: another rank of this rank0-only group reduces in this one's place."""


@dataclass(frozen=True, slots=True)
class LoseReduction:
    """The order to start no reduction; its result is lost. `aborts`: abort the process group, because the others may
    wait in the reduction."""

    aborts: bool = False


# --- live state -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Serve:
    """The order to take a snapshot of the user's state and offer it to healing replicas, with `own` beside it; then
    report `StateServed`."""

    attempt: int
    plan: Plan
    own: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StageState:
    """The order to wait for the fetch and check that the state fits what is registered here; report
    `StageEnded(FETCH)`.

    `in_vain`: why the fetch is useless, or was not started; end it instead, and report this as the error.
    """

    plan: Plan
    in_vain: Exception | None = None


@dataclass(frozen=True, slots=True)
class Agree:
    """The order to vote in this group on a stage, and report `Agreed`."""

    plan: Plan
    purpose: Purpose
    yes: bool


@dataclass(frozen=True, slots=True)
class SpreadState:
    """The order to give the state that rank 0 has fetched to the other ranks of the rank0-only group; report
    `StageEnded(SPREAD)`."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class MatchState:
    """The order to take this rank's own state to find where the fetched parts belong; report `StageEnded(MATCH)`."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class ExplainDivergence:
    """The order to log what differs between this replica's state and the source's.

    Args:
        plan: with the order to heal.
        stops: raise `StateDivergedError`; otherwise log it, and report `DivergenceExplained`.
        again: the last recovery has not repaired it.
    """

    plan: Plan
    stops: bool
    again: bool


@dataclass(frozen=True, slots=True)
class LoadState:
    """The order to apply the staged state by the user's functions; report `StageEnded(LOAD)`."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class ReportHealed:
    """The order to log that this rank has loaded the plan's reference."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class ReportHealFailed:
    """The order to log that this rank has not healed. `is_over`: the same error is raised next, so the log has no
    traceback."""

    name: StepName
    error: Exception
    is_over: bool


@dataclass(frozen=True, slots=True)
class HealAgain:
    """The order to log that this replica heals again, because state was registered after it had healed."""


@dataclass(frozen=True, slots=True)
class WarnLateState:
    """The order to log that state was registered after the first step, so that nothing makes it the same on all
    replicas."""


# --- the end of a step ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PutAside:
    """The order to defer the open attempt: it continues under its number while later ones run."""

    name: StepName


@dataclass(frozen=True, slots=True)
class SynchronizeDevice:
    """The order to wait until the device has finished the attempt's work; report `DeviceSynchronized`."""


@dataclass(frozen=True, slots=True)
class SendWord:
    """The order to exchange the word of a round with the same rank of all members; report `WordEnded`.

    Args:
        attempt: as in `EndAsked`.
        key: of the quorum.
        values: the integers to add up.
        round_number: rises from one word of a quorum to the next.
        why_asks: why this rank wants the next round to ask the lighthouse, one phrase, or empty.
        within_ms: time limit, never longer than that of any word; None: the usual limit.
        hears: wait for the sum now; else `HearWord` comes later.
    """

    attempt: int
    key: QuorumKey
    values: tuple[int, ...]
    round_number: int
    why_asks: str = ""
    within_ms: int | None = None
    hears: bool = True


@dataclass(frozen=True, slots=True)
class HearWord:
    """The order to wait for the sum of the words of a round, in which this rank's own was sent before; report
    `WordEnded`.

    Args:
        attempt: as in `EndAsked`.
        key, round_number: as in the `SendWord` with `hears` False.
    """

    attempt: int
    key: QuorumKey
    round_number: int


@dataclass(frozen=True, slots=True)
class ExchangeState:
    """The order to give or take state (`ExchangeAsked`), then report `VoteAsked`."""


@dataclass(frozen=True, slots=True)
class CastVote:
    """The order to vote in this group, and report `VerdictArrived`.

    Args:
        attempt: as in `EndAsked`.
        step: committed steps of this rank.
        key: of the quorum.
        yes: the vote.
        leaving: this rank wishes that the group leaves after this step.
        enough_replicas: there are min_replica_size participants.
        error: the first of the attempt, or None.
        stands: by the word of the round, no replica asked, left or recovered.
        why: the reason of a no by the word, one phrase; or empty.
    """

    attempt: int
    step: int
    key: QuorumKey
    yes: bool
    leaving: bool
    enough_replicas: bool
    error: Exception | None
    stands: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class ReportTooFew:
    """The order to log, once, that too few replicas take part for any step to commit."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class ReportAbandoned:
    """The order to log that an attempt ends without a vote, because it has failed with others."""

    error: Exception


@dataclass(frozen=True, slots=True)
class RecordCommit:
    """The order to record the end of the attempt. `excused`: its time does not count for this rank's pace."""

    name: StepName
    plan: Plan | None
    committed: bool
    excused: bool


@dataclass(frozen=True, slots=True)
class Concluded:
    """The order to tell the training loop the result.

    Args:
        committed: the optimizer steps.
        failures: attempts in a row that did not commit.
        exhausted: they exceed max_retries.
        error: the first of the attempt.
        plan: of the attempt.
    """

    committed: bool
    failures: int
    exhausted: bool
    error: Exception | None
    plan: Plan | None


# --- errors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReportError:
    """The order to log and record an error.

    Args:
        name: of the attempt; for an error between two steps, of the last one.
        error: what failed.
        counts: the attempt fails by it. Otherwise it came after the attempt.
        is_between: it belongs to no attempt.
    """

    name: StepName
    error: Exception
    counts: bool
    is_between: bool = False


@dataclass(frozen=True, slots=True)
class ReportNoQuorum:
    """The order to log and record that the attempt has no quorum."""

    name: StepName
    error: Exception


@dataclass(frozen=True, slots=True)
class ReportGroupLost:
    """The order to log and record that this replica group is lost."""

    name: StepName
    error: Exception


@dataclass(frozen=True, slots=True)
class Raise:
    """The order to raise the error in the training loop. `cause`: the error that caused it."""

    error: Exception
    cause: Exception | None = None


# --- standing quorums -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NumberBeat:
    """The order to send the beat with that number, so that it gets an answer."""

    number: int


@dataclass(frozen=True, slots=True)
class TellLate:
    """The order to tell the manager server that the round of that step waits for a member for too long."""

    key: QuorumKey
    step: int


# --- leaving ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReportLeft:
    """The order to log that this replica leaves."""

    reason: str


@dataclass(frozen=True, slots=True)
class TellLeaving:
    """The order to tell the manager server that this group leaves.

    Args:
        reason: one phrase.
        serve_ms: for how long it serves its state to healing replicas.
        finished_step: the training is finished at that step; None: it is not.
        waits: False: perform this on another thread, because the calling thread must not wait.
    """

    reason: str
    serve_ms: int
    finished_step: int | None = None
    waits: bool = True


@dataclass(frozen=True, slots=True)
class ServeOn:
    """The order to stay until no replica heals from this group any more.

    Args:
        until_ms: at the latest; in the past: none does.
        meets: then wait for the other ranks of this group, unless this process has a fatal error.
    """

    until_ms: int
    meets: bool


Effect: TypeAlias = (
    EndLoop
    | RefuseState
    | EndFetch
    | Pause
    | CompareState
    | Ask
    | GoOn
    | UsePlan
    | Fetch
    | Configure
    | ForgetPace
    | BreakQuorum
    | EndQuorum
    | ReportLateLoss
    | BreakAll
    | AbortGroup
    | Reduce
    | ReduceAlone
    | KeepTensor
    | LoseReduction
    | Serve
    | StageState
    | Agree
    | SpreadState
    | MatchState
    | ExplainDivergence
    | LoadState
    | ReportHealed
    | ReportHealFailed
    | HealAgain
    | WarnLateState
    | PutAside
    | SynchronizeDevice
    | SendWord
    | HearWord
    | ExchangeState
    | CastVote
    | ReportTooFew
    | ReportAbandoned
    | RecordCommit
    | Concluded
    | ReportError
    | ReportNoQuorum
    | ReportGroupLost
    | Raise
    | NumberBeat
    | TellLate
    | ReportLeft
    | TellLeaving
    | ServeOn
)
