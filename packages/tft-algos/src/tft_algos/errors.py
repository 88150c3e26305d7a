"""The errors of training, one class for each thing that a caller can do next.

Errors of the packages below (tft_coord, tft_pg, tft_ckpt) reach the caller as they are where their own names already
say what to do: a lost group stays `tft_coord.errors.GroupLost`. Those that the step itself decides on are defined with
it, in `tft_coord.core.step.errors`.

Law of this file: error classes only. Each carries its facts as fields and a message of one sentence that says what
happened, where, and what to do.
"""

from __future__ import annotations

import traceback

from tft_coord.core.names import shorten
from tft_coord.core.step.errors import (
    HealingFailed,
    QuorumBroken,
    StateUnavailable,
    StepAbandoned,
    SyncAbandoned,
    TrainingError,
    UsageError,
)

__all__ = [
    "CheckpointFailed",
    "Closed",
    "ExceptionWithTraceback",
    "HealingFailed",
    "LeftJob",
    "LoadFailed",
    "NoWeight",
    "QuorumBroken",
    "SettingError",
    "StateDiverged",
    "StateUnavailable",
    "StepAbandoned",
    "SyncAbandoned",
    "TooManyFailures",
    "TrainingError",
    "UnknownSetting",
    "Unsupported",
    "UsageError",
]


class SettingError(TrainingError, ValueError):
    """A setting is wrong: change the argument or the environment variable that the message names."""


class UnknownSetting(SettingError, TypeError):
    """There is no setting of that name; the message names the nearest one."""

    def __init__(self, message: str, *, name: str, nearest: str | None) -> None:
        super().__init__(message)
        self.name = name
        self.nearest = nearest


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


class NoWeight(TrainingError, ArithmeticError):
    """The weights of all that gave something sum to zero, or to no finite number, so there is no mean: give other
    weights in the next step."""


class LoadFailed(HealingFailed):
    """A state was fetched and can't be loaded here: mend what the message names. The next quorum tries again, once.

    What a load function of the user's raised is attached as the cause; without a cause the state does not fit what is
    registered here."""


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
