"""Parts of sharded tensors that were fetched, put on the meshes of the process that heals.

A mesh can't come from another process. But a process that heals runs the same program as its source, so that its own
state has a DTensor where the source's had one, and that one's mesh is the mesh to use. What the source has and this
process does not have yet, as the moments of an optimizer before its first step, belongs on the one mesh of the same
form that this process's state lies on.

Law of this file: two states in, one state out; nothing is loaded, and no process is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tft_algos.errors import HealingFailed
from tft_ckpt import LocalShard, Sharding, StateUnsupported

Path: TypeAlias = tuple[Any, ...]  # keys and indices from the root

_MISSING: Final = object()


def has_shards(state: Any) -> bool:
    """Whether a fetched state has parts of sharded tensors in it."""
    return any(isinstance(leaf, LocalShard) for _, leaf in _leaves(state, ()))


def place_shards(state: Any, own: Any) -> Any:
    """Make DTensors of the parts in a fetched state.

    Args:
        state: as a transport gave it; it is changed where it has parts.
        own: the state of the process that heals, as its own state-dict functions give it.
    Returns: the state with DTensors on the meshes of `own`; their memory is that of the parts.
    Raises: HealingFailed: a part does not fit what this process has there, or nothing says which mesh is meant.
    """
    return _Placer(own).place(state, own, ())


@final
class _Placer:
    """Knows the meshes of one process's state."""

    def __init__(self, own: Any) -> None:
        self._own = [(path, leaf) for path, leaf in _leaves(own, ()) if isinstance(leaf, DTensor)]

    def place(self, value: Any, own: Any, path: Path) -> Any:
        if isinstance(value, LocalShard):
            return self._place_shard(value, own, path)
        if isinstance(value, torch.Tensor):
            if isinstance(own, DTensor):
                raise HealingFailed(
                    f"{_name(path)} is a whole tensor of shape {tuple(value.shape)} at the source and a part of "
                    f"{LocalShard.of(own).sharding} here; shard the same tensors on every replica"
                )
            return value
        if isinstance(value, dict):
            for key in value:
                value[key] = self.place(value[key], _item(own, key), (*path, key))
            return value
        if isinstance(value, list):
            value[:] = self._items(value, own, path)
            return value
        if type(value) is tuple:
            return tuple(self._items(value, own, path))
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make(self._items(value, own, path))
        return value

    def _items(self, values: Sequence[Any], own: Any, path: Path) -> list[Any]:
        return [self.place(value, _item(own, index), (*path, index)) for index, value in enumerate(values)]

    def _place_shard(self, part: LocalShard, own: Any, path: Path) -> DTensor:
        if own is _MISSING:
            return part.to_dtensor(self._mesh_for(part.sharding, path))
        if not isinstance(own, DTensor):
            raise HealingFailed(
                f"{_name(path)} is a part of {part.sharding} at the source and a {type(own).__name__} here; shard the "
                "same tensors on every replica"
            )
        here = _part_of(own, path)
        if here.sharding != part.sharding or here.local.shape != part.local.shape:
            raise HealingFailed(
                f"{_name(path)} is a part of shape {tuple(part.local.shape)} of {part.sharding} at the source and one "
                f"of shape {tuple(here.local.shape)} of {here.sharding} here; give every replica group the same mesh "
                "and the same placements"
            )
        return part.to_dtensor(own.device_mesh)

    def _mesh_for(self, sharding: Sharding, path: Path) -> DeviceMesh:
        """The mesh for what this process has not got."""
        meshes = self._meshes(sharding, [leaf for _, leaf in self._own])
        if len(meshes) > 1:
            # The moments of a parameter stand under its name, which is the last key of the parameter's own path.
            names = {key for key in path[:-1] if isinstance(key, str)}
            of_that_name = [leaf for own_path, leaf in self._own if own_path and own_path[-1] in names]
            meshes = self._meshes(sharding, of_that_name) or meshes
        if len(meshes) == 1:
            return meshes[0]
        if meshes:
            found = f"{len(meshes)} different meshes here have that form; give one of their dimensions another name"
        else:
            found = "nothing else here is on a mesh of that form; give the sharded parameters in the state too"
        raise HealingFailed(
            f"{_name(path)} is a part of {sharding} at the source and missing here, and {found}, or have the "
            "optimizer's state before its first step"
        )

    def _meshes(self, sharding: Sharding, tensors: Sequence[DTensor]) -> list[DeviceMesh]:
        """The different meshes of that form among those of some tensors."""
        meshes: list[DeviceMesh] = []
        for tensor in tensors:
            if sharding.fits(tensor.device_mesh) and tensor.device_mesh not in meshes:
                meshes.append(tensor.device_mesh)
        return meshes


def _part_of(tensor: DTensor, path: Path) -> LocalShard:
    try:
        return LocalShard.of(tensor)
    except StateUnsupported as error:
        raise HealingFailed(f"{_name(path)} is a part of a sharded tensor at the source, and here {error}") from error


def _item(own: Any, key: Any) -> Any:
    if own is _MISSING:
        return _MISSING
    try:
        return own[key] if not isinstance(own, Mapping) or key in own else _MISSING
    except (TypeError, LookupError):
        return _MISSING


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _name(path: Path) -> str:
    return "state" + "".join(f"[{str(key)[:100]!r}]" if isinstance(key, str) else f"[{key!r:.100}]" for key in path)
