"""One attempt at a step: its name, its plan, and what went wrong in it.

An attempt begins with the question for a quorum and ends with a verdict. A strategy may have several at once, each
begun before the one before it has ended; an error belongs to exactly one of them, whenever it comes.

Law of this file: one attempt's facts. What they mean for the others, and for the state, is `core`'s to decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from tft_algos.errors import UsageError
from tft_coord.core.types import Plan, QuorumKey
from tft_coord.errors import Closed, GroupLost, ProtocolError, Refused

# Nothing can be done about these inside this process: a lost group, a wrong peer, calls that can't work.
FATAL: Final = (GroupLost, Refused, ProtocolError, Closed, UsageError)
MAX_ERRORS_KEPT: Final = 16


@dataclass(frozen=True, slots=True)
class StepName:
    """What a reduction, an error and a vote belong to.

    Args:
        attempt: counts calls of start_quorum; makes the name unique even where there was no quorum.
        step: committed steps before it, those that are in flight before it counted as if they were.
        key: of the quorum; None until there is one.
    """

    attempt: int
    step: int
    key: QuorumKey | None = None

    def __str__(self) -> str:
        return f"step {self.step}, quorum {self.key}" if self.key is not None else f"step {self.step}, without a quorum"


@final
class Attempt:
    """What is known of one call of start_quorum.

    Attributes:
        name, plan: None is the plan until there is one.
        abandoned: why it has failed with others, as all ranks of the group know alike, so that none votes on it.
        fatal: the first error with which this process can't go on, however many others came before it.
    """

    def __init__(self, name: StepName) -> None:
        self.name = name
        self.plan: Plan | None = None
        self.abandoned: Exception | None = None
        self.fatal: Exception | None = None
        self._errors: list[Exception] = []

    def note(self, error: Exception) -> None:
        """Something of it failed."""
        if self.fatal is None and isinstance(error, FATAL):
            self.fatal = error
        if len(self._errors) < MAX_ERRORS_KEPT:
            self._errors.append(error)

    def abandon(self, error: Exception) -> None:
        """It has failed with others."""
        self.abandoned = error

    @property
    def errors(self) -> tuple[Exception, ...]:
        """First first; what it was abandoned for is the last."""
        return (*self._errors, self.abandoned) if self.abandoned is not None else tuple(self._errors)

    @property
    def error(self) -> Exception | None:
        """The first one."""
        return self._errors[0] if self._errors else self.abandoned

    @property
    def own_error(self) -> Exception | None:
        """The first one that is its own."""
        return self._errors[0] if self._errors else None
