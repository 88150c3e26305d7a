"""Placing fetched parts of sharded tensors on the meshes of the process that heals, and sharding whole tensors alike.

A mesh can't come from another process. But a process that heals runs the same program as its source. So where the
source has a DTensor, this process has one too, and its mesh is used. The source may have tensors that this process does
not have yet, such as the moments of an optimizer before its first step. They go to the only mesh of the same form in
this process's state.

An island receives whole tensors, because its source shards differently or not at all. Each tensor is sharded like this
process's own tensor at that place. A tensor that this process does not have yet is sharded like the parameter of that
name or shape.

Law of this file: two states in, one state out. Nothing is loaded, and nothing is communicated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import torch

from tft_algos.dtensors import is_dtensor, shard_like
from tft_algos.errors import HealingError
from tft_ckpt import LocalShard, Sharding, StateUnsupportedError
from tft_ckpt.state.walk import Path, map_leaves, name_of, walk

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_MISSING: Final = object()
Leaf = TypeVar("Leaf", bound=torch.Tensor)


def has_shards(state: Any) -> bool:
    """Return whether a fetched state contains parts of sharded tensors."""
    return any(isinstance(leaf, LocalShard) for _, leaf in walk(state))


def place_shards(state: Any, own: Any) -> Any:
    """Make DTensors of the parts in a fetched state.

    Args:
        state: as a transport returned it. Parts are replaced in place.
        own: the state of the process that heals, as its own state-dict functions return it.
    Returns: the state with DTensors on the meshes of `own`. The DTensors use the memory of the parts.
    Raises: HealingError: a part does not fit the tensor of this process, or the right mesh can't be determined.
    """
    return map_leaves(state, _Placer(own).replace, in_place=True)


def shard_whole(state: Any, own: Any) -> Any:
    """Make DTensors of the whole tensors in a fetched state that are sharded here, without communication.

    Args:
        state: as a transport returned it, with whole tensors only. It is changed where this process has DTensors.
        own: the state of the process that heals, as its own state-dict functions return it.
    Returns: the state with DTensors on the meshes of `own`, with the same placements, that hold this process's parts.
    Raises: HealingError: a tensor does not fit the tensor of this process, or its sharding can't be determined.
    """
    return map_leaves(state, _Cutter(own).replace, in_place=True)


class _Placement(ABC):
    """The replacement of the tensors in a fetched state, by comparison with the state of this process."""

    def __init__(self, own: Any) -> None:
        self._root = own

    def replace(self, path: Path, leaf: Any) -> Any:
        if isinstance(leaf, LocalShard):
            return self.place_part(leaf, _at(self._root, path), path)
        if isinstance(leaf, torch.Tensor):
            return self.place_tensor(leaf, _at(self._root, path), path)
        return leaf

    @abstractmethod
    def place_part(self, part: LocalShard, own: Any, path: Path) -> DTensor: ...

    @abstractmethod
    def place_tensor(self, value: torch.Tensor, own: Any, path: Path) -> torch.Tensor: ...


@final
class _Placer(_Placement):
    """A placement of parts on the meshes of one process's state."""

    def __init__(self, own: Any) -> None:
        super().__init__(own)
        self._own = [(path, leaf) for path, leaf in walk(own) if is_dtensor(leaf)]

    def place_tensor(self, value: torch.Tensor, own: Any, path: Path) -> torch.Tensor:
        if is_dtensor(own):
            raise HealingError(
                f"{name_of(path)} is a whole tensor of shape {tuple(value.shape)} at the source and a part of "
                f"{LocalShard.of(own).sharding} here; shard the same tensors on every replica"
            )
        return value

    def place_part(self, part: LocalShard, own: Any, path: Path) -> DTensor:
        if own is _MISSING:
            return part.to_dtensor(self._mesh_for(part.sharding, path))
        if not is_dtensor(own):
            raise HealingError(
                f"{name_of(path)} is a part of {part.sharding} at the source and a {type(own).__name__} here; shard "
                "the same tensors on every replica"
            )
        here = _part_of(own, path)
        if here.sharding != part.sharding or here.local.shape != part.local.shape:
            raise HealingError(
                f"{name_of(path)} is a part of shape {tuple(part.local.shape)} of {part.sharding} at the source and "
                f"one of shape {tuple(here.local.shape)} of {here.sharding} here; give every replica group the same "
                "mesh and the same placements"
            )
        return part.to_dtensor(own.device_mesh)

    def _mesh_for(self, sharding: Sharding, path: Path) -> DeviceMesh:
        """Return the mesh for a tensor that this process does not have."""
        meshes = self._meshes(sharding, [leaf for _, leaf in self._own])
        if len(meshes) > 1:
            meshes = self._meshes(sharding, _of_that_name(self._own, path)) or meshes
        if len(meshes) == 1:
            return meshes[0]
        if meshes:
            found = f"{len(meshes)} different meshes here have that form; give one of their dimensions another name"
        else:
            found = "no tensor here is on a mesh of that form; register the sharded parameters too"
        raise HealingError(
            f"{name_of(path)} is a part of {sharding} at the source and missing here, and {found}, or create the "
            "optimizer's state before its first step"
        )

    def _meshes(self, sharding: Sharding, tensors: Sequence[DTensor]) -> list[DeviceMesh]:
        """Return the different meshes of that form among the meshes of some tensors."""
        meshes: list[DeviceMesh] = []
        for tensor in tensors:
            if sharding.fits(tensor.device_mesh) and tensor.device_mesh not in meshes:
                meshes.append(tensor.device_mesh)
        return meshes


@final
class _Cutter(_Placement):
    """A placement that shards whole tensors like one process's tensors."""

    def __init__(self, own: Any) -> None:
        super().__init__(own)
        self._own = [(path, leaf) for path, leaf in walk(own) if isinstance(leaf, torch.Tensor)]

    def place_part(self, part: LocalShard, own: Any, path: Path) -> DTensor:
        raise HealingError(
            f"{name_of(path)} is a part of {part.sharding}, and replica groups with rank0_synchronization_only "
            "exchange whole tensors; run the same release on every replica"
        )

    def place_tensor(self, value: torch.Tensor, own: Any, path: Path) -> torch.Tensor:
        if own is _MISSING:
            own = self._like(value, path)
        if not is_dtensor(own):
            return value
        if own.shape != value.shape:
            raise HealingError(
                f"{name_of(path)} is of shape {tuple(value.shape)} at the source and of shape {tuple(own.shape)} here; "
                "train the same model on every replica"
            )
        # A copy, because the part must not keep the whole tensor in memory.
        return shard_like(value.detach(), own)

    def _like(self, value: torch.Tensor, path: Path) -> DTensor | None:
        """Return a tensor that shows how to shard a tensor that this process does not have.

        None: the tensor stays whole.
        """
        alike = [(own_path, leaf) for own_path, leaf in self._own if leaf.shape == value.shape]
        # A whole tensor of the same shape as a sharded parameter is usually a buffer, and has no moments.
        of_that_name = _of_that_name(alike, path) or [leaf for _, leaf in alike]
        found = [leaf for leaf in of_that_name if is_dtensor(leaf)]
        if len({(leaf.device_mesh, leaf.placements) for leaf in found}) > 1:
            raise HealingError(
                f"{name_of(path)} is of shape {tuple(value.shape)} at the source and missing here, where tensors of "
                "that shape are sharded in several ways; create the optimizer's state before its first step"
            )
        return found[0] if found else None


def _of_that_name(own: Sequence[tuple[Path, Leaf]], path: Path) -> list[Leaf]:
    """Return the tensors whose name is a key on this path.

    The moments of a parameter are stored under the parameter's name, which is the last key of the parameter's own path.
    """
    names = {key for key in path[:-1] if isinstance(key, str)}
    return [leaf for own_path, leaf in own if own_path and own_path[-1] in names]


def _part_of(tensor: DTensor, path: Path) -> LocalShard:
    try:
        return LocalShard.of(tensor)
    except StateUnsupportedError as error:
        raise HealingError(f"{name_of(path)} is a part of a sharded tensor at the source, and here {error}") from error


def _at(own: Any, path: Path) -> Any:
    """Return the value at a path of this process's state, or _MISSING."""
    for key in path:
        try:
            if isinstance(own, Mapping) and key not in own:
                return _MISSING
            own = own[key]
        except (TypeError, LookupError):
            return _MISSING
    return own
