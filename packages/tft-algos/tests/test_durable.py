"""Durable checkpoints in one process: what is written, what is taken, and what is left alone."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tft_algos import ConfigError, Manager, Optimizer, durable
from tft_algos.durable import DurableCheckpoint
from tft_algos.durable_state import RESIDUALS, SavedResiduals
from tft_algos.errors import DurableCheckpointError
from tft_algos.quantization import ErrorFeedback, TopK
from tft_algos.rank_files import RankLoadPlanner, RankReader, RankSavePlanner, RankWriter, read_metadata
from tft_algos.testing import digest, plan_of


class StepSource:
    """What a checkpoint asks of a Manager, for a test to set."""

    def __init__(self) -> None:
        self.replica_id = uuid.uuid4().hex
        self.attempt = 0
        self.verdict: bool | None = True
        self.torn = False
        self.rank: int | None = 0
        self.world_size = 1
        self.lineage = "0" * 16
        self.loaded: Any = None
        self.step = 0

    def current_step(self) -> int:
        return self.step

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(
            group_rank=0,
            group_world_size=self.world_size,
            step=self.step,
            attempt=self.attempt,
            committed=self.verdict,
            is_torn=self.torn,
            participating_rank=self.rank,
        )

    def participating_rank(self) -> int | None:
        return self.rank

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "batches_committed": 3 * self.step, "lineage": self.lineage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Job:
    """A model that is trained, and its checkpoints."""

    def __init__(self, directory: Path, seed: int = 0, make: Any = torch.optim.AdamW, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = make(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.manager = StepSource()
        self.checkpoint = DurableCheckpoint(
            self.manager,  # type: ignore[arg-type]
            directory,
            model=self.model,
            optimizers=self.optimizer,
            others={"scheduler": self.scheduler},
            **settings,
        )

    def train(self, steps: int = 1) -> Path | None:
        path = None
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 3)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.manager.step += 1
            self.manager.attempt += 1
            path = self.checkpoint.save()
        return path

    def digest(self) -> str:
        return digest(self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict())


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.SGD,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        lambda parameters, lr: torch.optim.AdamW([{"params": [each], "lr": lr} for each in parameters]),
    ],
    ids=["adamw", "sgd", "momentum", "groups"],
)
def test_what_was_saved_is_loaded_whole(tmp_path: Path, make: Any) -> None:
    job = Job(tmp_path / "new" / "directory", make=make)
    path = job.train(3)
    assert path == tmp_path / "new" / "directory" / "step-3"
    again = Job(tmp_path / "new" / "directory", seed=1, make=make)
    assert again.digest() != job.digest()
    assert again.checkpoint.load() == 3
    assert again.digest() == job.digest()
    assert again.manager.loaded == job.manager.state_dict()


class Branches(torch.nn.Module):
    """Of its two parts one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(inputs)
        return result


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}], ids=["adamw", "momentum"])
def test_an_optimizer_that_has_seen_some_gradients_only_is_loaded_as_it_was(
    tmp_path: Path, settings: dict[str, Any], caplog: Any
) -> None:
    make = torch.optim.SGD if settings else torch.optim.AdamW
    jobs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = Branches()
        optimizer = make(model.parameters(), lr=0.1, **settings)
        manager: Any = StepSource()
        checkpoint = DurableCheckpoint(manager, tmp_path, model=model, optimizers=optimizer)
        jobs.append((model, optimizer, manager, checkpoint))
    (model, optimizer, manager, checkpoint), (other_model, other_optimizer, _, other_checkpoint) = jobs
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    manager.step = 1
    checkpoint.save()
    with caplog.at_level(logging.INFO, logger="tft_algos.durable"):
        assert other_checkpoint.load() == 1
    assert digest(other_model.state_dict(), other_optimizer.state_dict()) == digest(
        model.state_dict(), optimizer.state_dict()
    )
    assert len(other_optimizer.state) == 2
    assert "no optimizer state for unused.weight, unused.bias, which had no gradient by step 1" in caplog.text


def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    Job(tmp_path, make=torch.optim.SGD).train()
    with pytest.raises(DurableCheckpointError, match=r"Missing key .*give the same model, optimizers"):
        Job(tmp_path, make=torch.optim.AdamW).checkpoint.load()


def test_an_empty_directory_and_none_at_all_have_nothing_to_go_on_from(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        job = Job(directory)
        before = job.digest()
        assert job.checkpoint.load() is None
        assert (job.digest(), job.manager.loaded) == (before, None)


@pytest.mark.parametrize(
    ("name", "value"), [("verdict", False), ("verdict", None), ("torn", True), ("rank", 1), ("rank", None)]
)
def test_only_the_elected_writer_writes_and_only_what_was_committed(tmp_path: Path, name: str, value: Any) -> None:
    job = Job(tmp_path)
    setattr(job.manager, name, value)
    assert job.train() is None
    assert names(tmp_path) == []


def test_it_is_due_every_so_many_steps(tmp_path: Path) -> None:
    job = Job(tmp_path, every=3)
    for step in range(1, 8):
        job.manager.step = job.manager.attempt = step
        assert job.checkpoint.save_if_due() == (tmp_path / f"step-{step}" if step in (3, 6) else None)


def test_as_many_are_kept_as_was_said_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    for name in ("step-1", "step-x", "notes", f"{durable.REMOVING}1"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-1" / "mine").touch()
    (tmp_path / "step-3").touch()
    Job(tmp_path, keep=2).train(6)
    assert names(tmp_path) == ["notes", "step-1", "step-3", "step-5", "step-6", "step-x"]
    newest = Job(tmp_path, keep=1)
    newest.manager.step = 6
    newest.train()
    assert names(tmp_path) == ["notes", "step-1", "step-3", "step-7", "step-x"]


def test_a_slow_writer_removes_nothing_that_is_newer(tmp_path: Path) -> None:
    fast, slow = Job(tmp_path), Job(tmp_path, keep=1)
    fast.manager.step = 9
    fast.train()
    slow.manager.step = 4
    slow.train()
    assert names(tmp_path) == ["step-10", "step-5"]
    assert Job(tmp_path).checkpoint.load() == 10


def tamper_manifest(path: Path) -> None:
    manifest = path / durable.MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"batches_committed": 9', b'"batches_committed": 8'))


def tamper_data(path: Path) -> None:
    (data,) = path.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def write_manifest(path: Path, body: bytes) -> None:
    (path / durable.MANIFEST).write_bytes(hashlib.blake2b(body, digest_size=32).hexdigest().encode() + b"\n" + body)


SPOILERS: dict[str, Callable[[Path], object]] = {
    "a bit": tamper_data,
    "cut": lambda path: os.truncate(next(path.glob("*.distcp")), 10),
    "gone": lambda path: (path / "rank-0.json").unlink(),
    "more": lambda path: (path / "__1_0.distcp").touch(),
    "manifest": tamper_manifest,
    "manifest cut": lambda path: os.truncate(path / durable.MANIFEST, 100),
    "no manifest": lambda path: (path / durable.MANIFEST).unlink(),
    "no json": lambda path: write_manifest(path, b"{"),
    "a list": lambda path: write_manifest(path, b"[]"),
    "no files": lambda path: write_manifest(path, b'{"format": 1, "step": 3, "manager": {}}'),
    "nested": lambda path: write_manifest(path, b"[" * 100_000),
    "another manager": lambda path: write_manifest(
        path,
        json.dumps(
            {**json.loads((path / durable.MANIFEST).read_bytes().partition(b"\n")[2]), "manager": {"step": 9}}
        ).encode(),
    ),
    "no manager": lambda path: write_manifest(
        path,
        json.dumps({**json.loads((path / durable.MANIFEST).read_bytes().partition(b"\n")[2]), "manager": {}}).encode(),
    ),
    "later format": lambda path: write_manifest(path, b'{"format": 2}'),
    "a directory": lambda path: (
        (path / "data").mkdir(),
        write_manifest(path, b'{"format": 1, "step": 3, "manager": {"step": 3}, "files": {"data": [1, ""]}}'),
        [file.unlink() for file in path.iterdir() if file.is_file() and file.name != durable.MANIFEST],
    ),
    "a pipe": lambda path: ((path / durable.MANIFEST).unlink(), os.mkfifo(path / durable.MANIFEST)),
    "empty": lambda path: (shutil.rmtree(path), path.mkdir()),
    "another step's": lambda path: (shutil.rmtree(path), shutil.copytree(path.with_name("step-2"), path)),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS)
def test_what_is_not_whole_is_not_taken(tmp_path: Path, spoil: Callable[[Path], object], caplog: Any) -> None:
    job = Job(tmp_path)
    job.train(2)
    wanted = job.digest()
    spoil(job.train() or tmp_path)
    again = Job(tmp_path, seed=1)
    with caplog.at_level(logging.WARNING, logger="tft_algos.durable"):
        assert again.checkpoint.load() == 2
    assert again.digest() == wanted
    assert "step-3, which is not a complete checkpoint" in caplog.text


def test_where_none_is_whole_nothing_begins_anew_by_itself(tmp_path: Path) -> None:
    job = Job(tmp_path)
    tamper_data(job.train() or tmp_path)
    before = job.digest()
    with pytest.raises(
        DurableCheckpointError, match=r"no checkpoint in .* is complete \(step-1: the digest of __0_0.distcp is wrong\)"
    ):
        job.checkpoint.load()
    assert job.digest() == before


def test_what_is_being_read_is_not_removed_until_it_is(tmp_path: Path, monkeypatch: Any) -> None:
    writer, reader = Job(tmp_path, keep=1), Job(tmp_path, seed=1)
    writer.train()
    wanted = writer.digest()
    verify = durable._verify

    def meanwhile(path: Path) -> Any:
        manifest = verify(path)
        if writer.manager.step == 1:
            writer.train(2)
        return manifest

    monkeypatch.setattr(durable, "_verify", meanwhile)
    assert reader.checkpoint.load() == 1
    assert reader.digest() == wanted
    assert names(tmp_path) == ["step-1", "step-3"]
    writer.train()
    assert names(tmp_path) == ["step-4"]


def test_what_is_removed_while_we_look_is_looked_for_anew(tmp_path: Path, monkeypatch: Any) -> None:
    writer, reader = Job(tmp_path, keep=1), Job(tmp_path, seed=1)
    writer.train()
    listed = durable._checkpoints

    def late(directory: Path) -> list[Path]:
        found = listed(directory)
        if writer.manager.step == 1:
            writer.train()
        return found

    monkeypatch.setattr(durable, "_checkpoints", late)
    assert reader.checkpoint.load() == 2
    assert reader.digest() == writer.digest()


def test_a_step_can_be_chosen(tmp_path: Path) -> None:
    Job(tmp_path).train(3)
    again = Job(tmp_path)
    assert again.checkpoint.load(2) == 2
    with pytest.raises(DurableCheckpointError, match="none exists for that step"):
        again.checkpoint.load(1)


def test_a_model_that_does_not_fit_is_refused_with_the_place(tmp_path: Path) -> None:
    Job(tmp_path).train()
    other = DurableCheckpoint(StepSource(), tmp_path, model=torch.nn.Linear(3, 4))  # type: ignore[arg-type]
    with pytest.raises(
        DurableCheckpointError, match=r"could not load the checkpoint of step 1 .*step-1: .*give the same model"
    ) as e:
        other.load()
    assert (e.value.path, e.value.step) == (str(tmp_path / "step-1"), 1)


def test_two_writers_of_one_step_agree_on_one(tmp_path: Path) -> None:
    first, second = Job(tmp_path), Job(tmp_path)
    assert first.train() == second.train() == tmp_path / "step-1"
    assert names(tmp_path) == ["step-1"]


def test_another_history_and_a_broken_one_get_a_name_of_their_own(tmp_path: Path) -> None:
    Job(tmp_path).train()
    other = Job(tmp_path, seed=1)
    other.manager.lineage = "1" * 16
    assert other.train() == tmp_path / "step-1.1"
    tamper_data(tmp_path / "step-1.1")
    third = Job(tmp_path, seed=2)
    third.manager.lineage = "1" * 16
    assert third.train() == tmp_path / "step-1.2"
    again = Job(tmp_path, seed=3)
    assert again.checkpoint.load() == 1
    assert again.digest() == third.digest()


def test_what_a_rank_wrote_to_a_disk_of_its_own_makes_no_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    job = Job(tmp_path, keep=1)
    job.train()
    save = durable.save

    def with_a_part_elsewhere(*args: Any, storage_writer: Any, **settings: Any) -> None:
        save(*args, storage_writer=storage_writer, **settings)
        (Path(storage_writer.path) / "__0_0.distcp").unlink()

    monkeypatch.setattr(durable, "save", with_a_part_elsewhere)
    with pytest.raises(DurableCheckpointError, match=r"rank 0 can't see __0_0.distcp; give all ranks"):
        job.train()
    assert names(tmp_path) == ["step-1"]


def test_links_take_names_too_and_are_removed_as_links(tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    job = Job(place)
    (job.train() or place).rename(elsewhere)
    (place / "step-1").symlink_to(elsewhere)
    (place / "step-2").symlink_to(tmp_path / "nowhere")
    assert job.train() == place / "step-2.1"
    job.train(2)
    assert names(place) == ["step-2", "step-3", "step-4"]
    assert durable.MANIFEST in names(elsewhere)


def test_a_directory_that_is_lost_after_the_save_ends_nothing(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    def listed(directory: Path) -> list[Path]:
        raise FileNotFoundError(directory)

    monkeypatch.setattr(durable, "_checkpoints", listed)
    assert Job(tmp_path).train() == tmp_path / "step-1"
    assert "could not list old checkpoints" in caplog.text


def test_a_name_that_is_taken_at_the_last_moment_is_not_overwritten(tmp_path: Path, monkeypatch: Any) -> None:
    """The other writer's rename comes between our look and ours."""
    first, second = Job(tmp_path), Job(tmp_path)
    rename = Path.rename

    def late(self: Path, target: Path) -> Path:
        if second.manager.attempt and not first.manager.attempt and self.name.startswith(durable.WRITING):
            first.train()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    assert second.train() == tmp_path / "step-1"
    assert names(tmp_path) == ["step-1"]


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path: Path) -> None:
    for name in ("dead", "living"):
        (tmp_path / f"{durable.WRITING}1-{name}").mkdir()
        (tmp_path / f"{durable.WRITING}1-{name}{durable.LOCK}").touch()
    (tmp_path / f"{durable.WRITING}2-bare").mkdir()
    (tmp_path / f"{durable.WRITING}3-unreadable{durable.LOCK}").mkdir()
    living = os.open(tmp_path / f"{durable.WRITING}1-living{durable.LOCK}", os.O_RDWR)
    try:
        fcntl.flock(living, fcntl.LOCK_EX)
        Job(tmp_path).train()
    finally:
        os.close(living)
    stays = [f"{durable.WRITING}1-living", f"{durable.WRITING}1-living{durable.LOCK}"]
    assert names(tmp_path) == [*stays, f"{durable.WRITING}3-unreadable{durable.LOCK}", "step-1"]


@pytest.mark.parametrize("when", ["writing", "publishing"])
def test_a_full_disk_names_place_and_step_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: Any, caplog: Any, when: str
) -> None:
    job = Job(tmp_path)
    job.train()

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        if when == "writing":
            patched.setattr("os.fsync", full)
        else:
            patched.setattr(durable, "_digest_of", full)
        with pytest.raises(
            DurableCheckpointError, match=r"could not write the checkpoint of step 2.* No space left"
        ) as raised:
            job.train()
        assert (raised.value.path, raised.value.step) == (str(tmp_path), 2)
        with caplog.at_level(logging.ERROR, logger="tft_algos.durable"):
            assert job.checkpoint.save_if_due() is None
    assert "No space left on device" in caplog.text
    assert names(tmp_path) == ["step-1"]
    assert job.train() == tmp_path / "step-3"


def test_a_place_that_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DurableCheckpointError, match=r"could not write the checkpoint of step 1 in .*file"):
        Job(tmp_path / "file").train()
    with pytest.raises(DurableCheckpointError, match=r"could not read the checkpoint in .*file"):
        Job(tmp_path / "file").checkpoint.load()


@pytest.mark.parametrize("settings", [{"every": 0}, {"keep": 0}, {"every": 1.5}, {"keep": True}])
def test_settings_that_can_t_work_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Job(tmp_path, **settings)


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ({"model": 3}, "model is a int; give a torch.nn.Module"),
        ({"optimizers": [3]}, "optimizers holds a int"),
        ({"others": {"epoch": 3}}, "others has a int under 'epoch', whose state can't be saved"),
        ({"others": [3]}, "others is a list"),
    ],
)
def test_what_could_never_be_saved_is_refused_before_the_training(
    tmp_path: Path, argument: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        DurableCheckpoint(StepSource(), tmp_path, **{"model": torch.nn.Linear(1, 1), **argument})  # type: ignore[arg-type]


def test_a_group_of_several_needs_its_process_group(tmp_path: Path) -> None:
    manager = StepSource()
    manager.world_size = 2
    with pytest.raises(ConfigError, match="with 2 ranks needs a process group of them, and there is none"):
        DurableCheckpoint(manager, tmp_path, model=torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_with_a_manager_and_a_wrapped_optimizer(tmp_path: Path, rigs: Any) -> None:
    rig = rigs(plan_of())
    manager: Manager = rig.manager
    model = torch.nn.Linear(3, 2)
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters()))
    checkpoint = DurableCheckpoint(manager, tmp_path, model=model, optimizers=[optimizer])
    assert checkpoint.save_if_due() is None
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert checkpoint.save_if_due() == tmp_path / "step-1"
    said = json.loads((tmp_path / "step-1" / durable.MANIFEST).read_bytes().partition(b"\n")[2])
    assert said["manager"] == manager.state_dict()
    again = rigs().manager
    assert DurableCheckpoint(again, tmp_path, model=model, optimizers=[optimizer]).load() == 1
    assert (again.current_step(), again.state_dict()) == (1, manager.state_dict())


def test_a_checkpoint_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    """Torch reads what it is asked for, and would say nothing of the rest."""
    large, small = Job(tmp_path), Job(tmp_path)
    large.checkpoint._model = torch.nn.Sequential(large.model, torch.nn.Linear(2, 2))
    large.checkpoint._optimizers = []
    large.manager.step = 4
    assert large.checkpoint.save() is not None
    small.checkpoint._model = torch.nn.Sequential(small.model)
    small.checkpoint._optimizers = []
    before = digest(small.model.state_dict())
    with pytest.raises(DurableCheckpointError, match=r"the saved model has 1.bias, 1.weight, which this model lacks"):
        small.checkpoint.load()
    assert (digest(small.model.state_dict()), small.manager.loaded) == (before, None)


def test_what_a_checkpoint_has_beside_what_is_asked_for_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)
    job.manager.step = 4
    job.checkpoint.save()
    job.checkpoint._others = {}
    assert job.checkpoint.load() == 4
    assert "ignored the saved state of scheduler" in caplog.text


def test_a_model_of_another_dtype_is_loaded_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    job.manager.step = 4
    job.checkpoint.save()
    job.checkpoint.load()
    said = "2 tensors of the model have another dtype in the checkpoint and are converted"
    assert said not in caplog.text
    written = job.model.weight.detach().clone()
    job.model.bfloat16()
    assert job.checkpoint.load() == 4
    assert torch.equal(job.model.weight, written.bfloat16())
    assert f"{said}: weight from torch.float32 to torch.bfloat16, bias from" in caplog.text


def test_a_state_that_can_t_be_given_is_said_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    job.manager.step = 4
    monkeypatch.setattr(job.scheduler, "state_dict", lambda: 1 / 0)
    with pytest.raises(DurableCheckpointError, match=r"could not take the checkpoint of step 4.*nothing was written"):
        job.checkpoint.save()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said["files"].update({next(iter(said["files"])): [float("inf"), ""]}),
        lambda said: said["manager"].update(batches_committed="x"),
        lambda said: said["manager"].update(step=4.0),
    ],
    ids=["a size without end", "batches", "a broken step"],
)
def test_a_manifest_that_is_signed_and_odd_is_no_whole_checkpoint(tmp_path: Path, change: Any) -> None:
    job = Job(tmp_path)
    job.manager.step = 4
    path = job.checkpoint.save()
    assert path is not None
    said = json.loads((path / durable.MANIFEST).read_bytes().partition(b"\n")[2])
    change(said)
    body = json.dumps(said).encode()
    (path / durable.MANIFEST).write_bytes(hashlib.blake2b(body, digest_size=32).hexdigest().encode() + b"\n" + body)
    with pytest.raises(DurableCheckpointError):
        job.checkpoint.load()
    assert job.manager.loaded is None


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"manager": None}, "the manager is a NoneType; give a Manager"),
        ({"directory": 5}, "directory is 5; give a path"),
        ({"optimizers": None}, "optimizers is a NoneType"),
        (
            {"others": {1: SimpleNamespace(state_dict=dict, load_state_dict=dict)}},
            "others has the key 1; give strings as keys",
        ),
    ],
)
def test_what_can_t_be_an_argument_is_named(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    arguments = {"manager": StepSource(), "directory": tmp_path, "model": torch.nn.Linear(1, 1), **changed}
    with pytest.raises(ConfigError, match=says):
        DurableCheckpoint(arguments.pop("manager"), arguments.pop("directory"), **arguments)


@pytest.mark.parametrize("step", [True, "2", 2.0])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ConfigError, match="give a whole number, or None for the newest"):
        Job(tmp_path).checkpoint.load(step)


# --- residuals --------------------------------------------------------------------------------------------------------


class OwnStepSource(StepSource):
    """A StepSource with a name, to which the state of an ErrorFeedback may belong."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.replica_id = f"{name}:{uuid.uuid4()}"

    def register_state_dict_fn(self, *_: Any, **__: Any) -> None:
        pass


def replica_with_residuals(
    directory: Path, name: str, values: list[float | None], keys: tuple[str, ...] = ("error_feedback",)
) -> tuple[DurableCheckpoint, list[ErrorFeedback]]:
    """Return a checkpoint of one replica, and its feedback with one residual for each value."""
    manager: Any = OwnStepSource(name)
    feedback = [ErrorFeedback(manager, TopK(), key=key) for key in keys]
    for each in feedback:
        for index, value in enumerate(values):
            slot = each.of(f"fragment {index}, slice 0.1")
            if value is not None:
                slot.keep("mean", torch.full((100 + index,), value))
    model = torch.nn.Linear(3, 2)
    return DurableCheckpoint(manager, directory, model=model, feedback=feedback), feedback


def residuals_of(feedback: ErrorFeedback) -> dict[str, tuple[str, list[float] | None]]:
    slots = feedback.state_dict()["slots"].items()
    return {
        name: (slot["kind"], None if slot["residual"] is None else slot["residual"].tolist()) for name, slot in slots
    }


def test_a_replica_takes_up_its_own_residuals_and_others_begin_without(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    keys = ("first", "second")
    writer, (first, second) = replica_with_residuals(tmp_path, "a", [1.5, None, -2.0], keys)
    assert writer.save() is not None
    restarted, found = replica_with_residuals(tmp_path, "a", [], keys)
    assert restarted.load() == 0
    assert [residuals_of(each) for each in found] == [residuals_of(first), residuals_of(second)]
    assert found[0].of("fragment 2, slice 0.1").residual("mean", torch.device("cpu")) is not None
    assert "resumed step 0 with its residuals" in caplog.text
    caplog.clear()
    other, (own, _) = replica_with_residuals(tmp_path, "b", [7.0], keys)
    assert other.load() == 0
    assert residuals_of(own) == {"fragment 0, slice 0.1": ("", None)}
    assert "residuals" not in caplog.text


def test_a_replica_begins_without_residuals_if_the_checkpoint_has_none(tmp_path: Path) -> None:
    Job(tmp_path).checkpoint.save()
    model, manager = torch.nn.Linear(3, 2), OwnStepSource("a")
    feedback = ErrorFeedback(manager, TopK())
    feedback.of("weight").keep("mean", torch.ones(3))
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoint = DurableCheckpoint(manager, tmp_path, model=model, optimizers=adam, feedback=feedback)  # type: ignore[arg-type]
    assert checkpoint.load() == 0
    assert residuals_of(feedback) == {"weight": ("", None)}
    assert checkpoint.save() is not None  # without any residual
    assert checkpoint.load() == 0


def test_a_job_without_feedback_ignores_saved_residuals(tmp_path: Path) -> None:
    writer, _ = replica_with_residuals(tmp_path, "a", [1.0])
    writer.save()
    plain = DurableCheckpoint(OwnStepSource("a"), tmp_path, model=torch.nn.Linear(3, 2))  # type: ignore[arg-type]
    assert plain.load() == 0


def test_each_rank_has_its_own_residuals(tmp_path: Path) -> None:
    manager: Any = OwnStepSource("a")

    def part(rank: int, num_ranks: int) -> tuple[SavedResiduals, ErrorFeedback]:
        feedback = ErrorFeedback(manager)
        return SavedResiduals(manager, feedback, rank, num_ranks), feedback

    for rank in range(2):
        saved, feedback = part(rank, 2)
        feedback.of("weight").keep("mean", torch.full((5,), float(rank)))
        state = {"shared": torch.ones(2), **saved.state()}
        planner = RankSavePlanner(rank, own=RESIDUALS)
        with durable._without_dcp_warnings():
            save(state, storage_writer=RankWriter(tmp_path, rank), planner=planner, no_dist=True)
    metadata = read_metadata(tmp_path)
    for rank in range(2):
        saved, feedback = part(rank, 2)
        state = {"shared": torch.zeros(2), **saved.wanted(metadata)}
        with durable._without_dcp_warnings():
            load(state, storage_reader=RankReader(tmp_path, metadata), planner=RankLoadPlanner(), no_dist=True)
        assert saved.load(state)
        assert residuals_of(feedback) == {"weight": ("mean", [float(rank)] * 5)}
    saved, feedback = part(0, 1)
    assert saved.wanted(metadata) == {}
    assert not saved.load({})


def test_feedback_that_is_not_of_this_manager_is_refused(tmp_path: Path) -> None:
    manager: Any = OwnStepSource("a")
    for wrong, why in (
        (None, "feedback is a NoneType"),
        ([1], "feedback is a int"),
        (ErrorFeedback(OwnStepSource("a")), "belongs to another Manager"),
    ):
        with pytest.raises(ConfigError, match=why):
            DurableCheckpoint(manager, tmp_path, model=torch.nn.Linear(1, 1), feedback=wrong)  # type: ignore[arg-type]
