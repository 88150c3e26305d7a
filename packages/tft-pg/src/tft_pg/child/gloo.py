"""Gloo in a child process, for tensors on the CPU.

Tensors cross in shared memory: one copy in, one copy out. A large tensor crosses in parts. While the child reduces one
part, the next is copied in and the previous one is copied out.

Law of this file: how tensors of the CPU reach the child; see `group` for the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, final

import torch
import torch.distributed as dist

from tft_pg.backends.gloo import ProcessGroupGloo
from tft_pg.backends.gloo_table import lacks
from tft_pg.checks import fault_of, is_plain
from tft_pg.child.arguments import Arguments, dtype_name
from tft_pg.child.call import Call, CallMemory
from tft_pg.child.group import ProcessGroupBaby
from tft_pg.child.link import REPORT, Link
from tft_pg.child.segments import Pool, Segment, copy_in, copy_out, places
from tft_pg.child.sharing import TensorSharing
from tft_pg.errors import OperationRefusedError, Where
from tft_pg.ops import Collective
from tft_pg.settings import check_listening
from tft_pg.work import PendingWork

__all__ = ["ProcessGroupBabyGloo"]

# These fill every output on every rank, so the contents before the call need not cross.
_FILLS_ALL: Final = frozenset(
    {
        *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
        *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
        *("alltoall", "alltoall_base"),
    }
)
# These treat each element alike, so that a tensor may cross in parts. All ranks split it in the same way.
_IN_PARTS: Final = frozenset({"allreduce", "broadcast"})
_PART_BYTES: Final = 16 << 20

_Memory = tuple[int, int, torch.Size]


@final
class ProcessGroupBabyGloo(ProcessGroupBaby):
    """`ProcessGroupGloo` in a child process, for tensors on the CPU.

    Args:
        timeout: of each operation, and of `configure` unless it is given another, in seconds or as a timedelta.
        interface, hostname: where to listen, as for `ProcessGroupGloo`.
        in_parts: large tensors cross in parts, which is faster. All ranks must then be of this class, and set it.
            False: ranks of `ProcessGroupGloo` may be in the group.

    Raises: ConfigError: both are given, or the timeout is not above zero. UnsupportedOperationError: not on this
    system.
    """

    def __init__(
        self,
        timeout: float | timedelta = 60.0,
        *,
        interface: str | None = None,
        hostname: str | None = None,
        in_parts: bool = True,
    ) -> None:
        check_listening(interface=interface, hostname=hostname)
        settings: dict[str, object] = {"interface": interface, "hostname": hostname}
        super().__init__(timeout, kind="gloo", sharing=_SegmentSharing(in_parts=in_parts), settings=settings)

    @classmethod
    def like(cls, group: ProcessGroupGloo) -> ProcessGroupBabyGloo:
        """Return a new group with the settings of a `ProcessGroupGloo`. Its peers may be groups of both kinds."""
        timeout, settings = group.settings()
        found = cls(timeout, in_parts=False)
        found._settings = settings
        return found

    def getBackendName(self) -> str:
        return "tft-child-gloo"


@final
class _SegmentSharing(TensorSharing):
    """Copies tensors to shared memory, and the results back.

    Args:
        in_parts: split large tensors.
    """

    def __init__(self, *, in_parts: bool) -> None:
        self.prefix = "child" if in_parts else ""
        self._in_parts = in_parts
        self._pool = Pool()

    def open(self) -> CallMemory:
        self._pool.close()
        pool = self._pool = Pool()
        return CallMemory(lambda call: _give(pool, call.segment), dropped=pool.dropped)

    def fault(
        self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object], where: Where
    ) -> str:
        if is_plain(collective, args):
            return ""
        fault = fault_of(collective, args, kwargs, rank=where.rank or 0, world_size=where.world_size or 1)
        return fault or lacks(collective, args, kwargs)

    def start(
        self,
        link: Link,
        collective: Collective,
        packed: Arguments,
        results: Sequence[torch.Tensor],
        limit: timedelta,
    ) -> dist.Work:
        name = collective.name
        work = PendingWork(on_timeout=partial(link.late, name), limit=limit + REPORT)
        parts = _parts(name, packed.tensors) if self._in_parts else [packed.tensors]
        if any(tensor.layout is not torch.strided for tensor in packed.tensors):
            raise OperationRefusedError(
                f"{name} was refused ({link.where}): a child process takes no sparse tensors; pass a dense tensor, or "
                "use ProcessGroupGloo",
                where=link.where,
            )
        pool = self._pool  # if it is a later child's, the link has ended
        segments = _segments(pool, parts, link.where, name)
        outcome = _Outcome(name, work, results, len(parts))
        outputs = {id(tensor) for tensor in results} if len(parts) == 1 else None
        for number, (tensors, segment) in enumerate(zip(parts, segments, strict=True)):
            call = Call(name, outcome.finish, outcome.fail, limit.total_seconds(), segment=segment)
            command: dict[str, object] = {"do": "run", "name": name, "args": packed.args, "kwargs": packed.kwargs}
            try:
                command |= _copied(call, outcome, name, tensors, outputs)
                link.call(call, command)
            except Exception as error:
                for each in segments[number:]:
                    _give(pool, each)
                if number == 0:
                    raise
                outcome.fail(error)  # as the parts before have been
                break
        return work

    def close(self) -> None:
        self._pool.close()


def _segments(pool: Pool, parts: Sequence[Sequence[torch.Tensor]], where: Where, name: str) -> list[Segment | None]:
    """Take a segment for each part. Raises: OperationRefusedError: there is no memory."""
    found: list[Segment | None] = []
    try:
        for tensors in parts:
            found.append(pool.take(max(places(tensors)[1], 1)) if tensors else None)  # they may be empty
    except OSError as error:
        for segment in found:
            _give(pool, segment)
        raise OperationRefusedError(
            f"{name} was refused ({where}): there is no more shared memory for its tensors ({error}); free memory "
            "or descriptors",
            where=where,
        ) from error
    return found


def _give(pool: Pool, segment: Segment | None) -> None:
    if segment is not None:
        pool.give(segment)


def _parts(name: str, tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    """Return the tensors of each call of the child: all in one, or parts of a large one."""
    if name not in _IN_PARTS or len(tensors) != 1:
        return [tensors]
    tensor = tensors[0]
    if tensor.numel() * tensor.element_size() <= _PART_BYTES or not tensor.is_contiguous():
        return [tensors]
    return [[part] for part in tensor.data.view(-1).split(_PART_BYTES // tensor.element_size())]


def _copied(
    call: Call, outcome: _Outcome, name: str, tensors: Sequence[torch.Tensor], outputs: set[int] | None
) -> dict[str, object]:
    """Copy the tensors of a call to its segment, and note which to copy back.

    Args:
        outputs: the ids of the tensors that the call writes; None: all.

    Returns: what the child must know of them.
    """
    segment = call.segment
    if segment is None:
        return {"segment": None, "tensors": []}
    offsets, _ = places(tensors)
    back, records = [], []
    for tensor, offset in zip(tensors, offsets, strict=True):
        is_output = outputs is None or id(tensor) in outputs
        if is_output:
            back.append((tensor, offset, _memory_of(tensor)))
        if not (is_output and name in _FILLS_ALL):
            copy_in(segment.memory, offset, tensor)
        records.append([offset, dtype_name(tensor.dtype), list(tensor.shape)])
    call.write = partial(outcome.write, segment, back)
    return {"segment": [segment.number, segment.size], "tensors": records}


def _memory_of(tensor: torch.Tensor) -> _Memory:
    """Return the address and size of a tensor's memory, and the tensor's shape."""
    return tensor.data_ptr(), tensor.untyped_storage().nbytes(), tensor.shape


@final
class _Outcome:
    """The outcome of an operation, from those of its parts. Nothing is written after one has failed.

    Args:
        name: of the operation.
        work: the caller's.
        results: of the operation.
        count: of the parts.
    """

    def __init__(self, name: str, work: PendingWork, results: Sequence[torch.Tensor], count: int) -> None:
        self._name = name
        self._work = work
        self._results = list(results)
        self._left = count
        self._failed = False
        self._lock = threading.Lock()  # held during a copy

    def write(self, segment: Segment, back: Sequence[tuple[torch.Tensor, int, _Memory]]) -> None:
        with self._lock:
            if self._failed:
                return
            for tensor, offset, memory in back:
                if _memory_of(tensor) != memory:
                    raise OperationRefusedError(
                        f"{self._name} failed: a tensor of the call was resized or freed before the operation had "
                        "ended; keep it as it is until wait returns"
                    )
                copy_out(segment.memory, offset, tensor)

    def finish(self, answer: Mapping[str, Any]) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._work.finish(self._results, source=int(answer.get("value") or 0))

    def fail(self, error: Exception) -> None:
        with self._lock:
            self._failed = True
        self._work.fail(error)
