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
    """This rank's part of a tensor that every rank has whole, cut as another is, in memory of its own unless it is
    all of it. No communication."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def made_of(part: torch.Tensor, like: DTensor) -> DTensor:
    """The tensor of which each rank has a part, as it has of another. No communication; the part is not copied.

    Args:
        part: this rank's, of the shape of this rank's part of `like`.
    """
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
