"""The errors of torchft's interface, where tft's own have another type.

Code that was written for torchft catches builtin types: AssertionError for a wrong argument or order, RuntimeError for
a server that can't be reached, TimeoutError for a deadline. Each error here has these types, and the message of the tft
error that is its cause.

Law of this file: types and translation. Nothing is decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tft_coord.errors import ConfigError, CoordinationError, RequestTimeoutError


class ArgumentError(AssertionError, ValueError):
    """An argument is wrong. Next: change what the message names."""


class OrderError(AssertionError, RuntimeError):
    """A method was called in a wrong order. Next: change the loop as the message says."""


class ServerError(RuntimeError):
    """A lighthouse or a manager server can't be used. Next: look at what the message names."""


class DeadlineError(TimeoutError, RuntimeError):
    """A request was not answered in time. Next: check the peers that the message names, or ask again."""


@contextmanager
def translated() -> Iterator[None]:
    """Raise the errors of coordination with torchft's types.

    Raises: DeadlineError, a TimeoutError: a request timed out. ServerError, a RuntimeError: all else.
    """
    try:
        yield
    except RequestTimeoutError as error:
        raise DeadlineError(f'status: Cancelled, message: "Timeout expired": {error}') from error
    except (CoordinationError, ConfigError) as error:
        raise ServerError(str(error)) from error


@contextmanager
def asserted(*kinds: type[Exception]) -> Iterator[None]:
    """Raise these errors as an ArgumentError, which is an AssertionError too."""
    try:
        yield
    except kinds as error:
        raise ArgumentError(str(error)) from error
