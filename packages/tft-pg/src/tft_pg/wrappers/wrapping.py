"""The shared base of all wrappers, which forwards the life cycle to the wrapped group.

A wrapper adds one thing to the collectives and changes nothing else, so wrappers stack in any order.

Law of this file: forwarding only; a subclass implements `_run`, and `_forget` and `_end` if it has state of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Concatenate, ParamSpec, TypeVar, final

import torch.distributed as dist

from tft_pg.base import ProcessGroup
from tft_pg.errors import ConfigError
from tft_pg.forwarding import forward
from tft_pg.handles import OwnHandle
from tft_pg.ops import Collective
from tft_pg.settings import checks_argument_order, refuses_errored_false
from tft_pg.word import LINGER, WordExchange

__all__ = ["ProcessGroupWrapper", "WrappingProcessGroup", "takes_one_group"]

_P = ParamSpec("_P")
_Self = TypeVar("_Self")


def takes_one_group(init: Callable[Concatenate[_Self, _P], None]) -> Callable[Concatenate[_Self, _P], None]:
    """Decorate a wrapper's `__init__` so that it takes one group, and all other arguments by keyword.

    Raises: ConfigError, from the constructor.
    """

    @functools.wraps(init)
    def checked(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        given = [*args, *([kwargs["pg"]] if "pg" in kwargs else [])]
        if len(given) != 1 or not isinstance(given[0], ProcessGroup):
            kind = type(self).__name__
            raise ConfigError(
                f"{kind} wraps one tft_pg.ProcessGroup, but got {given}; write {kind}(ProcessGroupGloo(timeout=...))"
            )
        init(self, *args, **kwargs)

    return checked


class WrappingProcessGroup(ProcessGroup):
    """Abstract base: a group that wraps another one. A subclass implements `_run`, which gets every collective.

    `_run(collective, args, kwargs)` returns a Work, often that of `forward(self.parent, collective, args, kwargs)`.
    `_forget` and `_end` do nothing here. A wrapper with state or waits of its own overrides them.

    Args:
        pg: the wrapped group. The wrapper owns its life from now on.
    """

    @takes_one_group
    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__()
        self._parent = pg

    @property
    def parent(self) -> ProcessGroup:
        """Return the wrapped group."""
        return self._parent

    def _forget(self) -> None:
        """Discard the wrapper's state of the previous configuration, before each `configure` of the wrapped group."""
        return

    def _end(self) -> None:
        """End the waits inside the wrapper, after `abort` and `shutdown` of the wrapped group."""
        return

    def prepare(self) -> None:
        self._parent.prepare()

    @checks_argument_order
    def configure(
        self,
        store_addr: str,
        rank: int,
        world_size: int,
        *,
        replica_id: str = "",
        quorum_id: int | None = None,
        group_rank: int = 0,
        group_world_size: int = 1,
        global_ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._forget()
        self._parent.configure(
            store_addr=store_addr,
            rank=rank,
            world_size=world_size,
            replica_id=replica_id,
            quorum_id=quorum_id,
            group_rank=group_rank,
            group_world_size=group_world_size,
            global_ranks=global_ranks,
            timeout=timeout,
        )

    @refuses_errored_false
    def abort(self) -> None:
        self._parent.abort()
        self._end()

    def shutdown(self) -> None:
        self._parent.shutdown()
        self._end()

    def errored(self) -> Exception | None:
        return self._parent.errored()

    def exchange_word(self, words: Sequence[int], *, round_number: int, timeout: timedelta) -> WordExchange:
        return self._parent.exchange_word(words, round_number=round_number, timeout=timeout)

    def linger(self, timeout: timedelta = LINGER) -> bool:
        return self._parent.linger(timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._parent.set_timeout(timeout)

    def size(self) -> int:
        return self._parent.size()

    def rank(self) -> int:
        return self._parent.rank()

    def _own_handle(self) -> OwnHandle:
        return self._parent._own_handle()

    def getBackendName(self) -> str:
        return self._parent.getBackendName()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._parent!r})"


@final
class ProcessGroupWrapper(WrappingProcessGroup):
    """A wrapper that adds nothing: every call goes to `parent`. A pattern for custom wrappers."""

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        return forward(self._parent, collective, args, kwargs)
