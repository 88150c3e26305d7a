"""The errors of training that the step itself decides on; `tft_algos.errors` exports these and the others.

Law of this file: error classes only. Each carries its facts as fields and a message of one sentence that says what
happened, where, and what to do.
"""

from __future__ import annotations

from tft_coord.core.names import shorten


class TrainingError(Exception):
    """Base of every error of training that is raised on purpose.

    Its text has short replica ids, its `args` have whole ones.
    """

    def __str__(self) -> str:
        return shorten(super().__str__())


class UsageError(TrainingError, RuntimeError):
    """The calls came in an order that can't work: change the training loop as the message says."""


class StepAbandoned(TrainingError, RuntimeError):
    """This step can't commit: its replica has left the job, or this rank could not go on when the others of its group
    began it."""


class SyncAbandoned(TrainingError, RuntimeError):
    """A step in flight has failed with others: another quorum came, or an earlier one of them was not committed.

    Restore what the step was about; later steps go on.
    """


class QuorumBroken(TrainingError, RuntimeError):
    """A member of this quorum was lost or can't go on in it, so no more reductions can run: the next step asks for
    another.

    Args:
        message: one sentence.
        replica_id: of that member.
    """

    def __init__(self, message: str, *, replica_id: str) -> None:
        super().__init__(message)
        self.replica_id = replica_id


class HealingFailed(TrainingError, RuntimeError):
    """The live state could not be fetched or loaded; the next quorum tries again, with another source if there is one.

    Args:
        message: one sentence.
        sources: replica ids that were asked.
    """

    def __init__(self, message: str, *, sources: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.sources = sources


class StateUnavailable(TrainingError, RuntimeError):
    """The user's state can't be taken or loaded now: change what the message names."""
