"""The state that a rank holds, as the step knows it: its steps, its lineage, and whether it is intact.

Only three events change it: a commit, a recovery, and a checkpoint that the user loads.

Law of this file: find and folding. Other files decide when a commit or a recovery has happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from tft_coord.core.lineage import checked_lineage, fold_lineage, initial_lineage
from tft_coord.core.step.errors import HealingError, UserStateError
from tft_coord.core.step.values import Check
from tft_coord.core.types import MAX_INT64, Plan


@final
class OwnState:
    """The state of one rank.

    Args:
        job: gives the lineage of a state that was never trained.
    """

    def __init__(self, job: str) -> None:
        self.step = 0
        self.batches_committed = 0
        self.lineage: int | None = initial_lineage(job)
        self.live = False
        self.torn = False
        self.check: Check | None = None
        self.divergences = 0
        self._compared_step = 0
        self._diverged_step = 0

    def committed(self, plan: Plan) -> None:
        """Count a commit in that plan's quorum."""
        self.step += 1
        self.batches_committed += plan.num_participants
        if self.lineage is not None:
            self.lineage = fold_lineage(self.lineage, plan.key, self.step)
        self.live = True

    def planned(self, plan: Plan) -> None:
        """Learn from a plan: a lineage that was unknown, or that the last comparison has confirmed this state."""
        holds = plan.replica_rank in plan.up_to_date
        if not plan.heal and plan.step == self.step and self.lineage is None and holds:
            # A state loaded without a lineage gets the one that this quorum gives to replicas that heal from it.
            self.lineage = plan.lineage
        if not plan.heal and holds and self.check is not None and self._diverged_step < self.check.step == self.step:
            self.divergences = 0

    def healed(self, plan: Plan, own: Mapping[str, Any]) -> None:
        """Take over the plan's reference. `own`: the source's part, which was verified."""
        self.step = plan.step
        self.lineage = plan.lineage
        self.batches_committed = int(own["batches_committed"])
        self.live = True
        self.torn = False
        self.check = _check_of(own)
        self._compared_step = self.step

    def loaded(self, state: Mapping[str, Any]) -> None:
        """Take over a state from outside this job.

        Raises: UserStateError: it is no state of a Manager. Nothing has changed then.
        """
        step, batches, lineage = _read(state)
        self.step, self.batches_committed, self.lineage = step, batches, lineage
        self.check = None
        self._compared_step = self._diverged_step = self.divergences = 0
        self.live = self.torn = False

    @property
    def lineage_before_check(self) -> int | None:
        """Return the lineage from before the last comparison, which made the digest a part of it; None: another
        lineage."""
        check = self.check
        return check.before if check is not None and check.after == self.lineage else None

    # --- whether all hold the same state ------------------------------------------------------------------------------

    def is_due(self, every: int) -> bool:
        """Return whether the state must be compared before the next request: once a step, whatever fails in it.

        Args:
            every: steps between two comparisons; 0: none.
        """
        due = every > 0 and self.step > 0 and self.step % every == 0 and self._compared_step != self.step
        return due and self.lineage is not None

    def is_due_next(self, every: int) -> bool:
        """Return whether the state must be compared after the next commit, which every replica finds alike."""
        return every > 0 and (self.step + 1) % every == 0

    def compared(self, digest: bytes | None) -> None:
        """Make the state's digest a part of the lineage, so that the plan heals replicas with another one. None:
        unknown."""
        self._compared_step = self.step
        if digest is not None:
            assert self.lineage is not None, "a comparison of a state without a lineage"
            self.check = Check(self.step, self.lineage, checked_lineage(self.lineage, digest))
            self.lineage = self.check.after

    def diverges_from(self, own: Mapping[str, Any]) -> bool:
        """Return whether this rank heals because a comparison found its state different from the source's, not because
        it is behind.

        Args:
            own: the source's part.
        """
        here, theirs = self.check, _check_of(own)
        if here is None or theirs is None or self.torn:
            return False
        if (here.step, here.before) != (theirs.step, theirs.before) or here.after == theirs.after:
            return False
        if here.step > self._diverged_step:
            self._diverged_step = here.step
            self.divergences += 1
        return True


def mismatch(plan: Plan, own: Mapping[str, Any]) -> HealingError | None:
    """Return why a fetched state is not the plan's reference, or None."""
    wanted = {"step": plan.step, "lineage": f"{plan.lineage:016x}"}
    got = {name: own.get(name) for name in wanted}
    if got == wanted and isinstance(own.get("batches_committed"), int):
        return None
    return HealingError(
        f"the fetched state has {got} and the plan {wanted}; it was discarded, and the next quorum tries again",
        sources=tuple(source.replica_id for source in plan.sources),
    )


def _read(state: Mapping[str, Any]) -> tuple[int, int, int | None]:
    """Return step, batches and lineage of a Manager's state. Raises: UserStateError."""
    if not isinstance(state, Mapping):
        raise UserStateError(
            f"a Manager's state is a dict, and this one is {type(state).__name__}; give what state_dict() returned"
        )
    step, batches, lineage = state.get("step"), state.get("batches_committed"), state.get("lineage")
    if not _is_count(step) or not _is_count(batches):
        raise UserStateError(
            f"a Manager's state has the whole numbers step and batches_committed, and this one has {dict(state)}"
        )
    if lineage is not None:
        try:
            lineage = int(str(lineage), 16)
        except ValueError:
            lineage = -1
        if not 0 <= lineage < 2**64:
            raise UserStateError(
                f"a Manager's lineage is 16 hexadecimal digits, and this state has {state['lineage']!r}"
            )
    return int(step), int(batches), lineage  # type: ignore[arg-type]  # counted above


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INT64


def _check_of(own: Mapping[str, Any]) -> Check | None:
    """Return the last comparison in a source's part; None if there is none, or an unreadable one."""
    try:
        step, before, after = own["check"]
        return Check(int(step), int(before, 16), int(after, 16))
    except (KeyError, TypeError, ValueError):
        return None
