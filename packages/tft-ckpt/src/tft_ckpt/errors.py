"""What can go wrong with a state, named by what the caller can do next.

A state is asked for by name (its key) from a peer who may be gone, late, behind, or sick. Each way to fail has a class
here, with its facts as fields, and a message of one sentence: what, where, and what to do.

Law of this file: classes only, no decisions and no I/O.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tft_ckpt.key import StateKey

__all__ = [
    "CheckpointError",
    "Closed",
    "DeadlinePassed",
    "StateCorrupt",
    "StateDiffers",
    "StateMismatch",
    "StateUnavailable",
    "StateUnsupported",
    "WrongSetting",
]


# The UUID of a replica id: `name:uuid` or the UUID alone, with a rank behind it or not. Never one in a path.
_REPLICA_ID: Final = re.compile(
    r"(?:(?<=[^\s:/]:)|(?<![^\s\[({'\"=,])(?<!\bjob )(?<!\bjob ['\"]))"
    r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"
    r"(?![\w-]|\.\w|/(?!\d+(?![\w/])))"
)


class CheckpointError(Exception):
    """Base of every error that this package raises on purpose.

    Its text has short replica ids, its `args` have whole ones.
    """

    def __str__(self) -> str:
        """The message, with replica ids as people read them: `replica_1:0f3a9c1d`."""
        return _REPLICA_ID.sub(r"\1", super().__str__())


class WrongSetting(CheckpointError, ValueError):
    """An argument can't work as given: change it and call again. Nothing has been done."""


class StateUnavailable(CheckpointError):
    """No source that was asked can give the state: ask another one, or wait for the next quorum.

    Fields:
        source: the address that was asked, or several joined by a comma.
        key: the state that was asked for, or None where there was none yet.
    """

    def __init__(self, message: str, *, source: str = "", key: StateKey | None = None) -> None:
        super().__init__(message)
        self.source = source
        self.key = key


class StateCorrupt(CheckpointError):
    """Bytes arrived that are not what the source promised: suspect that source, its host or its network.

    Fields:
        source: the address that served them, or "" where they came from no peer.
        part: "manifest", "chunk 17", or the path of a leaf.
    """

    def __init__(self, message: str, *, part: str, source: str = "") -> None:
        super().__init__(message)
        self.source = source
        self.part = part


class StateUnsupported(CheckpointError):
    """A leaf of the state can't travel: change it to plain data or a plain tensor, or register its type.

    Fields:
        path: where the leaf stands, for example ``state['optim']['state'][0]``.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class StateDiffers(CheckpointError):
    """The state that arrives does not fit the one that it should be received into: receive it without `into`.

    Nothing of it was written; if something of another source's state was before, the message says so.

    Fields:
        path: where the two part, for example ``state['model']['weight']``.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class StateMismatch(CheckpointError):
    """The source has a state of another quorum, step or lineage, and will not have the one that was asked for.

    Fields:
        source: the address that was asked.
        wanted: the key that was asked for.
        offered: the key that the source has, or None where it did not say.
    """

    def __init__(
        self, message: str, *, wanted: StateKey | None, offered: StateKey | None = None, source: str = ""
    ) -> None:
        super().__init__(message)
        self.source = source
        self.wanted = wanted
        self.offered = offered


class DeadlinePassed(CheckpointError, TimeoutError):
    """The time that the caller gave is over: give more, or ask whether the source still lives.

    Fields:
        timeout_s: what the caller gave, in seconds.
    """

    def __init__(self, message: str, *, timeout_s: float) -> None:
        super().__init__(message)
        self.timeout_s = timeout_s


class Closed(CheckpointError):
    """The transport was aborted, cancelled or shut down by its own side: nothing is wrong with the peer."""
