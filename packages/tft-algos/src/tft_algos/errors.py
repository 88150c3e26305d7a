"""The errors of training, one class for each action that a caller can take next.

Errors of the packages below (tft_coord, tft_pg, tft_ckpt) reach the caller unchanged if their names already say what to
do. A lost group stays `tft_coord.errors.GroupLost`. Errors that the step core decides on are defined in
`tft_coord.core.step.errors`.

Law of this file: error classes only. Each class carries its facts as fields, and a message of one sentence that says
what happened, where, and what to do.
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
    """A setting is wrong. Change the argument or the environment variable that the message names."""


class UnknownSetting(SettingError, TypeError):
    """A setting of that name does not exist. The message names the nearest one."""

    def __init__(self, message: str, *, name: str, nearest: str | None) -> None:
        super().__init__(message)
        self.name = name
        self.nearest = nearest


class Unsupported(TrainingError, NotImplementedError):
    """The requested feature does not exist here, and nothing was done in its place. Use another feature."""


class Closed(TrainingError, RuntimeError):
    """The Manager was shut down. Make a new one."""


class LeftJob(SystemExit):
    """This replica has left the job, and no step begins any more.

    A training loop that does not check `manager.left` ends with this SystemExit, whose exit code is 0. It is a request
    to end the process, not a failure, and need not be caught. An uncaught LeftJob passes an `except Exception` and ends
    the script without a traceback. A supervisor then sees that the worker succeeded.

    Args:
        message: one sentence.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shorten(message))
        self.code = 0  # with a message as its code, a SystemExit would print the message and exit with 1


class NoWeight(TrainingError, ArithmeticError):
    """The weights of all contributions sum to zero, or to no finite number, so there is no mean.

    Give other weights in the next step.
    """


class LoadFailed(HealingFailed):
    """A fetched state can't be loaded here. Fix what the message names. The next quorum tries once more.

    If a load function of the user raised, its error is the cause. Without a cause, the state does not fit what is
    registered here.
    """


class StateDiverged(TrainingError, RuntimeError):
    """The state of this replica differs from the others, and healing is disabled or did not cure it.

    Fix what the message names, and start this replica again.

    Args:
        message: one sentence.
        replica_id: of this replica.
        source: replica id of the replica with which the state was compared.
        step: committed steps at the comparison.
        paths: what differs on this rank, such as `optimizer.param_groups.0.lr`. Empty: only other ranks differ.
    """

    def __init__(self, message: str, *, replica_id: str, source: str, step: int, paths: tuple[str, ...]) -> None:
        super().__init__(message)
        self.replica_id = replica_id
        self.source = source
        self.step = step
        self.paths = paths


class CheckpointFailed(TrainingError, RuntimeError):
    """A durable checkpoint could not be written, or none can be read. Make room, or fix what the message names.

    Args:
        message: one sentence.
        path: path of the directory.
        step: committed steps of the state. None: the step is not known.
    """

    def __init__(self, message: str, *, path: str, step: int | None) -> None:
        super().__init__(message)
        self.path = path
        self.step = step


class TooManyFailures(TrainingError, RuntimeError):
    """More steps in a row failed than `max_retries` allows. Look at the attached error, then start again.

    Args:
        message: one sentence.
        failures: failed steps in a row.
    """

    def __init__(self, message: str, *, failures: int) -> None:
        super().__init__(message)
        self.failures = failures


class ExceptionWithTraceback(TrainingError):
    """An error that was recorded for a step instead of being raised, with its traceback.

    Args:
        original_exception: the error.
    """

    def __init__(self, original_exception: Exception) -> None:
        self.original_exception = original_exception
        self.stack_trace = "".join(
            traceback.format_exception(type(original_exception), original_exception, original_exception.__traceback__)
        )
        super().__init__(f"{original_exception}\n{self.stack_trace}")
