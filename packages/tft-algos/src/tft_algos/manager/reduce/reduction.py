"""The handle of one reduction. It ends, it divides, and it never raises into a training loop.

A failed reduction leaves undefined data in its tensor. This is harmless if the optimizer does not step on it. So the
failure is reported, the step is voted down, and waiting callers continue.

A weighted mean is a sum of products, divided by the sum of the weights. Both sums are reduced at the same time, and the
division comes last.

Law of this file: one reduction and its end. Which reductions exist, and the effect of a failure, are decided elsewhere.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed as dist

from tft_algos.errors import ConfigError, UnsupportedFeatureError, UsageError, ZeroWeightError
from tft_algos.manager.interfaces import Clock
from tft_pg.errors import CollectiveTimeoutError

MOST_WEIGHT: Final = 1e18  # keeps the product with a gradient, and sums of such products, in the range of float32
# Means of these dtypes are reduced in a wider copy. In the original dtype, a product with a token count overflows, and
# a small gradient that is scaled before the sum underflows.
_WIDER: Final = {torch.float16: torch.float32, torch.complex32: torch.complex64}
_UNTOLD: Final = contextlib.nullcontext()


@contextlib.contextmanager
def changing(tensor: torch.Tensor) -> Iterator[None]:
    """Allow changes of a tensor in place without autograd, as a process group makes them."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        yield


def fill_with_neutral(tensor: torch.Tensor, reduce_op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> None:
    """Fill a tensor with the neutral value of a reduction. A member that does not participate contributes this."""
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
    """Return the lowest and the highest value of a dtype."""
    if dtype.is_floating_point:
        return -math.inf, math.inf
    if dtype == torch.bool:
        return False, True
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def check_weight(weight: object) -> float:
    """Return the weight as a float, checked.

    Raises: ConfigError: the value can't be a weight.
    """
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise ConfigError(
            f"weight is a {type(weight).__name__}; give a number, such as the samples or tokens in this replica's batch"
        )
    try:
        value = float(weight)
    except OverflowError:  # a whole number outside the range of floats
        value = math.inf
    if not 0.0 <= value < math.inf:
        raise ConfigError(f"weight is {value:g}; give a finite number that is not below zero")
    if value != 0.0 and not 1.0 / MOST_WEIGHT <= value <= MOST_WEIGHT:
        raise ConfigError(
            f"weight is {value:g}, by which a gradient can't be multiplied in its own dtype; give zero, or a number "
            f"between {1.0 / MOST_WEIGHT:g} and {MOST_WEIGHT:g}"
        )
    return value


def check_arguments(
    tensor: torch.Tensor,
    reduce_op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    weight: float | None,
) -> float | None:
    """Check the arguments of `Manager.allreduce`, and return the weight.

    Raises: as `Manager.allreduce`.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"allreduce was given a {type(tensor).__name__}; give one tensor")
    if not isinstance(reduce_op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        raise UsageError(f"reduce_op is {reduce_op!r}; give one of torch's, such as torch.distributed.ReduceOp.AVG")
    if reduce_op == dist.ReduceOp.PREMUL_SUM:
        raise UnsupportedFeatureError(
            "PREMUL_SUM is not supported; multiply the tensor, and reduce it with ReduceOp.SUM"
        )
    average = reduce_op == dist.ReduceOp.AVG
    if average and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"an average needs a floating point tensor, and this one is {tensor.dtype}; use ReduceOp.SUM")
    if weight is None:
        return None
    value = check_weight(weight)
    if not average:
        raise ConfigError(f"a weight belongs to ReduceOp.AVG, and this reduction is {reduce_op}; leave it out")
    return value


def check_writable(tensor: torch.Tensor) -> None:
    """Check that no two elements of a dense tensor share memory, because such a tensor can't be filled.

    Raises: UnsupportedFeatureError: several elements share memory.
    """
    if tensor.is_contiguous():
        return
    end = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride <= end:
            raise UnsupportedFeatureError(
                f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} can't be reduced in "
                "place, because several of its elements share memory; reduce tensor.contiguous()"
            )
        end += stride * (length - 1)


def canonical(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if its elements are in order, otherwise a copy with the elements in order.

    Backends reduce memory, not elements. If one replica's tensor is transposed or channels_last and another's is not,
    they would add elements of different positions, without an error.

    Raises: UnsupportedFeatureError: the result could not be written back, because elements share memory.
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor
    check_writable(tensor)
    return tensor.contiguous()


def times(tensor: torch.Tensor, factor: float, *, widens: bool) -> torch.Tensor:
    """Return a member's contribution to a mean: the tensor, multiplied in place, or a multiplied copy of it.

    Args:
        tensor: the tensor to reduce.
        factor: a weight, a scale, or their product.
        widens: reduce a narrow dtype in a wider copy.
    Raises: UnsupportedFeatureError, as `canonical`.
    """
    wider = _WIDER.get(tensor.dtype) if widens else None
    with changing(tensor):
        product = canonical(tensor)
        if wider is not None:
            product = product.to(wider)
        if factor == 0.0:
            product.zero_()  # a multiplication by zero would keep NaN and infinity
        elif factor != 1.0:
            product.mul_(factor)
    return product


@final
class Denominator:
    """The sum of the weights, reduced beside the data that it divides.

    Args:
        work: the Work of the process group.
        total: one element, float64, on the data's device, scaled like the data.
        name: the name of the step, for a message.
        read_later: the sum is on a device, and this object does not wait for it. The caller of `failure` has waited.
    """

    def __init__(self, work: dist.Work, total: torch.Tensor, *, name: str, read_later: bool) -> None:
        self.work = work
        self.read_later = read_later
        self._total = total
        self._name = name

    def divide(self, tensor: torch.Tensor) -> None:
        """Divide a tensor in place by the sum of the weights.

        Raises: ZeroWeightError: the sum can't divide. Nothing was divided.
        """
        if self.read_later:
            tensor.div_(self._total[0])  # without a dimension, so that the result keeps the dtype of `tensor`
            return
        failure = self.failure()
        if failure is not None:
            raise failure
        total = self._total.item()
        if total != 1.0:
            tensor.div_(total)

    def failure(self) -> ZeroWeightError | None:
        """Return why the sum can't divide; None: it can. Waits for the device."""
        total = float(self._total.item())
        if 0.0 < total < math.inf:
            return None
        return ZeroWeightError(
            f"the weights of {self._name} sum to {total:g} over all contributing participants, so there is no mean; "
            "give a finite weight above zero on at least one participant"
        )


@final
class LostReduction(dist.Work):
    """A reduction that could not be started. It has ended with a failure.

    Args:
        tensor: the tensor that was to be reduced. It may already hold this replica's own part of the mean.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def wait(self, timeout: timedelta | None = None) -> bool:
        return False

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self._tensor])
        return future

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return [self._tensor]

    def synchronize(self) -> None:
        return None

    def block_current_stream(self) -> None:
        return None


@final
class Reduction(dist.Work):
    """The result of `Manager.allreduce`.

    Args:
        work: the Work of the process group.
        tensor: the tensor to reduce, in place.
        divide_by: the reduced tensor is divided by this once, in place. 1: no division.
        report: receives the failure once, if there is one.
        abort: aborts the running operations of the process group. It is called after a time-out.
        clock: measures time-outs.
        into: receives the result, if `tensor` is a copy of it.
        limit: maximum time from now. None: the time-out of the process group.
        name: the name of the step, for a message.
        waits: a context that is entered while a caller waits for the result.
    """

    def __init__(
        self,
        work: dist.Work,
        tensor: torch.Tensor,
        *,
        divide_by: float | Denominator,
        report: Callable[[Exception], None],
        abort: Callable[[], None],
        clock: Clock,
        into: torch.Tensor | None = None,
        limit: timedelta | None = None,
        name: str = "this step",
        waits: contextlib.AbstractContextManager[None] = _UNTOLD,
    ) -> None:
        super().__init__()
        self._waits = waits
        self._works = (work, divide_by.work) if isinstance(divide_by, Denominator) else (work,)
        self._tensor = tensor
        self._into = tensor if into is None else into
        self._divide_by = divide_by
        self._report = report
        self._abort = abort
        self._clock = clock
        self._name = name
        self._lock = threading.RLock()
        self._ended: bool | None = None
        self._late = False
        self._future: torch.futures.Future[Any] | None = None
        self._no_alarm: Callable[[], object] | None = None if limit is None else self._start_timer(limit)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensor holds the result.

        Args:
            timeout: maximum wait. None or zero: the time-out of the process group. After it, the reduction has failed,
                and running operations of the process group are aborted. Other members may already have data that is
                missing here.
        Returns: False: the reduction failed. The failure was reported and the step does not commit.
        Raises: UsageError: timeout is not a timedelta.
        """
        if timeout is not None and not isinstance(timeout, timedelta):
            raise UsageError(f"wait was given the timeout {timeout!r}; give a timedelta: timedelta(seconds=5)")
        if self._ended is not None:
            return self._ended
        no_alarm = self._start_timer(timeout) if timeout else None
        try:
            with self._waits:
                for work in self._works:
                    work.wait()
        except Exception as error:
            self._end(error)
        else:
            self._end(None)
        finally:
            if no_alarm is not None:
                no_alarm()
        return bool(self._ended)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of `[tensor]` that is done when the tensor holds the result, or the reduction has failed.

        The future never holds an error. A callback chained with `then` sees the mean, not the sum.
        """
        if self._future is None:
            errors: list[Exception] = []

            def noted(future: torch.futures.Future[Any]) -> None:
                try:
                    future.value()
                except Exception as error:
                    errors.append(error)

            def ended(_: object) -> list[torch.Tensor]:
                self._end(errors[0] if errors else None)
                return [self._into]

            # Each future is made to succeed. Otherwise the first failure would complete all, while another one still
            # runs.
            futures = [work.get_future().then(noted) for work in self._works]
            self._future = (
                torch.futures.collect_all(futures).then(ended) if len(futures) > 1 else futures[0].then(ended)
            )
        return self._future

    def release(self) -> None:
        """Cancel the time-out. The device has finished, or the step is over."""
        no_alarm, self._no_alarm = self._no_alarm, None
        if no_alarm is not None:
            no_alarm()

    def _start_timer(self, limit: timedelta) -> Callable[[], object]:
        return self._clock.after(limit.total_seconds(), lambda: self._timed_out(limit))

    def _timed_out(self, limit: timedelta) -> None:
        """Report a time-out and abort.

        Runs on the clock's thread. Waiting callers continue after the abort, without a result.
        """
        with self._lock:
            if self._late or all(work.is_completed() for work in self._works):
                return
            self._late = True
            self._report(
                CollectiveTimeoutError(
                    f"a reduction of {self._name} timed out after {limit.total_seconds():g} s and was aborted; the "
                    "next step requests another quorum"
                )
            )
        self._abort()

    def _end(self, error: Exception | None) -> None:
        with self._lock:
            if self._ended is not None:
                return
            if error is None and not self._late:
                error = self._divide()
            if error is not None and not self._late:
                self._report(error)  # report before a caller can see the end and vote
            self._ended = error is None and not self._late
        if self._into.device.type == "cpu":
            self.release()

    def _divide(self) -> Exception | None:
        """Divide and write back the result. Return an error instead of raising it, so that callers continue."""
        if self._divide_by == 1 and self._into is self._tensor:
            return None
        try:
            with changing(self._into):
                if isinstance(self._divide_by, Denominator):
                    self._divide_by.divide(self._tensor)
                elif self._divide_by != 1:
                    self._tensor.div_(self._divide_by)
                if self._into is not self._tensor:
                    self._into.copy_(self._tensor)
        except Exception as error:
            return error
        return None

    def is_completed(self) -> bool:
        return self._ended is not None or all(work.is_completed() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        return [self._into]

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()
