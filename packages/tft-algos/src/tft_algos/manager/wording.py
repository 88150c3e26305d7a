"""The word of a round over the process group, and how long this rank's last word keeps its connections.

Law of this file: which groups can exchange a word, and the call. What it says, and what its sum means, is decided by
the step's core.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias, final

import torch.distributed as dist

from tft_algos.manager.config import STANDING_METHODS, ResolvedConfig
from tft_algos.manager.parts import Coordinator, Group, StandingCoordinator
from tft_algos.manager.shared import Shared
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_pg import ProcessGroup, WordExchange, exchange_word_by_allreduce
from tft_pg.word import LINGER

Exchange: TypeAlias = Callable[..., WordExchange]
CPU_BACKEND: Final = "gloo"  # of foreign groups these reduce tensors on the CPU


def exchange_of(group: Group) -> Exchange | None:
    """Return what exchanges a word in that group; None: it can't."""
    own = getattr(group, "exchange_word", None)
    if callable(own):
        return own  # type: ignore[no-any-return]
    if not isinstance(group, dist.ProcessGroup):
        return None
    name = ""
    with contextlib.suppress(Exception):  # it is not configured yet, or torch has no name for it
        name = str(group.getBackendName())  # type: ignore[attr-defined]  # torch has it, its stubs do not
    return partial(exchange_word_by_allreduce, group) if CPU_BACKEND in name.lower() else None


def standing_coordinator(coordinator: Coordinator) -> StandingCoordinator | None:
    """Return the coordinator, if its quorums may stand."""
    can = all(callable(getattr(coordinator, name, None)) for name in STANDING_METHODS)
    return coordinator if can else None  # type: ignore[return-value]


def lease_of(config: ResolvedConfig, group: Group, coordinator: Coordinator) -> int | None:
    """Return the lease that this rank says with its requests; None: it speaks no word and asks in every step.

    Of an island only rank 0 meets the others, so its other ranks could not say in time that they wish to ask or leave.
    """
    can = exchange_of(group) is not None and standing_coordinator(coordinator) is not None
    return config.timeouts.lease_ms if can and not config.rank0_synchronization_only else None


@final
class Wording:
    """The words of one rank.

    Args:
        shared: what all parts share.
        group: the process group across replicas.
    """

    def __init__(self, shared: Shared, group: Group) -> None:
        self._exchange = exchange_of(group)
        self._group = group
        self._timeout = shared.config.timeout
        self._monotonic = shared.clock.monotonic
        self._last_s: float | None = None  # when the last word was complete

    @property
    def is_ordered(self) -> bool:
        """Whether the words have to come in the order of the reductions, as an allreduce has to."""
        if self._exchange is None:
            return False
        own = getattr(self._group, "exchange_word", None)
        return own is None or getattr(inspect.unwrap(own), "__func__", None) is ProcessGroup.exchange_word

    def exchange(self, order: do.SendWord) -> on.WordEnded:
        """Exchange a word; blocks until all members have sent theirs, or one can't."""
        assert self._exchange is not None, "a word where this rank has said that it speaks none"
        try:
            exchange = self._exchange(order.values, round_number=order.round_number, timeout=self._timeout)
            sums = exchange.wait()
        except Exception as error:  # of the group, which may be the user's own: the round has no word then
            self._last_s = None
            return on.WordEnded(order.attempt, None, error)
        self._last_s = self._monotonic()
        return on.WordEnded(order.attempt, sums)

    def linger(self) -> None:
        """Keep the connections until the last word had time to pass; called when this Manager ends."""
        linger = getattr(self._group, "linger", None)
        if self._last_s is None or not callable(linger) or self._group.errored() is not None:
            return
        left = LINGER.total_seconds() - (self._monotonic() - self._last_s)
        if left > 0:
            linger(LINGER * (left / LINGER.total_seconds()))
