"""Errors of state transfers, named after the caller's next action.

A receiver requests a state by its name (its key) from a peer that may be gone, late, behind or faulty. Each failure has
a class here, with its facts as fields. Its message is one sentence: what, where, and what to do.

Law of this file: classes only, no decisions and no I/O.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

__all__ = [
    "CheckpointError",
    "ConfigError",
    "StateCorruptError",
    "StateLayoutError",
    "StateMismatchError",
    "StateUnavailableError",
    "StateUnsupportedError",
    "TransferTimeoutError",
    "TransportClosedError",
]


# The UUID of a replica id: `name:uuid` or the UUID alone, with or without a rank after it. A UUID inside a path does
# not match.
_REPLICA_ID: Final = re.compile(
    r"(?:(?<=[^\s:/]:)|(?<![^\s\[({'\"=,])(?<!\bjob )(?<!\bjob ['\"]))"
    r"\b([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"
    r"(?![\w-]|\.\w|/(?!\d+(?![\w/])))"
)


class NamedState(Protocol):
    """The facts of a `StateKey`, which the errors carry."""

    @property
    def quorum_id(self) -> int: ...
    @property
    def nonce(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def lineage(self) -> int: ...


class CheckpointError(Exception):
    """Base of every error that tft-ckpt raises on purpose.

    Its text has short replica ids, its `args` have whole ones.
    """

    def __str__(self) -> str:
        """Return the message with shortened replica ids, such as `replica_1:0f3a9c1d`."""
        return _REPLICA_ID.sub(r"\1", super().__str__())


class ConfigError(CheckpointError, ValueError):
    """An argument is invalid. Next: change it and call again. Nothing has been done."""


class StateUnavailableError(CheckpointError):
    """No source can give the state. Next: ask another source, or wait for the next quorum.

    Fields:
        source: the requested address, or several joined by a comma.
        key: the requested state, or None if there was none yet.
    """

    def __init__(self, message: str, *, source: str = "", key: NamedState | None = None) -> None:
        super().__init__(message)
        self.source = source
        self.key = key


class StateCorruptError(CheckpointError):
    """The received bytes differ from the source's manifest. Next: suspect that source, its host or its network.

    Fields:
        source: the address that served them, or "" if they came from no peer.
        part: "manifest", "chunk 17", or the path of a leaf.
    """

    def __init__(self, message: str, *, part: str, source: str = "") -> None:
        super().__init__(message)
        self.source = source
        self.part = part


class StateUnsupportedError(CheckpointError):
    """A leaf of the state can't be transferred. Next: use plain data or a plain tensor, or register its type.

    Fields:
        path: the place of the leaf, for example ``state['optim']['state'][0]``.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class StateLayoutError(CheckpointError):
    """The received state does not fit the state in `into`. Next: receive it without `into`.

    Nothing of it was written. If data of another source's state was written before, the message says so.

    Fields:
        path: the place of the difference, for example ``state['model']['weight']``.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class StateMismatchError(CheckpointError):
    """The source has another state than the requested one, and keeps it. Next: ask for a new quorum.

    Fields:
        source: the requested address.
        wanted: the requested key.
        offered: the source's key, or None if it is unknown.
    """

    def __init__(
        self, message: str, *, wanted: NamedState | None, offered: NamedState | None = None, source: str = ""
    ) -> None:
        super().__init__(message)
        self.source = source
        self.wanted = wanted
        self.offered = offered


class TransferTimeoutError(CheckpointError, TimeoutError):
    """The caller's timeout expired. Next: allow more time, or check whether the source still runs.

    Fields:
        timeout_s: the caller's timeout, in seconds.
    """

    def __init__(self, message: str, *, timeout_s: float) -> None:
        super().__init__(message)
        self.timeout_s = timeout_s


class TransportClosedError(CheckpointError):
    """This side aborted, cancelled or shut down the transport. Next: make a new one, if it was a shutdown."""
