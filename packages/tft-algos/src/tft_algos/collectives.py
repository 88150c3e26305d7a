"""Quantized reductions over a process group: a sum in float32 of numbers that travel as small codes.

Each member encodes its tensor and sends each chunk to the member that owns the chunk. The owner adds the chunks in
float32, in the order of the ranks, and rounds the sum once. All members then gather the rounded sums. All decode the
same bytes, so they end with equal bits.

Law of this file: the two halves of a reduction and their Work. The arithmetic of blocks is in `quantization`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias, final

import torch
import torch.distributed as dist

from tft_algos.errors import ConfigError, UnsupportedFeatureError
from tft_algos.quantization.codecs import Codec, Int8, check_quantizable, flat_float32, write_back
from tft_algos.quantization.feedback import Compensation
from tft_pg import DummyWork

__all__ = ["allreduce_quantized", "reduce_scatter_quantized"]

Issue: TypeAlias = Callable[[Callable[[], dist.Work]], dist.Work]

_NEEDED: Final = ("alltoall_base", "_allgather_base", "size", "rank")


def allreduce_quantized(
    tensors: list[torch.Tensor],
    opts: dist.AllreduceOptions | dist.ReduceOp | dist.ReduceOp.RedOpType,
    process_group: dist.ProcessGroup,
    *,
    codec: Codec | None = None,
) -> dist.Work:
    """Reduce tensors over a process group, in place, as quantized numbers.

    The tensors travel together in two messages for each peer. The call issues the first half, and `wait` or
    `get_future` issues the second half. So all ranks call these in the same order, as they do with collectives. For a
    group of one, nothing is rounded.

    Args:
        tensors: dense, of floating-point or complex dtypes, on one device. All ranks give the same shapes and dtypes.
        opts: SUM or AVG, or options with one of them.
        process_group: any group with `alltoall_base` and `_allgather_base` for uint8: a group of tft_pg, or torch's.
        codec: None: `Int8`.
    Returns: a Work. Its `wait` raises the errors of the process group, and writes into no tensor then.
    Raises: UnsupportedFeatureError: the operation, a tensor or the group can't be used. ConfigError: an argument is
        wrong. Errors of the process group.
    """
    average = _averages(opts)
    codec = _checked(codec, process_group, tensors)
    if process_group.size() == 1 or not any(tensor.numel() for tensor in tensors):
        return DummyWork(tensors)
    work = QuantizedWork(process_group, codec, tensors, average=average)
    work.begin()
    return work


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
    if len(inputs) == 1 or not output.numel():
        output.copy_(inputs[0])
        return DummyWork([output])
    work = QuantizedWork(process_group, codec, [output], average=average, inputs=inputs)
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
    if reduce_op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise UnsupportedFeatureError(
            f"{reduce_op} of quantized numbers is not supported; use ReduceOp.SUM or ReduceOp.AVG, or reduce without "
            "quantization"
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
    for tensor in tensors:
        check_quantizable(tensor)
    if len({tensor.device for tensor in tensors}) != 1:
        raise ConfigError(f"{len(tensors)} tensors are on several devices or there is none; give tensors of one device")
    return codec or Int8()


@final
class QuantizedWork(dist.Work):
    """A quantized reduction, from its encoding to its result.

    Args:
        group: of at least two ranks.
        codec: encodes the numbers.
        tensors: receive the result, and are the contribution unless `inputs` are given.
        average: divide the sum by the number of ranks.
        inputs: of a reduce-scatter: one for each rank.
        compensation: error feedback of `tensors`. Only with a sum.
        is_driven: another thread calls `begin` and `advance`, so `wait` and `get_future` do not.
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
        is_driven: bool = False,
        issue: Issue | None = None,
    ) -> None:
        super().__init__()
        self._group = group
        self._codec = codec
        self._tensors = tensors
        self._average = average
        self._inputs = inputs
        self._compensation = compensation
        self._is_driven = is_driven
        self._issue: Issue = issue or (lambda start: start())
        self._buffers = _Buffers(codec, group.size(), group.rank())
        self._lock = threading.RLock()
        self._first: dist.Work | None = None
        self._second: dist.Work | None = None
        self._end = _End()

    # --- the halves ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Encode, and start the exchange of the chunks. Raises: errors of the process group."""
        with self._lock:
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

    def advance(self) -> None:
        """Wait for the chunks, add them, and start to gather the sums. A second call does nothing. Raises nothing."""
        with self._lock:
            if self._end.advanced.is_set():
                return
            try:
                if self._first is None:
                    self.begin()
                assert self._first is not None
                self._first.wait()
                self._add()
            except Exception as error:
                self._end.error = error
            self._first = None
        self._end.advanced.set()
        self._resolve()

    def _add(self) -> None:
        total = self._buffers.add()
        if self._average:
            total.div_(self._buffers.num_ranks)
        if self._inputs is not None:
            write_back(total, self._tensors)
            self._end.is_written = True
            return
        own, everything = self._buffers.round(total)
        if self._compensation is not None:
            self._codec.add_to(own, total, -1.0)
            self._compensation.owned(self._buffers.own_start, total)
        self._second = self._issue(lambda: self._group._allgather_base(everything.view(-1), own.view(-1)))

    def _finish(self) -> None:
        """Write the result. The second half has ended."""
        with self._lock:
            if self._end.is_written or self._end.error is not None:
                return
            try:
                self._write()
            except Exception as error:
                self._end.error = error
            self._end.is_written = self._end.error is None
            self._buffers.release()

    def _write(self) -> None:
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

    @property
    def failure(self) -> Exception | None:
        """Return the error of a half that could not start or has failed. None: there is none yet."""
        return self._end.error

    # --- the interface of a Work --------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensors hold the result. Raises: errors of the process group."""
        if self._is_driven:
            # No deadline of its own: the halves have the group's time-out, and an abort of the group ends them.
            self._end.advanced.wait()
        else:
            self.advance()
        second = self._second
        if self._end.error is None and second is not None and not self._end.is_written:
            failure = _failure(lambda: second.wait(timeout) if timeout else second.wait())
            self._end.error = self._end.error or failure
        self._finish()
        if self._end.error is not None:
            raise self._end.error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors, which is done when they hold the result, or holds an error."""
        if not self._is_driven:
            self.advance()
        with self._end.lock:
            if self._end.future is None:
                device = self._tensors[0].device
                self._end.future = torch.futures.Future(devices=None if device.type == "cpu" else [device])
            future = self._end.future
        if self._end.advanced.is_set():
            self._resolve()
        return future

    def _resolve(self) -> None:
        """Complete the future, if there is one, when the second half has ended."""
        with self._end.lock:
            future = self._end.future
            if future is None or self._end.is_resolved:
                return
            self._end.is_resolved = True
            second = self._second
        if second is None:
            self._complete(future)
        elif self._tensors[0].device.type != "cpu":  # this wait only orders the stream
            self._end.error = self._end.error or _failure(second.wait)
            self._complete(future)
        else:
            second.get_future().add_done_callback(lambda ended: self._ended(future, ended))

    def _ended(self, future: torch.futures.Future[Any], ended: torch.futures.Future[Any]) -> None:
        # A wait here, on the backend's own thread, would never end.
        self._end.error = self._end.error or _failure(ended.value)
        self._complete(future)

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        """Complete the future. Both halves have ended."""
        self._finish()
        if self._end.error is not None:
            future.set_exception(self._end.error)
        else:
            future.set_result(self._tensors)

    def is_completed(self) -> bool:
        if self._end.is_written or self._end.error is not None:
            return True
        second = self._second
        return self._end.advanced.is_set() and second is not None and second.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


def _failure(call: Callable[[], object]) -> Exception | None:
    """Return the error that a call raises, or None."""
    try:
        call()
    except Exception as error:
        return error
    return None


@final
class _End:
    """How far a reduction has come."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # of the future. The lock of the Work is held during the first half
        self.advanced = threading.Event()  # the second half was issued, or there is an error
        self.error: Exception | None = None
        self.is_written = False
        self.future: torch.futures.Future[Any] | None = None
        self.is_resolved = False


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
