"""DTensors in a received state, for code that calls a transport itself. A Manager takes the meshes of its own state.

A mesh can't be transferred, but its form can. Meshes are equal if their ranks, names and device are, so a DTensor on a
mesh of the same form can be loaded into the DTensors of this process. Such a mesh is made here. It has no process
groups, so a collective over it fails.

Law of this file: one state in, one state out. Nothing is communicated.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tft_ckpt import LocalShard, Sharding
from tft_ckpt.state.walk import map_leaves

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def as_dtensors(state: Any) -> Any:
    """Replace the parts of sharded tensors in a received state by DTensors, in place.

    Args:
        state: as a transport returned it.
    Returns: the state. A part stays a `tft_ckpt.LocalShard` if its mesh is not of the ranks 0 to n-1 of torch's default
        group with this process at the same place, or if there is no default group.
    """
    meshes: dict[Any, DeviceMesh | None] = {}

    def replace(_: object, leaf: Any) -> Any:
        if not isinstance(leaf, LocalShard):
            return leaf
        sharding = leaf.sharding
        form = sharding.mesh_shape, sharding.mesh_dim_names, sharding.coordinate
        if form not in meshes:
            meshes[form] = _mesh_of(sharding)
        mesh = meshes[form]
        return leaf if mesh is None else leaf.to_dtensor(mesh)

    return map_leaves(state, replace, in_place=True)


def _mesh_of(sharding: Sharding) -> DeviceMesh | None:
    """Return a mesh without process groups of the form in `sharding`. None: this process has another place in it."""
    from torch.distributed.device_mesh import DeviceMesh

    size = math.prod(sharding.mesh_shape)
    if not dist.is_initialized() or size > dist.get_world_size():
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    mesh = DeviceMesh(
        "cpu" if accelerator is None else accelerator.type,
        torch.arange(size).view(sharding.mesh_shape),
        mesh_dim_names=sharding.mesh_dim_names,
        _init_backend=False,
    )
    return mesh if sharding.fits(mesh) else None
