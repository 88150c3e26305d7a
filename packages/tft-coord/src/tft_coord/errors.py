"""The errors of coordination, one class for each thing that a caller can do next.

Law of this file: error classes only. Each carries its facts as fields and a message of one sentence that says what
happened, where, and what to do.
"""

from __future__ import annotations

from tft_coord.core.names import shorten


class CoordinationError(Exception):
    """Base of every error that tft-coord raises on purpose.

    Its text has short replica ids, its `args` have whole ones.
    """

    def __str__(self) -> str:
        return shorten(super().__str__())


class SettingError(CoordinationError, ValueError):
    """A setting is wrong: change the argument, flag or environment variable that the message names."""


class ProtocolError(CoordinationError, ValueError):
    """A peer sent a message that the protocol does not allow: it speaks another version, or its frame was damaged."""


class UnknownCall(ProtocolError):
    """The server does not know this call, as torchft's lighthouse knows none of this project's: do without it, or start
    tft-lighthouse."""


class DeadlinePassed(CoordinationError, TimeoutError):
    """No answer came in time: ask again, or look at what the message says it waited for."""


class Unreachable(CoordinationError, ConnectionError):
    """The peer can't be reached: check its address, that it runs, and the network between."""


class Closed(CoordinationError, RuntimeError):
    """This object was shut down: make a new one."""


class Refused(CoordinationError, RuntimeError):
    """The lighthouse or the manager server refused by name: the message says why and what to change."""

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class JobOver(Refused):
    """The job has ended at a later step than this replica's, and no replica is left from which it could heal.

    Use the result of that step, or start a new run.
    """


class StaleQuorum(CoordinationError, RuntimeError):
    """The call belongs to a quorum or step that is over: drop its result and start the next quorum."""


class GroupLost(CoordinationError, RuntimeError):
    """A rank of this replica group, or its manager server, is lost: end this process; a new group heals from a peer."""
