"""Checks of a group's settings, with errors that say how to pass each setting.

Other libraries have groups with the same methods and another order of arguments. For a caller of those libraries,
Python's error names only a number of arguments. The checks here say what to write instead.

Law of this file: arguments are checked and passed on; nothing is converted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Concatenate, ParamSpec, TypeVar

from tft_pg.errors import ConfigError

__all__ = [
    "check_int",
    "check_listening",
    "check_place",
    "check_rank_info",
    "checked_timeout",
    "checks_argument_order",
    "refuses_errored_false",
]

_P = ParamSpec("_P")
_Self = TypeVar("_Self")


def checked_timeout(timeout: timedelta) -> timedelta:
    """Return the timeout unchanged. Raises: ConfigError: it is not a timedelta, or not above zero."""
    if not isinstance(timeout, timedelta):
        raise ConfigError(f"the timeout is {timeout!r}; pass timedelta(seconds=...)")
    if timeout <= timedelta(0):
        raise ConfigError(f"the timeout is {timeout.total_seconds():g} s; pass a timedelta above zero")
    return timeout


def check_int(name: str, value: object, *, least: int | None = None, most: int | None = None) -> None:
    """Check a number. Raises: ConfigError: it is not an int, or a bool, or not in the range."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; pass an int")
    # Python writes no number of thousands of digits.
    if least is not None and value < least:
        raise ConfigError(f"{name} is below {least}; pass a number from {least}")
    if most is not None and value > most:
        raise ConfigError(f"{name} is above {most}; pass a smaller number")


def check_rank_info(replica_id: object, group_rank: object, group_world_size: object) -> None:
    """Check who a process is. Raises: ConfigError: it names the argument."""
    if not isinstance(replica_id, str):
        raise ConfigError(f"replica_id is {replica_id!r}; pass a string")
    check_int("group_rank", group_rank, least=0)
    check_int("group_world_size", group_world_size, least=1)


def check_place(
    rank: int,
    world_size: int,
    *,
    replica_id: object = "",
    quorum_id: object = None,
    group_rank: object = 0,
    group_world_size: object = 1,
    global_ranks: Sequence[int] | None = None,
) -> None:
    """Check the arguments of a `configure`, without the store and the timeout. Raises: ConfigError: it names one."""
    check_int("rank", rank)
    check_int("world_size", world_size)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank} and world_size is {world_size}; pass a rank from 0 to world_size - 1")
    check_rank_info(replica_id, group_rank, group_world_size)
    if quorum_id is not None:
        check_int("quorum_id", quorum_id)
    if global_ranks is None:
        return
    if not isinstance(global_ranks, Sequence) or isinstance(global_ranks, (str, bytes)):
        raise ConfigError(f"global_ranks is {global_ranks!r}; pass a list with one int for each rank")
    if len(global_ranks) != world_size:
        raise ConfigError(
            f"global_ranks has {len(global_ranks)} entries and world_size is {world_size}; pass one for each rank"
        )
    for place, each in enumerate(global_ranks):
        check_int(f"global_ranks[{place}]", each, least=0)


def check_listening(*, interface: object = None, hostname: object = None) -> None:
    """Check where a group listens. Raises: ConfigError: an argument is no string, or both are given."""
    for name, value in (("interface", interface), ("hostname", hostname)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{name} is {value!r}; pass a string")
    if interface and hostname:
        raise ConfigError(f"name an interface ({interface}) or a hostname ({hostname}), not both")


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
