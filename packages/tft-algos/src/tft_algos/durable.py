"""Durable checkpoints beside live ones, to resume a job when no replica is left.

As long as one replica lives, newcomers heal from it and need no disk. A durable checkpoint covers the loss of all
replicas. All replicas hold the same state after a commit, so one of them writes it: the participant with the smallest
replica id. Its ranks write together, through torch.distributed.checkpoint. The plan names this participant, so no
request is needed.

A checkpoint is a directory `step-N`. One rename creates it, when everything in it is on the disk. It contains a
manifest with the digest of each file. So whenever the writer dies, every directory `step-N` is complete. A checkpoint
that was damaged later is not loaded. A running writer holds a lock, which ends with its process. The next writer
removes the leftovers of writers without a lock.

The directory is on the user's own disk, not on the network. The digests detect damage, not attacks: a user with write
access can give the job other weights. Nothing that is read there is executed (`rank_files`).

Law of this file: files, and the order in which they appear. The content of a state is torch's, and the lineage is the
Manager's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

from tft_algos.durable_state import MOST_NAMED, RESIDUALS, SavedResiduals, leave_out, named, optimizers_in, others_in
from tft_algos.errors import ConfigError, DurableCheckpointError
from tft_algos.manager import Manager
from tft_algos.quantization import ErrorFeedback
from tft_algos.rank_files import (
    RankLoadPlanner,
    RankReader,
    RankSavePlanner,
    RankWriter,
    read_metadata,
)

logger = logging.getLogger("tft_algos.durable")

FORMAT: Final = 2  # format 1 contained torch's pickled metadata
MANIFEST: Final = "manifest"
WRITING: Final = ".tft-writing-"
REMOVING: Final = ".tft-removing-"
LOCK: Final = ".lock"
MOST_MANIFEST_BYTES: Final = 64 << 20
READ_BYTES: Final = 1 << 20
MAX_SEARCHES: Final = 3

_NAME: Final = re.compile(r"step-(0|[1-9][0-9]{0,13})(?:\.([1-9][0-9]{0,3}))?")
_TAKEN: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


class _DamagedError(Exception):
    """A directory is not a complete checkpoint. The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class _Manifest:
    """The manifest of a checkpoint.

    Args:
        step: committed steps.
        manager: the result of `Manager.state_dict`.
        files: size in bytes and digest of each file, by name.
    """

    step: int
    manager: dict[str, Any]
    files: dict[str, tuple[int, str]]


@final
class DurableCheckpoint:
    """Checkpoints of a job in a directory: writing them, and resuming from the newest complete one.

    Every rank of every replica group makes one DurableCheckpoint with the same arguments. Each rank calls `load` once
    before it trains, and `save_if_due` after each `optimizer.step()`.

    Args:
        manager: the Manager of this process.
        directory: a directory of this job only, visible to all ranks of a group. Groups that also see it resume from
            it. Other groups heal.
        model: any module, including modules of FSDP2 and DDP.
        optimizers: the model's optimizers, wrapped or not.
        others: other state that is the same on every replica: schedulers, counters. The state of rank 0 is saved.
        feedback: the `ErrorFeedback` of this Manager, or several. The writing group saves its own residuals, and only a
            group with the same name and as many ranks takes them up. All others begin without residuals.
        every: committed steps from one checkpoint to the next.
        keep: number of complete checkpoints to keep. Older ones are removed.
        process_group: torch's group of this replica group's ranks. None: the default group. A group of one does not use
            it.
    Raises: ConfigError: an argument can't work.
    """

    def __init__(
        self,
        manager: Manager,
        directory: str | os.PathLike[str],
        *,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        others: Mapping[str, Stateful] | None = None,
        feedback: ErrorFeedback | Sequence[ErrorFeedback] = (),
        every: int = 1,
        keep: int = 2,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not callable(getattr(manager, "participating_rank", None)):
            raise ConfigError(f"the manager is a {type(manager).__name__}; give a Manager, and a directory after it")
        if not isinstance(directory, str | os.PathLike):
            raise ConfigError(f"directory is {directory!r}; give a path")
        for name, value in (("every", every), ("keep", keep)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; give a whole number, at least 1")
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model is a {type(model).__name__}; give a torch.nn.Module")
        self._manager = manager
        self._directory = Path(directory)
        self._model = model
        self._optimizers = optimizers_in(optimizers)
        self._others = others_in(others)
        self._every = every
        self._keep = keep
        status = manager.status()
        self._rank, self._world_size = status.group_rank, status.group_world_size
        self._residuals = SavedResiduals(manager, feedback, self._rank, self._world_size)
        self._group: dist.ProcessGroup | None = None
        if self._world_size > 1:
            group = process_group or (dist.group.WORLD if dist.is_initialized() else None)
            if group is None or group.size() != self._world_size:
                has = "there is none" if group is None else f"the given one has {group.size()}"
                raise ConfigError(
                    f"a checkpoint of a replica group with {self._world_size} ranks needs a process group of them, and "
                    f"{has}; call torch.distributed.init_process_group, or give process_group"
                )
            self._group = group

    # --- writing -------------------------------------------------------------------------------------------------

    def save_if_due(self) -> Path | None:
        """Write a checkpoint, if one is due and this group is elected.

        A checkpoint is due if the last step was committed and is a multiple of `every`. A failure is logged as an
        error, and the training continues, because the disk may have room again later. Use `save` to get the error
        raised.

        Returns: the path of the checkpoint. None: no checkpoint was written.
        """
        if self._manager.current_step() % self._every:
            return None
        try:
            return self.save()
        except DurableCheckpointError as error:
            logger.error("[%s/%d] %s", self._manager.replica_id, self._rank, error)
            return None

    def save(self) -> Path | None:
        """Write a checkpoint, if the last step was committed and this group is elected.

        All ranks of a group call this, between `optimizer.step()` and the next `zero_grad()`. The other groups train on
        meanwhile. A group that writes for longer than the lighthouse's join_timeout heals afterwards.

        Returns: the path of the checkpoint, complete and on the disk. None: another group writes it, or the last step
            was not committed.
        Raises: DurableCheckpointError: on every rank. The failed checkpoint is removed, and earlier ones are unchanged.
        """
        manager, status = self._manager, self._manager.status()
        if not status.committed or status.participating_rank != 0:
            return None
        # All ranks must know what one rank alone knows. Otherwise they would wait for this rank below.
        if not self._all_agree(not status.is_torn):
            return None
        step = status.step
        begun = time.monotonic()
        state = self._take_state(step)
        writer = _Writer(self._directory, f"{manager.replica_id} {status.attempt}", step, self._world_size)
        try:
            with self._converting_errors(step, "write"):
                self._on_rank_0(writer.begin, step)
                with self._together(step, "write"), _without_dcp_warnings():
                    save(
                        state,
                        storage_writer=RankWriter(writer.place, self._rank),
                        planner=RankSavePlanner(self._rank, own=RESIDUALS),
                        no_dist=True,
                    )
                path = self._directory / f"step-{step}"
                number = self._on_rank_0(lambda: writer.publish(manager.state_dict()), step)
                if number:
                    path = path.with_name(f"{path.name}.{number}")
            if self._rank == 0:
                _retire(self._directory, path, self._keep)
        finally:
            writer.close()
        logger.info(
            "[%s/%d - step %d] wrote %s in %.0f ms",
            manager.replica_id,
            self._rank,
            step,
            path,
            1_000 * (time.monotonic() - begun),
        )
        return path

    # --- reading -------------------------------------------------------------------------------------------------

    def load(self, step: int | None = None) -> int | None:
        """Resume: load the newest complete checkpoint in place, together with the Manager's state.

        All ranks of a group call this before they train. The number of replica groups may differ from the writer's. The
        number of ranks in a group may also differ, if torch can reshard the state. Groups that load the same checkpoint
        continue from it without healing.

        Args:
            step: load the checkpoint of this step. None: the newest one. Newer checkpoints are kept, and the next load
                without `step` would take them.
        Returns: the committed steps of the checkpoint. None: the directory has no checkpoint.
        Raises: DurableCheckpointError: checkpoints exist and none is complete, the given step has none, or the
            checkpoint does not fit this model (for example, it belongs to a larger model). ConfigError: step is not a
            whole number.
        """
        if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
            raise ConfigError(f"step is {step!r}; give a whole number, or None for the newest checkpoint")
        with contextlib.ExitStack() as reading:
            return self._load(step, reading)

    def _load(self, step: int | None, reading: contextlib.ExitStack) -> int | None:
        found: list[_Manifest] = []

        def choose() -> int:
            path, manifest = _newest(self._directory, step, reading)
            if path is None or manifest is None:
                return -1
            found.append(manifest)
            return _place_of(path)[0] * 10_000 + _place_of(path)[1]

        with self._converting_errors(step, "read"):
            chosen = self._on_rank_0(choose, step)
            if chosen < 0:
                return None
            step, number = divmod(chosen, 10_000)
            path = self._directory / (f"step-{step}.{number}" if number else f"step-{step}")
            manifest = found[0] if found else _read_manifest(path)
        with self._converting_errors(step, "load", path):
            state = self._state()
            metadata = read_metadata(path)
            self._check_wanted(state, metadata)
            state |= self._residuals.wanted(metadata)
            if self._optimizers:
                without = leave_out(state["optimizer"]["state"], metadata.planner_data)
                if without:
                    logger.info(
                        "[%s/%d] the checkpoint has no optimizer state for %s, which had no gradient by step %d",
                        self._manager.replica_id,
                        self._rank,
                        named(without),
                        step,
                    )
            with self._together(step, "load", path), _without_dcp_warnings():
                load(state, storage_reader=RankReader(path, metadata), planner=RankLoadPlanner(), no_dist=True)
            set_model_state_dict(self._model, state["model"])
            if self._optimizers:
                set_optimizer_state_dict(
                    self._model, self._optimizers, state["optimizer"], options=StateDictOptions(strict=False)
                )
            for key, other in self._others.items():
                other.load_state_dict(state["others"][key][0])
            has_residuals = self._residuals.load(state)
        self._manager.load_state_dict(manifest.manager)
        with_residuals = " with its residuals" if has_residuals else ""
        logger.info(
            "[%s/%d] resumed step %d%s from %s", self._manager.replica_id, self._rank, step, with_residuals, path
        )
        return step

    # --- inside --------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """Return the state to save. For loading, this is the state that the checkpoint is read into."""
        state: dict[str, Any] = {"model": get_model_state_dict(self._model)}
        if self._optimizers:
            state["optimizer"] = get_optimizer_state_dict(self._model, self._optimizers)
        if self._others:
            # A tuple is one leaf to torch, so its content may have other keys at every save.
            state["others"] = {key: (other.state_dict(),) for key, other in self._others.items()}
        return state

    def _check_wanted(self, state: Mapping[str, Any], metadata: Metadata) -> None:
        """Check that the checkpoint has no parameters that this model lacks. Torch ignores such parameters silently.

        Torch also converts dtypes silently. This method logs them, and logs state of others that is not loaded.

        Raises: ValueError: the checkpoint has parameters or buffers of a larger model.
        """
        there: dict[str, set[str]] = {"model": set(), "others": set()}
        converted: list[str] = []
        for leaf, keys in (metadata.planner_data or {}).items():
            if len(keys) < 2 or keys[0] not in there:
                continue
            there[keys[0]].add(str(keys[1]))
            written = metadata.state_dict_metadata.get(leaf)
            wanted = state["model"].get(keys[1]) if keys[0] == "model" else None
            if isinstance(written, TensorStorageMetadata) and isinstance(wanted, torch.Tensor):
                dtypes = (written.properties.dtype, wanted.dtype)
                if dtypes[0] != dtypes[1]:
                    converted.append(f"{keys[1]} from {dtypes[0]} to {dtypes[1]}")
        unread = sorted(there["model"] - set(state["model"]))
        if unread:
            raise ValueError(f"the saved model has {named(unread)}, which this model lacks")
        if converted:
            logger.warning(
                "[%s/%d] %d tensors of the model have another dtype in the checkpoint and are converted: %s",
                self._manager.replica_id,
                self._rank,
                len(converted),
                named(converted),
            )
        if unread := sorted(there["others"] - set(self._others)):
            logger.warning(
                "[%s/%d] ignored the saved state of %s, because `others` has no such key",
                self._manager.replica_id,
                self._rank,
                named(unread),
            )

    def _take_state(self, step: int) -> dict[str, Any]:
        """Return the state to save.

        Raises: DurableCheckpointError: on every rank, if one rank can't give its state.
        """
        error: DurableCheckpointError | None = None
        state: dict[str, Any] = {}
        try:
            with self._converting_errors(step, "take"):
                state = self._state() | self._residuals.state()
        except DurableCheckpointError as failure:
            error = failure
        if not self._all_agree(error is None) and error is None:
            error = DurableCheckpointError(
                f"another rank of replica {self._manager.replica_id} could not return its state of step {step} for "
                "the checkpoint; see the error of that rank (earlier checkpoints are unchanged)",
                path=str(self._directory),
                step=step,
            )
        if error is not None:
            raise error
        return state

    @contextlib.contextmanager
    def _together(self, step: int | None, verb: str, path: Path | None = None) -> Iterator[None]:
        """Make a step succeed on all ranks or raise on all ranks.

        Raises: DurableCheckpointError: another rank failed. An error of this rank is raised as it is.
        """
        error: BaseException | None = None
        try:
            yield
        except (Exception, CheckpointException) as raised:
            error = raised
        if self._all_agree(error is None):
            return
        if error is not None:
            raise error
        raise DurableCheckpointError(
            f"another rank of replica {self._manager.replica_id} could not {verb} its part of the checkpoint of step "
            f"{step} in {path or self._directory}; see the error of that rank",
            path=str(path or self._directory),
            step=step,
        )

    def _all_agree(self, yes: bool) -> bool:
        """Return whether all ranks of this group say yes."""
        if self._group is None:
            return yes
        said = self._on_its_device(torch.full((1,), int(yes), dtype=torch.int64))
        dist.all_reduce(said, dist.ReduceOp.MIN, group=self._group)
        return bool(said.item())

    def _on_its_device(self, told: torch.Tensor) -> torch.Tensor:
        """Return the tensor on a device that the process group supports."""
        on_cpu = "cpu:" in str(dist.get_backend_config(self._group))
        return told if on_cpu else told.to(torch.accelerator.current_accelerator())

    def _on_rank_0(self, act: Any, step: int | None) -> int:
        """Call `act` on rank 0, and return its number on all ranks.

        Raises: on rank 0 the error of `act`. On the other ranks DurableCheckpointError.
        """
        error: Exception | None = None
        told = torch.full((1,), -2, dtype=torch.int64)
        if self._rank == 0:
            try:
                told[0] = act() or 0
            except Exception as raised:
                error = raised
        if self._group is not None:
            told = self._on_its_device(told)
            dist.broadcast(told, group_src=0, group=self._group)
        if error is not None:
            raise error
        if told.item() == -2:
            raise DurableCheckpointError(
                f"rank 0 of replica {self._manager.replica_id} could not use {self._directory}; see that rank's error",
                path=str(self._directory),
                step=step,
            )
        return int(told.item())

    @contextlib.contextmanager
    def _converting_errors(self, step: int | None, verb: str, path: Path | None = None) -> Iterator[None]:
        """Convert any error inside to a DurableCheckpointError that names the place and the step."""
        try:
            yield
        except DurableCheckpointError:
            raise
        except (Exception, CheckpointException) as error:
            where = path or self._directory
            of_step = "" if step is None else f" of step {step}"
            cause: BaseException = error
            if isinstance(error, CheckpointException) and error.failures:
                cause, _ = min(error.failures.items())[1]
                of_step += f" (rank {self._rank})"
            advice = {
                "take": "fix the function that raised it (nothing was written, and earlier checkpoints are unchanged)",
                "write": "free disk space or fix the permissions (earlier checkpoints are unchanged)",
                "read": "fix the permissions, or give another directory",
                "load": "give the same model, optimizers and others that were saved",
            }[verb]
            raise DurableCheckpointError(
                f"replica {self._manager.replica_id} could not {verb} the checkpoint{of_step} in {where}: "
                f"{type(cause).__name__}: {cause}; {advice}",
                path=str(where),
                step=step,
            ) from error


@final
class _Writer:
    """One attempt to write one checkpoint. Except for `place`, only rank 0 uses it."""

    def __init__(self, directory: Path, unique: str, step: int, world_size: int) -> None:
        name = hashlib.blake2b(unique.encode(), digest_size=8).hexdigest()
        self.place = directory / f"{WRITING}{step}-{name}"
        self._directory = directory
        self._step = step
        self._world_size = world_size
        self._lock: int | None = None

    def begin(self) -> None:
        """Remove leftovers of dead writers, and make a locked place for this writer."""
        self._directory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(self._directory)
        self._lock = _take_lock(_lock_of(self.place))
        if self._lock is None:
            raise FileExistsError(f"another writer already uses {self.place}")
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()

    def publish(self, manager: Mapping[str, Any]) -> int:
        """Turn the place into a checkpoint. Return the number behind its name, 0 for none."""
        files = {path.name: (path.stat().st_size, _digest_of(path)) for path in sorted(self.place.iterdir())}
        elsewhere = [f"rank-{rank}.json" for rank in range(self._world_size) if f"rank-{rank}.json" not in files]
        if not elsewhere:
            written = {each.relative_path for each in read_metadata(self.place).storage_data.values()}
            elsewhere = sorted(written - {*files})
        if elsewhere:
            raise FileNotFoundError(
                f"rank 0 can't see {', '.join(elsewhere[:MOST_NAMED])}; give all ranks of a group the same directory"
            )
        body = json.dumps(
            {"format": FORMAT, "step": self._step, "manager": dict(manager), "files": files}, sort_keys=True
        ).encode()
        with (self.place / MANIFEST).open("wb") as stream:
            stream.write(hashlib.blake2b(body, digest_size=32).hexdigest().encode() + b"\n" + body)
            stream.flush()
            os.fsync(stream.fileno())
        _sync_directory(self.place)
        number = 0
        while True:
            # An existing checkpoint is never replaced, so a complete checkpoint exists at every moment.
            path = self._directory / (f"step-{self._step}.{number}" if number else f"step-{self._step}")
            if os.path.lexists(path):  # a broken link also uses the name
                with contextlib.suppress(_DamagedError):
                    if _verify(path).manager.get("lineage") == manager.get("lineage"):
                        shutil.rmtree(self.place)  # another writer has already written this step
                        return number
            else:
                try:
                    self.place.rename(path)
                except OSError as error:
                    if error.errno not in _TAKEN:
                        raise
                    continue
                _sync_directory(self._directory)
                return number
            number += 1

    def close(self) -> None:
        """Remove everything except a finished checkpoint."""
        if self._lock is not None:
            shutil.rmtree(self.place, ignore_errors=True)
            with contextlib.suppress(OSError):
                _lock_of(self.place).unlink()
            os.close(self._lock)
            self._lock = None


def _lock_of(place: Path) -> Path:
    return place.with_name(place.name + LOCK)


def _take_lock(path: Path) -> int | None:
    """Lock a file, and create it if needed. Return its descriptor, or None if a living process holds the lock."""
    while True:
        # O_NOFOLLOW, because a link in the directory could make or lock a file anywhere.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the previous holder has removed the file, so this lock protects nothing


def _remove_leftovers(directory: Path) -> None:
    """Remove leftovers of dead writers, and checkpoints whose removal was interrupted."""
    for path in directory.iterdir():
        if path.name.startswith(REMOVING):
            _discard(path)
        elif path.name.startswith(WRITING):
            place = path.with_name(path.name.removesuffix(LOCK))
            try:
                lock = _take_lock(_lock_of(place))
            except OSError as error:
                logger.warning("can't tell whether the writer of %s is alive, so its files are kept: %s", place, error)
                continue
            if lock is not None:
                shutil.rmtree(place, ignore_errors=True)
                with contextlib.suppress(OSError):
                    _lock_of(place).unlink()
                os.close(lock)


def _retire(directory: Path, newest: Path, keep: int) -> None:
    """Remove complete checkpoints that are older than the newest, except the `keep` - 1 newest of them.

    Newer checkpoints belong to another writer and stay. A directory with the name of a checkpoint stays too, if it has
    no valid manifest.
    """
    older = []
    try:
        found = _checkpoints(directory)
    except OSError as error:
        logger.warning("could not list old checkpoints in %s: %s", directory, error)
        return
    for path in found:
        if _place_of(path) < _place_of(newest):
            with contextlib.suppress(_DamagedError, OSError):
                _read_manifest(path)
                older.append(path)
    for path in older[keep - 1 :]:
        away = path.with_name(f"{REMOVING}{uuid.uuid4().hex}")
        try:
            descriptor = os.open(path / MANIFEST, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.rename(away)
            finally:
                os.close(descriptor)
        except BlockingIOError:
            continue  # a reader holds it, so a later call removes it
        except OSError as error:
            logger.warning("could not remove the old checkpoint %s: %s", path, error)
            continue
        _discard(away)


def _discard(path: Path) -> None:
    """Remove a checkpoint, or a link to a checkpoint that is elsewhere."""
    if path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _kept_for_reading(path: Path) -> Iterator[None]:
    """Protect a checkpoint from removal, on file systems with locks."""
    try:
        # Without O_NONBLOCK, a pipe of that name would block.
        descriptor = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        yield  # there is nothing to read, and the caller notices that itself
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _checkpoints(directory: Path) -> list[Path]:
    """Return the directories that are named like a checkpoint, newest first."""
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_place_of, reverse=True)


def _place_of(path: Path) -> tuple[int, int]:
    """Return the step and the number in the name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, f"{path} does not have the name of a checkpoint"
    return int(match[1]), int(match[2] or 0)


def _newest(directory: Path, step: int | None, reading: contextlib.ExitStack) -> tuple[Path | None, _Manifest | None]:
    """Return the newest complete checkpoint, or the one of a step.

    The checkpoint is not removed before `reading` ends.

    Returns: path and manifest. (None, None): no step is given, and the directory has no checkpoint at all.
    Raises: DurableCheckpointError: checkpoints exist and none is complete, or the given step has none.
    """
    unfit: dict[str, str] = {}
    for _ in range(MAX_SEARCHES):  # a running job may remove old checkpoints during the search
        try:
            candidates = _checkpoints(directory)
        except FileNotFoundError:
            candidates = []
        candidates = [path for path in candidates if step is None or _place_of(path)[0] == step]
        unfit.clear()
        for path in candidates:
            with contextlib.ExitStack() as looking:
                looking.enter_context(_kept_for_reading(path))
                try:
                    manifest = _verify(path)
                except _DamagedError as error:
                    unfit[path.name] = str(error)
                    logger.warning("skipped %s, which is not a complete checkpoint: %s", path, error)
                    continue
                reading.enter_context(looking.pop_all())
                return path, manifest
        if not unfit and step is None:
            return None, None
    told = "; ".join(f"{name}: {reason}" for name, reason in unfit.items()) or "none exists for that step"
    raise DurableCheckpointError(
        f"no checkpoint in {directory} is complete ({told}); give another directory, or an empty one to start anew",
        path=str(directory),
        step=step,
    )


def _verify(path: Path) -> _Manifest:
    """Check every byte of a checkpoint, and return its manifest.

    Raises: _DamagedError: the checkpoint is incomplete or damaged.
    """
    manifest = _read_manifest(path)
    try:
        there = {entry.name for entry in path.iterdir()} - {MANIFEST}
        if there != set(manifest.files):
            raise _DamagedError(f"its files differ from its manifest: {sorted(there ^ set(manifest.files))[:4]}")
        for name, (size, digest) in manifest.files.items():
            if not (path / name).is_file():
                raise _DamagedError(f"{name} is not a file")
            if (path / name).stat().st_size != size:
                raise _DamagedError(f"{name} has {(path / name).stat().st_size} bytes instead of {size}")
            if _digest_of(path / name) != digest:
                raise _DamagedError(f"the digest of {name} is wrong")
    except OSError as error:
        raise _DamagedError(f"its files can't be read: {error}") from error
    return manifest


def _read_manifest(path: Path) -> _Manifest:
    """Read the manifest of a checkpoint.

    Raises: _DamagedError: there is no manifest, or its format or digest is wrong.
    """
    try:
        if not (path / MANIFEST).is_file():
            raise _DamagedError("it has no manifest")
        with (path / MANIFEST).open("rb") as stream:
            digest, _, body = stream.read(MOST_MANIFEST_BYTES).partition(b"\n")
    except OSError as error:
        raise _DamagedError(f"its manifest can't be read: {error}") from error
    if hashlib.blake2b(body, digest_size=32).hexdigest().encode() != digest:
        raise _DamagedError("the digest of its manifest is wrong")
    try:
        said = json.loads(body)
        if said["format"] != FORMAT:
            raise _DamagedError(f"its format is {said['format']}, and this release reads {FORMAT}")
        if said["step"] != _place_of(path)[0]:
            raise _DamagedError(f"its manifest is of step {said['step']}")
        files = {name: (int(size), str(digest)) for name, (size, digest) in said["files"].items()}
        if said["manager"]["step"] != said["step"]:
            raise _DamagedError(f"its Manager's state is of step {said['manager']['step']}")
        if any(type(said["manager"][name]) is not int for name in ("step", "batches_committed")):
            raise _DamagedError("its Manager's state has values that are not whole numbers")
        return _Manifest(int(said["step"]), dict(said["manager"]), files)
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise _DamagedError(f"unrecognised manifest format: {error!r}") from error


def _digest_of(path: Path) -> str:
    total = hashlib.blake2b(digest_size=32)
    with path.open("rb") as stream:
        while chunk := stream.read(READ_BYTES):
            total.update(chunk)
    return total.hexdigest()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _without_dcp_warnings() -> Iterator[None]:
    """Suppress torch's warning about a save in a single process, because that is right for a group of one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process.*")
        yield
