"""Every collective, once, callable on any rank with any tensors, and its expected result.

A check of all collectives reads this table. The expected result is computed from all ranks' inputs in one process, by
torch's own arithmetic and without a group.

Law of this file: no configuring, no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ReduceOp

from tft_pg.base import ProcessGroup
from tft_pg.ops import COLLECTIVES

__all__ = ["CASES", "REDUCTIONS", "Case", "Sample", "Started", "reduced"]

PREMUL_FACTOR = 2.0


@dataclass(frozen=True)
class Sample:
    """The input of one rank.

    Args:
        rank, world_size: the place of the rank.
        dtype: of every tensor.
        length: elements of one portion. An input for each rank has this many elements times the world size.
        op: the reduction's name in `REDUCTIONS`; ignored by collectives that do not reduce.
        lay_out: converts a contiguous tensor to a tensor of equal shape with another layout.
        flat: whether a portion has one dimension; otherwise it has none, and `length` is 1.
    """

    rank: int
    world_size: int
    dtype: torch.dtype = torch.float32
    length: int = 5
    op: str = "SUM"
    lay_out: Callable[[torch.Tensor], torch.Tensor] = field(default=torch.Tensor.contiguous)
    flat: bool = True

    def at(self, rank: int) -> Sample:
        """Return the same sample on another rank."""
        return Sample(rank, self.world_size, self.dtype, self.length, self.op, self.lay_out, self.flat)

    def portion(self, salt: int = 0) -> torch.Tensor:
        """Return this rank's input of one portion. Whole numbers from 1 to 3 make every result exact in most dtypes."""
        return self.lay_out(self._numbers(self.length, salt).reshape(self._shape()))

    def portions(self) -> list[torch.Tensor]:
        """Return this rank's input for each rank."""
        return [self.portion(salt) for salt in range(self.world_size)]

    def whole(self) -> torch.Tensor:
        """Return this rank's input for each rank in one tensor, one portion after another."""
        return self.lay_out(torch.cat([self.portion(salt).reshape(-1) for salt in range(self.world_size)]))

    def blank(self) -> torch.Tensor:
        """Return a portion to be filled in."""
        return self.lay_out(torch.zeros(self._shape(), dtype=self.dtype))

    def blanks(self) -> list[torch.Tensor]:
        """Return a portion to be filled in for each rank."""
        return [self.blank() for _ in range(self.world_size)]

    def blank_whole(self) -> torch.Tensor:
        """Return one tensor to be filled in with a portion for each rank."""
        return self.lay_out(torch.zeros(self.length * self.world_size, dtype=self.dtype))

    def reduce_op(self) -> Any:
        """Return torch's object for the reduction."""
        return REDUCTIONS[self.op]

    def _shape(self) -> tuple[int, ...]:
        return (self.length,) if self.flat else ()

    def _numbers(self, length: int, salt: int) -> torch.Tensor:
        first = [(index * 7 + self.rank * 5 + salt) % 3 for index in range(3)]
        numbers = [number != 0 for number in first] if self.dtype == torch.bool else [number + 1 for number in first]
        return torch.tensor(numbers).to(self.dtype).repeat(length // 3 + 1)[:length]


REDUCTIONS: dict[str, Any] = {
    **{name: getattr(ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")},
    "PREMUL_SUM": dist._make_nccl_premul_sum(PREMUL_FACTOR),  # type: ignore[attr-defined]
}
"""Every reduction of torch by its name."""


def reduced(op: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the reduction of one tensor from each rank, in their dtype, or None if that reduction does not exist."""
    dtype = tensors[0].dtype
    if len(tensors) == 1 and op != "PREMUL_SUM":
        return tensors[0].contiguous()
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    if (dtype.is_complex and op in ("MIN", "MAX")) or (is_whole and op == "AVG"):
        return None
    if not is_whole and op in ("BAND", "BOR", "BXOR"):
        return None
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    total, *others = [tensor.contiguous().to(wide) for tensor in tensors]
    for other in others:
        total = _STEPS[op](total, other)
    if op == "AVG":
        total = total / len(tensors)
    if op == "PREMUL_SUM":
        total = total * PREMUL_FACTOR
    return total.to(dtype)


_STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "PRODUCT": torch.mul,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@dataclass(frozen=True)
class Started:
    """A running collective on this rank.

    Args:
        works: the Works to wait for, in any order.
        outputs: the tensors that the collective fills in on this rank; may be empty.
    """

    works: list[dist.Work]
    outputs: list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One collective.

    Args:
        row: its name in `tft_pg.COLLECTIVES`.
        start: calls the collective on one rank.
        expected: returns the expected outputs on one rank; None: the result does not exist.
        reduces: whether the collective reduces.
        sends: whether the collective exchanges tensors.
    """

    row: str
    start: Callable[[ProcessGroup, Sample], Started]
    expected: Callable[[Sample], list[torch.Tensor] | None]
    reduces: bool = False
    sends: bool = True


def _everybody(sample: Sample) -> list[Sample]:
    return [sample.at(rank) for rank in range(sample.world_size)]


def _options(kind: Any, sample: Sample, root: int | None = None) -> Any:
    opts = kind()
    if hasattr(opts, "reduceOp"):
        opts.reduceOp = sample.reduce_op()
    if root is not None:
        opts.rootRank = root
    return opts


def _last(sample: Sample) -> int:
    """Return the root of collectives that have one."""
    return sample.world_size - 1


def _is_root(sample: Sample) -> bool:
    return sample.rank == _last(sample)


def _total(sample: Sample, salt: int = 0) -> list[torch.Tensor] | None:
    result = reduced(sample.op, [each.portion(salt) for each in _everybody(sample)])
    return None if result is None else [result]


def _gathered(sample: Sample) -> list[torch.Tensor]:
    return [each.portion() for each in _everybody(sample)]


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


# --- how to call each one ---


def _allreduce(group: ProcessGroup, sample: Sample) -> Started:
    tensor = sample.portion()
    return Started([group.allreduce([tensor], _options(dist.AllreduceOptions, sample))], [tensor])


def _allreduce_coalesced(group: ProcessGroup, sample: Sample) -> Started:
    tensors = [sample.portion(salt) for salt in range(2)]
    opts = _options(dist.AllreduceCoalescedOptions, sample)
    return Started([group.allreduce_coalesced(tensors, opts)], tensors)


def _two_totals(sample: Sample) -> list[torch.Tensor] | None:
    totals = [_total(sample, salt) for salt in range(2)]
    return None if None in totals else [total[0] for total in totals if total is not None]


def _reduce(group: ProcessGroup, sample: Sample) -> Started:
    tensor = sample.portion()
    work = group.reduce([tensor], _options(dist.ReduceOptions, sample, _last(sample)))
    return Started([work], [tensor] if _is_root(sample) else [])


def _reduce_expected(sample: Sample) -> list[torch.Tensor] | None:
    total = _total(sample)
    return total if _is_root(sample) or total is None else []


def _reduce_scatter(group: ProcessGroup, sample: Sample) -> Started:
    output = sample.blank()
    opts = _options(dist.ReduceScatterOptions, sample)
    return Started([group.reduce_scatter([output], [sample.portions()], opts)], [output])


def _reduce_scatter_base(group: ProcessGroup, sample: Sample) -> Started:
    output = sample.blank()
    opts = _options(dist.ReduceScatterOptions, sample)
    return Started([group._reduce_scatter_base(output, sample.whole(), opts)], [output])


def _reduce_scatter_tensor_coalesced(group: ProcessGroup, sample: Sample) -> Started:
    output = sample.blank()
    opts = _options(dist.ReduceScatterOptions, sample)
    return Started([group.reduce_scatter_tensor_coalesced([output], [sample.whole()], opts)], [output])


def _own_total(sample: Sample) -> list[torch.Tensor] | None:
    return _total(sample, sample.rank)


def _broadcast(group: ProcessGroup, sample: Sample) -> Started:
    tensor = sample.portion()
    return Started([group.broadcast([tensor], _options(dist.BroadcastOptions, sample, _last(sample)))], [tensor])


def _allgather(group: ProcessGroup, sample: Sample) -> Started:
    outputs = sample.blanks()
    return Started([group.allgather([outputs], [sample.portion()], AllgatherOptions())], outputs)


def _allgather_coalesced(group: ProcessGroup, sample: Sample) -> Started:
    outputs = sample.blanks()
    lists = [[output] for output in outputs]
    return Started([group.allgather_coalesced(lists, [sample.portion()], AllgatherOptions())], outputs)


def _allgather_base(group: ProcessGroup, sample: Sample) -> Started:
    output = sample.blank_whole()
    return Started([group._allgather_base(output, sample.portion(), AllgatherOptions())], [output])


def _allgather_into_tensor_coalesced(group: ProcessGroup, sample: Sample) -> Started:
    output = sample.blank_whole()
    work = group.allgather_into_tensor_coalesced([output], [sample.portion()], AllgatherOptions())
    return Started([work], [output])


def _alltoall_base(group: ProcessGroup, sample: Sample) -> Started:
    output = sample.blank_whole()
    return Started([group.alltoall_base(output, sample.whole(), [], [], dist.AllToAllOptions())], [output])


def _alltoall(group: ProcessGroup, sample: Sample) -> Started:
    outputs = sample.blanks()
    return Started([group.alltoall(outputs, sample.portions(), dist.AllToAllOptions())], outputs)


def _exchanged(sample: Sample) -> list[torch.Tensor]:
    return [each.portion(sample.rank) for each in _everybody(sample)]


def _gather(group: ProcessGroup, sample: Sample) -> Started:
    outputs = sample.blanks() if _is_root(sample) else []
    opts = _options(dist.GatherOptions, sample, _last(sample))
    return Started([group.gather([outputs] if outputs else [], [sample.portion()], opts)], outputs)


def _gather_into_tensor(group: ProcessGroup, sample: Sample) -> Started:
    output = sample.blank_whole()
    opts = _options(dist.GatherOptions, sample, _last(sample))
    work = group.gather_into_tensor(output, sample.portion(), opts)  # type: ignore[attr-defined]  # since torch 2.15
    return Started([work], [output] if _is_root(sample) else [])


def _scatter(group: ProcessGroup, sample: Sample) -> Started:
    output = sample.blank()
    opts = _options(dist.ScatterOptions, sample, _last(sample))
    return Started([group.scatter([output], [sample.portions()] if _is_root(sample) else [], opts)], [output])


def _ring(group: ProcessGroup, sample: Sample, kind: int, receive: Callable[..., dist.Work]) -> Started:
    """Send to the next rank and receive from the previous one. A single rank does nothing.

    Args:
        kind: 0 to 2, so that no rank receives a message of another kind or length.
        receive: called with a tensor, the source rank, and the tag.
    """
    if sample.world_size == 1:
        return Started([], [])
    received = sample.blank()
    before, after = ((sample.rank + step) % sample.world_size for step in (-1, 1))
    tag = kind + 3 * sample.length
    if kind == 0:
        works = [group.send([sample.portion()], after, tag), receive([received], before, tag)]
    else:
        works = [receive([received], before, tag), group.send([sample.portion()], after, tag)]
    return Started(works, [received])


def _send(group: ProcessGroup, sample: Sample) -> Started:
    return _ring(group, sample, 0, group.recv)


def _recv(group: ProcessGroup, sample: Sample) -> Started:
    return _ring(group, sample, 1, group.recv)


def _recv_anysource(group: ProcessGroup, sample: Sample) -> Started:
    return _ring(group, sample, 2, lambda tensors, source, tag: group.recv_anysource(tensors, tag))


def _from_before(sample: Sample) -> list[torch.Tensor]:
    return [] if sample.world_size == 1 else [sample.at((sample.rank - 1) % sample.world_size).portion()]


def _barrier(group: ProcessGroup, sample: Sample) -> Started:
    return Started([group.barrier(dist.BarrierOptions())], [])


_ALL = (
    Case("allreduce", _allreduce, _total, reduces=True),
    Case("allreduce_coalesced", _allreduce_coalesced, _two_totals, reduces=True),
    Case("reduce", _reduce, _reduce_expected, reduces=True),
    Case("reduce_scatter", _reduce_scatter, _own_total, reduces=True),
    Case("_reduce_scatter_base", _reduce_scatter_base, _own_total, reduces=True),
    Case("reduce_scatter_tensor_coalesced", _reduce_scatter_tensor_coalesced, _own_total, reduces=True),
    Case("broadcast", _broadcast, lambda sample: [sample.at(_last(sample)).portion()]),
    Case("allgather", _allgather, _gathered),
    Case("allgather_coalesced", _allgather_coalesced, _gathered),
    Case("_allgather_base", _allgather_base, lambda sample: [_flat(_gathered(sample))]),
    Case("allgather_into_tensor_coalesced", _allgather_into_tensor_coalesced, lambda s: [_flat(_gathered(s))]),
    Case("alltoall_base", _alltoall_base, lambda sample: [_flat(_exchanged(sample))]),
    Case("alltoall", _alltoall, _exchanged),
    Case("gather", _gather, lambda sample: _gathered(sample) if _is_root(sample) else []),
    Case("gather_into_tensor", _gather_into_tensor, lambda s: [_flat(_gathered(s))] if _is_root(s) else []),
    Case("scatter", _scatter, lambda sample: [sample.at(_last(sample)).portion(sample.rank)]),
    Case("send", _send, _from_before),
    Case("recv", _recv, _from_before),
    Case("recv_anysource", _recv_anysource, _from_before),
    Case("barrier", _barrier, lambda sample: [], sends=False),
)

CASES: tuple[Case, ...] = tuple(case for case in _ALL if case.row in {row.name for row in COLLECTIVES})
"""Every row of `tft_pg.COLLECTIVES`, in no particular order."""
