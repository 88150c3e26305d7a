"""What a caller gives a group besides tensors, and the sentence that says how else it is to be given.

Other libraries have groups with the same methods and another order of arguments. Whoever comes from there would get
Python's error about a number of arguments, which does not say what to write instead. The law of this file: arguments
are looked at and passed on; nothing is converted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Concatenate, ParamSpec, TypeVar

from tft_pg.errors import InvalidSetting

__all__ = ["always_leaves_an_error", "checked_timeout", "place_first"]

_P = ParamSpec("_P")
_Self = TypeVar("_Self")


def checked_timeout(timeout: timedelta) -> timedelta:
    """The time-out as it is. Raises: InvalidSetting: it is no timedelta, or not above zero."""
    if not isinstance(timeout, timedelta):
        raise InvalidSetting(f"a time-out is a timedelta, but this one is {timeout!r}; give timedelta(seconds=...)")
    if timeout <= timedelta(0):
        raise InvalidSetting(f"a time-out must be above zero, but this one is {timeout.total_seconds():g} s")
    return timeout


def place_first(configure: Callable[Concatenate[_Self, _P], None]) -> Callable[Concatenate[_Self, _P], None]:
    """Decorator of a `configure`: refuse a call in another order. Raises: InvalidSetting, as the method then does."""

    @functools.wraps(configure)
    def ordered(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if len(args) > 3 or any(isinstance(place, str) for place in args[1:]):
            raise InvalidSetting(
                "configure takes store_addr, rank and world_size in this order, and all else by keyword, "
                f"as replica_id=...; but got {', '.join(map(repr, args))}"
            )
        configure(self, *args, **kwargs)

    return ordered


def always_leaves_an_error(abort: Callable[[_Self], None]) -> Callable[[_Self], None]:
    """Decorator of an `abort`: refuse to leave none. Raises: InvalidSetting, as the method then does."""

    @functools.wraps(abort)
    def marked(self: _Self, errored: bool = True) -> None:
        if not errored:
            raise InvalidSetting(
                "abort leaves an error until the next configure, always; call abort() and configure, or shutdown()"
            )
        abort(self)

    return marked
