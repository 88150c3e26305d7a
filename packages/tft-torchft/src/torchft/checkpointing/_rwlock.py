"""A lock for readers and one writer. Law of this file: one class, for code that uses it. tft itself does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["RWLock"]


class RWLock:
    """A lock that many readers or one writer hold. Readers come first.

    Args:
        timeout: seconds that an acquire waits; -1: for ever.
    """

    def __init__(self, timeout: float = -1) -> None:
        self.timeout = timeout
        self._changed = threading.Condition()
        self._num_readers = 0
        self._is_writing = False

    def r_acquire(self) -> None:
        """Acquire the lock for reading. Raises: TimeoutError: a writer held it for too long."""
        with self._changed:
            self._wait(lambda: not self._is_writing, "rlock")
            self._num_readers += 1

    def r_release(self) -> None:
        """Release the lock of one reader. Raises: RuntimeError: no reader holds it."""
        with self._changed:
            if self._num_readers == 0:
                raise RuntimeError("r_release was called, and no reader holds the lock")
            self._num_readers -= 1
            self._changed.notify_all()

    @contextmanager
    def r_lock(self) -> Iterator[None]:
        """Hold the lock for reading."""
        self.r_acquire()
        try:
            yield
        finally:
            self.r_release()

    def w_acquire(self) -> None:
        """Acquire the lock for writing. Raises: TimeoutError: others held it for too long."""
        with self._changed:
            self._wait(lambda: not self._is_writing and self._num_readers == 0, "wlock")
            self._is_writing = True

    def w_release(self) -> None:
        """Release the lock of the writer. Raises: RuntimeError: no writer holds it."""
        with self._changed:
            if not self._is_writing:
                raise RuntimeError("w_release was called, and no writer holds the lock")
            self._is_writing = False
            self._changed.notify_all()

    @contextmanager
    def w_lock(self) -> Iterator[None]:
        """Hold the lock for writing."""
        self.w_acquire()
        try:
            yield
        finally:
            self.w_release()

    def w_locked(self) -> bool:
        """Return whether a writer holds the lock."""
        return self._is_writing

    def _wait(self, is_free: Callable[[], bool], name: str) -> None:
        end_s = None if self.timeout < 0 else time.monotonic() + self.timeout
        while not is_free():
            left_s = None if end_s is None else end_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError(f"Timed out waiting for {name} after {self.timeout} seconds")
            self._changed.wait(left_s)
