"""The flight recorder of one group: when a record is taken, and of what.

A record is taken on another thread, so an abort does not wait for it. Torch's ring counts an operation as ended once
the abort has ended it, so the number of running operations is noted before.

Law of this file: which record is taken when; torch keeps the ring, and `writer` writes.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import torch
from torch._C import _distributed_c10d

from tft_pg.errors import ConfigError, UnsupportedOperationError, Where
from tft_pg.recorder.record import Snapshot
from tft_pg.recorder.writer import TraceWriter

if TYPE_CHECKING:
    from tft_pg.backends.live import LiveGroup

__all__ = ["TRACE_DIR_ENV", "GroupRecorder", "dump_traces", "flush_traces", "name_job"]

TRACE_DIR_ENV: Final = "TFT_TRACE_DIR"
_JOB_ENV: Final = "TFT_JOB_ID"
_RING_AFTER_S: Final = 0.3
_SETTLE_S: Final = 2.0
_DEFAULT_JOB: Final = "default"
_RING_SIZE_ENVS: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Torch keeps one ring for NCCL and one for all other backends.
_READERS: Final = {"tft-nccl": "_dump_nccl_trace_json"}
_READER: Final = "_dump_fr_trace_json"

_writer = TraceWriter()
_numbers = itertools.count()
_recorders: weakref.WeakSet[GroupRecorder] = weakref.WeakSet()
_named_job = ""


def name_job(job: str) -> None:
    """Set the job of this process in later records, in place of what TFT_JOB_ID says. The last call counts."""
    global _named_job
    _named_job = job


def dump_traces(directory: str | os.PathLike[str] | None = None) -> list[Path]:
    """Write the flight records of all configured groups of this process now.

    Args:
        directory: the directory for the files; None: each group's own `trace_dir`, or that of TFT_TRACE_DIR. Groups
            with neither are left out.

    Returns: the files.
    Raises: ConfigError: no configured group has a directory. TraceWriteError: the directory can't be written.
        UnsupportedOperationError: this torch has no flight recorder.
    """
    given = None if directory is None else Path(directory)
    configured = [recorder for recorder in _recorders if recorder.is_configured]
    if given is None:
        placed = [recorder for recorder in configured if recorder.has_directory]
        if configured and not placed:
            raise ConfigError(f"no directory for flight records is set; pass one, or set {TRACE_DIR_ENV}")
        configured = placed
    paths = [recorder.dump(given) for recorder in configured]
    return [path for path in paths if path is not None]


def flush_traces(timeout_s: float = 10.0) -> bool:
    """Wait until the records of all groups that have ended are written. Returns: whether they were in time."""
    return _writer.flush(timeout_s)


@final
class GroupRecorder:
    """Takes the flight records of one group.

    Args:
        directory: the directory for the record of each configuration at its end. None: the one that TFT_TRACE_DIR
            names. With neither, a record is only written on request.
        backend: name of the group's backend.

    Raises: ConfigError: the directory is not a path, or one is set but torch's recorder is switched off.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, *, backend: str) -> None:
        if directory is not None and not isinstance(directory, (str, os.PathLike)):
            raise ConfigError(f"trace_dir is {directory!r}; pass the path of a directory")
        named = os.environ.get(TRACE_DIR_ENV, "") if directory is None else os.fspath(directory)
        self._directory = Path(named) if named else None
        if self._directory is not None:
            _check_ring()
        self._backend = backend
        self._lock = threading.Lock()
        self._live: weakref.ref[LiveGroup] | None = None
        self._label = ("", "")
        _recorders.add(self)

    def configured(self, live: LiveGroup, prefix: str) -> None:
        """Label a new torch group in torch's ring, and record this group from now on."""
        # Ranks may be threads of one process and share torch's ring, and another store may have the same prefix.
        description = f"tft rank {live.where.rank} of {live.where.world_size}, group {next(_numbers)} of this process"
        live.label(prefix, description)
        with self._lock:
            self._live, self._label = weakref.ref(live), (prefix, description)

    def ended(self, live: LiveGroup, reason: str) -> None:
        """Take the record of a group that is about to end, once for each configuration. Never blocks.

        Args:
            live: the configured group.
            reason: `abort`, `failure`, or `end` if the group ends without an error. The ranks that a failed rank waited
                for may have no error of their own, so their records count too.
        """
        with self._lock:
            if self._live is None or self._live() is not live:
                return
            self._live = None
            label = self._label
        if self._directory is not None:
            state = _state(live)
            take = partial(self._snapshot, label, *state, reason)
            # Where the number of running operations is known, the ring says the same a moment later. Any other library
            # forgets its operations at the abort.
            delay_s = 0.0 if state[2] is None else _RING_AFTER_S
            _writer.submit(self._directory, live.where, take, delay_s=delay_s)

    def settle(self) -> None:
        """Wait until this group's record is written, for 2 s at most. A group that is shut down leaves no thread."""
        if self._directory is not None:
            _writer.flush(_SETTLE_S)

    @property
    def is_configured(self) -> bool:
        """Return whether the group is configured now."""
        return self._live is not None and self._live() is not None

    @property
    def has_directory(self) -> bool:
        """Return whether the group's records have a directory of their own."""
        return self._directory is not None

    def dump(self, directory: Path | None) -> Path | None:
        """Write the record now. Returns: the file, or None if the group is not configured."""
        with self._lock:
            live = None if self._live is None else self._live()
            label = self._label
        if live is None:
            return None
        target = directory or self._directory
        assert target is not None, "dump_traces chooses the groups"
        return _writer.write(target, self._snapshot(label, *_state(live), "request"))

    def _snapshot(
        self, label: tuple[str, str], where: Where, error: str, unfinished: int | None, time_ns: int, reason: str
    ) -> Snapshot:
        name = _READERS.get(self._backend, _READER)
        reader = getattr(_distributed_c10d, name, None)
        if reader is None:
            raise UnsupportedOperationError(
                f"this torch ({torch.__version__}) has no {name}, so there is no flight record ({where}); install a "
                "torch with it, or set no directory",
                where=where,
            )
        return Snapshot(
            where=where,
            group=label[0],
            label=label,
            backend=self._backend,
            job=_named_job or os.environ.get(_JOB_ENV) or _DEFAULT_JOB,
            host=socket.gethostname(),
            pid=os.getpid(),
            reason=reason,
            error=error,
            unfinished=unfinished,
            time_ns=time_ns,
            ring=reader(),
        )

    def forked(self) -> None:
        """Forget the parent's group in a forked child."""
        self._lock = threading.Lock()
        self._live = None


def _state(live: LiveGroup) -> tuple[Where, str, int | None, int]:
    """Return what must be known before the connections end."""
    return live.where, str(live.error or ""), live.unfinished(), time.time_ns()


def _check_ring() -> None:
    for name in _RING_SIZE_ENVS:
        if os.environ.get(name, "").strip() == "0":
            raise ConfigError(
                f"{name} is 0, so torch records no collectives, but a directory for flight records is set; unset {name}"
            )
