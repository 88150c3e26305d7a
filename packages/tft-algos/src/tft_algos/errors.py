"""The errors of training, one class for each thing that a caller can do next.

Errors of the packages below (tft_coord, tft_pg, tft_ckpt) reach the caller as they are where their own names already
say what to do: a lost group stays `tft_coord.errors.GroupLost`.

Law of this file: error classes only. Each carries its facts as fields and a message of one sentence that says what
happened, where, and what to do.
"""

from __future__ import annotations

import traceback

from tft_coord.core.names import shorten


class TrainingError(Exception):
    """Base of every error that tft-algos raises on purpose.

    Its text has short replica ids, its `args` have whole ones.
    """

    def __str__(self) -> str:
        return shorten(super().__str__())


class SettingError(TrainingError, ValueError):
    """A setting is wrong: change the argument or the environment variable that the message names."""


class UnknownSetting(SettingError, TypeError):
    """There is no setting of that name; the message names the nearest one."""

    def __init__(self, message: str, *, name: str, nearest: str | None) -> None:
        super().__init__(message)
        self.name = name
        self.nearest = nearest


class UsageError(TrainingError, RuntimeError):
    """The calls came in an order that can't work: change the training loop as the message says."""


class Unsupported(TrainingError, NotImplementedError):
    """What was asked for does not exist here, and nothing else is done in its place: ask for something else."""


class Closed(TrainingError, RuntimeError):
    """The Manager was shut down: make a new one."""


class LeftJob(SystemExit):
    """This replica has left the job, and no step begins any more: a training loop that does not look at
    `manager.left` ends here.

    A request to end the process, not a failure: it is a SystemExit with exit code 0. Nobody has to catch it. Then it
    passes an `except Exception`, ends the script without a traceback, and tells a supervisor that the worker succeeded.

    Args:
        message: one sentence.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shorten(message))
        self.code = 0  # or the message would be the exit code: printed, and 1


class StepAbandoned(TrainingError, RuntimeError):
    """This step can't commit, because its replica has left the job while it ran."""


class NoWeight(TrainingError, ArithmeticError):
    """The weights of all that gave something sum to zero, or to no finite number, so there is no mean: give other
    weights in the next step."""


class HealingFailed(TrainingError, RuntimeError):
    """The live state could not be fetched or loaded; the next quorum tries again, with another source if there is one.

    Args:
        message: one sentence.
        sources: replica ids that were asked.
    """

    def __init__(self, message: str, *, sources: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.sources = sources


class LoadFailed(HealingFailed):
    """A state was fetched and can't be loaded here: mend what the message names. The next quorum tries again, once.

    What a load function of the user's raised is attached as the cause; without a cause the state does not fit what is
    registered here."""


class QuorumBroken(TrainingError, RuntimeError):
    """A member of this quorum was lost or can't go on in it, so nothing more can be reduced in it: the next step asks
    for another quorum.

    Args:
        message: one sentence.
        replica_id: of that member.
    """

    def __init__(self, message: str, *, replica_id: str) -> None:
        super().__init__(message)
        self.replica_id = replica_id


class SyncAbandoned(TrainingError, RuntimeError):
    """A step that was in flight beside others has failed with them: another quorum came, or an earlier one of them was
    not committed. Restore what it was about; later steps go on."""


class StateDiverged(TrainingError, RuntimeError):
    """This replica's state is not that of the others, and healing is not wanted or does not cure it: look at what the
    message names, mend it, and start this replica again.

    Args:
        message: one sentence.
        replica_id: of this replica.
        source: replica id of the one whose state it was compared with.
        step: committed steps at which they were compared.
        paths: what differs on this rank, such as `optimizer.param_groups.0.lr`; empty if only other ranks differ.
    """

    def __init__(self, message: str, *, replica_id: str, source: str, step: int, paths: tuple[str, ...]) -> None:
        super().__init__(message)
        self.replica_id = replica_id
        self.source = source
        self.step = step
        self.paths = paths


class CheckpointFailed(TrainingError, RuntimeError):
    """A durable checkpoint could not be written, or none can be read: make room or mend what the message names.

    Args:
        message: one sentence.
        path: of the directory it is about.
        step: committed steps of the state; None where that is not known.
    """

    def __init__(self, message: str, *, path: str, step: int | None) -> None:
        super().__init__(message)
        self.path = path
        self.step = step


class StateUnavailable(TrainingError, RuntimeError):
    """The user's state can't be taken or loaded now: change what the message names."""


class TooManyFailures(TrainingError, RuntimeError):
    """More steps in a row failed than `max_retries` allows: look at the error attached, then start again.

    Args:
        message: one sentence.
        failures: failed steps in a row.
    """

    def __init__(self, message: str, *, failures: int) -> None:
        super().__init__(message)
        self.failures = failures


class ExceptionWithTraceback(TrainingError):
    """An error that was recorded for a step instead of being raised, with the place where it happened.

    Args:
        original_exception: the error.
    """

    def __init__(self, original_exception: Exception) -> None:
        self.original_exception = original_exception
        self.stack_trace = "".join(
            traceback.format_exception(type(original_exception), original_exception, original_exception.__traceback__)
        )
        super().__init__(f"{original_exception}\n{self.stack_trace}")
