"""Checks of a call that one rank can do before it sends anything.

Torch's backends check most arguments on the calling thread. They miss these faults:

- They skip a tensor on another device.
- They fill a non-contiguous tensor as if it were contiguous.
- They read a conjugate or negated view as stored.
- A rank that sends to itself breaks the group.
- Splits with a wrong sum fail on a thread while the other ranks already wait.

This file contains the missing checks. It omits checks that need two ranks, because those cost a message.

Law of this file: pure functions from a call to a part of a sentence; one table; each operation pays for its own row
only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tft_pg.ops import COLLECTIVES, Collective

__all__ = ["fault_of", "is_plain"]

_Check = Callable[[Sequence[Any], int, int], str]


def fault_of(
    collective: Collective, args: Sequence[object], kwargs: Mapping[str, object], *, rank: int, world_size: int
) -> str:
    """Return why a call on CPU tensors can't work, regardless of the other ranks. The result is empty if no fault
    shows.

    Args:
        collective: the collective.
        args, kwargs: as the caller gave them. For types that torch does not know, torch's own error is better.
        rank, world_size: of the caller, in the group.
    """
    given = [collective.argument(index, args, kwargs) for index in range(len(collective.parameters))]
    for value in given:
        fault = _unreadable(value)
        if fault:
            return fault
    check = _CHECKS.get(collective.name)
    return check(given, rank, world_size) if check is not None else ""


def is_plain(collective: Collective, args: Sequence[object]) -> bool:
    """Return whether a call is the most frequent, always valid form. Callers check this first.

    That form is one contiguous CPU tensor of floats, in place, in a list.
    """
    if not args or collective.name not in _IN_PLACE:
        return False
    tensors = args[0]
    if type(tensors) is not list or len(tensors) != 1:
        return False
    tensor = tensors[0]
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype in _FLOATS
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _unreadable(value: object) -> str:
    """Return why the memory of one of the tensors can't be sent or filled in, or an empty string."""
    if type(value) is list or type(value) is tuple:
        for item in value:
            fault = _unreadable(item)
            if fault:
                return fault
    elif isinstance(value, torch.Tensor):
        if not value.is_cpu:
            return f"a tensor is on {value.device}, but this group is for the CPU"
        if value.is_conj():
            return f"a tensor of {_described(value)} is a conjugate view; pass its resolve_conj()"
        if value.is_neg():
            return f"a tensor of {_described(value)} is a negated view; pass its resolve_neg()"
    return ""


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _check_peer(given: Sequence[Any], rank: int, world_size: int) -> str:
    peer = given[1]
    if isinstance(peer, int) and not 0 <= peer < world_size:
        return f"there is no rank {peer} in a group of {world_size}"
    return f"rank {peer} is this rank itself" if peer == rank else ""


def _check_anysource(given: Sequence[Any], rank: int, world_size: int) -> str:
    return "" if world_size > 1 else "a group of one has no other rank to receive from"


def _check_single(given: Sequence[Any], rank: int, world_size: int) -> str:
    """Return a fault if a call has several tensors. Torch takes them for several devices, and adds them all or
    uses the first.
    """
    tensors = given[0]
    if isinstance(tensors, (list, tuple)) and len(tensors) > 1:
        return f"a call takes one tensor, but got {len(tensors)}; call it for each tensor"
    return ""


def _check_allreduce(given: Sequence[Any], rank: int, world_size: int) -> str:
    fault = _check_single(given, rank, world_size)
    return f"{fault}, or use allreduce_coalesced" if fault else ""


def _check_scatter(given: Sequence[Any], rank: int, world_size: int) -> str:
    return _gap(given[0]) or _gap(given[1])


def _gap(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "" if value.is_contiguous() else f"a tensor of {_described(value)} is not contiguous"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return next(filter(None, map(_gap, value)), "")
    return ""


def _check_alltoall_base(given: Sequence[Any], rank: int, world_size: int) -> str:
    output, input_, output_splits, input_splits = given[:4]
    if not isinstance(output, torch.Tensor) or not isinstance(input_, torch.Tensor):
        return ""
    if output.dtype != input_.dtype:
        return f"the output is {_described(output)}, but the input is {_described(input_)}"
    if not output.dim() or not input_.dim() or output.shape[1:].numel() != input_.shape[1:].numel():
        return f"the rows of the output, {_described(output)}, are not as long as the input's, {_described(input_)}"
    fault = _gap(output) or _gap(input_)
    if fault:
        return fault
    lengths = []
    for what, tensor, splits in (("output", output, output_splits), ("input", input_, input_splits)):
        rows = tensor.shape[0]
        if not splits:
            if rows % world_size:
                return f"the {rows} rows of the {what} can't be split among {world_size} ranks"
            lengths.append(rows // world_size)
        elif len(splits) != world_size or min(splits) < 0 or sum(splits) != rows:
            return f"the {what} splits {list(splits)} are not {world_size} sizes that add up to its {rows} rows"
        else:
            lengths.append(splits[rank])
    if lengths[0] != lengths[1]:
        return f"rank {rank} receives {lengths[0]} rows from itself but sends itself {lengths[1]}"
    return ""


def _check_reduce_scatter(given: Sequence[Any], rank: int, world_size: int) -> str:
    """Return a fault of any of the three forms: a tensor with a list or a tensor, or lists of these."""
    outputs, inputs = given[0], given[1]
    if isinstance(outputs, torch.Tensor):
        outputs, inputs = [outputs], [inputs]
    if not isinstance(outputs, Sequence) or not isinstance(inputs, Sequence):
        return "the arguments must be tensors, or lists of tensors"
    if not outputs or len(outputs) != len(inputs):
        return f"there are {len(outputs)} outputs and {len(inputs)} inputs"
    return next(filter(None, (_part_fault(*pair, world_size) for pair in zip(outputs, inputs, strict=True))), "")


def _part_fault(output: object, input_: object, world_size: int) -> str:
    if not isinstance(output, torch.Tensor) or not isinstance(input_, (torch.Tensor, list, tuple)):
        return "the arguments must be tensors, or lists of tensors"
    if isinstance(input_, torch.Tensor):
        if input_.numel() != world_size * output.numel() or input_.dtype != output.dtype:
            return (
                f"an input of {_described(input_)} is not {world_size} times as large as its output of "
                f"{_described(output)}"
            )
        return ""
    if len(input_) != world_size:
        return f"{len(input_)} tensors can't be scattered among {world_size} ranks"
    for part in input_:
        if not isinstance(part, torch.Tensor):
            return "the arguments must be tensors, or lists of tensors"
        if part.numel() != output.numel() or part.dtype != output.dtype:
            return f"an input of {_described(part)} is not as large as its output of {_described(output)}"
    return ""


_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_IN_PLACE = frozenset({"allreduce", "broadcast"})

_CHECKS: Mapping[str, _Check] = {
    "allreduce": _check_allreduce,
    "broadcast": _check_single,
    "reduce": _check_single,
    "send": _check_peer,
    "recv": _check_peer,
    "recv_anysource": _check_anysource,
    "scatter": _check_scatter,
    "alltoall_base": _check_alltoall_base,
    "reduce_scatter": _check_reduce_scatter,
    "_reduce_scatter_base": _check_reduce_scatter,
    "reduce_scatter_tensor_coalesced": _check_reduce_scatter,
}
assert _CHECKS.keys() | _IN_PLACE <= {row.name for row in COLLECTIVES}
