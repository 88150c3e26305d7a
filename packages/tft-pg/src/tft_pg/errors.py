"""What can go wrong with a process group, named by what the caller can do next.

Every error here is a `RuntimeError`, because that is what torch raises from a failed collective and what code
written for torch catches. Each one carries its facts as fields and says in one sentence what happened, where, and
what to do. The law of this file: errors only, no decisions about when they are raised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = [
    "Aborted",
    "Closed",
    "ConfigureFailed",
    "DeadlinePassed",
    "InvalidSetting",
    "NotConfigured",
    "OperationRefused",
    "PeerFailed",
    "ProcessGroupError",
    "StoreAddressError",
    "StoreUnreachable",
    "Unsupported",
    "Where",
]


@dataclass(frozen=True)
class Where:
    """The place of one process in one configured group; every field that is known, for messages.

    Args:
        rank: rank in the group, 0-based; None before the first configure.
        world_size: number of ranks in the group; None before the first configure.
        replica_id: the replica that this process belongs to; empty if the caller named none.
        quorum_id: the quorum that the group was configured for; None if the caller named none.
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


# The UUID of a replica id: `name:uuid` or the UUID alone, with a rank behind it or not. Never one in a path.
_REPLICA_ID: Final = re.compile(
    r"(?:(?<=[^\s:/]:)|(?<![^\s\[({'\"=,])(?<!\bjob )(?<!\bjob ['\"]))"
    r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"
    r"(?![\w-]|\.\w|/(?!\d+(?![\w/])))"
)


class ProcessGroupError(RuntimeError):
    """The base of all errors of this package.

    Args:
        message: one sentence: what, where, what to do next.
        where: the place in the group; None where no group is concerned.
    """

    def __init__(self, message: str, *, where: Where | None = None) -> None:
        super().__init__(message)
        self.where = where

    def __str__(self) -> str:
        """The message, with replica ids as people read them: `replica_1:0f3a9c1d`."""
        return _REPLICA_ID.sub(r"\1", super().__str__())


class InvalidSetting(ProcessGroupError, ValueError):
    """An argument can't work whatever the others do. Next: mend the program."""


class StoreAddressError(InvalidSetting):
    """A store address is not `host:port/prefix`. Next: mend the address; `address` holds it."""

    def __init__(self, message: str, *, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class Unsupported(ProcessGroupError):
    """This kind of group does not have this operation, ever. Next: use another group."""


class NotConfigured(ProcessGroupError):
    """The group was used before its first `configure`. Next: configure it."""


class Closed(ProcessGroupError):
    """The group was used after `shutdown()`. Next: make a new one; this one stays closed."""


class Aborted(ProcessGroupError):
    """What ran was ended by `abort()`, by a new `configure` or by `shutdown()` on this rank. Next: configure."""


class ConfigureFailed(ProcessGroupError):
    """A `configure` did not build a group; nothing of it is left. Next: configure again under a fresh prefix.

    Args:
        missing_ranks: the ranks that had not shown up when the deadline passed; empty if that was not the fault.
        unreached: the ranks that had shown up, but refuse a connection or don't answer it, and why, in a few words.
    """

    def __init__(
        self,
        message: str,
        *,
        where: Where | None = None,
        missing_ranks: tuple[int, ...] = (),
        unreached: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message, where=where)
        self.missing_ranks = missing_ranks
        self.unreached: Mapping[int, str] = dict(unreached or {})


class StoreUnreachable(ConfigureFailed):
    """The store did not answer within the deadline. Next: ask for a new quorum, which names another store.

    Args:
        host, port: of the store.
        why: in a few words.
    """

    def __init__(
        self, message: str, *, where: Where | None = None, host: str = "", port: int = 0, why: str = ""
    ) -> None:
        super().__init__(message, where=where)
        self.host = host
        self.port = port
        self.why = why


class PeerFailed(ProcessGroupError):
    """A connection to another rank ended during an operation (its cause is attached). Next: configure without it.

    Args:
        unreached: the ranks that acknowledged nothing any more, and why, in a few words, where that has ended it.
        rank: the rank whose connection has ended, where a word (`exchange_word`) has found that; else None.
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


class DeadlinePassed(ProcessGroupError, TimeoutError):
    """An operation took longer than its time-out (its cause is attached). Next: abort, then configure."""


class OperationRefused(ProcessGroupError):
    """The backend refused the operation itself, for example its dtype (its cause is attached). Next: mend the call.

    The group works on: nothing was exchanged.
    """
