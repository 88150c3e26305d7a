"""One more dimension for a DeviceMesh: the replica groups.

FSDP2, tensor parallelism and DTensor find their process groups in a DeviceMesh. Torch's meshes are of processes that
live and die together. Here a mesh of one replica group gets a dimension across the groups, whose size changes from
step to step. So the mesh says 1 for it: in this process's view its replica group holds all the weights, and nothing is
ever sharded across groups. The group in that dimension says the true size, and what is reduced there, is reduced over
whoever takes part: FSDP2 takes the dimension as that of hybrid sharding's replicas, and asks the group for its size in
each backward pass.

The mesh is torch's own class, made by its public `from_group`. What can't keep the dimension is refused: torch would
make a flattened mesh of the ranks that it sees, and so silently leave out the other replica groups.

Torch's meshes are equal if their ranks, layouts and names are, and code compiled for one is used for its equals, with
the name of the first one's group in it. All groups across the replica groups have the same rank here, so the layout
tells them apart: a dimension of size 1 may have any stride, and this one's is a number for the group's name, counted
up, so that a mesh which was saved equals that of the same program started anew.

The law of this file: meshes; who is reduced over, and how, is the group's.
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
from tft_pg.errors import Closed, InvalidSetting, Unsupported
from tft_pg.forks import fork_safe_lock

__all__ = ["extend_device_mesh"]

_ABOVE_ALL_STRIDES = 1 << 32
_lock = fork_safe_lock()
_numbers: dict[GroupName, int] = {}  # of each name that a group in a mesh has had; under the lock


def extend_device_mesh(mesh: DeviceMesh, pg: ProcessGroup, name: str = "dp", dim: int = 0) -> DeviceMesh:
    """Give a mesh of one replica group a dimension across replica groups.

    Args:
        mesh: of this replica group's processes; its dimensions have names. Flatten or unflatten it first, if at all.
        pg: across the replica groups, of the processes at this place in theirs: a ManagedProcessGroup or any other
            group of this package. It is registered as `name` unless it is registered already.
        name: of the new dimension.
        dim: where it comes: 0, the first, is where FSDP2 has hybrid sharding's replicas.
    Returns: a mesh whose size in the new dimension is 1, with `pg` as the group there. Slices share it. Two of them
        are equal if torch knows the groups by the same name.
    Raises: InvalidSetting: an argument can't work; nothing is registered. Unsupported: this release of torch keeps its
        meshes otherwise; before 2.13 it takes the dimension as the first one only.
    """
    if not isinstance(mesh, DeviceMesh):
        raise InvalidSetting(f"extend_device_mesh was given a {type(mesh).__name__}; give a DeviceMesh")
    if not isinstance(pg, ProcessGroup):
        raise InvalidSetting(
            f"extend_device_mesh was given a {type(pg).__name__} as group; give one of this package, such as a "
            "ManagedProcessGroup"
        )
    names = mesh.mesh_dim_names
    if names is None:
        raise InvalidSetting(f"{mesh} has no names for its dimensions; give it mesh_dim_names")
    if name in names:
        raise InvalidSetting(f"{mesh} has a dimension {name!r} already; give the new one another name")
    check_name(name)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise InvalidSetting(f"the place of a dimension is a whole number, not {dim!r}")
    if not 0 <= dim <= mesh.ndim:
        raise InvalidSetting(f"{mesh} has {mesh.ndim} dimensions, so that a new one can't be number {dim}")
    if dim and hasattr(mesh._layout, "stride"):
        raise Unsupported(
            f"torch {torch.__version__} takes no slice of a mesh whose strides don't fall from dimension to dimension, "
            f"so that {name!r} can be the first one only: leave out dim={dim}, or use torch 2.13 or later"
        )
    if isinstance(error := pg.errored(), Closed):
        raise InvalidSetting(f"the group for dimension {name!r} was shut down; make a new group") from error
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
    _number_dimension(extended, name, mesh, number)
    _forbid_new_groups(extended, name)
    return extended


def _number_dimension(extended: DeviceMesh, name: str, inner: DeviceMesh, number: int) -> None:
    """Give the dimension of the replica groups a number as its stride, and keep those that the inner mesh may have."""
    unnumbered = extended[name]
    layout: Any = extended._layout
    axes: list[Any] = list(layout)
    dim = (extended.mesh_dim_names or ()).index(name)
    for place, axis in zip((place for place in range(len(axes)) if place != dim), inner._layout, strict=True):
        if axis.numel() == 1:
            axes[place] = axis
    if hasattr(layout, "stride"):  # before torch 2.13: the shapes of all axes, and the strides of all, in falling order
        axes[dim] = type(layout)(1, number * _ABOVE_ALL_STRIDES)
        extended._layout = type(layout)(tuple(axis.shape for axis in axes), tuple(axis.stride for axis in axes))
    else:
        axes[dim] = copy.copy(axes[dim])
        vars(axes[dim]).update(shape=(1,), stride=(number,))  # its constructor would bring these to a normal form
        extended._layout = type(layout)(axes)
    if extended[name] == unnumbered:
        raise Unsupported(
            f"torch {torch.__version__} keeps its meshes otherwise than 2.11 to 2.15, so that compiled code would take "
            "a mesh over one group for a mesh over another; use one of these"
        )


def _forbid_new_groups(mesh: DeviceMesh, name: str) -> None:
    """Refuse what would make new groups of a mesh's ranks: they would lack the other replica groups.

    All of a mesh's slices and concatenations look up and note flattened meshes and groups at the mesh that they come
    from, so it is enough to refuse there.
    """
    for table in ("_flatten_mapping", "_pg_registry"):
        if not isinstance(vars(mesh).get(table), dict):
            raise Unsupported(
                f"torch {torch.__version__} keeps its meshes otherwise than 2.11 to 2.15, so that a flattened mesh "
                "would silently leave out the other replicas; use one of these"
            )
        setattr(mesh, table, _Closed(vars(mesh)[table], dimension=name))


@final
class _Closed(dict[Any, Any]):
    """A table of a mesh that stays as it is.

    Args:
        table: what it holds.
        dimension: name of the one across replica groups.
    """

    def __init__(self, table: Mapping[Any, Any], *, dimension: str) -> None:
        super().__init__(table)
        self._dimension = dimension

    def __contains__(self, key: object) -> bool:
        """Torch asks whether there is a flattened mesh of some name before it makes one."""
        if not super().__contains__(key):
            raise self._refusal()
        return True

    def __setitem__(self, key: Any, value: Any) -> None:
        raise self._refusal()

    def _refusal(self) -> Unsupported:
        return Unsupported(
            f"a mesh with the dimension {self._dimension!r} across replica groups can't be flattened or unflattened, "
            "because the new group would lack the other replicas; do so before you extend the mesh, and reduce over "
            f"{self._dimension!r} and over the others one after the other"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Closed:
        return _Closed(self, dimension=self._dimension)

    def __reduce__(self) -> tuple[Any, ...]:
        # Elsewhere the groups are others, so that what is loaded there is a plain mesh, which needs nothing of ours.
        return OrderedDict, (), None, None, iter(self.items())
