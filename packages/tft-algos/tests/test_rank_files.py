"""Descriptions of a checkpoint's files that come from a disk: put together when they fit, refused by name when not."""

from __future__ import annotations

import dataclasses
import fractions
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tft_algos.durable import _take_lock
from tft_algos.rank_files import RankLoadPlanner, RankReader, RankSavePlanner, RankWriter, read_metadata

# Torch says so of a save that asks nobody else, as here.
pytestmark = pytest.mark.filterwarnings("ignore:.*the intent is to (save|load) in a single process.*")


def written(place: Path, state: dict[str, Any], rank: int = 0) -> None:
    save(state, storage_writer=RankWriter(place, rank), planner=RankSavePlanner(rank), no_dist=True)


def read(place: Path, state: dict[str, Any]) -> dict[str, Any]:
    load(state, storage_reader=RankReader(place, read_metadata(place)), planner=RankLoadPlanner(), no_dist=True)
    return state


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    state = {"a": {"b": torch.arange(6).reshape(2, 3), "n": 3, "t": ({"x": [1.5, None]},)}, "e": torch.zeros(0)}
    written(tmp_path, state)
    written(tmp_path, {"a": {"b": torch.zeros(2, 3)}}, rank=1)  # what all ranks hold the first one writes
    assert (tmp_path / "__1_0.distcp").stat().st_size == 0
    found = read(tmp_path, {"a": {"b": torch.zeros(2, 3, dtype=torch.int64), "n": 0, "t": ()}, "e": torch.ones(0)})
    assert found["a"]["b"].equal(state["a"]["b"])  # type: ignore[index]
    assert (found["a"]["n"], found["a"]["t"]) == (3, ({"x": [1.5, None]},))


def test_what_is_no_plain_data_is_refused_when_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"others\.x can't be read back as plain data"):
        written(tmp_path, {"others": {"x": (fractions.Fraction(1, 2),)}})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda said: said["files"][0].update(file="../elsewhere"), "is outside the checkpoint"),
        (lambda said: said["files"][0].update(at=-1), "are not whole numbers"),
        (lambda said: said["files"][0].update(length=True), "are not whole numbers"),
        (lambda said: said.pop("files"), "not a valid description of a rank's files"),
        (lambda said: said["leaves"]["a"].update(dtype="load"), "has the dtype 'load'"),
        (lambda said: said["leaves"]["a"].update(size=[9]), "4 of the 9 elements of a were written"),
        (lambda said: said["leaves"]["a"].update(chunks=[[[2], [4]]]), "a part outside its bounds"),
        (
            lambda said: said["leaves"]["a"].update(chunks=[[[0], [4]]] * 2) or said["files"].clear(),
            "no file contains a part",
        ),
    ],
)
def test_a_description_that_can_not_be_is_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], object], says: str
) -> None:
    written(tmp_path, {"a": torch.ones(4)})
    path = tmp_path / "rank-0.json"
    said = json.loads(path.read_text())
    spoil(said)
    path.write_text(json.dumps(said))
    with pytest.raises(ValueError, match=says):
        read_metadata(tmp_path)


def test_a_pickle_that_stands_in_a_file_is_not_obeyed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "obeyed",))

    written(tmp_path, {"x": 1.5})
    metadata = read_metadata(tmp_path)
    torch.save(Evil(), tmp_path / "__0_0.distcp")
    (index, stored), *_ = metadata.storage_data.items()
    length = (tmp_path / "__0_0.distcp").stat().st_size
    metadata.storage_data = {index: dataclasses.replace(stored, offset=0, length=length)}
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        load({"x": 0.0}, storage_reader=RankReader(tmp_path, metadata), planner=RankLoadPlanner(), no_dist=True)
    assert not (tmp_path / "obeyed").exists()


def test_a_link_is_not_followed_to_a_lock(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="symbolic link"):
        _take_lock(tmp_path / "lock")
    assert not (tmp_path / "made").exists()
