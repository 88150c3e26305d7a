"""Conversion of numpy's scalars and arrays to transferable values, and back.

A scalar becomes its bytes, and an array becomes a tensor that shares its memory. numpy is an optional dependency. A
sender of such a value has imported numpy already, and a receiver imports it for the first such value.

Law of this file: a fixed table of types. Nothing is looked up in numpy by a received name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

__all__ = ["ARRAY", "PREFIX", "Kind", "has_numbers", "kinds"]

PREFIX: Final = "numpy."
"""The prefix of each name."""
ARRAY: Final = "numpy.ndarray"
"""The name of arrays."""

_INTEGERS: Final = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES: Final = frozenset(("bool", *_INTEGERS, "float16", "float32", "float64", "complex64", "complex128"))


class Kind(NamedTuple):
    """A numpy type, its name in a manifest, and its conversion in both directions."""

    cls: type[Any]
    name: str
    flatten: Callable[[Any], object]
    unflatten: Callable[[Any], Any]


@functools.cache
def kinds() -> tuple[Kind, ...]:
    """Return all transferable types. Raises: ImportError: numpy is not installed."""
    import numpy  # not at the top, because numpy is an optional dependency

    scalars = [_scalar_kind(numpy, name) for name in sorted(_DTYPES)]
    return (
        *scalars,
        Kind(numpy.str_, f"{PREFIX}str", str, lambda parts: numpy.str_(_exactly(str, parts))),
        Kind(numpy.bytes_, f"{PREFIX}bytes", bytes, lambda parts: numpy.bytes_(_exactly(bytes, parts))),
        Kind(numpy.ndarray, ARRAY, _tensor_of, lambda parts: _exactly(torch.Tensor, parts).numpy()),
    )


def has_numbers(array: Any) -> bool:
    """Return whether an array's elements have a type that torch supports, in this machine's byte order."""
    return bool(array.dtype.isnative) and array.dtype.name in _DTYPES


def _scalar_kind(numpy: Any, name: str) -> Kind:
    dtype = numpy.dtype(name)

    def make(parts: object) -> Any:
        raw = _exactly(bytes, parts)
        if len(raw) != dtype.itemsize or (name == "bool" and raw not in (b"\0", b"\1")):
            raise ValueError(f"{len(raw)} bytes are not a numpy.{name}")
        return numpy.frombuffer(raw, dtype=dtype)[0]

    return Kind(dtype.type, f"{PREFIX}{name}", lambda value: value.tobytes(), make)


def _tensor_of(array: Any) -> torch.Tensor:
    """Return a tensor on the array's memory. A read-only array, or one with unsupported strides, is copied."""
    can_share = array.flags.writeable and all(step >= 0 and step % array.itemsize == 0 for step in array.strides)
    return torch.from_numpy(array if can_share else array.copy())


def _exactly(cls: type[Any], value: object) -> Any:
    if type(value) is not cls:
        raise ValueError(f"a {type(value).__name__} arrived in place of a {cls.__name__}")
    return value
