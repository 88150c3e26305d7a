"""The reductions of one member: which of them it gives to, with what weight, and what they are divided by.

Inside a step a member either gives or, while it heals or is a spare, takes part with what changes nothing; after an
error of the step it stays out, and ends for the others what they would wait for in vain. Between a verdict and the next
quorum nothing is at stake any more: whoever has a usable group takes part, and gives if it has committed the step, so
that a mean is over those that did. How many they are nobody knows beforehand, so that mean is always a weighted one.

Law of this file: starting reductions and keeping what is in flight; how one ends is `reduction`'s, and what its failure
means `core`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Final, TypeAlias, final

import torch
import torch.distributed as dist

from tft_algos.errors import NoWeight, Unsupported, UsageError
from tft_algos.manager.attempt import StepName
from tft_algos.manager.core import Phase, StepCore
from tft_algos.manager.own_time import OwnTime
from tft_algos.manager.parts import Clock, Group
from tft_algos.manager.reduction import (
    WEIGHT_SCALE,
    Denominator,
    LostReduction,
    Reduction,
    check_weight,
    check_writable,
    fill_with_nothing,
    mean_factors,
    times,
)
from tft_coord.core.types import Plan
from tft_pg import DummyWork

ReduceOp: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"

Report: TypeAlias = Callable[[Exception, StepName], None]

_AVG: Final = dist.ReduceOp.AVG
_SUM: Final = dist.ReduceOp.SUM


@final
class Started:
    """What was started in one step and is not let go of.

    Args:
        report: told of each failure and of the step that it belongs to.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._reductions: list[Reduction] = []
        self._unread: list[tuple[Denominator, StepName]] = []

    def add(self, reduction: Reduction) -> None:
        """It was started."""
        self._reductions.append(reduction)

    def read_later(self, denominator: Denominator, name: StepName) -> None:
        """What only the device knows is read when it is released."""
        self._unread.append((denominator, name))

    @property
    def runs(self) -> bool:
        """Whether some of it is under way; asked from any thread."""
        return any(not reduction.is_completed() for reduction in tuple(self._reductions))

    def finish(self) -> None:
        """Wait until all of it has ended."""
        for reduction in self._reductions:
            reduction.wait()

    def release(self) -> None:
        """The device has done what it holds: read what only it knew, and let go of what has ended."""
        for denominator, name in self._unread:
            failure = denominator.failure()
            if failure is not None:
                self._report(failure, name)
        self.let_go()

    def let_go(self) -> None:
        """Nobody asks any more how it ended."""
        for reduction in self._reductions:
            reduction.release()
        self._reductions.clear()
        self._unread.clear()


@final
class Reducer:
    """Starts the reductions of one member.

    Args:
        group: the process group.
        core: says where the step is; only asked.
        clock: measures time-outs.
        report: told of each failure and of the step that it belongs to.
        own_time: told when this member has given what it has to give.
        stands_by: another rank reduces in this one's place; tensors stay as they are.
    """

    def __init__(
        self,
        group: Group,
        core: StepCore,
        clock: Clock,
        report: Report,
        *,
        own_time: OwnTime,
        stands_by: bool = False,
    ) -> None:
        self._group = group
        self._core = core
        self._clock = clock
        self._report = report
        self._own_time = own_time
        self._stands_by = stands_by
        self._started = Started(report)
        self.has_reduced = False  # in this step
        self.num_started = 0  # in this Manager's life
        self._weight: float | None = None
        self._denominators: dict[torch.device, Denominator] = {}  # of that weight

    def set_weight(self, weight: float) -> None:
        """See `Manager.set_weight`."""
        value = check_weight(weight)
        if self._core.phase is Phase.IDLE:
            raise UsageError("set_weight was called outside a step; call it after start_quorum, before backward")
        if self._denominators and value != self._weight:
            raise UsageError(
                f"set_weight was called with {value:g} after a reduction of this step was weighted with "
                f"{self._weight:g}; say one weight a step, before its first reduction"
            )
        self._weight = value

    def step_begins(self) -> None:
        """A new step, whose weight nobody has said yet."""
        self.has_reduced = False
        self._weight = None
        self._denominators.clear()

    @property
    def reduces(self) -> bool:
        """Whether a reduction is under way, of a step that was not put aside; asked from any thread."""
        return self._started.runs

    def put_aside(self) -> Started:
        """The open step goes on beside later ones; what was started in it is the caller's from now on."""
        started, self._started = self._started, Started(self._report)
        self.step_begins()
        return started

    def finish(self) -> None:
        """Wait until all that was started has ended."""
        self._started.finish()

    def release(self) -> None:
        """The device has done what it holds: read what only it knew, and let go of what has ended."""
        self._started.release()
        self._denominators.clear()  # a backend's Work keeps connections

    def reduce(
        self,
        tensor: torch.Tensor,
        reduce_op: ReduceOp,
        *,
        plan: Plan | None,
        weight: float | None,
        limit: timedelta | None,
    ) -> dist.Work:
        """See `Manager.allreduce`.

        Args:
            plan: of the step; None where there is no quorum.
            weight: of this reduction alone; None: the step's, if it has one.
            limit: how long it may take.
        """
        core, name = self._core, self._core.name
        inside = core.phase is not Phase.IDLE
        if not inside:
            name = replace(name, attempt=0)  # of no attempt: the last one may be in flight, and does not fail by it
        self.has_reduced = self.has_reduced or inside
        if plan is None:
            return LostReduction(tensor)
        if inside and core.error is not None:
            self._stay_out(plan)
            return LostReduction(tensor)
        if self._stands_by:
            return DummyWork([tensor])
        gives = core.is_participating and (inside or core.verdict is True)
        shared = reduce_op == _AVG and weight is None and inside
        weight = self._enters(weight, plan, gives=gives, inside=inside) if reduce_op == _AVG else None
        if gives and plan.replica_world_size == 1:
            return self._alone(tensor, weight, name)
        if inside:
            self._own_time.mark()
        failure = core.broken or (None if inside else self._group.errored())
        if failure is not None:
            self._report(failure, name)
            return LostReduction(tensor)
        try:
            factor, divide_by = mean_factors(plan.num_participants) if reduce_op == _AVG else (1.0, 1.0)
            denominator = None
            if weight is not None:
                factor = weight
                denominator = self._denominator(weight, tensor.device, name, shared=shared, inside=inside)
            if not gives:
                fill_with_nothing(tensor, reduce_op)
            data = times(tensor, factor if gives else 1.0, widens=reduce_op == _AVG)
            work = self._group.allreduce([data], _SUM if reduce_op == _AVG else reduce_op)
        except Exception as error:
            self._report(error, name)
            self._stay_out(plan)
            return LostReduction(tensor)
        reduction = Reduction(
            work,
            data,
            divide_by=denominator or divide_by,
            report=lambda error: self._report(error, name),
            abort=self._group.abort,
            clock=self._clock,
            into=tensor,
            limit=limit,
            name=str(name),
            waits=self._own_time,
        )
        self._started.add(reduction)
        self.num_started += 1
        return reduction

    def _enters(self, weight: float | None, plan: Plan, *, gives: bool, inside: bool) -> float | None:
        """Return what this member enters into the sum of the weights of a mean, scaled; None: the mean has no weights.

        The only participant's gradient is the mean, to the last bit, whatever its weight; so that weight is one.
        """
        if weight is None and not inside:  # how many give shows in the sum, and nowhere else
            return 1.0 / max(plan.num_participants, 1) if gives else 0.0
        weight = self._weight if weight is None else weight
        if weight is None:
            return None
        if not gives:
            return 0.0
        return weight * WEIGHT_SCALE if plan.num_participants != 1 else float(weight > 0.0)

    def _denominator(
        self, weight: float, device: torch.device, name: StepName, *, shared: bool, inside: bool
    ) -> Denominator:
        """Start the sum of the weights; the one of the step's own weight only once, for all its reductions."""
        if shared and device in self._denominators:
            return self._denominators[device]
        total = torch.full((1,), weight, dtype=torch.float64, device=device)
        # Outside a step somebody waits for one number, and may wait for the device as well.
        read_later = inside and device.type != "cpu"
        denominator = Denominator(self._group.allreduce([total], _SUM), total, name=str(name), read_later=read_later)
        if shared:
            self._denominators[device] = denominator
        if read_later:
            self._started.read_later(denominator, name)
        return denominator

    def _alone(self, tensor: torch.Tensor, weight: float | None, name: StepName) -> dist.Work:
        if tensor.layout is not torch.strided or tensor.is_meta:  # what fails with others is not right without them
            kind = "on the meta device" if tensor.is_meta else f"{tensor.layout}"
            self._report(Unsupported(f"a tensor that is {kind} can't be reduced; give a dense one with memory"), name)
            return LostReduction(tensor)
        try:
            check_writable(tensor)
        except Unsupported as error:
            self._report(error, name)
            return LostReduction(tensor)
        if weight == 0.0:
            self._report(
                NoWeight(
                    f"the weight of the only participant of {name} is zero, so there is no mean; give a finite weight "
                    "above zero"
                ),
                name,
            )
            return LostReduction(tensor)
        return DummyWork([tensor])

    def _stay_out(self, plan: Plan) -> None:
        """The others are in this reduction already, or soon: end it for them, rather than let them wait."""
        if plan.replica_world_size > 1 and self._group.errored() is None:
            self._group.abort()
