"""Torch's DTensor, imported when there is one: the import takes longer than all the rest of this package's, and a
replica that shards nothing would pay it each time it starts.

Law of this file: what a DTensor is, and others like it; what they are for is not known here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is one of torch's DTensors, or of a class made from it."""
    module = sys.modules.get("torch.distributed.tensor")
    # While another thread imports it its names are not there yet, and still there is none.
    return isinstance(value, getattr(module, "DTensor", ()))


def cut_like(whole: torch.Tensor, like: DTensor) -> DTensor:
    """Return this rank's part of a tensor that every rank holds whole, sharded as `like` is. Does not communicate.

    The part has memory of its own, unless the part is the whole tensor.
    """
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def made_of(part: torch.Tensor, like: DTensor) -> DTensor:
    """Return the DTensor whose parts the ranks hold, sharded as `like` is. Does not communicate or copy.

    Args:
        part: this rank's part, of the shape of this rank's part of `like`.
    """
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
