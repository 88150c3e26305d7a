"""Quantized reductions over a process group: a sum in float32 of numbers that travel as small codes.

Each member encodes its tensor and sends each chunk to the member that owns the chunk. The owner adds the chunks in
float32, in the order of the ranks, and rounds the sum once. All members then gather the rounded sums. All decode the
same bytes, so they end with equal bits.

Law of this file: the two halves of a reduction. The arithmetic of blocks is in `quantization`, the life of a Work in
`encoded_work`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed as dist

from tft_algos.agreement import Agreement, Issue, at_once, describe
from tft_algos.encoded_work import EncodedWork, Exchange
from tft_algos.errors import ConfigError, UnsupportedFeatureError
from tft_algos.quantization.codecs import Codec, Int8, check_quantizable, flat_float32, write_back
from tft_algos.quantization.feedback import Compensation
from tft_pg import DummyWork

__all__ = ["allreduce_quantized", "reduce_scatter_quantized"]

_NEEDED: Final = ("alltoall_base", "_allgather_base", "size", "rank")


def allreduce_quantized(
    tensors: list[torch.Tensor],
    opts: dist.AllreduceOptions | dist.ReduceOp | dist.ReduceOp.RedOpType,
    process_group: dist.ProcessGroup,
    *,
    codec: Codec | None = None,
) -> dist.Work:
    """Reduce tensors over a process group, in place, as quantized numbers.

    The tensors travel together in two messages for each peer. The ranks first compare their codecs, operations, dtypes
    and shapes. The call issues this comparison, and `wait` or `get_future` issues the rest. So all ranks call these in
    the same order, as they do with collectives, and `get_future` returns when the last half has started: that takes
    until the other ranks have begun, and at most the time-out of the group for each half. On an accelerator, the call
    issues the first half too, `wait` waits for the device, and backends may fail otherwise if sizes differ. For a group
    of one, nothing is rounded.

    Args:
        tensors: dense, of floating-point or complex dtypes, on one device. All ranks give the same shapes and dtypes.
        opts: SUM or AVG, or options with one of them.
        process_group: any group with `alltoall_base` and `_allgather_base` for uint8: a group of tft_pg, or torch's.
        codec: None: `Int8`. Not `TopK`, which needs an `ErrorFeedback` of a Manager.
    Returns: a Work. Its `wait` raises the errors of the process group, or ContributionError if another rank reduces
        something else, and writes into no tensor then.
    Raises: UnsupportedFeatureError: the operation, a tensor or the group can't be used. ConfigError: an argument is
        wrong. Errors of the process group.
    """
    average = _averages(opts)
    codec = _checked(codec, process_group, tensors)
    if process_group.size() == 1:
        return DummyWork(tensors)
    return _begun(ChunkExchange(process_group, codec, tensors, average=average), process_group, codec, tensors)


def reduce_scatter_quantized(
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    opts: dist.ReduceScatterOptions | dist.ReduceOp | dist.ReduceOp.RedOpType,
    process_group: dist.ProcessGroup,
    *,
    codec: Codec | None = None,
) -> dist.Work:
    """Reduce one tensor for each rank, as quantized numbers. The output is the sum or mean of this rank's inputs.

    Args:
        output: receives the result. The sum is not rounded to codes again.
        inputs: one tensor for each rank, each with the shape and dtype of the output.
        opts, process_group, codec: as in `allreduce_quantized`.
    Returns: as `allreduce_quantized`. Raises: as `allreduce_quantized`.
    """
    average = _averages(opts)
    codec = _checked(codec, process_group, [output, *inputs])
    if len(inputs) != process_group.size() or any(each.shape != output.shape for each in inputs):
        raise ConfigError(
            f"the output has the shape {list(output.shape)}, and the inputs have the shapes "
            f"{[list(each.shape) for each in inputs]}; give one input of the output's shape for each of the "
            f"{process_group.size()} ranks"
        )
    if len(inputs) == 1:
        output.copy_(inputs[0])
        return DummyWork([output])
    exchange = ChunkExchange(process_group, codec, [output], average=average, inputs=inputs)
    return _begun(exchange, process_group, codec, [output])


def _begun(exchange: ChunkExchange, group: Any, codec: Codec, tensors: list[torch.Tensor]) -> EncodedWork:
    """Return the Work of an exchange, begun."""
    agreement = Agreement(group, describe(codec, exchange.operation, tensors), tensors[0].device)
    work = EncodedWork(exchange, agreement, tensors)
    work.begin()
    return work


def check_group(group: object) -> None:
    """Check that a process group has the collectives of a quantized reduction.

    Raises: UnsupportedFeatureError: a method is missing.
    """
    missing = [name for name in _NEEDED if not callable(getattr(group, name, None))]
    if missing:
        raise UnsupportedFeatureError(
            f"a {type(group).__name__} has no {' and no '.join(missing)}, which a quantized reduction needs; reduce "
            "without quantization, or give a group of tft_pg, such as ProcessGroupGloo()"
        )


def check_operation(reduce_op: object) -> None:
    """Check that a quantized reduction can run this operation. Raises: UnsupportedFeatureError: not SUM or AVG."""
    # torch's ReduceOp objects equal their kind, but the kind does not equal them: so the object stands on the left.
    if not (reduce_op == dist.ReduceOp.SUM or reduce_op == dist.ReduceOp.AVG):
        raise UnsupportedFeatureError(
            f"{getattr(reduce_op, 'op', reduce_op)} of quantized numbers is not supported; use ReduceOp.SUM or "
            "ReduceOp.AVG, or reduce without quantization"
        )


def check_dense(codec: object) -> None:
    """Check that a codec works without error feedback. Raises: UnsupportedFeatureError: it does not."""
    if isinstance(codec, Codec) and codec.is_sparse:
        name = type(codec).__name__
        raise UnsupportedFeatureError(
            f"{name} sends only a few numbers of a tensor, so all others would be lost without error feedback; give "
            f"DiLoCo(should_quantize=ErrorFeedback(manager, {name}())), or another codec: Int8()"
        )


def _averages(opts: object) -> bool:
    """Return whether the operation is a mean. Raises: UnsupportedFeatureError: it is neither SUM nor AVG."""
    reduce_op = getattr(opts, "reduceOp", opts)
    check_operation(reduce_op)
    return bool(reduce_op == dist.ReduceOp.AVG)


def _checked(codec: Codec | None, group: object, tensors: Sequence[torch.Tensor]) -> Codec:
    check_group(group)
    if codec is not None and not isinstance(codec, Codec):
        raise ConfigError(f"codec is a {type(codec).__name__}; give a codec of tft_algos.quantization: Int8()")
    check_dense(codec)
    for tensor in tensors:
        check_quantizable(tensor)
    if len({tensor.device for tensor in tensors}) != 1:
        raise ConfigError(f"{len(tensors)} tensors are on several devices or there is none; give tensors of one device")
    return codec or Int8()


@final
class ChunkExchange(Exchange):
    """An exchange in two halves: each member receives its chunk of all tensors, and all gather the rounded sums.

    Args:
        group: of at least two ranks.
        codec: encodes the numbers.
        tensors: receive the result, and are the contribution unless `inputs` are given.
        average: divide the sum by the number of ranks.
        inputs: of a reduce-scatter: one for each rank.
        compensation: error feedback of `tensors`. Only with a sum.
        issue: starts a collective, if the group is still configured as it was.
    """

    def __init__(
        self,
        group: Any,
        codec: Codec,
        tensors: list[torch.Tensor],
        *,
        average: bool,
        inputs: list[torch.Tensor] | None = None,
        compensation: Compensation | None = None,
        issue: Issue = at_once,
    ) -> None:
        self._group = group
        self._codec = codec
        self._tensors = tensors
        self._average = average
        self._inputs = inputs
        self._compensation = compensation
        self._issue = issue
        self._buffers = _Buffers(codec, group.size(), group.rank())
        self._first: dist.Work | None = None

    @property
    def operation(self) -> str:
        """Return what is done, for a comparison with the other members."""
        return f"{'mean' if self._average else 'sum'}{'' if self._inputs is None else ', scattered'}"

    def begin(self) -> None:
        if self._inputs is not None:
            parts = [flat_float32([each]) for each in self._inputs]
        elif self._compensation is not None:
            parts = [self._compensation.compensated(self._tensors)]
        else:
            parts = [flat_float32(self._tensors)]
        sent = self._buffers.encode(parts)
        if self._compensation is not None:
            self._compensation.sent(self._codec, sent)
        received = torch.empty_like(sent)
        self._buffers.received = received
        self._first = self._issue(lambda: self._group.alltoall_base(received.view(-1), sent.view(-1), [], []))

    def proceed(self, timeout: timedelta | None) -> dist.Work | None:
        first, self._first = self._first, None
        assert first is not None, "the exchange has not begun"
        if timeout:
            first.wait(timeout)
        else:
            first.wait()
        total = self._buffers.add()
        if self._average:
            total.div_(self._buffers.num_ranks)
        if self._inputs is not None:
            write_back(total, self._tensors)
            return None
        own, everything = self._buffers.round(total)
        if self._compensation is not None:
            self._codec.add_to(own, total, -1.0)
            self._compensation.owned(self._buffers.own_start, total)
        return self._issue(lambda: self._group._allgather_base(everything.view(-1), own.view(-1)))

    def write(self) -> None:
        tensor = self._tensors[0]
        in_place = len(self._tensors) == 1 and tensor.dtype == torch.float32 and tensor.is_contiguous()
        if in_place:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                self._buffers.decode(tensor.detach().view(-1))
            return
        size = sum(each.numel() * (2 if each.is_complex() else 1) for each in self._tensors)
        values = torch.empty(size, dtype=torch.float32, device=tensor.device)
        self._buffers.decode(values)
        write_back(values, self._tensors)

    def release(self) -> None:
        self._buffers.release()


@final
class _Buffers:
    """The rows of bytes of one reduction. Each rank's chunk has the same number of rows."""

    def __init__(self, codec: Codec, num_ranks: int, rank: int) -> None:
        self.num_ranks = num_ranks
        self._codec = codec
        self._rank = rank
        self._rows = 0  # of a chunk
        self._sent: torch.Tensor | None = None
        self.received: torch.Tensor | None = None

    @property
    def own_start(self) -> int:
        """Return the index of the first element of the own chunk."""
        return self._rank * self._rows * self._codec.block

    def encode(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Encode one flat tensor for all ranks, or one for each rank. Return the rows, in the order of the ranks."""
        codec, each = self._codec, len(parts) > 1
        num_rows = codec.num_rows(parts[0].numel())
        self._rows = num_rows if each else -(-num_rows // self.num_ranks)
        shape = self.num_ranks * self._rows, codec.row_bytes
        self._sent = torch.empty(shape, dtype=torch.uint8, device=parts[0].device)
        if not each:
            codec.encode(parts[0], self._sent)
        else:
            for values, rows in zip(parts, self._sent.split(self._rows), strict=True):
                codec.encode(values, rows)
        return self._sent

    def add(self) -> torch.Tensor:
        """Return the sum of the received chunks: float32, flat, in the order of the ranks."""
        assert self.received is not None
        first, *others = self.received.split(self._rows)
        total = torch.empty(self._rows * self._codec.block, dtype=torch.float32, device=first.device)
        self._codec.decode(first, total)
        for rows in others:
            self._codec.add_to(rows, total)
        return total

    def round(self, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of the rounded sum, and the rows that receive the sums of all chunks."""
        assert self.received is not None
        assert self._sent is not None
        own = self.received[: self._rows]
        self._codec.encode(total, own)
        return own, self._sent

    def decode(self, values: torch.Tensor) -> None:
        """Write the gathered sums into a flat float32 tensor."""
        assert self._sent is not None
        self._codec.decode(self._sent, values)

    def release(self) -> None:
        """Release the memory."""
        self._sent = self.received = None
