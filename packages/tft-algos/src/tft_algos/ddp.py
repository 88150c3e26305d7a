"""Data parallelism across replica groups that come and go.

Torch's own DistributedDataParallel does the work: it packs gradients into buckets and hands each over as soon as it is
full, while the backward pass goes on. We hand the bucket to the Manager, whose averages are over whoever participates,
and wait for all of them when the backward pass is done.

One thing torch may not do here is to change the buckets: it lays them out by definition order, and again, once, in the
order in which the first gradients came. A newcomer would then exchange other sizes than those who were here before,
which Gloo answers by ending the process. So the second layout is made at the start, of all parameters in the reverse
order of their definition, the same on every replica and in every step.

Law of this file: what differs from torch's class; no reduction is implemented here.
"""

from __future__ import annotations

from collections import deque
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from tft_algos.errors import SettingError, Unsupported
from tft_algos.manager import Manager
from tft_coord.errors import GroupLost
from tft_pg import ProcessGroupDummy


@final
class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """`torch.nn.parallel.DistributedDataParallel` across the replica groups of a Manager.

    After `backward` the gradients are averages over the participants. A failed reduction never raises: the step is
    voted down. Only one among the processes of this group is fatal to it, and `should_commit` then raises GroupLost.

    Args:
        manager: averages over its participants.
        module: to be trained. Every replica gives the same parameters in the same order.
        process_group: the processes of this replica group, where it has more than one; gradients are averaged inside
            it first, then across. None: this process is the group.
        kwargs: torch's own, but find_unused_parameters. `gradient_as_bucket_view` is True unless given: it saves a
            copy of every gradient.
    Raises: Unsupported: find_unused_parameters; whether a parameter was used would have to be agreed on by all.
        SettingError: this release of torch can't hold one layout of buckets.
    """

    def __init__(
        self,
        manager: Manager,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("find_unused_parameters"):
            raise Unsupported(
                "find_unused_parameters does not exist here; use every parameter in each step, or freeze those that "
                "are not used with requires_grad_(False) before wrapping"
            )
        kwargs.setdefault("gradient_as_bucket_view", True)
        if kwargs.get("static_graph") and not kwargs["gradient_as_bucket_view"]:
            # Torch then copies the first step's gradients out of the buckets before anybody has waited for them.
            raise Unsupported("static_graph needs gradient_as_bucket_view here; leave gradient_as_bucket_view out")
        group = process_group if process_group is not None else ProcessGroupDummy(0, 1)
        super().__init__(module, process_group=group, **kwargs)
        # Torch compares a hook's annotations with types, and ours are strings; a lambda has none.
        self.register_comm_hook(_Backward(manager, process_group), lambda state, bucket: _reduce(state, bucket))
        self.reducer._push_all_rebuilt_params()
        if not self.reducer._rebuild_buckets():
            raise SettingError(
                f"torch {torch.__version__} did not lay out its gradient buckets at the start, so that replicas which "
                "join later would have others; use torch 2.13"
            )

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        # Gradients come in about the reverse order of definition, and buckets are laid out in the reducer's order.
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], sparse[::-1]


@final
class _Backward:
    """The reductions of one backward pass, started in the order of the buckets, waited for at its end.

    Args:
        manager: reduces across the groups.
        process_group: reduces inside this one; None where it is one process.
    """

    def __init__(self, manager: Manager, process_group: dist.ProcessGroup | None) -> None:
        self._manager = manager
        self._group = process_group
        self._inside: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._across: list[dist.Work] = []
        self._ends = False

    def reduce(self, buffer: torch.Tensor) -> None:
        """A bucket is full; called by torch within the backward pass."""
        if not self._ends:
            self._ends = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
        if self._group is None:
            self._across.append(self._manager.allreduce(buffer))
            return
        if buffer.is_floating_point() or buffer.is_complex():
            # Divided before it is summed, so that the sum is the mean of the group.
            buffer.div_(self._group.size())
        self._inside.append((self._group.allreduce([buffer], dist.ReduceOp.SUM), buffer))
        while self._inside and self._inside[0][0].is_completed():
            self._pass_on()

    def end(self) -> None:
        """The backward pass is done: wait until every bucket holds its average."""
        self._ends = False
        while self._inside:
            self._pass_on()
        for work in self._across:
            work.wait()
        self._across.clear()

    def _pass_on(self) -> None:
        """The first bucket reduced inside the group goes on across, so that the order is the same everywhere."""
        work, buffer = self._inside.popleft()
        try:
            work.wait()
        except RuntimeError as error:
            # Torch's own groups don't come back, so neither does this replica: should_commit raises it.
            lost = GroupLost(
                f"a reduction among the processes of this replica failed ({error}); end this process and start the "
                "group again"
            )
            lost.__cause__ = error
            self._manager.report_error(lost)
        self._across.append(self._manager.allreduce(buffer))


def _reduce(state: _Backward, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Torch's hook for a full bucket. Its future is done at once, because `end` waits before torch reads the bucket."""
    buffer = bucket.buffer()
    state.reduce(buffer)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done
