"""What a simulated process waits for, and what a call that failed tells it.

Law of this file: values and their waiters; nothing is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from tft_coord.core.step.errors import StateUnavailable
from tft_coord.core.types import Refusal
from tft_coord.errors import DeadlinePassed, GroupLost, ProtocolError, StaleQuorum
from tft_coord.errors import Refused as RefusedByName


class Waiter:
    """Something that a process waits for: resolved once, with a value."""

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self._then: list[Callable[[Any], None]] = []

    def resolve(self, value: Any) -> None:
        """Give it its value; later values are ignored."""
        if self.done:
            return
        self.done = True
        self.value = value
        then, self._then = self._then, []
        for action in then:
            action(value)

    def then(self, action: Callable[[Any], None]) -> None:
        """Let `action` happen with the value."""
        if self.done:
            action(self.value)
        else:
            self._then.append(action)


Life = Generator[Waiter, Any, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """A call failed. `fatal`: this process can only end."""

    code: str
    message: str = ""
    fatal: bool = False


class UserError(Exception):
    """An error of the user's own code."""


class Lost(Exception):
    """Something of a process group's failed."""


def error_of(answer: Refused) -> Exception:
    """Return what a client raises for that answer."""
    match answer.code:
        case "deadline" | "unreachable":
            return DeadlinePassed(answer.message)
        case "group_lost":
            return GroupLost(answer.message)
        case Refusal.STALE.value:
            return StaleQuorum(answer.message)
        case Refusal.MALFORMED.value:
            return ProtocolError(answer.message)
        case _:
            return RefusedByName(answer.message, code=answer.code)


def answer_of(error: Exception) -> Refused:
    """Return what a process was told that ends by that error."""
    message = str(error.args[0])
    match error:
        case RefusedByName():
            return Refused(error.code, message, fatal=True)
        case GroupLost():
            return Refused("group_lost", message, fatal=True)
        case ProtocolError():
            return Refused(Refusal.MALFORMED.value, message, fatal=True)
        case StateUnavailable():
            return Refused("unloadable", message, fatal=True)
        case _:
            raise error
