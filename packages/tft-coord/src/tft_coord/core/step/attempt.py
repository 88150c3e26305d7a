"""One attempt at a step: its name, its plan, its phase, and its errors.

An attempt begins with the request for a quorum and ends with a verdict. A strategy may have several at once, each begun
before the last one has ended. An error belongs to exactly one of them, whenever it comes.

Law of this file: one attempt's facts. Other files decide the consequences for other attempts and for the state.
"""

from __future__ import annotations

from typing import Final, final

from tft_coord.core.standing import Vote
from tft_coord.core.step.errors import UsageError
from tft_coord.core.step.status import AttemptStatus
from tft_coord.core.step.values import Healing, StepName
from tft_coord.core.types import Plan
from tft_coord.errors import CoordinationClosedError, ProtocolError, RefusedError, ReplicaGroupLostError

# These errors can't be repaired inside this process: a lost group, a wrong peer, calls that can't work.
FATAL: Final = (ReplicaGroupLostError, RefusedError, ProtocolError, CoordinationClosedError, UsageError)
MAX_ERRORS_KEPT: Final = 16


@final
class Attempt:
    """The facts about one attempt.

    Args:
        name: of the attempt, until its plan arrives.
        is_asynchronous: a healing member contributes zeros.
    Attributes:
        name, plan: the plan is None until it arrives.
        healing: the stage of its recovery.
        exchanged: state was served or received in it, or no member needed any.
        abandoned: why it failed together with other attempts. All ranks of the group know this, so none votes on it.
        fatal: the first error that this process can't recover from.
        agreed: the outcome of its round's control words; None: there are no words, or no outcome yet.
        has_failed_member: the sum of the control words reports an error of a member.
        is_word_incomplete: the exchange of control words did not complete, and the process group was aborted.
        wants_leave: this rank's control word says that its group leaves.
        sent_word: number of the round whose word was sent before this attempt's end; None: none was.
        num_reductions, weight: of this rank; `is_weighted`: a reduction has used the weight.
    """

    __slots__ = (
        "_errors",
        "abandoned",
        "agreed",
        "exchanged",
        "fatal",
        "has_failed_member",
        "healing",
        "is_asynchronous",
        "is_weighted",
        "is_word_incomplete",
        "name",
        "num_reductions",
        "plan",
        "sent_word",
        "wants_leave",
        "weight",
    )

    def __init__(self, name: StepName, *, is_asynchronous: bool = True) -> None:
        self.name = name
        self.is_asynchronous = is_asynchronous
        self.plan: Plan | None = None
        self.healing = Healing.NONE
        self.exchanged = False
        self.abandoned: Exception | None = None
        self.fatal: Exception | None = None
        self.agreed: Vote | None = None
        self.has_failed_member = False
        self.is_word_incomplete = False
        self.wants_leave = False
        self.sent_word: int | None = None
        self.num_reductions = 0
        self.weight: float | None = None
        self.is_weighted = False
        self._errors: list[Exception] = []

    def note(self, error: Exception) -> None:
        """Keep an error of this attempt."""
        if self.fatal is None and isinstance(error, FATAL):
            self.fatal = error
        if len(self._errors) < MAX_ERRORS_KEPT:
            self._errors.append(error)

    @property
    def errors(self) -> tuple[Exception, ...]:
        """Return all errors, oldest first; the reason of its abandonment is the last."""
        return (*self._errors, self.abandoned) if self.abandoned is not None else tuple(self._errors)

    @property
    def error(self) -> Exception | None:
        """Return the first error."""
        return self._errors[0] if self._errors else self.abandoned

    @property
    def own_error(self) -> Exception | None:
        """Return the first error of this attempt itself."""
        return self._errors[0] if self._errors else None

    @property
    def is_participating(self) -> bool:
        """Return whether this group's gradients count. A synchronous member counts once its recovery has succeeded."""
        plan = self.plan
        if plan is None or plan.participating_rank is None:
            return False
        return self.healing is Healing.NONE or self.healing is Healing.LOADED

    @property
    def sends_word(self) -> bool:
        """Return whether the attempt ends with an exchange of control words."""
        return self.plan is not None and self.plan.lease_ms is not None

    @property
    def has_to_exchange(self) -> bool:
        """Return whether the plan makes this rank serve or fetch state."""
        return self.healing is Healing.FETCHING or (self.plan is not None and self.plan.serve)

    @property
    def status(self) -> AttemptStatus:
        """Return the attempt as a frozen value."""
        return AttemptStatus(self.name, self.plan, self.error, self.abandoned)
