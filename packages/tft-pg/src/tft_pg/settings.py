"""Checks of a group's settings, with errors that say how to pass each setting.

Other libraries have groups with the same methods and another order of arguments. For a caller of those libraries,
Python's error names only a number of arguments. The checks here say what to write instead.

Law of this file: arguments are checked and passed on; nothing is converted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Concatenate, ParamSpec, TypeVar

from tft_pg.errors import ConfigError

__all__ = ["checked_timeout", "checks_argument_order", "refuses_errored_false"]

_P = ParamSpec("_P")
_Self = TypeVar("_Self")


def checked_timeout(timeout: timedelta) -> timedelta:
    """Return the timeout unchanged. Raises: ConfigError: it is not a timedelta, or not above zero."""
    if not isinstance(timeout, timedelta):
        raise ConfigError(f"the timeout is {timeout!r}; pass timedelta(seconds=...)")
    if timeout <= timedelta(0):
        raise ConfigError(f"the timeout is {timeout.total_seconds():g} s; pass a timedelta above zero")
    return timeout


def checks_argument_order(configure: Callable[Concatenate[_Self, _P], None]) -> Callable[Concatenate[_Self, _P], None]:
    """Decorate a `configure` to refuse arguments in another order. Raises: ConfigError, from the method."""

    @functools.wraps(configure)
    def ordered(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if len(args) > 3 or any(isinstance(place, str) for place in args[1:]):
            raise ConfigError(
                "configure takes store_addr, rank and world_size in this order, and all other arguments by keyword, "
                f"such as replica_id=...; but got {', '.join(map(repr, args))}"
            )
        configure(self, *args, **kwargs)

    return ordered


def refuses_errored_false(abort: Callable[[_Self], None]) -> Callable[[_Self], None]:
    """Decorate an `abort` to refuse `errored=False`. Raises: ConfigError, from the decorated method."""

    @functools.wraps(abort)
    def marked(self: _Self, errored: bool = True) -> None:
        if not errored:
            raise ConfigError(
                "abort(errored=False) is not supported, because an aborted group needs a new configure; call abort() "
                "and configure, or shutdown()"
            )
        abort(self)

    return marked
