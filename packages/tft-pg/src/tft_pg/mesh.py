"""A DeviceMesh dimension across replica groups.

FSDP2, tensor parallelism and DTensor find their process groups in a DeviceMesh. Torch's meshes contain processes that
live and die together. Here the mesh of one replica group gets a dimension across replica groups, whose number changes
from step to step.

The mesh reports size 1 for this dimension, because each replica group holds all weights and nothing is sharded across
replica groups. The group of the dimension reports the true size, and reduces over the participants of the step. FSDP2
uses the dimension as the replicate dimension of hybrid sharding, and asks the group for its size in each backward pass.

The mesh has torch's own class, made by its public `from_group`. Operations that can't keep the dimension are refused.
Torch would flatten the mesh to the ranks that it sees, and would silently leave out the other replica groups.

Torch's meshes are equal if their ranks, layouts and names are equal. Code compiled for one mesh runs for an equal mesh,
with the group name of the first mesh. All groups across replica groups have the same rank here, so the layout must
distinguish them. A dimension of size 1 may have any stride, so its stride is a number for the group's name. The numbers
count up, so a saved mesh equals the mesh of the same program after a restart.

Law of this file: meshes; the group decides what is reduced, and how.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

from tft_pg import registry
from tft_pg.base import ProcessGroup, check_name
from tft_pg.errors import ConfigError, ProcessGroupClosedError, UnsupportedOperationError
from tft_pg.forks import fork_safe_lock

__all__ = ["extend_device_mesh"]

_STRIDE_UNIT = 1 << 32
_lock = fork_safe_lock()
_numbers: dict[GroupName, int] = {}  # a number for each name of a group in a mesh; under the lock


def extend_device_mesh(mesh: DeviceMesh, pg: ProcessGroup, name: str = "dp", dim: int = 0) -> DeviceMesh:
    """Give a mesh of one replica group a dimension across replica groups.

    Args:
        mesh: a mesh of this replica group's processes, with named dimensions. Flatten or unflatten the mesh first.
        pg: a group across the replica groups, of the processes at the same place in each: a ManagedProcessGroup or any
            other group of this package. The function registers the group as `name` if it is not registered yet.
        name: the name of the new dimension.
        dim: the index of the new dimension. FSDP2 expects the replicate dimension of hybrid sharding at 0, the first.

    Returns: a mesh whose size in the new dimension is 1, with `pg` as its group. Slices share the group. Two such
        meshes are equal if torch knows their groups by the same name.
    Raises: ConfigError: an argument is invalid; nothing is registered. UnsupportedOperationError: this release of
        torch stores meshes differently. Before 2.13, torch accepts the dimension only as the first one.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"extend_device_mesh got a {type(mesh).__name__} as mesh; pass a DeviceMesh")
    if not isinstance(pg, ProcessGroup):
        raise ConfigError(
            f"extend_device_mesh got a {type(pg).__name__} as group; pass a group of tft-pg, such as a "
            "ManagedProcessGroup"
        )
    names = mesh.mesh_dim_names
    if names is None:
        raise ConfigError(f"{mesh} has no names for its dimensions; pass mesh_dim_names")
    if name in names:
        raise ConfigError(f"{mesh} already has a dimension {name!r}; pass another name")
    check_name(name)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ConfigError(f"dim is {dim!r}; pass a whole number")
    if not 0 <= dim <= mesh.ndim:
        raise ConfigError(f"{mesh} has {mesh.ndim} dimensions, so dim={dim} is out of range; pass 0 to {mesh.ndim}")
    if dim and hasattr(mesh._layout, "stride"):
        raise UnsupportedOperationError(
            f"torch {torch.__version__} supports {name!r} only as the first dimension, because it can't slice a mesh "
            f"with rising strides; leave out dim={dim}, or install torch 2.13 or later"
        )
    if isinstance(error := pg.errored(), ProcessGroupClosedError):
        raise ConfigError(f"the group for dimension {name!r} was shut down; make a new group") from error
    if not registry.is_entered(pg):
        pg.register(name)
    groups: list[dist.ProcessGroup] = mesh.get_all_groups()
    groups.insert(dim, pg)
    extended = DeviceMesh.from_group(
        groups,
        mesh.device_type,
        mesh.mesh.unsqueeze(dim),
        mesh_dim_names=(*names[:dim], name, *names[dim:]),
    )
    with _lock:
        number = _numbers.setdefault(pg.group_name, len(_numbers) + 1)
    _set_stride(extended, name, mesh, number)
    _forbid_new_groups(extended, name)
    return extended


def _set_stride(extended: DeviceMesh, name: str, inner: DeviceMesh, number: int) -> None:
    """Set the stride of the replica group dimension to a number, and keep the strides of the inner mesh."""
    unnumbered = extended[name]
    layout: Any = extended._layout
    axes: list[Any] = list(layout)
    dim = (extended.mesh_dim_names or ()).index(name)
    for place, axis in zip((place for place in range(len(axes)) if place != dim), inner._layout, strict=True):
        if axis.numel() == 1:
            axes[place] = axis
    # Before torch 2.13: one tuple of shapes and one tuple of strides, in descending order.
    if hasattr(layout, "stride"):
        axes[dim] = type(layout)(1, number * _STRIDE_UNIT)
        extended._layout = type(layout)(tuple(axis.shape for axis in axes), tuple(axis.stride for axis in axes))
    else:
        axes[dim] = copy.copy(axes[dim])
        vars(axes[dim]).update(shape=(1,), stride=(number,))  # the constructor would normalise these values
        extended._layout = type(layout)(axes)
    if extended[name] == unnumbered:
        raise UnsupportedOperationError(
            f"torch {torch.__version__} does not store meshes like 2.11 to 2.15, so compiled code would confuse meshes "
            "of different groups; install one of these versions"
        )


def _forbid_new_groups(mesh: DeviceMesh, name: str) -> None:
    """Refuse operations that create new groups from the mesh's ranks, because such groups lack the other replica
    groups.

    Slices and concatenations of a mesh look up and store flattened meshes and groups at the root mesh. So refusing
    there is enough.
    """
    for table in ("_flatten_mapping", "_pg_registry"):
        if not isinstance(vars(mesh).get(table), dict):
            raise UnsupportedOperationError(
                f"torch {torch.__version__} does not store meshes like 2.11 to 2.15, so a flattened mesh would "
                "silently leave out the other replicas; install one of these versions"
            )
        setattr(mesh, table, _ReadOnlyTable(vars(mesh)[table], dimension=name))


@final
class _ReadOnlyTable(dict[Any, Any]):
    """A table of a mesh that refuses new entries.

    Args:
        table: the existing entries.
        dimension: name of the dimension across replica groups.
    """

    def __init__(self, table: Mapping[Any, Any], *, dimension: str) -> None:
        super().__init__(table)
        self._dimension = dimension

    def __contains__(self, key: object) -> bool:
        """Refuse a missing key. Torch asks for a flattened mesh by name before it creates one."""
        if not super().__contains__(key):
            raise self._refusal()
        return True

    def __setitem__(self, key: Any, value: Any) -> None:
        raise self._refusal()

    def _refusal(self) -> UnsupportedOperationError:
        return UnsupportedOperationError(
            f"a mesh with the dimension {self._dimension!r} across replica groups can't be flattened or unflattened, "
            "because the new group would lack the other replicas; flatten the mesh before extend_device_mesh, and "
            f"reduce over {self._dimension!r} separately"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _ReadOnlyTable:
        return _ReadOnlyTable(self, dimension=self._dimension)

    def __reduce__(self) -> tuple[Any, ...]:
        # Other processes have other groups, so a loaded mesh is a plain torch mesh that needs nothing of this package.
        return OrderedDict, (), None, None, iter(self.items())
