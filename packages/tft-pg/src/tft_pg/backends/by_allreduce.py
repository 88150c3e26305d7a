"""Collectives that run as an allreduce: reduce_scatter with a Work that reports its end, and a barrier.

Torch 2.13's Gloo reduces a copy of the whole input and keeps a rank's own part. But its Work reports nothing before a
wait, and that wait can't be interrupted. This file does the same with one allreduce for each tensor. The first caller
that sees their end copies the result: a wait, a future, or a check of completion. The group makes such a check before
it releases the Works. The result is bit-identical to torch's.

Gloo's barrier waits for all operations that its object has ever started. One that Gloo has forgotten delays it until
the operation's own timeout. An allreduce of one element waits for no other operation.

Law of this file: no backend and no life cycle, only the collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from tft_pg.ops import Collective

__all__ = ["start_barrier", "start_reduce_scatter"]

_Future = torch.futures.Future[Any]


def start_reduce_scatter(
    torch_group: dist.ProcessGroup, collective: Collective, args: Sequence[object], kwargs: Mapping[str, object]
) -> dist.Work:
    """Start any form of reduce_scatter.

    Args:
        torch_group: the group whose allreduce is used.
        collective: one of the table's three rows, with arguments that passed `tft_pg.checks`.
        args, kwargs: as the caller gave them.

    Raises: RuntimeError: the backend refuses the dtype or the reduction; nothing was sent then.
    """
    outputs: Any = collective.argument(0, args, kwargs)
    inputs: Any = collective.argument(1, args, kwargs)
    if isinstance(outputs, torch.Tensor):
        outputs, inputs = [outputs], [inputs]
    rank, works, copies = torch_group.rank(), [], []
    for output, input_ in zip(outputs, inputs, strict=True):
        # A list of inputs has one tensor for each rank.
        parts = input_ if isinstance(input_, Sequence) else [input_]
        reduced = torch.cat([part.detach().reshape(-1) for part in parts])
        works.append(torch_group.allreduce([reduced], _options(collective, args, kwargs)))
        copies.append((output.detach(), reduced.narrow(0, rank * output.numel(), output.numel())))
    return _ByAllreduce(works, copies, list(outputs))


def start_barrier(
    torch_group: dist.ProcessGroup,
    before: Sequence[dist.Work],
    collective: Collective,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> dist.Work:
    """Start a barrier, which also waits for the operations `before` it, as Gloo's does.

    Raises: RuntimeError: the backend can't start an operation; nothing was sent then.
    """
    given = collective.argument(0, args, kwargs)
    options = dist.AllreduceOptions()
    if isinstance(given, dist.BarrierOptions):
        options.timeout = given.timeout
    elif isinstance(given, timedelta):
        options.timeout = given
    return _ByAllreduce([*before, torch_group.allreduce([torch.zeros(1)], options)], [], [])


def _options(collective: Collective, args: Sequence[object], kwargs: Mapping[str, object]) -> dist.AllreduceOptions:
    given = collective.argument(2, args, kwargs)
    options = dist.AllreduceOptions()
    if isinstance(given, dist.ReduceScatterOptions):
        options.reduceOp, options.timeout = given.reduceOp, given.timeout
    elif given is not None:
        options.reduceOp = given  # type: ignore[assignment]
    timeout = collective.argument(3, args, kwargs) if len(collective.parameters) > 3 else None
    if isinstance(timeout, timedelta):
        options.timeout = timeout
    return options


@final
class _ByAllreduce(dist.Work):
    """One or more operations that count as one.

    Args:
        works: of the operations.
        copies: for each allreduce with a result, the destination of this rank's part, and the part.
        outputs: the tensors that the operation fills in.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        outputs: list[torch.Tensor],
    ) -> None:
        super().__init__()
        self._works = works
        self._copies = copies
        self._outputs = outputs
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        deadline_s = time.monotonic() + timeout.total_seconds() if timeout else None
        for work in self._works:
            if deadline_s is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=max(deadline_s - time.monotonic(), 0.001)))
        self._copy()
        return True

    def _copy(self) -> None:
        with self._lock:
            for output, part in self._copies:
                output.copy_(part.reshape(output.shape))
            self._copies = ()

    def get_future(self) -> _Future:
        together: _Future = torch.futures.collect_all([work.get_future() for work in self._works])
        return together.then(self._outcome)

    def _outcome(self, together: _Future) -> list[torch.Tensor]:
        for future in together.value():
            future.value()
        self._copy()
        return self._outputs

    def is_completed(self) -> bool:
        """Return whether the operation has ended. After a success, the outputs are filled in by then."""
        if not all(work.is_completed() for work in self._works):
            return False
        with suppress(RuntimeError):  # a waiter gets this error
            self.wait()
        return True

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        for work in self._works:
            work.synchronize()
