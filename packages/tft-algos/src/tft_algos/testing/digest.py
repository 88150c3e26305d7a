"""One number for a whole state. Two replicas agree iff their numbers are equal.

Law of this file: bytes in, hexadecimal digits out. Nothing is changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from tft_algos.manager.recovery.divergence import as_octets, memory_of


def digest(*states: Any) -> str:
    """Return a digest of tensors and plain data, in any nesting: `digest(model.state_dict(), optimizer.state_dict())`.

    Args:
        states: mappings, lists, tuples, tensors, numbers, strings, None. Mappings may be in any order.
    Returns: 32 hexadecimal digits. The digits are equal for equal bytes, dtypes and shapes.
    """
    total = hashlib.blake2b(digest_size=16)
    for state in states:
        _feed(total, state)
    return total.hexdigest()


def _feed(total: hashlib.blake2b, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        total.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        total.update(memory_of(as_octets(value.detach().cpu())))
    elif isinstance(value, Mapping):
        total.update(f"mapping {len(value)}".encode())
        for key in sorted(value, key=repr):
            total.update(repr(key).encode())
            _feed(total, value[key])
    elif isinstance(value, list | tuple):
        total.update(f"sequence {len(value)}".encode())
        for item in value:
            _feed(total, item)
    else:
        total.update(f"{type(value).__name__} {value!r}".encode())
