"""The arguments of a collective as JSON, and back. A tensor is a number; its contents travel in shared memory.

Law of this file: pure functions; the types that may cross are a closed list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

__all__ = ["Arguments", "dtype_name", "dtype_of", "pack", "unpack"]

_OPTIONS: Final = {
    name: getattr(c10d, name)
    for name in (
        *("AllreduceOptions", "AllreduceCoalescedOptions", "ReduceOptions", "ReduceScatterOptions"),
        *("BroadcastOptions", "AllgatherOptions", "AllToAllOptions", "GatherOptions", "ScatterOptions"),
        "BarrierOptions",
    )
    if hasattr(c10d, name)
}
# The attributes of torch's options that have a meaning for tensors of the CPU.
_ATTRIBUTES: Final = ("reduceOp", "rootRank", "rootTensor", "timeout", "asyncOp")
_MICROSECOND: Final = timedelta(microseconds=1)
_DTYPES: Final = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


@dataclass
class Arguments:
    """The packed arguments of one call.

    Args:
        args, kwargs: as JSON values.
        tensors: the tensors in the order of their numbers, each once.
        timeout: the longest timeout among the arguments.
        reduction: the name of the reduction; empty if there is none.
    """

    args: list[object] = field(default_factory=list)
    kwargs: dict[str, object] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)
    timeout: timedelta = timedelta(0)
    reduction: str = ""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a message."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name. Raises: ValueError: there is none."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"there is no dtype {name!r}") from None


def pack(args: Sequence[object], kwargs: Mapping[str, object]) -> Arguments:
    """Pack the arguments of a call. Raises: TypeError: a type that no collective takes."""
    packed = Arguments()
    numbers: dict[int, int] = {}
    packed.args = [_out(value, packed, numbers) for value in args]
    packed.kwargs = {key: _out(value, packed, numbers) for key, value in kwargs.items()}
    return packed


def _out(value: object, packed: Arguments, numbers: dict[int, int]) -> object:
    if isinstance(value, torch.Tensor):
        number = numbers.setdefault(id(value), len(packed.tensors))
        if number == len(packed.tensors):
            packed.tensors.append(value)
        return {"tensor": number}
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_out(item, packed, numbers) for item in value]
    if isinstance(value, timedelta):
        packed.timeout = max(packed.timeout, value)
        return {"microseconds": value // _MICROSECOND}
    kind = getattr(value, "op", value)  # a ReduceOp object, which may carry a factor, holds its kind in `op`
    if isinstance(kind, ReduceOp.RedOpType):
        packed.reduction = kind.name
        return {"reduction": kind.name}
    name = type(value).__name__
    if _OPTIONS.get(name) is type(value):
        found = {each: _out(getattr(value, each), packed, numbers) for each in _ATTRIBUTES if hasattr(value, each)}
        return {"options": name, "attributes": found}
    raise TypeError(f"a collective takes tensors, numbers, options and lists of these, but got {value!r:.100}")


def unpack(
    args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call, with these tensors at their places. Raises: ValueError, KeyError, IndexError."""
    return [_in(value, tensors) for value in args], {key: _in(value, tensors) for key, value in kwargs.items()}


def _in(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_in(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "microseconds" in value:
        return timedelta(microseconds=value["microseconds"])
    if "reduction" in value:
        return getattr(ReduceOp, value["reduction"])
    options = _OPTIONS[value["options"]]()
    for name, each in value["attributes"].items():
        if name not in _ATTRIBUTES:
            raise ValueError(f"options have no attribute {name!r}")
        setattr(options, name, _in(each, tensors))
    return options
