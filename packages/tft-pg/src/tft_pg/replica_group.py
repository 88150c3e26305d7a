"""Torch's default process group for the ranks of one replica group, safe across launcher restarts.

A launcher that restarts the processes of a replica group may keep their store. The store then still holds the addresses
of dead processes, and a rank that reads them can't connect. A restart count in the environment does not distinguish all
restarts, because torchrun does not raise it when its members change. So the ranks agree on a fresh prefix at each
start. Each rank writes an unused random word. Only a rank 0 that has read this word answers under it, so an answer of a
dead process never matches.

Law of this file: the environment is read, the ranks meet, and torch builds the group.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    HashStore,
    PrefixStore,
    Store,
    rendezvous,
)

from tft_pg.errors import ConfigError, ConfigureError, StoreUnreachableError
from tft_pg.settings import checked_timeout

__all__ = ["init_group"]

_log = logging.getLogger("tft_pg")
_PREFIX = "tft/init_group"
_POLL_S = 0.02
_LOG_AFTER_S = 5.0
_JOIN_TIMEOUT = timedelta(minutes=5)
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}


def init_group(
    device: torch.device | str | None = None,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    join_timeout: timedelta = _JOIN_TIMEOUT,
) -> dist.ProcessGroup:
    """Start torch's default process group for the ranks inside this replica group.

    Call this function once in each process, in place of `torch.distributed.init_process_group`. It reads RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets. Without WORLD_SIZE this process is the whole replica
    group. After a restart by torchrun the ranks meet under a fresh prefix of the store. End the group with
    `destroy_process_group`.

    Args:
        device: the device of the tensors. None: the accelerator of this machine, else the CPU. On an accelerator the
            process selects the device of its LOCAL_RANK.
        backend: torch's name of the backend. None: Gloo for the CPU, Gloo and NCCL for CUDA, Gloo and XCCL for XPU.
            Each backend handles its own tensors.
        timeout: of each collective. None: torch's own.
        join_timeout: how long all ranks may take to start.

    Returns: the default group, also as `torch.distributed.group.WORLD`.
    Raises: ConfigError: a variable is missing or wrong, the device does not exist, or a default group exists
        already. StoreUnreachableError: the store at MASTER_ADDR:MASTER_PORT does not answer. ConfigureError: ranks did
        not start in time; `missing_ranks` holds them.
    """
    checked_timeout(join_timeout)
    if timeout is not None:
        checked_timeout(timeout)
    if dist.is_initialized():
        raise ConfigError(
            "torch's default process group already exists; call init_group once, instead of init_process_group"
        )
    place = _place(os.environ)
    chosen = _select_device(device, os.environ)
    if place.world_size == 1:
        store: Store = HashStore()
    else:
        shared = _open_store(place, join_timeout)
        store = PrefixStore(_agree(shared, place, join_timeout), shared)
    dist.init_process_group(
        backend or _BACKENDS[chosen], store=store, rank=place.rank, world_size=place.world_size, timeout=timeout
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@dataclass(frozen=True, slots=True)
class _Place:
    """This process's place in its replica group. `store`: `host:port` of the store, for messages."""

    rank: int
    world_size: int
    store: str = ""


def _place(environ: Mapping[str, str]) -> _Place:
    """Read the launcher's variables. Raises: ConfigError: one is missing or wrong."""
    world_size = _whole(environ, "WORLD_SIZE", "1")
    if world_size < 1:
        raise ConfigError(f"WORLD_SIZE is {world_size}; set it to the number of processes of this replica group")
    rank = _whole(environ, "RANK", "0" if world_size == 1 else "")
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE is {world_size}; ranks count from 0")
    if world_size == 1:
        return _Place(rank, world_size)
    if not environ.get("MASTER_ADDR"):
        raise ConfigError(_missing("MASTER_ADDR"))
    port = _whole(environ, "MASTER_PORT", "")
    return _Place(rank, world_size, f"{environ['MASTER_ADDR']}:{port}")


def _whole(environ: Mapping[str, str], name: str, default: str) -> int:
    text = environ.get(name) or default
    if not text:
        raise ConfigError(_missing(name))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; set it to a whole number") from None


def _missing(name: str) -> str:
    return f"{name} is not set, but WORLD_SIZE is above 1; set {name}, or start the script with torchrun"


def _select_device(device: torch.device | str | None, environ: Mapping[str, str]) -> str:
    """Make the device of this local rank the current one. Returns: the device type."""
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = found.type if found is not None else "cpu"
    wanted = torch.device(device)
    if wanted.type not in _BACKENDS:
        raise ConfigError(f"no backend is known for {wanted.type!r}; pass backend= and device='cpu'")
    if wanted.type != "cpu":
        index = wanted.index if wanted.index is not None else _whole(environ, "LOCAL_RANK", "0")
        available = torch.accelerator.device_count()
        if index >= available:
            raise ConfigError(
                f"LOCAL_RANK is {index}, but this machine has {available} {wanted.type} devices; start at most one "
                "process for each device"
            )
        torch.accelerator.set_device_index(index)
    return wanted.type


def _open_store(place: _Place, timeout: timedelta) -> Store:
    """Connect to the launcher's store; rank 0 hosts it where the launcher has none."""
    try:
        store: Store = next(rendezvous("env://", place.rank, place.world_size, timeout=timeout))[0]
    except (DistNetworkError, DistStoreError) as error:
        raise StoreUnreachableError(
            f"rank {place.rank} of {place.world_size} can't reach the store of its replica group at {place.store} "
            f"within {timeout.total_seconds():g} s; check MASTER_ADDR and MASTER_PORT, and that rank 0 has started"
        ) from error
    store.set_timeout(timeout)
    return store


def _agree(store: Store, place: _Place, timeout: timedelta) -> str:
    """Meet the other ranks of this start. Returns: a prefix that no other start has used."""
    deadline_s = time.monotonic() + timeout.total_seconds()
    meet = _answer if place.rank == 0 else _ask
    try:
        return meet(PrefixStore(_PREFIX, store), place, deadline_s)
    except (DistNetworkError, DistStoreError) as error:
        raise StoreUnreachableError(
            f"rank {place.rank} of {place.world_size} disconnected from the store of its replica group at "
            f"{place.store}; check that torchrun, or rank 0, still runs"
        ) from error


def _answer(store: Store, place: _Place, deadline_s: float) -> str:
    """Answer each rank, as rank 0, until all ranks have confirmed this start."""
    start = uuid.uuid4().hex
    wait = _Wait(place, deadline_s)
    others = set(range(1, place.world_size))
    confirmed: dict[int, str] = {}
    while True:
        for rank in sorted(others.difference(confirmed)):
            word = _read(store, f"asked/{rank}")  # of this start's process, or of a dead process
            if not word:
                continue
            if _read(store, f"{start}/{rank}") == word:
                confirmed[rank] = word
            else:
                store.set(f"answered/{word}", f"{start} {place.world_size}")
        if len(confirmed) == len(others):
            # A launcher may have restarted a rank after the rank had confirmed. The new process has its own word.
            confirmed = {rank: word for rank, word in confirmed.items() if _read(store, f"asked/{rank}") == word}
            if len(confirmed) == len(others):
                store.set(f"{start}/0", "complete")
                return f"{_PREFIX}/{start}"
        wait.look_again(partial(others.difference, confirmed))


def _ask(store: Store, place: _Place, deadline_s: float) -> str:
    """Ask rank 0, confirm its answer, and wait until all ranks have confirmed.

    A launcher may restart rank 0 in the meantime. The new process answers again, and its start is the one that counts.
    """
    word = uuid.uuid4().hex
    store.set(f"asked/{place.rank}", word)
    wait = _Wait(place, deadline_s)
    confirmed = ""
    while True:
        start, _, world_size = _read(store, f"answered/{word}").partition(" ")
        if start != confirmed:
            if int(world_size) != place.world_size:
                raise ConfigError(
                    f"WORLD_SIZE is {place.world_size} on rank {place.rank} and {world_size} on rank 0; set the same "
                    "value in every process of the replica group"
                )
            store.set(f"{start}/{place.rank}", word)
            confirmed = start
        if start and store.check([f"{start}/0"]):
            return f"{_PREFIX}/{start}"
        wait.look_again(partial(_unconfirmed, store, confirmed, place))


def _unconfirmed(store: Store, start: str, place: _Place) -> set[int]:
    """Return the ranks that have not confirmed this start, or rank 0 if it has not answered or does not continue."""
    return {rank for rank in range(1, place.world_size) if start and not store.check([f"{start}/{rank}"])} or {0}


def _read(store: Store, key: str) -> str:
    """Return the value of a key, or "" if the key is not set."""
    return store.get(key).decode() if store.check([key]) else ""


@final
class _Wait:
    """The pause between two looks at the store, up to the deadline."""

    def __init__(self, place: _Place, deadline_s: float) -> None:
        self._place = place
        self._deadline_s = deadline_s
        self._log_at_s = time.monotonic() + _LOG_AFTER_S

    def look_again(self, find_missing: Callable[[], set[int]]) -> None:
        """Pause before the next look at the store.

        Args:
            find_missing: returns the ranks that have not started.

        Raises: ConfigureError: the deadline has passed.
        """
        now_s = time.monotonic()
        if now_s > self._deadline_s:
            raise _timeout_error(self._place, find_missing())
        if now_s > self._log_at_s:
            missing = sorted(find_missing())
            _log.warning("rank %d waits for ranks %s of its replica group to start", self._place.rank, missing)
            self._log_at_s = self._deadline_s
        time.sleep(_POLL_S)


def _timeout_error(place: _Place, missing: set[int]) -> ConfigureError:
    ranks = tuple(sorted(missing))
    return ConfigureError(
        f"rank {place.rank} of {place.world_size} timed out waiting for ranks {', '.join(map(str, ranks))} of its "
        "replica group to start; look at their logs, or raise join_timeout",
        missing_ranks=ranks,
    )
