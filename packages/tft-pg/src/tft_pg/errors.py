"""Errors of process groups, named after the caller's next action.

Every error here is a `RuntimeError`, because torch raises `RuntimeError` from a failed collective and existing code
catches it. Each error carries its facts as fields. Each message is one sentence: what happened, where, and what to do.

Law of this file: errors only, no decisions about when they are raised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = [
    "AbortedError",
    "CollectiveTimeoutError",
    "CommunicatorFailedError",
    "ConfigError",
    "ConfigureError",
    "NotConfiguredError",
    "OperationRefusedError",
    "PeerDisconnectedError",
    "ProcessGroupClosedError",
    "ProcessGroupError",
    "StoreAddressError",
    "StoreUnreachableError",
    "TraceWriteError",
    "UnsupportedOperationError",
    "Where",
]


@dataclass(frozen=True)
class Where:
    """The place of one process in one configured group, for messages. Unknown fields keep their defaults.

    Args:
        rank: rank in the group, 0-based; None before the first configure.
        world_size: number of ranks in the group; None before the first configure.
        replica_id: the replica of this process; empty if the caller gave none.
        quorum_id: the quorum of this configuration; None if the caller gave none.
        group_rank: rank inside the replica group, 0-based.
    """

    rank: int | None = None
    world_size: int | None = None
    replica_id: str = ""
    quorum_id: int | None = None
    group_rank: int = 0

    def __str__(self) -> str:
        if self.rank is None:
            return "unconfigured group"
        parts = [f"rank {self.rank} of {self.world_size}"]
        if self.replica_id:
            parts.append(f"replica {self.replica_id}/{self.group_rank}")
        if self.quorum_id is not None:
            parts.append(f"quorum {self.quorum_id}")
        return ", ".join(parts)


# The UUID of a replica id: `name:uuid` or the UUID alone, with or without a rank after it. A UUID inside a path does
# not match.
_REPLICA_ID: Final = re.compile(
    r"(?:(?<=[^\s:/]:)|(?<![^\s\[({'\"=,])(?<!\bjob )(?<!\bjob ['\"]))"
    r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"
    r"(?![\w-]|\.\w|/(?!\d+(?![\w/])))"
)


class ProcessGroupError(RuntimeError):
    """Base of every error that tft-pg raises on purpose.

    Args:
        message: one sentence: what, where, what to do next.
        where: the place in the group; None if the error concerns no group.
    """

    def __init__(self, message: str, *, where: Where | None = None) -> None:
        super().__init__(message)
        self.where = where

    def __str__(self) -> str:
        """Return the message with shortened replica ids, such as `replica_1:0f3a9c1d`."""
        return _REPLICA_ID.sub(r"\1", super().__str__())


class ConfigError(ProcessGroupError, ValueError):
    """An argument is invalid regardless of the other ranks. Next: fix the program."""


class StoreAddressError(ConfigError):
    """A store address is not `host:port/prefix`. Next: fix the address, which `address` holds."""

    def __init__(self, message: str, *, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class UnsupportedOperationError(ProcessGroupError):
    """This kind of group never supports this operation. Next: use another group."""


class NotConfiguredError(ProcessGroupError):
    """The group was used before its first `configure`. Next: configure the group."""


class ProcessGroupClosedError(ProcessGroupError):
    """The group was used after `shutdown()`. Next: create a new group, because this one stays closed."""


class TraceWriteError(ProcessGroupError):
    """A flight record could not be written (cause attached). Next: check the directory and its free space."""


class AbortedError(ProcessGroupError):
    """This rank's `abort()`, new `configure` or `shutdown()` ended the operation. Next: configure."""


class ConfigureError(ProcessGroupError):
    """A `configure` failed, and nothing remains of the group. Next: configure again under a fresh prefix.

    Args:
        missing_ranks: the ranks that had not joined at the deadline; empty if that was not the cause.
        unreached: the ranks that had joined but refused or did not answer a connection, each with a short reason.
        is_own: no peer is involved: this process can't listen, or its device does not work.
    """

    def __init__(
        self,
        message: str,
        *,
        where: Where | None = None,
        missing_ranks: tuple[int, ...] = (),
        unreached: Mapping[int, str] | None = None,
        is_own: bool = False,
    ) -> None:
        super().__init__(message, where=where)
        self.missing_ranks = missing_ranks
        self.unreached: Mapping[int, str] = dict(unreached or {})
        self.is_own = is_own


class StoreUnreachableError(ConfigureError):
    """The store did not answer within the deadline. Next: ask for a new quorum, which names another store.

    Args:
        host, port: of the store.
        why: a short reason.
    """

    def __init__(
        self, message: str, *, where: Where | None = None, host: str = "", port: int = 0, why: str = ""
    ) -> None:
        super().__init__(message, where=where)
        self.host = host
        self.port = port
        self.why = why


class PeerDisconnectedError(ProcessGroupError):
    """A connection to another rank ended during an operation (cause attached). Next: configure without that rank.

    Args:
        unreached: the ranks that stopped acknowledging data, each with a short reason, if this ended the operation.
        rank: the disconnected rank, if a word (`exchange_word`) has found it; else None.
    """

    def __init__(
        self,
        message: str,
        *,
        where: Where | None = None,
        unreached: Mapping[int, str] | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message, where=where)
        self.unreached: Mapping[int, str] = dict(unreached or {})
        self.rank = rank


class CollectiveTimeoutError(ProcessGroupError, TimeoutError):
    """An operation exceeded its timeout (cause attached). Next: abort, then configure."""


class CommunicatorFailedError(ProcessGroupError):
    """The device library or the child process failed, and no operation works any more. Next: configure again."""


class OperationRefusedError(ProcessGroupError):
    """The backend refused the operation, for example its dtype (cause attached). Next: fix the call.

    The ranks exchanged no data, and the group keeps working.
    """
