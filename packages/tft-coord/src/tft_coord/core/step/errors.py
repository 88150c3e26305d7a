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
    """The training loop calls the Manager in a wrong order. Next: change the loop as the message says."""


class StepAbandonedError(TrainingError, RuntimeError):
    """This step can't commit: its replica leaves the job, or this rank could not join its group. Next: start a new
    step."""


class SyncAbandonedError(TrainingError, RuntimeError):
    """A deferred step failed, because the quorum changed or an earlier step did not commit. Next: train on.

    Restore the parameters of that step first, if the strategy is your own.
    """


class QuorumBrokenError(TrainingError, RuntimeError):
    """A member of this quorum was lost, so its reductions can't run. Next: continue; the next step gets a new quorum.

    Args:
        message: one sentence.
        replica_id: of that member.
    """

    def __init__(self, message: str, *, replica_id: str) -> None:
        super().__init__(message)
        self.replica_id = replica_id


class HealingError(TrainingError, RuntimeError):
    """The live state could not be fetched or loaded. Next: continue; the next quorum tries again, from another source.

    Args:
        message: one sentence.
        sources: replica ids that were asked.
    """

    def __init__(self, message: str, *, sources: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.sources = sources


class UserStateError(TrainingError, RuntimeError):
    """The registered state can't be taken or loaded. Next: change what the message names."""
