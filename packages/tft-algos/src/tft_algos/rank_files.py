"""Torch's distributed checkpoint, in which each rank writes and reads its own part without communication.

Torch's own planner sends plans between the ranks as pickled objects. An attacker in place of a rank could run code in
the others. Torch also writes a pickled description to the disk. Both are avoided here. A rank knows which parts of the
state it holds, and which of them it writes. A part that several ranks hold is written by the first of them. Each rank
describes what it wrote in its own JSON file. Together these files describe the checkpoint. A reading rank looks up what
it needs.

Values that are not tensors (a learning rate, a scheduler's state) are read by torch's reader for weights. This reader
builds plain data and tensors, and calls no function from the file. The writer checks that this reader can read each
value back.

Law of this file: plans, descriptions and their checks. Which directory is used, and whether it is complete, is decided
in `durable`.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, final

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

__all__ = ["RankLoadPlanner", "RankReader", "RankSavePlanner", "RankWriter", "files_of_ranks", "read_metadata"]

DESCRIPTION: Final = "rank-{}.json"
MAX_BYTES: Final = 256 << 20
MAX_DIMENSIONS: Final = 64


def files_of_ranks(directory: Path) -> list[Path]:
    """Return the descriptions that exist."""
    return sorted(directory.glob(DESCRIPTION.format("*")))


# --- writing ---------------------------------------------------------------------------------------------------------


@final
class RankSavePlanner(DefaultSavePlanner):
    """The plan of what one rank writes: parts that only it holds, and parts that it is the first to hold.

    Args:
        rank: the rank of this process in its group.
        own: the key of the part of the state that each rank has alone. None: there is none.
    """

    def __init__(self, rank: int, *, own: str | None = None) -> None:
        super().__init__()
        self._rank = rank
        self._own = own

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plan of this rank only. `read_metadata` checks later that all ranks together wrote everything."""
        (plan,) = all_plans
        own = dataclasses.replace(plan, items=[item for item in plan.items if self._writes(item)])
        plans, metadata = create_default_global_save_plan([own])
        mappings = {item.index.fqn: plan.planner_data[item.index.fqn] for item in own.items}
        return plans, dataclasses.replace(metadata, planner_data=mappings)

    def _writes(self, item: WriteItem) -> bool:
        if self.mappings[item.index.fqn][0] == self._own:
            return True
        value = self.state_dict[item.index.fqn]
        if not isinstance(value, DTensor):
            return self._rank == 0
        here = value.device_mesh.get_coordinate()
        placed = zip(here or (), value.placements, strict=True)
        return all(where == 0 for where, placement in placed if placement.is_replicate())

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the data to write. Check that anything but a tensor can be read back.

        Raises: ValueError: a value can't be read back. The message names it.
        """
        data = super().resolve_data(write_item)
        if isinstance(data, io.BytesIO):
            try:
                torch.load(io.BytesIO(data.getvalue()), weights_only=True)
            except pickle.UnpicklingError as error:
                raise ValueError(
                    f"{write_item.index.fqn} can't be read back as plain data ({str(error).partition(chr(10))[0]}); "
                    "keep numbers, texts, lists, dicts and tensors in it, or name its classes in "
                    "torch.serialization.add_safe_globals"
                ) from error
        return data


@final
class RankWriter(FileSystemWriter):
    """A writer of one rank's files.

    Args:
        directory: an empty directory, visible to all ranks of the group.
        rank: the rank of this process.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        super().__init__(directory)
        self._directory = directory
        self._own_rank = rank

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return this rank's plan. Torch names the files by the plan's position in a list, so the list is padded."""
        (plan,) = plans
        return super().prepare_global_plan([plan] * (self._own_rank + 1))[-1:]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Describe the written parts in this rank's file."""
        files = [
            {
                "name": result.index.fqn,
                "offset": None if result.index.offset is None else list(result.index.offset),
                "file": result.storage_data.relative_path,
                "at": result.storage_data.offset,
                "length": result.storage_data.length,
            }
            for each in results
            for result in each
        ]
        leaves = {name: _described(leaf) for name, leaf in metadata.state_dict_metadata.items()}
        keys = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
        with (self._directory / DESCRIPTION.format(self._own_rank)).open("w", encoding="utf-8") as stream:
            json.dump({"leaves": leaves, "keys": keys, "files": files}, stream)
            stream.flush()
            os.fsync(stream.fileno())


def _described(leaf: TensorStorageMetadata | BytesStorageMetadata) -> dict[str, Any]:
    if isinstance(leaf, BytesStorageMetadata):
        return {}
    return {
        "dtype": str(leaf.properties.dtype).removeprefix("torch."),
        "size": list(leaf.size),
        "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in leaf.chunks],
    }


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Stored:
    """The location of a part, in the terms of torch's reader."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] | None = None


@final
class RankReader(FileSystemReader):
    """A reader of the parts that one rank needs.

    Args:
        metadata: the metadata of the checkpoint at that place, from `read_metadata`.
    """

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata that this reader was given."""
        return self._metadata


@final
class RankLoadPlanner(DefaultLoadPlanner):
    """A load planner that builds only plain data and tensors, and calls nothing from the file."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that is not a tensor as plain data.

        Raises: pickle.UnpicklingError: the value is more than plain data. The message names it.
        """
        *path, last = self.mappings[read_item.dest_index.fqn]
        inside: Any = self.original_state_dict
        for key in path:
            inside = inside[key]
        inside[last] = torch.load(value, weights_only=True)


def read_metadata(directory: Path) -> Metadata:
    """Combine the descriptions of all ranks.

    Raises: OSError: a description can't be read. ValueError: the descriptions are invalid, or a part of a tensor is
        missing.
    """
    leaves: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    keys: dict[str, tuple[str | int, ...]] = {}
    stored: dict[MetadataIndex, _Stored] = {}
    for path in files_of_ranks(directory):
        with path.open("rb") as stream:
            body = stream.read(MAX_BYTES + 1)
        if len(body) > MAX_BYTES:
            raise ValueError(f"{path.name} has more than {MAX_BYTES} bytes")
        try:
            parsed = json.loads(body)
            for name, leaf in parsed["leaves"].items():
                _add(leaves, str(name), leaf)
            for name, way in parsed["keys"].items():
                keys[str(name)] = tuple(key if isinstance(key, int) else str(key) for key in way)
            for each in parsed["files"]:
                offset = None if each["offset"] is None else _numbers(each["offset"])
                if Path(each["file"]).name != each["file"]:
                    raise ValueError(f"the file {each['file']!r} is outside the checkpoint")
                at, length = _numbers([each["at"], each["length"]])
                stored.setdefault(MetadataIndex(str(each["name"]), offset), _Stored(each["file"], at, length))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{path.name} is not a valid description of a rank's files: {error!r}") from error
    _check_whole(leaves, stored)
    return Metadata(state_dict_metadata=dict(leaves), planner_data=keys, storage_data=stored)


def _add(leaves: dict[str, TensorStorageMetadata | BytesStorageMetadata], name: str, parsed: Mapping[str, Any]) -> None:
    if not parsed:
        leaves.setdefault(name, BytesStorageMetadata())
        return
    dtype = getattr(torch, parsed["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has the dtype {parsed['dtype']!r}, which this torch does not have")
    size = torch.Size(_numbers(parsed["size"]))
    leaf = leaves.setdefault(name, TensorStorageMetadata(TensorProperties(dtype=dtype), size, []))
    if not isinstance(leaf, TensorStorageMetadata) or (leaf.size, leaf.properties.dtype) != (size, dtype):
        raise ValueError(f"{name} has two different descriptions")
    known = {tuple(chunk.offsets) for chunk in leaf.chunks}
    for offsets, sizes in parsed["chunks"]:
        chunk = ChunkStorageMetadata(torch.Size(_numbers(offsets)), torch.Size(_numbers(sizes)))
        if not len(chunk.offsets) == len(chunk.sizes) == len(size) or any(
            at + length > most for at, length, most in zip(chunk.offsets, chunk.sizes, size, strict=True)
        ):
            raise ValueError(f"{name} has a part outside its bounds")
        if tuple(chunk.offsets) not in known:
            known.add(tuple(chunk.offsets))
            leaf.chunks.append(chunk)


def _numbers(parsed: Iterable[Any]) -> list[int]:
    found = list(parsed)
    if len(found) > MAX_DIMENSIONS or not all(type(number) is int and 0 <= number < 2**63 for number in found):
        raise ValueError(f"{str(found)[:64]} are not whole numbers")
    return found


def _check_whole(
    leaves: Mapping[str, TensorStorageMetadata | BytesStorageMetadata], stored: Mapping[MetadataIndex, _Stored]
) -> None:
    for name, leaf in leaves.items():
        if isinstance(leaf, BytesStorageMetadata):
            parts = [MetadataIndex(name)]
        else:
            parts = [MetadataIndex(name, chunk.offsets) for chunk in leaf.chunks]
            described = sum(math.prod(chunk.sizes) for chunk in leaf.chunks)
            if described != math.prod(leaf.size):
                raise ValueError(f"{described} of the {math.prod(leaf.size)} elements of {name} were written")
        if any(part not in stored for part in parts):
            raise ValueError(f"no file contains a part of {name}")
