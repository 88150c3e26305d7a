"""Quantized reductions of one Manager, and the thread that moves them from their first half to the second.

All members must start the collectives of a group in the same order. A quantized reduction has two, and the second
starts when the first has ended, which is at another moment on each member. So one thread runs the quantized reductions
one after the other, and every other collective waits until that thread has started all of them. The order is then that
of the calls. On an accelerator, the order of its stream does the same without a thread.

Law of this file: the order of collectives. The halves of a reduction are in `tft_algos.collectives`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed as dist

from tft_algos.agreement import Agreement
from tft_algos.collectives import ChunkExchange, check_dense, check_group, check_operation
from tft_algos.encoded_work import EncodedWork, Exchange
from tft_algos.errors import ConfigError, ContributionError
from tft_algos.gathered import RowExchange
from tft_algos.quantization.codecs import Codec, Int8, check_quantizable
from tft_algos.quantization.feedback import Compensation, FeedbackSlot
from tft_algos.quantization.top_k import TopK
from tft_pg import AbortedError, CollectiveTimeoutError
from tft_pg.forks import Inheritance, let_go_in_child
from tft_pg.threads import join_within

_DEFAULT: Final = Int8()


@final
@dataclass(frozen=True, slots=True)
class Quantizer:
    """How one tensor is quantized.

    Args:
        codec: encodes the numbers.
        slot: of the tensor's error feedback. None: there is no feedback.
    """

    codec: Codec
    slot: FeedbackSlot | None = None


def quantizer_of(
    should_quantize: object, tensor: torch.Tensor, reduce_op: object, *, group: object, manager: object
) -> Quantizer:
    """Return how to quantize a tensor. See `Manager.allreduce`. `should_quantize` is not False.

    Args:
        group: the process group. None: another rank reduces for this one.
        manager: to which a slot must belong. None: the caller knows that it does.
    Raises: ConfigError: should_quantize is none of its types, or a slot of another Manager. UnsupportedFeatureError:
        the operation, the tensor or the group can't be used.
    """
    if isinstance(should_quantize, FeedbackSlot):
        if manager is not None and should_quantize.manager is not manager:
            raise ConfigError(
                f"the slot {should_quantize.name!r} belongs to the ErrorFeedback of another Manager, which keeps its "
                "state; give a slot of ErrorFeedback(manager)"
            )
        quantizer = Quantizer(should_quantize.codec, should_quantize)
    elif isinstance(should_quantize, Codec):
        check_dense(should_quantize)
        quantizer = Quantizer(should_quantize)
    elif should_quantize is True:
        quantizer = Quantizer(_DEFAULT)
    else:
        raise ConfigError(
            f"should_quantize is {should_quantize!r}; give True, False, a codec of tft_algos.quantization, or a slot "
            "of an ErrorFeedback"
        )
    check_operation(reduce_op)
    check_quantizable(tensor)
    if group is not None:
        check_group(group)
    return quantizer


@final
class QuantizedReductions:
    """The quantized reductions of one Manager. Its thread starts with the first one and ends with `close`.

    Args:
        group: the process group, with the collectives that `check_group` names.
        timeout: maximum time of one reduction, until its last collective has started.
    """

    def __init__(self, group: Any, *, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout
        self._num_advanced = 0
        self._works: deque[tuple[EncodedWork, int]] = deque()  # with its configuration. The first one is under way
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._issuing = threading.Lock()
        self._configuration = 0

    def start(
        self,
        tensor: torch.Tensor,
        codec: Codec,
        compensation: Compensation | None,
        *,
        text: str,
        read_later: bool = False,
    ) -> EncodedWork:
        """Start the sum of a tensor over the members, in place. The caller has checked the tensor.

        Args:
            tensor: receives the sum.
            codec: encodes the numbers.
            compensation: error feedback of the tensor.
            text: of `describe`, which must be equal on all members.
            read_later: the caller reads `agreement.failure()` of the returned Work. Only on an accelerator.
        Raises: errors of the process group, for a tensor on an accelerator.
        """
        configuration = self._configuration
        agreement = Agreement(
            self._group,
            text,
            tensor.device,
            issue=lambda start: self._issue(start, configuration),
            member="replica rank",
            read_later=read_later,
        )
        work = self._work(tensor, codec, compensation, agreement)
        if tensor.device.type != "cpu":
            self.drain()
            work.begin()
            work.advance()
            if work.failure is not None:
                raise work.failure
            return work
        with self._changed:
            if self._thread is None:
                let_go_in_child(self)
                self._thread = threading.Thread(target=self._run, name="tft-quantized", daemon=True)
                self._thread.start()
            self._works.append((work, configuration))
            self._changed.notify_all()
        return work

    def _work(
        self, tensor: torch.Tensor, codec: Codec, compensation: Compensation | None, agreement: Agreement
    ) -> EncodedWork:
        issue = agreement.issue
        if isinstance(codec, TopK):
            assert compensation is not None, "a sparse reduction without error feedback"
            exchange: Exchange = RowExchange(self._group, codec, tensor, compensation=compensation, issue=issue)
        else:
            exchange = ChunkExchange(
                self._group, codec, [tensor], average=False, compensation=compensation, issue=issue
            )
        return EncodedWork(exchange, agreement, [tensor], driver=self if tensor.device.type == "cpu" else None)

    def drain(self) -> None:
        """Wait until all collectives of earlier quantized reductions have started, or failed.

        Raises: CollectiveTimeoutError, as `await_until`.
        """
        if self._works:
            self.await_until(lambda: not self._works, None)

    def await_until(self, done: Callable[[], bool], timeout: timedelta | None) -> None:
        """Wait until the thread of this object has made `done` true.

        Args:
            timeout: for the whole wait. None: the time-out of one reduction, which starts again whenever one advances.
        Raises: CollectiveTimeoutError: the time-out has passed. The process group was aborted.
        """
        limit_s = (self._timeout if timeout is None else timeout).total_seconds()
        ends_at = time.monotonic() + limit_s
        with self._changed:
            while not done():
                advanced = self._num_advanced
                if not self._changed.wait(ends_at - time.monotonic()) and not done():
                    break
                if timeout is None and self._num_advanced != advanced:
                    ends_at = time.monotonic() + limit_s
            else:
                return
            num_behind = max(len(self._works) - 1, 0)
            configuration = self._works[0][1] if self._works else self._configuration
        self._abort(configuration)
        raise CollectiveTimeoutError(
            f"a quantized reduction timed out after {limit_s:g} s and was aborted, with {num_behind} behind it; the "
            "next step requests another quorum (on a slow link, raise the Manager's timeout)"
        )

    def group_changes(self) -> None:
        """Prepare for a new configuration of the group: no later half of an earlier reduction starts in it."""
        with self._issuing:
            self._configuration += 1

    def close(self, *, wait: bool) -> None:
        """End the thread. The group was shut down, so that no operation runs."""
        with self._changed:
            self._closed = True
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None and wait:
            join_within(thread)

    def forked(self) -> Inheritance:
        """Forget the thread and its work in a forked child."""
        self._works.clear()
        self._changed, self._issuing = threading.Condition(), threading.Lock()
        self._thread, self._closed = None, True
        return Inheritance()

    def _issue(self, start: Callable[[], dist.Work], configuration: int) -> dist.Work:
        with self._issuing:
            if configuration != self._configuration:
                raise AbortedError(
                    "a quantized reduction was aborted, because the process group was configured again; the next step "
                    "reduces again"
                )
            return start()

    def _abort(self, configuration: int) -> None:
        """Abort the group after a failure, unless it was configured again.

        The other members may have started a collective that this member has not. Its next collective must not meet that
        one.
        """
        with self._issuing:
            if configuration == self._configuration and self._group.errored() is None:
                self._group.abort()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._works or self._closed)
                if not self._works:
                    return
                work, configuration = self._works[0]
            work.advance()
            # All members have found a ContributionError, so their collectives are still in the same order.
            if work.failure is not None and not isinstance(work.failure, ContributionError):
                self._abort(configuration)
            with self._changed:
                self._works.popleft()
                self._num_advanced += 1
                self._changed.notify_all()
