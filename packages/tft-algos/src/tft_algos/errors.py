"""The errors of training, one class for each action that a caller can take next.

Errors of the packages below (tft_coord, tft_pg, tft_ckpt) reach the caller unchanged if their names already say what to
do. A lost group stays `tft_coord.errors.ReplicaGroupLostError`. Errors that the step core decides on are defined in
`tft_coord.core.step.errors`.

Law of this file: error classes only. Each class carries its facts as fields, and a message of one sentence that says
what happened, where, and what to do.
"""

from __future__ import annotations

import traceback

from tft_coord.core.names import shorten
from tft_coord.core.step.errors import (
    HealingError,
    QuorumBrokenError,
    StepAbandonedError,
    SyncAbandonedError,
    TrainingError,
    UsageError,
    UserStateError,
)

__all__ = [
    "ConfigError",
    "ContributionError",
    "DurableCheckpointError",
    "ExceptionWithTraceback",
    "HealingError",
    "LeftJob",
    "ManagerClosedError",
    "QuorumBrokenError",
    "ServerBusyError",
    "ServerRestartedError",
    "SessionRefusedError",
    "StateDivergedError",
    "StateLoadError",
    "StepAbandonedError",
    "SyncAbandonedError",
    "TooManyFailuresError",
    "TrainingError",
    "UnknownSettingError",
    "UnsupportedFeatureError",
    "UsageError",
    "UserStateError",
    "ZeroWeightError",
]


class ConfigError(TrainingError, ValueError):
    """A setting is wrong. Next: change the argument or the environment variable that the message names."""


class UnknownSettingError(ConfigError, TypeError):
    """A setting of that name does not exist. Next: use the nearest one, which the message names."""

    def __init__(self, message: str, *, name: str, nearest: str | None) -> None:
        super().__init__(message)
        self.name = name
        self.nearest = nearest


class UnsupportedFeatureError(TrainingError, NotImplementedError):
    """The requested feature does not exist here, and nothing was done. Next: use another feature."""


class ManagerClosedError(TrainingError, RuntimeError):
    """The Manager was used after its shutdown. Next: make a new one."""


class ServerRestartedError(TrainingError):
    """The manager server of this group of one ended, and a new one runs. Next: request again, without a held quorum.

    A Coordinator raises this to the Manager.

    Calls that were open at the old server count as a no.
    """


class LeftJob(SystemExit):
    """This replica has left the job, and no step begins any more. Next: let the process end.

    A training loop that does not check `manager.left` ends with this SystemExit, whose exit code is 0. It is a request
    to end the process, not a failure, and need not be caught. An uncaught LeftJob passes an `except Exception` and ends
    the script without a traceback. A supervisor then sees that the worker succeeded.

    Args:
        message: one sentence.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shorten(message))
        self.code = 0  # with a message as its code, a SystemExit would print the message and exit with 1


class ZeroWeightError(TrainingError, ArithmeticError):
    """The weights of all contributions sum to zero or to no finite number. Next: give other weights in the next
    step."""


class ContributionError(TrainingError, ArithmeticError):
    """A replica's contribution to a reduction can't be added, and the step does not commit. Next: look on the replica
    that the message names for numbers that are not finite, or for another codec, dtype or shape.

    Args:
        message: one sentence.
        replica_rank: the replica's place in the quorum, or the rank in a process group without a Manager.
    """

    def __init__(self, message: str, *, replica_rank: int) -> None:
        super().__init__(message)
        self.replica_rank = replica_rank


class StateLoadError(HealingError):
    """A fetched state can't be loaded here. Next: fix what the message names; the next quorum tries once more.

    If a load function of the user raised, its error is the cause. Without a cause, the state does not fit what is
    registered here.
    """


class StateDivergedError(TrainingError, RuntimeError):
    """This replica's state differs from the others'. Next: fix what the message names, and start the replica again.

    Healing is disabled, or did not cure it.

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


class DurableCheckpointError(TrainingError, RuntimeError):
    """A durable checkpoint can't be written or read. Next: make room, or fix what the message names.

    Args:
        message: one sentence.
        path: path of the directory.
        step: committed steps of the state. None: the step is not known.
    """

    def __init__(self, message: str, *, path: str, step: int | None) -> None:
        super().__init__(message)
        self.path = path
        self.step = step


class TooManyFailuresError(TrainingError, RuntimeError):
    """More steps in a row failed than `max_retries` allows. Next: look at the attached error, then start again.

    Args:
        message: one sentence.
        failures: failed steps in a row.
    """

    def __init__(self, message: str, *, failures: int) -> None:
        super().__init__(message)
        self.failures = failures


class SessionRefusedError(TrainingError, RuntimeError):
    """A parameter server opened no session. Next: fix what the message names, such as the secret or the address.

    Args:
        message: one sentence.
        status: the HTTP status of the answer.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerBusyError(SessionRefusedError):
    """A parameter server has as many sessions as it allows, or stops. Next: ask again later, or another server."""


class ExceptionWithTraceback(TrainingError):  # noqa: N818 - torchft's users know this name
    """An error that was recorded for a step, with its traceback. Next: read `original_exception`.

    Args:
        original_exception: the error.
    """

    def __init__(self, original_exception: Exception) -> None:
        self.original_exception = original_exception
        self.stack_trace = "".join(
            traceback.format_exception(type(original_exception), original_exception, original_exception.__traceback__)
        )
        super().__init__(f"{original_exception}\n{self.stack_trace}")
