"""8-bit rows with a scale each, in torchft's layout, in plain torch.

torchft has these as kernels of Triton. Here they are ordinary tensor operations, so they work on any device. Only the
constants of Triton's own types need Triton.

The buffer has one slice for each rank. A slice has that rank's rows of each tensor. A row is a float32 scale, and its
codes, padded to a multiple of 4 bytes.

Law of this file: the layout and the rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Final

import torch
from torch.distributed import ReduceOp

from torchft._errors import ArgumentError
from torchft.collectives import get_padded_sizes

__all__ = [
    "BLOCK_SIZE_T",
    "SCALE_DTYPE",
    "SCALE_DTYPE_BYTES",
    "fused_dequantize_from_fp8",
    "fused_quantize_into_fp8",
    "fused_reduce_fp8",
]

SCALE_DTYPE: Final = torch.float32
SCALE_DTYPE_BYTES: Final = 4
BLOCK_SIZE_T: Final = 2048
_ALIGNMENT: Final = 4
_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


def __getattr__(name: str) -> Any:
    if name not in ("SCALE_TL_DTYPE", "SCALE_TL_DTYPE_BYTES"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        scale = import_module("triton.language").float32
    except ImportError as error:
        raise ImportError(f"{name} is a type of Triton; install triton") from error
    return scale if name == "SCALE_TL_DTYPE" else scale.primitive_bitwidth // 8


def fused_quantize_into_fp8(inputs: Sequence[torch.Tensor], all_reduce_group_size: int) -> torch.Tensor:
    """Return the tensors as 8-bit rows.

    Args:
        inputs: of up to two dimensions, of float32, float16 or bfloat16, on one device.
        all_reduce_group_size: number of ranks.
    Returns: uint8, flat, one slice for each rank.
    Raises: AssertionError: the tensors can't be used.
    """
    buffer = torch.zeros(_num_bytes(inputs, all_reduce_group_size), dtype=torch.uint8, device=inputs[0].device)
    for tensor, rows in zip(inputs, _rows(inputs, buffer, all_reduce_group_size), strict=True):
        matrix = _matrix(tensor).float()
        padded = matrix.new_zeros(rows.shape[0] * rows.shape[1], matrix.shape[1])
        padded[: matrix.shape[0]] = matrix
        _encode(padded.view(*rows.shape[:2], -1), rows)
    return buffer


def fused_dequantize_from_fp8(inputs: Sequence[torch.Tensor], output: torch.Tensor, all_reduce_group_size: int) -> None:
    """Write 8-bit rows back into tensors.

    Args:
        inputs: receive the values.
        output: of `fused_quantize_into_fp8`.
        all_reduce_group_size: number of ranks.
    """
    for tensor, rows in zip(inputs, _rows(inputs, output, all_reduce_group_size), strict=True):
        matrix = _matrix(tensor)
        values = _decode(rows, matrix.shape[1]).flatten(0, 1)
        matrix.copy_(values[: matrix.shape[0]])


def fused_reduce_fp8(
    inputs: Sequence[torch.Tensor],
    output: torch.Tensor,
    all_reduce_group_size: int,
    all_reduce_rank: int,
    reduce_op: Any = ReduceOp.SUM,
) -> None:
    """Reduce the slices of a buffer, in place, into the slice of one rank.

    Args:
        inputs: tensors of the shapes in the buffer.
        output: the buffer: after an exchange it has one slice of each rank, all of the same rows.
        all_reduce_group_size: number of ranks.
        all_reduce_rank: the rank whose slice receives the result.
        reduce_op: SUM. All else divides by the number of ranks.
    """
    for tensor, rows in zip(inputs, _rows(inputs, output, all_reduce_group_size), strict=True):
        total = _decode(rows, _matrix(tensor).shape[1]).sum(dim=0, keepdim=True)
        if reduce_op != ReduceOp.SUM:
            total /= all_reduce_group_size
        _encode(total, rows[all_reduce_rank : all_reduce_rank + 1])


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 2 else tensor.view(-1, 1)


def _codes(device: torch.device) -> tuple[torch.dtype, float]:
    """Return the type of a code on that device, and its largest value."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return torch.float8_e4m3fn, 448.0
    return torch.int8, 127.0


def _row_bytes(num_columns: int) -> int:
    return SCALE_DTYPE_BYTES + -(-num_columns // _ALIGNMENT) * _ALIGNMENT


def _num_bytes(inputs: Sequence[torch.Tensor], num_ranks: int) -> int:
    if len({(tensor.device, tensor.dtype) for tensor in inputs}) != 1:
        raise ArgumentError("the tensors must have one device and one dtype")
    if inputs[0].dtype not in _DTYPES or any(tensor.dim() > 2 for tensor in inputs):
        raise ArgumentError("give tensors of up to two dimensions, of float32, float16 or bfloat16")
    return sum(rows * _row_bytes(columns) for rows, columns in get_padded_sizes(inputs, num_ranks))


def _rows(inputs: Sequence[torch.Tensor], buffer: torch.Tensor, num_ranks: int) -> Iterator[torch.Tensor]:
    """Yield for each tensor its rows in the buffer: [rank, row, byte]."""
    slices = buffer.view(num_ranks, -1)
    begin = 0
    for num_rows, num_columns in get_padded_sizes(inputs, num_ranks):
        own, width = num_rows // num_ranks, _row_bytes(num_columns)
        yield slices[:, begin : begin + own * width].unflatten(1, (own, width))
        begin += own * width


def _encode(values: torch.Tensor, rows: torch.Tensor) -> None:
    """Write values of [rank, row, column] into rows."""
    dtype, largest = _codes(values.device)
    scale = values.abs().amax(dim=-1, keepdim=True) / largest
    scaled = values / torch.where(scale == 0, 1.0, scale)
    codes = scaled.round().to(dtype) if dtype is torch.int8 else scaled.to(dtype)
    rows[..., :SCALE_DTYPE_BYTES] = scale.contiguous().view(torch.uint8)
    rows[..., SCALE_DTYPE_BYTES : SCALE_DTYPE_BYTES + values.shape[-1]] = codes.view(torch.uint8)


def _decode(rows: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return the values of rows, [rank, row, column], as float32."""
    dtype, _ = _codes(rows.device)
    scale = rows[..., :SCALE_DTYPE_BYTES].contiguous().view(SCALE_DTYPE)
    codes = rows[..., SCALE_DTYPE_BYTES : SCALE_DTYPE_BYTES + num_columns].contiguous().view(dtype)
    return codes.float() * scale
