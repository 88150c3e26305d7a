"""The handle of one reduction: it ends, it divides, and it never raises into a training loop.

A reduction that fails leaves garbage in its tensor. That is harmless as long as nobody steps on it, so the failure is
reported, the step is voted down, and whoever waits just goes on.

Law of this file: one reduction and its own ending; which reductions there are, and what a failure means, is the
Manager's.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist


@contextlib.contextmanager
def changing(tensor: torch.Tensor) -> Iterator[None]:
    """What is done inside changes a tensor in place, behind autograd's back, as a process group does."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        yield


def fill_with_nothing(tensor: torch.Tensor, reduce_op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> None:
    """Make a tensor, in place, what changes nothing in a reduction: what a member gives that does not participate."""
    with changing(tensor):
        _fill(tensor, reduce_op)


def _fill(tensor: torch.Tensor, reduce_op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> None:
    if reduce_op == dist.ReduceOp.PRODUCT:
        tensor.fill_(1)
    elif reduce_op == dist.ReduceOp.MAX:
        tensor.fill_(_bounds(tensor.dtype)[0])
    elif reduce_op == dist.ReduceOp.MIN:
        tensor.fill_(_bounds(tensor.dtype)[1])
    elif reduce_op == dist.ReduceOp.BAND:
        tensor.zero_().bitwise_not_()
    else:
        tensor.zero_()


def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    """The least and the greatest value of a dtype."""
    if dtype.is_floating_point:
        return -math.inf, math.inf
    if dtype == torch.bool:
        return False, True
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


@final
class Reduction(dist.Work):
    """What `Manager.allreduce` returns.

    Args:
        work: of the process group.
        tensor: that is reduced, in place.
        divide_by: the reduced tensor is divided by this, in place, once; 1 for none.
        report: told of the failure, if there is one, once.
    """

    def __init__(
        self, work: dist.Work, tensor: torch.Tensor, *, divide_by: int, report: Callable[[Exception], None]
    ) -> None:
        super().__init__()
        self._work = work
        self._tensor = tensor
        self._divide_by = divide_by
        self._report = report
        self._lock = threading.Lock()
        self._ended: bool | None = None
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensor holds the result.

        Args:
            timeout: how long at most; None or zero: as long as the process group's own time-out allows.
        Returns: False if the reduction failed; the failure was reported and the step will not commit.
        """
        if self._ended is None:
            try:
                if timeout:
                    self._work.wait(timeout)
                else:
                    self._work.wait()
            except Exception as error:
                self._end(error)
            else:
                self._end(None)
        return bool(self._ended)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of `[tensor]` that is done when the tensor holds the result, or when the reduction has failed."""
        if self._future is None:
            future = self._work.get_future()
            self._future = future.then(self._end_of_future)
        return self._future

    def _end_of_future(self, future: torch.futures.Future[Any]) -> list[torch.Tensor]:
        try:
            future.value()
        except Exception as error:
            self._end(error)
        else:
            self._end(None)
        return [self._tensor]

    def _end(self, error: Exception | None) -> None:
        with self._lock:
            if self._ended is not None:
                return
            if error is None and self._divide_by != 1:
                error = self._divide()
            if error is not None:
                self._report(error)  # before anybody can see that it has ended, and vote
            self._ended = error is None

    def _divide(self) -> Exception | None:
        """Raises nothing: whoever waits only goes on."""
        try:
            with changing(self._tensor):
                self._tensor.div_(self._divide_by)
        except Exception as error:
            return error
        return None

    def is_completed(self) -> bool:
        return self._ended is not None or self._work.is_completed()

    def result(self) -> list[torch.Tensor]:
        return [self._tensor]

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()
