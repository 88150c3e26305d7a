"""The dtypes and reductions that torch's NCCL supports, as a table, and the calls that torch needs in another form.

NCCL and torch refuse most of what they do not support. But an error of NCCL itself ends the communicator, and in a call
for several tensors it ends the process. Torch's own refusals often don't name the dtype or the reduction. So this file
checks each call first, and all ranks refuse alike.

The table was measured on an H100 with torch 2.11 and NCCL 2.28.

Law of this file: pure functions from a call to a part of a sentence, or to another call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tft_pg.ops import Collective

__all__ = ["fit", "lacks"]

_WIDE_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_SMALL_FLOATS = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_WHOLE = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_ARITHMETIC = frozenset({"SUM", "AVG", "MIN", "MAX", "PRODUCT"})
_TAKES_COMPLEX = frozenset({"allreduce", "reduce", "broadcast"})
_BITWISE = frozenset({"BAND", "BOR", "BXOR"})

_Arguments = tuple[tuple[object, ...], Mapping[str, object]]


def lacks(collective: Collective, args: Sequence[object], kwargs: Mapping[str, object], world_size: int) -> str:
    """Return why NCCL can't run this call. Empty if NCCL can run it, or refuses it and keeps working.

    Args:
        collective: the collective.
        args, kwargs: as the caller gave them.
        world_size: of the group.
    """
    tensors = (*collective.given(args, kwargs), *collective.results(args, kwargs))
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    op = collective.reduction(args, kwargs) if _reduces(collective) else ""
    return next(filter(None, (_fault(collective.name, dtype, op, world_size) for dtype in dtypes)), "")


def _reduces(collective: Collective) -> bool:
    return "reduce" in collective.name


def _fault(name: str, dtype: torch.dtype, op: str, world_size: int) -> str:
    word = str(dtype).removeprefix("torch.")
    if dtype in _COMPLEX and name not in _TAKES_COMPLEX:
        return f"NCCL does not support {word} in this collective; view it as real"
    if dtype not in _WIDE_FLOATS | _SMALL_FLOATS | _WHOLE | _COMPLEX | {torch.bool}:
        return f"NCCL does not support {word}; use another dtype, or view it as one of the same size"
    # A group of one copies the input in these, and leaves out the factor.
    without_factor = op == "PREMUL_SUM" and world_size == 1 and "reduce_scatter" in name
    if not op or (op in _reductions(dtype, world_size) and not without_factor):
        return ""
    hint = "use MIN or MAX of whole numbers" if op in _BITWISE else "use SUM and multiply the result"
    return f"NCCL does not support {op} of {word}; {hint}"


def _reductions(dtype: torch.dtype, world_size: int) -> frozenset[str]:
    if dtype in _COMPLEX:
        return frozenset({"SUM", "AVG", "PREMUL_SUM"})
    if dtype is torch.bool or dtype in _WHOLE:
        return _ARITHMETIC - {"AVG"}  # a mean of whole numbers would be rounded down
    if dtype in _SMALL_FLOATS:
        return _ARITHMETIC - ({"AVG"} if world_size == 1 else set())
    return _ARITHMETIC if dtype is torch.bfloat16 else _ARITHMETIC | {"PREMUL_SUM"}  # torch passes a wrong factor


def fit(collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object], world_size: int) -> _Arguments:
    """Return the arguments of an equivalent call that works.

    Torch takes "in progress" for an error in an all-to-all of equal parts, because its communicator does not block. It
    does not in one with the sizes of the parts.
    """
    if (
        collective.name != "alltoall_base"
        or collective.argument(2, args, kwargs)
        or collective.argument(3, args, kwargs)
    ):
        return args, kwargs
    tensors = [collective.argument(place, args, kwargs) for place in range(2)]
    sizes = [
        [tensor.size(0) // world_size] * world_size
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.size(0) % world_size == 0
    ]
    if len(sizes) < len(tensors):  # torch refuses it
        return args, kwargs
    names = {name for keywords in collective.parameters[:4] for name in keywords}
    return (*tensors, *sizes, *args[4:]), {name: value for name, value in kwargs.items() if name not in names}
