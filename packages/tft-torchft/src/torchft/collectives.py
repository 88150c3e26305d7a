"""Quantized collectives, under torchft's names. They need no Triton, and work on any device and any group.

Law of this file: the layout of torchft's arguments. The reductions are tft_algos's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import tft_algos.collectives as ours
from torchft._errors import ArgumentError
from torchft.utils import get_stream_context

__all__ = [
    "allocate_reduce_scatter_output",
    "allreduce_quantized",
    "get_padded_sizes",
    "reduce_scatter_quantized",
]


def get_padded_sizes(tensors: Sequence[torch.Tensor], world_size: int) -> list[torch.Size]:
    """Return the size of each tensor as a matrix whose rows are a multiple of `world_size`. A vector has one column."""
    sizes = []
    for tensor in tensors:
        rows, *columns = tensor.shape if tensor.dim() > 1 else (tensor.numel(), 1)
        sizes.append(torch.Size([-(-rows // world_size) * world_size, *columns]))
    return sizes


def allocate_reduce_scatter_output(
    tensors: Sequence[torch.Tensor], world_size: int
) -> tuple[torch.Tensor, list[torch.Size]]:
    """Return an uninitialized output for `reduce_scatter_quantized`, and the padded sizes of the tensors.

    Raises: AssertionError: the tensors differ in device or dtype, or there are none.
    """
    if len({(tensor.device, tensor.dtype) for tensor in tensors}) != 1:
        raise ArgumentError("the tensors must have one device and one dtype")
    sizes = get_padded_sizes(tensors, world_size)
    numel = sum(size.numel() for size in sizes) // world_size
    return torch.empty(numel, device=tensors[0].device, dtype=tensors[0].dtype), sizes


def reduce_scatter_quantized(
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    opts: Any,
    process_group: dist.ProcessGroup,
    sync_stream: torch.Stream | None = None,
) -> dist.Work:
    """Reduce tensors as 8-bit codes. Each rank gets its share of the rows of each tensor.

    Args:
        output: of `allocate_reduce_scatter_output`.
        inputs: the tensors, the same shapes on every rank.
        opts: SUM or AVG, or options with one of them.
        process_group: of the ranks.
        sync_stream: the stream to work on. None: the current one.
    Raises: NotImplementedError: neither SUM nor AVG. AssertionError: the tensors differ in device or dtype.
    """
    world_size = process_group.size()
    parts: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
    with get_stream_context(sync_stream):
        for tensor, size in zip(inputs, get_padded_sizes(inputs, world_size), strict=True):
            padded = tensor.new_zeros(size.numel())
            padded[: tensor.numel()] = tensor.reshape(-1)
            for own, share in zip(parts, padded.chunk(world_size), strict=True):
                own.append(share)
        return ours.reduce_scatter_quantized(output, [torch.cat(own) for own in parts], opts, process_group)


def allreduce_quantized(
    tensors: list[torch.Tensor],
    opts: Any,
    process_group: dist.ProcessGroup,
    sync_stream: torch.Stream | None = None,
) -> dist.Work:
    """Reduce tensors in place as 8-bit codes.

    Args:
        tensors: the same shapes on every rank.
        opts, process_group, sync_stream: as in `reduce_scatter_quantized`.
    Raises: NotImplementedError: neither SUM nor AVG.
    """
    with get_stream_context(sync_stream):
        return ours.allreduce_quantized(tensors, opts, process_group)
