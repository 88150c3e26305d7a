"""The reductions of one member, as the step core orders them.

Law of this file: starting reductions and keeping those in flight. The core decides the contribution and the divisor.
The end of a reduction is in `reduction`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Final, TypeAlias, final

import torch
import torch.distributed as dist

from tft_algos.agreement import Agreement, describe
from tft_algos.errors import UnsupportedFeatureError, UsageError, ZeroWeightError
from tft_algos.manager.interfaces import Clock, ProcessGroupLike
from tft_algos.manager.reduce.quantized import QuantizedReductions, Quantizer
from tft_algos.manager.reduce.reduction import (
    Denominator,
    LostReduction,
    Reduction,
    check_weight,
    check_writable,
    fill_with_neutral,
    times,
)
from tft_algos.manager.step.mailbox import StepMailbox
from tft_algos.manager.step.own_time import OwnTime
from tft_algos.quantization.codecs import Codec
from tft_algos.quantization.feedback import Compensation
from tft_coord.core.step import StepName
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_pg import DummyWork

ReduceOp: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"

Report: TypeAlias = Callable[[Exception, StepName], None]
Unread: TypeAlias = Denominator | Agreement

_AVG: Final = dist.ReduceOp.AVG
_SUM: Final = dist.ReduceOp.SUM


@final
class Started:
    """The reductions that were started in one step and are not released yet.

    Args:
        report: receives each failure and its step.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._reductions: list[Reduction] = []
        self._unread: list[tuple[Unread, StepName]] = []
        self._compensations: list[Compensation] = []

    def compensate(self, compensation: Compensation) -> None:
        """Add the error feedback of a reduction. `settle` ends it."""
        self._compensations.append(compensation)

    def settle(self, attempt: int | None, *, committed: bool) -> None:
        """End the error feedback of an attempt, which has committed or not. None: of all attempts."""
        for compensation in tuple(self._compensations):
            if attempt in (None, compensation.attempt):
                self._compensations.remove(compensation)
                compensation.settle(committed=committed)

    def add(self, reduction: Reduction) -> None:
        """Add a reduction that was started."""
        self._reductions.append(reduction)

    def read_later(self, unread: Unread, name: StepName) -> None:
        """Record a denominator or a comparison that only the device knows. `release` reads it."""
        self._unread.append((unread, name))

    @property
    def runs(self) -> bool:
        """Return whether a reduction is under way. Any thread may call this."""
        return any(not reduction.is_completed() for reduction in tuple(self._reductions))

    def finish(self) -> None:
        """Wait until all reductions have ended."""
        for reduction in self._reductions:
            reduction.wait()

    def release(self) -> None:
        """Read what was recorded and release all reductions. The caller has synchronized the device."""
        for unread, name in self._unread:
            failure = unread.failure()
            if failure is not None:
                self._report(failure, name)
        self.release_all()

    def release_all(self) -> None:
        """Release all reductions, because no caller needs their results any more."""
        for reduction in self._reductions:
            reduction.release()
        self._reductions.clear()
        self._unread.clear()


@final
class Reducer:
    """The starter of one member's reductions.

    Args:
        group: the process group.
        step: decides each reduction, and receives each failure.
        clock: measures time-outs.
        own_time: told when this member has given its contribution.
        waits: a context that is entered while a caller waits for a result.
        timeout: maximum time of one quantized reduction.
    """

    def __init__(
        self,
        group: ProcessGroupLike,
        step: StepMailbox,
        clock: Clock,
        *,
        own_time: OwnTime,
        waits: contextlib.AbstractContextManager[None],
        timeout: timedelta,
    ) -> None:
        self._group = group
        self._step = step
        self._clock = clock
        self._own_time = own_time
        self._waits = waits
        self._started = Started(self._report)
        self._aside: list[Started] = []  # of deferred steps
        self.num_started = 0  # since the start of this Manager
        self._denominators: dict[torch.device, Denominator] = {}  # sums of the step's weight
        self.quantized = QuantizedReductions(group, timeout=timeout)

    def set_weight(self, weight: float) -> None:
        """Set the weight of the open step. See `Manager.set_weight`."""
        self._step.tell(on.WeightSet(check_weight(weight)))

    def step_begins(self) -> None:
        """Begin a new step, which has no weight yet."""
        self._denominators.clear()
        self._started.settle(None, committed=False)  # of an attempt without a verdict

    def step_ended(self, name: StepName, *, committed: bool) -> None:
        """Keep or drop the error feedback of a step that has ended."""
        for started in (self._started, *self._aside):
            started.settle(name.attempt, committed=committed)

    @property
    def reduces(self) -> bool:
        """Return whether a reduction of any step is under way. Any thread may call this."""
        return self._started.runs or any(started.runs for started in tuple(self._aside))

    def detach(self) -> Started:
        """Detach the open step, which then runs at the same time as later steps.

        Returns: what was started in the step. The end of the step must pass it to `forget`.
        """
        started, self._started = self._started, Started(self._report)
        self._aside.append(started)
        self.step_begins()
        return started

    def forget(self, started: Started) -> None:
        """Release the reductions of a deferred step that is over."""
        started.release_all()
        started.settle(None, committed=False)
        if started in self._aside:
            self._aside.remove(started)

    def finish(self) -> None:
        """Wait until all reductions of the open step have ended."""
        self._started.finish()

    def release(self) -> None:
        """Read the recorded denominators and release all reductions. The caller has synchronized the device."""
        self._started.release()
        self._denominators.clear()  # the Work of a backend keeps connections

    def release_all(self) -> None:
        """Release all reductions of the open step, because no caller needs their results any more."""
        self._started.release_all()
        self._denominators.clear()

    def close(self) -> None:
        """Release everything that was started. No reduction may follow."""
        for started in tuple(self._aside):
            self.forget(started)
        self.release()

    def reduce(
        self,
        tensor: torch.Tensor,
        reduce_op: ReduceOp,
        *,
        weight: float | None,
        limit: timedelta | None,
        quantizer: Quantizer | None = None,
    ) -> dist.Work:
        """Start a reduction. See `Manager.allreduce`. Call this after the plan has arrived, or when there is none.

        Args:
            tensor: the tensor to reduce.
            reduce_op: the operation.
            quantizer: of the tensor. None: the tensor is sent as it is.
            weight: the weight of this reduction alone. None: the step's weight, if it has one.
            limit: maximum time.
        """
        (order,) = self._step.tell(on.ReductionAsked(reduce_op == _AVG, weight))
        match order:
            case do.Reduce():
                return self._start(order, tensor, reduce_op, limit, quantizer)
            case do.ReduceAlone():
                return self._alone(tensor, order.weight, order.name)
            case do.KeepTensor():
                return DummyWork([tensor])
            case do.LoseReduction(aborts):
                if aborts:
                    self._abort_group()
        return LostReduction(tensor)

    def _start(
        self,
        order: do.Reduce,
        tensor: torch.Tensor,
        reduce_op: ReduceOp,
        limit: timedelta | None,
        quantizer: Quantizer | None,
    ) -> dist.Work:
        name, average = order.name, reduce_op == _AVG
        if order.inside:
            self._own_time.mark()
        else:
            failure = self._group.errored()
            if failure is not None:
                self._report(failure, name)
                return LostReduction(tensor)
        compensation = None if quantizer is None else self._compensation(order, quantizer, tensor, average=average)
        try:
            denominator = None if order.weight is None else self._denominator(order, order.weight, tensor.device)
            if not order.gives:
                fill_with_neutral(tensor, reduce_op)
            data = times(tensor, order.factor if order.gives else 1.0, widens=average)
            if quantizer is None:
                self.quantized.drain()
                work = self._group.allreduce([data], _SUM if average else reduce_op)
            else:
                work = self._start_quantized(order, tensor, data, quantizer.codec, compensation, average=average)
        except Exception as error:
            self._report(error, name)
            if order.num_others:
                self._abort_group()
            return LostReduction(tensor)
        reduction = Reduction(
            work,
            data,
            divide_by=denominator or order.divide_by,
            report=lambda error: self._report(error, name),
            abort=self._group.abort,
            clock=self._clock,
            into=tensor,
            limit=limit,
            name=str(name),
            waits=self._waits,
        )
        self._started.add(reduction)
        self.num_started += 1
        return reduction

    def _compensation(
        self, order: do.Reduce, quantizer: Quantizer, tensor: torch.Tensor, *, average: bool
    ) -> Compensation | None:
        """Begin the error feedback of a reduction, if it has one.

        Raises: UsageError: the reduction belongs to no step, or its slot is of another size, or in use by a step that
            may still commit.
        """
        slot = quantizer.slot
        if slot is None:
            return None
        if not order.inside:
            raise UsageError(
                f"error feedback of {slot.name!r} was asked for between two steps, where nothing commits; call "
                "allreduce between start_quorum and should_commit, or without feedback"
            )
        kind, scale = ("mean", order.factor) if average else ("sum", 1.0)
        if order.weight is not None:
            # A sum of weights that has one participant has another scale.
            plan = self._step.status.plan
            alone = plan is not None and plan.num_participants == 1
            kind, scale = "alone" if alone else "weighted", 1.0
        if slot.pending is not None and not self._may_commit(slot.pending.attempt, order.name):
            slot.pending = None
        compensation = slot.begin(tensor, order.name.attempt, kind=kind, scale=scale)
        self._started.compensate(compensation)
        return compensation

    def _may_commit(self, attempt: int, current: StepName) -> bool:
        """Return whether an attempt that uses a slot is the current one, or in flight and not abandoned."""
        if attempt == current.attempt:
            return True
        status = self._step.status.attempt(attempt)
        return status is not None and status.abandoned is None

    def _start_quantized(
        self,
        order: do.Reduce,
        tensor: torch.Tensor,
        data: torch.Tensor,
        codec: Codec,
        compensation: Compensation | None,
        *,
        average: bool,
    ) -> dist.Work:
        """Start a quantized reduction. `data` is the tensor, or a wider copy of it."""
        # Outside a step, the caller waits for the result, so it may wait for the device as well.
        read_later = order.inside and tensor.device.type != "cpu"
        text = describe(codec, "mean" if average else "sum", [tensor])
        work = self.quantized.start(data, codec, compensation, text=text, read_later=read_later)
        if read_later:
            self._started.read_later(work.agreement, order.name)
        return work

    def _denominator(self, order: do.Reduce, weight: float, device: torch.device) -> Denominator:
        """Start the sum of the weights. The sum of the step's own weight is started once and shared."""
        if order.shared and device in self._denominators:
            return self._denominators[device]
        total = torch.full((1,), weight, dtype=torch.float64, device=device)
        # Outside a step, the caller waits for one number, so it may wait for the device as well.
        read_later = order.inside and device.type != "cpu"
        self.quantized.drain()
        work = self._group.allreduce([total], _SUM)
        denominator = Denominator(work, total, name=str(order.name), read_later=read_later)
        if order.shared:
            self._denominators[device] = denominator
        if read_later:
            self._started.read_later(denominator, order.name)
        return denominator

    def _alone(self, tensor: torch.Tensor, weight: float | None, name: StepName) -> dist.Work:
        # A tensor that fails with other members must also fail without them.
        if tensor.layout is not torch.strided or tensor.is_meta:
            kind = "on the meta device" if tensor.is_meta else f"{tensor.layout}"
            self._report(
                UnsupportedFeatureError(f"a tensor that is {kind} can't be reduced; give a dense one with memory"), name
            )
            return LostReduction(tensor)
        try:
            check_writable(tensor)
        except UnsupportedFeatureError as error:
            self._report(error, name)
            return LostReduction(tensor)
        if weight == 0.0:
            self._report(
                ZeroWeightError(
                    f"the weight of the only participant of {name} is zero, so there is no mean; give a finite weight "
                    "above zero"
                ),
                name,
            )
            return LostReduction(tensor)
        return DummyWork([tensor])

    def _abort_group(self) -> None:
        """Abort the group, so that the other members do not wait in this reduction."""
        if self._group.errored() is None:
            self._group.abort()

    def _report(self, error: Exception, name: StepName) -> None:
        self._step.tell(on.ErrorReported(error, name))
