"""Quantized reductions of one Manager, and the thread that moves them from their first half to the second.

All members must start the collectives of a group in the same order. A quantized reduction has two, and the second
starts when the first has ended, which is at another moment on each member. So one thread runs the quantized reductions
one after the other, and every other collective waits until that thread has started all of them. The order is then that
of the calls. On an accelerator, the order of its stream does the same without a thread.

Law of this file: the order of collectives. The halves of a reduction are in `tft_algos.collectives`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.distributed as dist

from tft_algos.collectives import QuantizedWork, check_group, check_operation
from tft_algos.errors import ConfigError
from tft_algos.quantization.codecs import Codec, Int8, check_quantizable
from tft_algos.quantization.feedback import Compensation, FeedbackSlot
from tft_pg import AbortedError, DummyWork
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
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._works: deque[tuple[QuantizedWork, int]] = deque()  # with its configuration. The first one is under way
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._issuing = threading.Lock()
        self._configuration = 0

    def start(self, tensor: torch.Tensor, codec: Codec, compensation: Compensation | None) -> dist.Work:
        """Start the sum of a tensor over the members, in place. The caller has checked the tensor.

        Raises: errors of the process group, for a tensor on an accelerator.
        """
        if not tensor.numel():
            return DummyWork([tensor])
        configuration = self._configuration
        work = QuantizedWork(
            self._group,
            codec,
            [tensor],
            average=False,
            compensation=compensation,
            is_driven=tensor.device.type == "cpu",
            issue=lambda start: self._issue(start, configuration),
        )
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

    def drain(self) -> None:
        """Wait until all collectives of earlier quantized reductions have started, or failed.

        The halves have the time-out of the process group, and an abort ends them.
        """
        if self._works:
            with self._changed:
                self._changed.wait_for(lambda: not self._works)

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
            if work.failure is not None:
                self._abort(configuration)
            with self._changed:
                self._works.popleft()
                self._changed.notify_all()
