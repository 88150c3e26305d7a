"""One process's part of a tensor that several processes share, and the sharding of the whole tensor.

A DTensor consists of the local part, the sharding of the whole, and the process groups of a mesh. The first two can be
transferred. The groups can't, because they exist only in the processes that made them. So a record of the part and the
sharding is transferred. A receiver with a mesh of the same form makes a DTensor of it again.

Law of this file: values and their checks; no communication. Torch's DTensor is used only if it is already imported,
because the import is slow, or if this file makes one.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import torch

from tft_ckpt.errors import ConfigError, StateUnsupportedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["LocalShard", "Placement", "Sharding"]

MAX_DIMENSIONS: Final = 64
MAX_SIZE: Final = 1 << 48
MAX_ELEMENTS: Final = 1 << 62
MAX_MESH_DIMENSIONS: Final = 16
MAX_NAME_LENGTH: Final = 100


@final
@dataclass(frozen=True, slots=True)
class Placement:
    """The distribution of a tensor along one dimension of a mesh.

    Fields:
        dim: the sharded tensor dimension, 0-based; None: each process has all of the tensor.
        split_factor: None: each process has one piece. Otherwise each has that many, as in torch's _StridedShard. FSDP2
            uses it to shard tensors that tensor parallelism has already sharded.
    """

    dim: int | None = None
    split_factor: int | None = None

    def __str__(self) -> str:
        if self.dim is None:
            return "Replicate()"
        return f"Shard({self.dim})" if self.split_factor is None else f"_StridedShard({self.dim}, {self.split_factor})"


@final
@dataclass(frozen=True, slots=True)
class Sharding:
    """The sharding of a tensor, and the part of one process. Equal values mean equal parts.

    Fields:
        shape, stride: of the whole tensor, in elements.
        placements: one for each dimension of the mesh.
        mesh_shape: number of processes in each mesh dimension.
        mesh_dim_names: the names of the mesh dimensions, or None.
        coordinate: this process's place in the mesh, or None if it is outside and has nothing of the tensor.

    Raises: ConfigError: the sharding is impossible; one sentence names the fault.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    placements: tuple[Placement, ...]
    mesh_shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None
    coordinate: tuple[int, ...] | None

    def __post_init__(self) -> None:
        for name, most in (("shape", MAX_DIMENSIONS), ("stride", MAX_DIMENSIONS), ("mesh_shape", MAX_MESH_DIMENSIONS)):
            _check_sizes(name, getattr(self, name), most)
        if len(self.stride) != len(self.shape):
            raise ConfigError(f"a sharded tensor has {len(self.shape)} dimensions and {len(self.stride)} strides")
        if _product(self.shape) > MAX_ELEMENTS or _product(self.mesh_shape) > MAX_SIZE or 0 in self.mesh_shape:
            raise ConfigError(
                f"a tensor of shape {self.shape} on a mesh of shape {self.mesh_shape} is too large or empty"
            )
        self._check_mesh()
        if type(self.placements) is not tuple or len(self.placements) != len(self.mesh_shape):
            raise ConfigError(f"a mesh of {len(self.mesh_shape)} dimensions needs one placement for each")
        for placement in self.placements:
            self._check_placement(placement)

    def _check_mesh(self) -> None:
        names, coordinate = self.mesh_dim_names, self.coordinate
        if names is not None and (
            type(names) is not tuple
            or len(names) != len(self.mesh_shape)
            or any(type(name) is not str or len(name) > MAX_NAME_LENGTH for name in names)
        ):
            raise ConfigError(f"a mesh of {len(self.mesh_shape)} dimensions needs one short name for each")
        if coordinate is not None:
            _check_sizes("coordinate", coordinate, MAX_MESH_DIMENSIONS)
            if len(coordinate) != len(self.mesh_shape) or any(
                place >= size for place, size in zip(coordinate, self.mesh_shape, strict=True)
            ):
                raise ConfigError(f"coordinate {coordinate} is outside a mesh of shape {self.mesh_shape}")

    def _check_placement(self, placement: Placement) -> None:
        if type(placement) is not Placement:
            raise ConfigError(f"a placement is a {type(placement).__name__}; give a Placement")
        dim, factor = placement.dim, placement.split_factor
        if dim is not None and (type(dim) is not int or not 0 <= dim < len(self.shape)):
            raise ConfigError(f"a placement shards dimension {dim!r} of a tensor with {len(self.shape)} dimensions")
        if factor is not None and (dim is None or type(factor) is not int or not 1 <= factor <= MAX_SIZE):
            raise ConfigError(f"split_factor is {factor!r}, which is invalid for a placement of dimension {dim!r}")

    def check_part(self, shape: Sequence[int]) -> None:
        """Check that a part of this shape can be this process's. Raises: ConfigError: it can't."""
        if self.coordinate is None:
            if 0 not in shape:
                raise ConfigError(f"a process outside the mesh can't have a part of shape {tuple(shape)}")
            return
        sharded = {placement.dim for placement in self.placements}
        if len(shape) != len(self.shape) or any(
            part > whole or (part < whole and dim not in sharded)
            for dim, (part, whole) in enumerate(zip(shape, self.shape, strict=True))
        ):
            raise ConfigError(f"a part of shape {tuple(shape)} does not fit a tensor of {self}")

    def fits(self, mesh: DeviceMesh) -> bool:
        """Return whether a mesh has the same form, and this process the same place in it."""
        return form_of(mesh) == (self.mesh_shape, self.mesh_dim_names, self.coordinate)

    def __str__(self) -> str:
        names = "" if self.mesh_dim_names is None else f" {self.mesh_dim_names}"
        return (
            f"shape {self.shape} as {', '.join(str(placement) for placement in self.placements) or 'one'} at "
            f"{self.coordinate} of mesh {self.mesh_shape}{names}"
        )


@final
@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """One process's part of a tensor: the received form of a DTensor in a state.

    Fields:
        local: the part, a plain tensor.
        sharding: the sharding of the whole tensor.

    Raises: ConfigError: the part does not fit the sharding.
    """

    local: torch.Tensor
    sharding: Sharding

    def __post_init__(self) -> None:
        self.sharding.check_part(self.local.shape)

    @classmethod
    def of(cls, tensor: DTensor) -> LocalShard:
        """Return this process's part of a DTensor, without a copy and without communication.

        Raises: StateUnsupportedError: it holds an unreduced sum, or has a sharding that can't be described.
        """
        return _part_of(tensor, "the DTensor")

    def to_dtensor(self, mesh: DeviceMesh) -> DTensor:
        """Make a DTensor from the part, without communication. The part is copied only if it must move to the mesh's
        device.

        Args:
            mesh: a mesh of the form in `sharding`, with this process at the same place.

        Raises: ConfigError: the mesh has another form, or this process has another place in it.
        """
        from torch.distributed import tensor as dtensor

        sharding = self.sharding
        if not sharding.fits(mesh):
            raise ConfigError(f"the part is of {sharding}, but this mesh has the form {form_of(mesh)}")
        placements: list[dtensor.Placement] = []
        for placement in sharding.placements:
            if placement.dim is None:
                placements.append(dtensor.Replicate())
            elif placement.split_factor is None:
                placements.append(dtensor.Shard(placement.dim))
            else:
                strided = dtensor.placement_types._StridedShard
                placements.append(strided(placement.dim, split_factor=placement.split_factor))
        with torch.no_grad():
            return dtensor.DTensor.from_local(
                self.local,
                mesh,
                placements,
                run_check=False,
                shape=torch.Size(sharding.shape),
                stride=sharding.stride,
            )


def form_of(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[str, ...] | None, tuple[int, ...] | None]:
    """Return a mesh's shape, its dimensions' names, and this process's place in it."""
    names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
    return (
        tuple(mesh.shape),
        None if names is None else tuple(names),
        None if coordinate is None else tuple(coordinate),
    )


def part_of(value: object, path: str) -> LocalShard | None:
    """Return this process's part if the value is a DTensor or a LocalShard; else None.

    Raises: StateUnsupportedError: it can't be transferred.
    """
    if type(value) is LocalShard:
        return value
    module = sys.modules.get("torch.distributed.tensor")
    return _part_of(value, path) if module is not None and type(value) is module.DTensor else None


def _part_of(tensor: Any, path: str) -> LocalShard:
    types = sys.modules["torch.distributed.tensor.placement_types"]
    placements = []
    for placement in tensor.placements:
        # By exact type, because a subclass may mean more than its dimension.
        if type(placement) is types.Replicate:
            placements.append(Placement())
        elif type(placement) is types.Shard:
            placements.append(Placement(placement.dim % tensor.ndim))
        elif type(placement) is types._StridedShard:
            placements.append(Placement(placement.dim % tensor.ndim, int(placement.split_factor)))
        else:
            raise StateUnsupportedError(
                f"{path} is a DTensor with the placement {placement!r}, which can't be transferred; reduce it first, "
                "with redistribute() or full_tensor()",
                path=path,
            )
    # Several mesh dimensions may shard one tensor dimension, and torch supports any order.
    order = getattr(tensor._spec, "shard_order", None) or ()
    if any(later < earlier for entry in order for earlier, later in itertools.pairwise(entry.mesh_dims)):
        raise StateUnsupportedError(
            f"{path} is a DTensor with shard order {order}, which can't be transferred; use redistribute() to shard it "
            "in the order of the mesh's dimensions",
            path=path,
        )
    mesh_shape, names, coordinate = form_of(tensor.device_mesh)
    try:
        sharding = Sharding(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            placements=tuple(placements),
            mesh_shape=mesh_shape,
            mesh_dim_names=names,
            coordinate=coordinate,
        )
        with torch.no_grad():
            local = tensor.to_local()
            if type(local).__name__ == "AsyncCollectiveTensor":
                local = local.wait()
        return LocalShard(local, sharding)
    except ConfigError as error:
        raise StateUnsupportedError(f"{path} is a DTensor that can't be transferred: {error}", path=path) from error


def _check_sizes(name: str, sizes: object, most: int) -> None:
    if type(sizes) is not tuple or len(sizes) > most:
        raise ConfigError(f"the {name} of a sharded tensor is not a tuple of at most {most} numbers")
    if any(type(size) is not int or not 0 <= size <= MAX_SIZE for size in sizes):
        raise ConfigError(f"the {name} of a sharded tensor has an element that is not an integer from 0 to {MAX_SIZE}")


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= max(size, 1)
    return total
