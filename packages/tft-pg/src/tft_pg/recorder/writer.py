"""Files of flight records, written by a thread that exists only while there is something to write.

An abort must not wait for a ring of thousands of calls, nor for a disk. So the thread reads torch's ring, which
releases the interpreter's lock meanwhile, and converts and writes the record. While the ring is read, no operation can
end, because its end is entered into the ring. So the thread can wait until the abort has ended the operations. A slow
disk delays the thread, and records beyond the queue's bound are left out with a warning.

Law of this file: one queue, one thread, whole files under their final names.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from tft_pg.errors import ProcessGroupError, TraceWriteError, Where
from tft_pg.forks import Inheritance, let_go_in_child
from tft_pg.recorder.record import SUFFIX, Snapshot, encode, file_stem

__all__ = ["FILES_MAX", "TraceWriter"]

logger = logging.getLogger(__name__)

FILES_MAX: Final = 32
_QUEUE_MAX: Final = 8
_AT_EXIT_S: Final = 2.0


@final
class TraceWriter:
    """Writes the records of this process, and keeps the newest.

    Args:
        files_max: the number of files that this process keeps. The oldest is removed for the next.
    """

    def __init__(self, files_max: int = FILES_MAX) -> None:
        self._files_max = files_max
        self._lock = threading.Lock()
        self._hurry = threading.Event()
        self._pending: deque[tuple[Path, Where, Callable[[], Snapshot], float]] = deque()
        self._thread: threading.Thread | None = None
        self._written: deque[Path] = deque()
        self._count = 0
        self._flushes_at_exit = False

    def submit(self, directory: Path, where: Where, take: Callable[[], Snapshot], *, delay_s: float = 0.0) -> None:
        """Take and write a record on the thread. Never blocks and never raises; a failure is logged.

        Args:
            directory: the directory for the file.
            where: the place of the group, for messages.
            take: takes the record; called on the thread.
            delay_s: call it after this time. `flush` ends the delay.
        """
        let_go_in_child(self)
        with self._lock:
            if len(self._pending) >= _QUEUE_MAX:
                logger.warning(
                    "a flight record (%s) is left out, because %d others still wait for the disk of %s",
                    where,
                    len(self._pending),
                    directory,
                )
                return
            self._pending.append((directory, where, take, time.monotonic() + delay_s))
            if not self._flushes_at_exit:
                self._flushes_at_exit = True
                atexit.register(self.flush, _AT_EXIT_S)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tft-pg-trace", daemon=True)
                self._thread.start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all submitted records are written and the thread has ended. Returns: whether it was in time."""
        with self._lock:
            thread = self._thread
            if thread is None:
                return True
            self._hurry.set()
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    self._thread = None
                    self._hurry.clear()
                    return
                directory, where, take, due_s = self._pending.popleft()
            self._hurry.wait(max(0.0, due_s - time.monotonic()))
            try:
                path = self.write(directory, take())
            except ProcessGroupError as error:
                logger.warning("%s", error)
            except Exception:  # the thread has no caller, and the other records must still be written
                logger.exception("the flight record (%s) can't be converted; report a bug", where)
            else:
                logger.info("wrote the flight record %s (%s)", path, where)

    def write(self, directory: Path, snapshot: Snapshot) -> Path:
        """Write a record now. Returns: the file. Raises: TraceWriteError: the directory can't be written."""
        content = encode(snapshot)
        with self._lock:
            self._count += 1
            name = f"{file_stem(snapshot)}.{snapshot.pid}-{self._count}{SUFFIX}"
        path, unfinished = directory / name, directory / f".{name}.unfinished"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            try:
                _write_new(unfinished, content)
                os.replace(unfinished, path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise TraceWriteError(
                f"the flight record {path} can't be written ({snapshot.where}): {error.strerror}; check the directory "
                "of TFT_TRACE_DIR or trace_dir",
                where=snapshot.where,
            ) from error
        self._remove_old(path)
        return path

    def _remove_old(self, newest: Path) -> None:
        with self._lock:
            self._written.append(newest)
            old = [self._written.popleft() for _ in range(len(self._written) - self._files_max)]
        for path in old:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("the old flight record %s can't be removed: %s", path, error.strerror)

    def forked(self) -> Inheritance:
        """Leave the parent's records to the parent."""
        self._lock = threading.Lock()
        self._hurry = threading.Event()
        self._pending.clear()
        self._written.clear()
        self._thread = None
        return Inheritance()


def _write_new(path: Path, content: bytes) -> None:
    # Unbuffered, so a forked child has nothing of the file to write again.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)
