"""The activity of a Manager as one value of facts: `manager.status()`.

Law of this file: reading. Nothing is decided, nothing waits, and a step has no extra cost.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from tft_algos.manager.assembly import Parts
from tft_algos.manager.step import waits
from tft_algos.manager.step.event_log import Incident
from tft_coord.core.progress import Phase
from tft_coord.core.step import Healing
from tft_coord.core.types import Plan, QuorumKey


class ManagerPhase(enum.Enum):
    """What the rank of a Manager is doing, in words."""

    BETWEEN_STEPS = "between two steps"
    QUORUM = "waiting for a quorum"  # with an asynchronous quorum, the training thread may compute meanwhile
    CONFIGURING = "building the process group of a new quorum"  # the training thread may compute meanwhile
    COMPUTING = "computing"  # forward, backward, data
    REDUCING = "in a reduction"
    RECOVERING = "receiving live state"
    # Serving live state, or waiting for the other replicas' words or for the vote of the group.
    VOTING = "ending the step"
    APPLYING = "applying a committed step"
    CLOSED = "shut down"


_OF_A_WAIT: Final = {
    waits.QUORUM: ManagerPhase.QUORUM,
    waits.GROUP: ManagerPhase.CONFIGURING,
    waits.REDUCTION: ManagerPhase.REDUCING,
    waits.STATE: ManagerPhase.RECOVERING,
    waits.VOTE: ManagerPhase.VOTING,
    waits.WORD: ManagerPhase.VOTING,
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerStatus:
    """Facts about one rank of a replica group at the time of `Manager.status`.

    "This step" is the step of the last `start_quorum`, until the next one.

    Args:
        replica_id: full id of this replica group, `name:uuid4`.
        group_rank, group_world_size: the rank of this process in the group, from 0, and the number of its processes.
        step: committed steps, 0 at the start.
        batches_committed: sum of the participants over the committed steps.
        attempt: calls of start_quorum so far. This is the number of this step, committed or not.
        phase: what this rank is doing.
        committed: whether this step was committed. None: there is no verdict yet.
        quorum: key of the last quorum of this rank. None: this rank holds no quorum.
        plan: the plan of this step. None: the plan is not known yet, or the step has no quorum.
        participants: full ids of the replicas whose gradients count in this step, by participating rank. Empty without
            a plan.
        participating_rank: the rank of this group among the participants, from 0. None: this group gives zeros, or
            there is no plan.
        is_healing: live state of another replica is being transferred to this one.
        is_torn: the state here is half written, because an optimizer or a load function raised. This replica heals.
        is_left_out: the other replicas train without this replica, because it is a straggler or unreachable.
        is_leaving: a request to leave is recorded, or this replica has left.
        has_left: this replica has left. No step begins any more.
        share: the share of its usual batch that this replica should take, above 0 and up to 1. It is below 1 if the
            lighthouse runs with `--stragglers shrink` and this replica slows the others down. The ranks of a group hear
            of a change at different moments.
        waits_for: what this rank waits for, and for which replicas, in words with short ids. "": it does not wait.
        waits_s: how long it has waited, in seconds, rounded down to the last beat (about 1 s) that saw the wait.
        errors: the errors of this step, oldest first, at most 16.
        last_error: the newest error that was reported in any step, `type: text`. "": no error.
        incidents: the last errors and losses of all steps, oldest first, at most 32.
        spent_s: what the time of this rank went to, up to its last verdict: seconds by cause. The causes are those of
            the lighthouse's metrics, and `commit` for goodput.
        num_stalls: how many incidents this rank has come through, with its start.
        stalls_s: what the time of all these went to.
    """

    replica_id: str
    group_rank: int
    group_world_size: int
    step: int
    batches_committed: int
    attempt: int
    phase: ManagerPhase
    committed: bool | None
    quorum: QuorumKey | None
    plan: Plan | None
    participants: tuple[str, ...]
    participating_rank: int | None
    is_healing: bool
    is_torn: bool
    is_left_out: bool
    is_leaving: bool
    has_left: bool
    share: float
    waits_for: str
    waits_s: float
    errors: tuple[Exception, ...]
    last_error: str
    incidents: tuple[Incident, ...]
    spent_s: Mapping[str, float]
    num_stalls: int
    stalls_s: Mapping[str, float]


def status_of(parts: Parts) -> ManagerStatus:
    """Return the current facts. Any thread may call this."""
    shared, step = parts.shared, parts.shared.step.status
    is_closed = shared.closing.is_set()
    wait = None if is_closed else parts.waits.now(step)
    if is_closed:
        phase = ManagerPhase.CLOSED
    elif wait is not None:
        phase = _OF_A_WAIT[wait.kind]
    elif parts.step_progress.phase(step) is Phase.OUTSIDE:
        phase = ManagerPhase.BETWEEN_STEPS
    else:
        phase = ManagerPhase.APPLYING if parts.step_progress.applies else ManagerPhase.COMPUTING
    plan, totals = step.plan, shared.times.totals()
    return ManagerStatus(
        replica_id=shared.coordinator.replica_id,
        group_rank=shared.config.rank,
        group_world_size=shared.config.world_size,
        step=step.step,
        batches_committed=step.batches_committed,
        attempt=step.name.attempt,
        phase=phase,
        committed=step.verdict,
        quorum=step.held,
        plan=plan,
        participants=tuple(plan.replica_ids[rank] for rank in plan.participants) if plan is not None else (),
        participating_rank=plan.participating_rank if plan is not None and step.is_participating else None,
        is_healing=step.healing is Healing.FETCHING,
        is_torn=step.torn,
        is_left_out=step.is_left_out or parts.waits.is_left_out,
        is_leaving=step.wishes or step.left,
        has_left=step.left,
        share=parts.straggling.share,
        waits_for=f"{wait.kind}: {wait.who}" if wait is not None else "",
        waits_s=wait.seconds if wait is not None else 0.0,
        errors=step.errors,
        last_error=shared.reports.records.last_error,
        incidents=tuple(shared.reports.records.incidents.copy()),
        spent_s={each.value: seconds for each, seconds in totals.spent_s.items()},
        num_stalls=totals.num_stalls,
        stalls_s={each.value: seconds for each, seconds in totals.stalls_s.items()},
    )
