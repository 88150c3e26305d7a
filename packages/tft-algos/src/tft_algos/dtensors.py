"""Torch's DTensor, imported only if it is used.

The import takes longer than all other imports of this package. A replica that shards nothing would pay this at each
start.

Law of this file: what a DTensor is, and how to make one like another. Its use is not known here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor, or an instance of a subclass."""
    module = sys.modules.get("torch.distributed.tensor")
    # The names may be missing while another thread imports the module. No DTensor exists yet then.
    return isinstance(value, getattr(module, "DTensor", ()))


def shard_like(whole: torch.Tensor, like: DTensor) -> DTensor:
    """Return this rank's part of a tensor that every rank holds whole, sharded as `like` is. Does not communicate.

    The part has memory of its own, unless the part is the whole tensor.
    """
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def dtensor_of(part: torch.Tensor, like: DTensor) -> DTensor:
    """Return the DTensor whose parts the ranks hold, sharded as `like` is. Does not communicate or copy.

    Args:
        part: this rank's part, of the shape of this rank's part of `like`.
    """
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
