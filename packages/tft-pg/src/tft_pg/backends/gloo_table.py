"""The dtypes, reductions and layouts that torch's Gloo supports, as a table.

Gloo itself refuses most of what it does not support, before it sends anything. Some calls fail silently. Gloo reduces a
non-contiguous tensor as if it were contiguous. A sum of bools leaves bytes that are neither true nor false. A mean of
integers fails after the tensor has been overwritten. So this file checks every tensor of a call first, and all ranks
refuse alike. A fault of the second tensor must not show after the first has been sent.

Law of this file: pure functions from a call to a part of a sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from tft_pg.ops import Collective

__all__ = ["lacks"]

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_WHOLE = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_ARITHMETIC = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
_BITWISE = ("MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")

_ANY_BYTES = frozenset({"send", "recv", "recv_anysource"})
_MOVES_COMPLEX = frozenset({"broadcast"})
_REDUCES = frozenset(
    {
        *("allreduce", "allreduce_coalesced", "reduce"),
        *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    }
)
# These operations read and write from the first element on, as many bytes as the tensor's elements need.
_IGNORES_GAPS = frozenset({"allreduce", "reduce", "broadcast"})


def lacks(collective: Collective, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Return why Gloo can't run this call. Empty if Gloo can run it, or refuses it before it sends anything.

    Args:
        collective: the collective.
        args, kwargs: as the caller gave them.
    """
    name = collective.name
    outputs = () if collective.outputs is None else collective.argument(collective.outputs, args, kwargs)
    inputs = () if collective.inputs is None else collective.argument(collective.inputs, args, kwargs)
    if name in _ANY_BYTES:
        empty = name == "recv_anysource" and any(tensor.numel() == 0 for tensor in _tensors(outputs))
        return "a receive from any rank needs at least one element" if empty else ""
    dtypes = {tensor.dtype: None for value in (outputs, inputs) for tensor in _tensors(value)}  # in the given order
    faults = (_dtype_fault(collective, dtype, args, kwargs) for dtype in dtypes)
    return next(filter(None, faults), "") or _layout_fault(name, outputs)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _layout_fault(name: str, outputs: object) -> str:
    for tensor in _tensors(outputs):
        if tensor.is_contiguous() or tensor.layout is not torch.strided:
            continue
        if any(length > 1 and not stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            return (
                f"a tensor of {_word(tensor.dtype)} whose elements share memory can't be filled in; make a copy of it"
            )
        if name in _IGNORES_GAPS and not _is_dense(tensor):
            return f"a tensor of {_word(tensor.dtype)} with gaps between its elements; make it contiguous"
    return ""


def _dtype_fault(
    collective: Collective, dtype: torch.dtype, args: Sequence[object], kwargs: Mapping[str, object]
) -> str:
    if dtype not in _FLOATS and dtype not in _WHOLE and dtype not in _COMPLEX and dtype is not torch.bool:
        return f"Gloo does not support {_word(dtype)}; use another dtype, or view it as one of the same size"
    if collective.name not in _REDUCES:
        if dtype in _COMPLEX and collective.name not in _MOVES_COMPLEX:
            return f"Gloo does not support {_word(dtype)} in this collective; view it as real"
        return ""
    op = collective.reduction(args, kwargs)
    if op in _reductions(dtype):
        return ""
    hint = "use MAX" if dtype is torch.bool and op == "SUM" else "use another dtype or reduction"
    return f"Gloo does not support {op} of {_word(dtype)}; {hint}"


def _reductions(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype in _FLOATS:
        return _ARITHMETIC
    if dtype in _COMPLEX:
        return ("SUM", "AVG")
    return _BITWISE if dtype is torch.bool else ("SUM", *_BITWISE)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements are adjacent in some order, as in a transposed matrix."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
