"""The status of the step, as a frozen value for every reader.

Law of this file: facts, and what follows from them alone; nothing is decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tft_coord.core.standing import State
from tft_coord.core.step.errors import QuorumBrokenError
from tft_coord.core.step.values import Check, Healing, Phase, StepName
from tft_coord.core.types import LossNotice, Plan, QuorumKey


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """One attempt that was put aside and is not over.

    Args:
        name, plan: the plan is None if there was no quorum for it.
        error: the first failure in it or with it; None: no failure.
        abandoned: why it has failed with others, on all ranks of the group; None: it may still commit, or fail alone.
    """

    name: StepName
    plan: Plan | None
    error: Exception | None
    abandoned: Exception | None


class StepStatus(NamedTuple):
    """One rank's step, between two events. It is a tuple, because it is made several times a step.

    Args:
        step, batches_committed, lineage, live, torn: of the state that this rank holds, as in `Member`.
        check: the last comparison of the user's state, or None.
        divergences: comparisons in a row at which this replica's state differed from that of the others.
        name, phase, plan, healing, is_asynchronous, is_participating, has_reduced, is_abandoned, errors: of the attempt
            that was begun last, whether it is open or not.
        verdict: of that attempt; None while there is none.
        exchanged: state was served or received in it, or no member needed any.
        fatal: the error that this process can't recover from, or None.
        broken: why nothing can start in the held quorum, or None.
        held, configured: keys of the newest quorum that this rank was given, and of the one that its process group is
            built for.
        pends: the plan has not arrived, or the process group is not built.
        excused: the attempt is the first after a start, a recovery or a reconfiguration, or has no quorum.
        healed_in: the last attempt in which the state came from a source, or None.
        num_deferred: earlier attempts that may still commit.
        aside: all that were put aside and are not over, oldest first.
        failed_quorums, commit_failures: attempts in a row that had no quorum, or that did not commit.
        is_left_out: as a straggler; no quorum comes.
        by_strategy: a strategy decides when state is exchanged.
        wishes: a leave of this replica is requested.
        left: it has left, and no further step begins.
        leave_reason: one phrase.
        losses: the notices that have broken the held quorum; empty while it stands.
        standing: the rank's state in its quorum: whether the next step asks the lighthouse.
    """

    step: int
    batches_committed: int
    lineage: int | None
    live: bool
    torn: bool
    check: Check | None
    divergences: int
    name: StepName
    phase: Phase
    plan: Plan | None
    healing: Healing
    is_asynchronous: bool
    is_participating: bool
    has_reduced: bool
    is_abandoned: bool
    errors: tuple[Exception, ...]
    verdict: bool | None
    exchanged: bool
    fatal: Exception | None
    broken: QuorumBrokenError | None
    held: QuorumKey | None
    configured: QuorumKey | None
    pends: bool
    excused: bool
    healed_in: int | None
    num_deferred: int
    aside: tuple[AttemptStatus, ...]
    failed_quorums: int
    commit_failures: int
    is_left_out: bool
    by_strategy: bool
    wishes: bool
    left: bool
    leave_reason: str
    losses: tuple[LossNotice, ...]
    standing: State

    @property
    def error(self) -> Exception | None:
        """Return the first error of the attempt that was begun last."""
        return self.errors[0] if self.errors else None

    @property
    def is_open(self) -> bool:
        """Return whether an attempt is open."""
        return self.phase is not Phase.IDLE

    @property
    def num_participants(self) -> int:
        """Return how many members' gradients count in this step; 0 before the first quorum."""
        return self.plan.num_participants if self.plan is not None else 0

    @property
    def is_untouched(self) -> bool:
        """Return whether the open attempt is as it was begun: nothing reduced, nothing failed, nothing voted."""
        is_open = self.phase is Phase.ASKED or self.phase is Phase.PLANNED
        return is_open and not self.errors and self.broken is None and not self.has_reduced

    @property
    def speaks_first(self) -> bool:
        """Return whether this rank sends its control word before it receives the state that it needs.

        Otherwise all members would wait at their ends for that transfer. The shell reports `WordAsked` when the word
        may go.
        """
        plan = self.plan
        if plan is None or plan.lease_ms is None or self.num_deferred or self.exchanged:
            return False
        return self.by_strategy and self.healing is Healing.FETCHING

    def attempt(self, number: int) -> AttemptStatus | None:
        """Return the attempt of that number that was put aside; None if it is over."""
        for each in self.aside:
            if each.name.attempt == number:
                return each
        return None

    def own_state(self) -> dict[str, Any]:
        """Return this rank's own part of the state that a healing replica receives.

        It fits a plan whose reference is this rank's own step and lineage. The lineage must be known.
        """
        assert self.lineage is not None, "the state of a boundary without a lineage"
        return own_state(self.step, self.lineage, self.batches_committed, self.check)

    def state_dict(self) -> dict[str, int | str]:
        """Return what a durable checkpoint keeps: step, batches_committed, and the lineage in hexadecimal if known."""
        state: dict[str, int | str] = {"step": self.step, "batches_committed": self.batches_committed}
        lineage = self.lineage
        if self.check is not None and lineage == self.check.after:
            lineage = self.check.before  # a replica that loads it repeats the comparison at this step
        if lineage is not None:
            state["lineage"] = f"{lineage:016x}"
        return state


def own_state(step: int, lineage: int, batches_committed: int, check: Check | None) -> dict[str, Any]:
    """Return the step's own part of a state that travels between replicas."""
    state: dict[str, Any] = {"step": step, "batches_committed": batches_committed, "lineage": f"{lineage:016x}"}
    if check is not None:
        state["check"] = [check.step, f"{check.before:016x}", f"{check.after:016x}"]
    return state
