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


class ConfigError(CoordinationError, ValueError):
    """A setting is wrong. Next: change the argument, flag or environment variable that the message names."""


class ProtocolError(CoordinationError, ValueError):
    """A peer sent a message that the protocol does not allow. Next: check the version of the peer that it names."""


class UnknownCallError(ProtocolError):
    """The server does not know this call, for example because it is torchft's lighthouse. Next: start
    tft-lighthouse."""


class RequestTimeoutError(CoordinationError, TimeoutError):
    """A request was not answered in time. Next: check the peers that the message names, or ask again."""


class UnreachableError(CoordinationError, ConnectionError):
    """A server can't be reached. Next: check its address, that it runs, and the network to it."""


class CoordinationClosedError(CoordinationError, RuntimeError):
    """A client or server was used after it was shut down. Next: make a new one."""


class RefusedError(CoordinationError, RuntimeError):
    """The lighthouse or the manager server refused a request. Next: change what the message names."""

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class JobOverError(RefusedError):
    """The job has ended at a later step, and no replica is left to heal from. Next: use the result of that step."""


class StaleQuorumError(CoordinationError, RuntimeError):
    """A call belongs to a quorum or a step that is over. Next: drop its result, and ask for a new quorum."""


class ReplicaGroupLostError(CoordinationError, RuntimeError):
    """A rank of this replica group, or its manager server, is lost. Next: end this process and start the group
    again."""
