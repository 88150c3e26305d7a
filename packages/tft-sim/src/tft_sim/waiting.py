"""The waits of a simulated process, and the results of its failed calls.

Law of this file: values and their waiters. Decisions belong elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from tft_coord.core.step.errors import UserStateError
from tft_coord.core.types import Refusal
from tft_coord.errors import ProtocolError, ReplicaGroupLostError, RequestTimeoutError, StaleQuorumError
from tft_coord.errors import RefusedError as RefusedByName


class Waiter:
    """A future of a process: it resolves once, with a value."""

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self._then: list[Callable[[Any], None]] = []

    def resolve(self, value: Any) -> None:
        """Set the value. Later values are ignored."""
        if self.done:
            return
        self.done = True
        self.value = value
        then, self._then = self._then, []
        for action in then:
            action(value)

    def then(self, action: Callable[[Any], None]) -> None:
        """Call `action` with the value."""
        if self.done:
            action(self.value)
        else:
            self._then.append(action)


Life = Generator[Waiter, Any, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """A failed call. `fatal`: this process has to end."""

    code: str
    message: str = ""
    fatal: bool = False


class UserError(Exception):
    """An error of the user's own code."""


class ReplicaLostError(Exception):
    """A failure in a process group."""


def error_of(answer: Refused) -> Exception:
    """Return the error that a client raises for that answer."""
    match answer.code:
        case "deadline" | "unreachable":
            return RequestTimeoutError(answer.message)
        case "group_lost":
            return ReplicaGroupLostError(answer.message)
        case Refusal.STALE.value:
            return StaleQuorumError(answer.message)
        case Refusal.MALFORMED.value:
            return ProtocolError(answer.message)
        case _:
            return RefusedByName(answer.message, code=answer.code)


def answer_of(error: Exception) -> Refused:
    """Return the answer behind an error that ends a process."""
    message = str(error.args[0])
    match error:
        case RefusedByName():
            return Refused(error.code, message, fatal=True)
        case ReplicaGroupLostError():
            return Refused("group_lost", message, fatal=True)
        case ProtocolError():
            return Refused(Refusal.MALFORMED.value, message, fatal=True)
        case UserStateError():
            return Refused("unloadable", message, fatal=True)
        case _:
            raise error
