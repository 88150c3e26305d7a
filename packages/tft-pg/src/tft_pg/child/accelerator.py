"""A device's library in a child process, for tensors on the device, which the child works on in place.

Works behave as in `backends.accelerator`. `wait()` orders the current stream after the operation, as soon as the child
has started it. `wait(timeout)` and a barrier also wait on the host. The child's host observes failures later than the
device, so `errored()` asks the child while an operation may still fail.

Law of this file: how tensors of a device reach the child; the memory itself is in `device`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist

from tft_pg.child.arguments import Arguments, dtype_name
from tft_pg.child.call import Call, CallMemory
from tft_pg.child.device import CALLS_MAX, DeviceMemory
from tft_pg.child.link import REPORT, Link
from tft_pg.child.sharing import TensorSharing
from tft_pg.errors import OperationRefusedError, Where
from tft_pg.ops import Collective
from tft_pg.work import PendingWork

__all__ = ["DeviceSharing"]

_Lacks = Callable[[Collective, Sequence[object], Mapping[str, object], int], str]


@final
class DeviceSharing(TensorSharing):
    """Lends tensors of a device to the child.

    Args:
        make: makes the memory for one child.
        lacks: for a call and a world size, why the library can't run it.
    """

    def __init__(self, make: Callable[[], DeviceMemory], lacks: _Lacks) -> None:
        self._make = make
        self._lacks = lacks
        self._memory: DeviceMemory | None = None

    def open(self) -> CallMemory:
        memory = self._memory = self._make()
        return CallMemory(_forget, memory.release, memory.settings())

    def fault(
        self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object], where: Where
    ) -> str:
        memory = self._memory
        if memory is None:
            return ""  # the group has just been shut down, which `start` reports
        tensors = (*collective.given(args, kwargs), *collective.results(args, kwargs))
        fault = next(filter(None, map(memory.fault, tensors)), "")
        return fault or self._lacks(collective, args, kwargs, where.world_size or 1)

    def start(
        self,
        link: Link,
        collective: Collective,
        packed: Arguments,
        results: Sequence[torch.Tensor],
        limit: timedelta,
    ) -> dist.Work:
        memory = self._memory  # if it is a later child's, the link has ended
        name = collective.name
        if memory is None:
            raise link.ended_error(name)
        if link.outstanding >= CALLS_MAX:
            raise OperationRefusedError(
                f"{name} was refused ({link.where}): {CALLS_MAX} operations have not ended yet; wait for some of them",
                where=link.where,
            )
        buffers, records = _placed(memory, packed.tensors)
        pending = PendingWork(on_timeout=partial(link.late, name), limit=limit + REPORT)
        started = threading.Event()

        def fail(error: Exception) -> None:
            pending.fail(error)
            started.set()

        def finish(answer: Mapping[str, Any]) -> None:
            pending.finish(list(results))
            started.set()

        call = Call(name, finish, fail, limit.total_seconds(), started=started.set, lent=packed.tensors)
        command = {"do": "run", "name": name, "args": packed.args, "kwargs": packed.kwargs}
        link.call(call, command | {"buffers": buffers, "tensors": records})
        memory.set_flag(call.number)
        return _DeviceWork(pending, started, partial(memory.order_after, call.number), link, name)

    def close(self) -> None:
        self._memory = None


def _forget(call: Call) -> None:
    call.lent = ()


def _placed(memory: DeviceMemory, tensors: Sequence[torch.Tensor]) -> tuple[list[object], list[object]]:
    """Return the allocations of these tensors, and the tensors in them, as JSON values. Empty ones lie in none."""
    buffers: dict[int, str] = {}
    records: list[object] = []
    for tensor in tensors:
        buffer, offset = -1, 0
        if tensor.numel():
            place = memory.place(tensor)
            buffers[place.buffer] = place.handle
            buffer, offset = place.buffer, place.offset
        records.append([buffer, offset, dtype_name(tensor.dtype), list(tensor.shape), list(tensor.stride())])
    return [list(each) for each in buffers.items()], records


@final
class _DeviceWork(dist.Work):
    """The caller's Work of an operation: ordered like the stream, with the true outcome.

    Args:
        pending: ends when the child has reported the end.
        started: set when the child has reported the start or the end.
        order: orders the current stream after the operation.
        link: to the child.
        operation: name of the collective.
    """

    def __init__(
        self, pending: PendingWork, started: threading.Event, order: Callable[[], None], link: Link, operation: str
    ) -> None:
        super().__init__()
        self._pending = pending
        self._started = started
        self._order = order
        self._link = link
        self._operation = operation

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream after the operation.

        Args:
            timeout: wait on the host until the device is done, for at most this time. A barrier always waits on the
                host. None or zero: wait on the host only until the child has started the operation.

        Raises: ProcessGroupError: the operation, or the whole group, has failed by now.
        """
        if timeout or self._operation == "barrier":
            return self._pending.wait(timeout)
        limit = self._pending.limit
        if not self._started.wait(min(limit.total_seconds(), threading.TIMEOUT_MAX)):
            raise self._link.late(self._operation, limit)
        if self._pending.is_completed():
            return self._pending.wait()
        self._order()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that ends when the device is done."""
        return self._pending.get_future()

    def is_completed(self) -> bool:
        """Return whether the child has reported the end of the operation."""
        return self._pending.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._pending.result()

    def source_rank(self) -> int:
        return self._pending.source_rank()

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()
