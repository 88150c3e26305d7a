"""The word of a round over the process group, and how long this rank keeps its connections after its last word.

Law of this file: which groups can exchange a word, and the call. The step core decides the content of a word and the
meaning of the sum.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final, TypeAlias, final

import torch.distributed as dist

from tft_algos.manager.config import STANDING_METHODS, ResolvedConfig
from tft_algos.manager.context import ManagerContext
from tft_algos.manager.interfaces import Coordinator, ProcessGroupLike, StandingCoordinator
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.types import QuorumKey
from tft_coord.errors import RequestTimeoutError
from tft_coord.timeouts import Timeouts
from tft_pg import ProcessGroup, WordExchange, WrappingProcessGroup, exchange_word_by_allreduce
from tft_pg.word import LINGER

Exchange: TypeAlias = Callable[..., WordExchange]
END_WITHIN_S: Final = 5.0
ANY_TIME_MS: Final = 7 * 24 * 3_600_000  # if a step has no time limit
CPU_BACKEND: Final = "gloo"  # foreign groups with this backend reduce tensors on the CPU


def exchange_of(group: ProcessGroupLike) -> Exchange | None:
    """Return the function that exchanges a word in that group; None: the group can't."""
    own = getattr(group, "exchange_word", None)
    if callable(own):
        return own  # type: ignore[no-any-return]
    if not isinstance(group, dist.ProcessGroup):
        return None
    name = ""
    with contextlib.suppress(Exception):  # the group is not configured yet, or torch has no name for it
        name = str(group.getBackendName())  # type: ignore[attr-defined]  # torch's stubs lack it
    return partial(exchange_word_by_allreduce, group) if CPU_BACKEND in name.lower() else None


def standing_coordinator(coordinator: Coordinator) -> StandingCoordinator | None:
    """Return the coordinator if its quorums may stand; None if not."""
    can = all(callable(getattr(coordinator, name, None)) for name in STANDING_METHODS)
    return coordinator if can else None  # type: ignore[return-value]


def lease_of(config: ResolvedConfig, group: ProcessGroupLike, coordinator: Coordinator) -> int | None:
    """Return the lease for this rank's requests; None: this rank sends no word and makes a request in every step.

    In an island, only rank 0 communicates with the others. Its other ranks could not announce in time that they want to
    request a quorum or leave.
    """
    can = exchange_of(group) is not None and standing_coordinator(coordinator) is not None
    return config.timeouts.lease_ms if can and not config.rank0_synchronization_only else None


def sent_timeout(timeouts: Timeouts) -> timedelta:
    """Return the time-out of a word that was sent before its sync ended.

    Meanwhile, this rank recovers, and all members train until their syncs end.
    """
    longest_ms = timeouts.slowest_step_ms or ANY_TIME_MS
    return timedelta(milliseconds=timeouts.heal_timeout_ms + longest_ms + timeouts.timeout_ms)


def _receive(exchange: WordExchange, sums: Future[tuple[int, ...]]) -> None:
    try:
        sums.set_result(exchange.wait())
    except BaseException as error:  # the thread that reads the result raises it
        sums.set_exception(error)


@dataclass(slots=True)
class _Sent:
    """A word that was sent before its sync ended: its quorum and round, and the future sum."""

    name: tuple[QuorumKey, int]
    sums: Future[tuple[int, ...]]
    thread: threading.Thread | None


@final
class ControlWords:
    """The words of one rank.

    Args:
        shared: what all parts share.
        group: the process group across replicas.
    """

    def __init__(self, shared: ManagerContext, group: ProcessGroupLike) -> None:
        self._exchange = exchange_of(group)
        self._group = group
        self._step = shared.step
        self._timeout = shared.config.timeout
        self._sent_timeout = sent_timeout(shared.config.timeouts)
        self._sent: _Sent | None = None
        self._monotonic = shared.clock.monotonic
        self._last_s: float | None = None  # when the last word was complete

    @property
    def is_ordered(self) -> bool:
        """Return whether words must keep the order of the reductions, as an allreduce must."""
        if self._exchange is None:
            return False
        group: object = self._group
        while isinstance(group, WrappingProcessGroup):
            group = group.parent
        own = getattr(group, "exchange_word", None)
        return own is None or getattr(inspect.unwrap(own), "__func__", None) is ProcessGroup.exchange_word

    def exchange(self, order: do.SendWord) -> on.WordEnded:
        """Exchange a word. Blocks until all members have sent theirs, or one can't."""
        begin, timeout = self._words, self._timeout
        if order.within_ms is not None:
            timeout = min(timeout, timedelta(milliseconds=order.within_ms))
        return self._ended(
            order.attempt, lambda: begin(order.values, round_number=order.round_number, timeout=timeout).wait()
        )

    def send(self, order: do.SendWord) -> None:
        """Send a word whose sum is read at the end of its sync.

        A thread receives the sum meanwhile, because in a large group the sums of others pass through this rank.
        """
        begin = self._words
        sent = self._sent = _Sent((order.key, order.round_number), Future(), None)
        try:
            exchange = begin(order.values, round_number=order.round_number, timeout=self._sent_timeout)
        except Exception as error:  # as in `_ended`
            sent.sums.set_exception(error)
            return
        sent.thread = threading.Thread(target=_receive, args=(exchange, sent.sums), name="tft-word", daemon=True)
        sent.thread.start()

    def hear(self, order: do.HearWord) -> on.WordEnded:
        """Wait for the sum of a word that was sent earlier."""
        sent = self._sent
        assert sent is not None, "the sum of a word that was not sent"
        assert sent.name == (order.key, order.round_number), (sent.name, order)
        return self._ended(order.attempt, partial(self._received, sent))

    @property
    def _words(self) -> Exchange:
        assert self._exchange is not None, "a control word from a rank that sends none"
        return self._exchange

    def _received(self, sent: _Sent) -> tuple[int, ...]:
        """Return the sum of a word that was sent earlier.

        Raises: RequestTimeoutError: the words of the others did not arrive in time. Any error that the exchange raised.
        """
        if not wait((sent.sums,), self._timeout.total_seconds()).done:
            key, number = sent.name
            raise RequestTimeoutError(
                f"timed out waiting for the control words of the other members of quorum {key} for step {number + 1}, "
                f"{self._timeout.total_seconds():g} s after this rank's own sync; the next step requests another quorum"
            )
        return sent.sums.result()

    def _ended(self, attempt: int, sums: Callable[[], tuple[int, ...]]) -> on.WordEnded:
        """Wait for the sum of a round's words. Return the event that reports it."""
        try:
            total = sums()
        except Exception as error:  # any error of the group, which may be the user's own; the round then has no word
            self._last_s = None
            return on.WordEnded(attempt, None, error)
        self._last_s = self._monotonic()
        return on.WordEnded(attempt, total)

    def close(self) -> None:
        """Wait for the receiving thread, which ends with the process group's connections."""
        sent, self._sent = self._sent, None
        if sent is not None and sent.thread is not None:
            sent.thread.join(END_WITHIN_S)

    def linger(self) -> None:
        """Keep the connections until the last word has had time to arrive. Called when this Manager ends.

        Inside a step the other members wait for this rank, and hear of its end by the end of its connections.
        """
        linger, status = getattr(self._group, "linger", None), self._step.status
        if self._last_s is None or not callable(linger) or self._group.errored() is not None:
            return
        if status.is_open or status.num_deferred:
            return
        left = LINGER.total_seconds() - (self._monotonic() - self._last_s)
        if left > 0:
            linger(LINGER * (left / LINGER.total_seconds()))
