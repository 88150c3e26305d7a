"""A pipe between processes of one program, with time-outs.

Law of this file: one class, for programs that use it. Both ends are this program's own. Nothing from a network comes
here.
"""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["_MonitoredPipe"]


class _MonitoredPipe:
    """One end of a pipe, whose other end may send an exception to raise here.

    Args:
        pipe: of `multiprocessing.Pipe`.
    """

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe

    def send(self, obj: object) -> None:
        """Send an object. Raises: OSError: the pipe is closed."""
        self._pipe.send(obj)

    def recv(self, timeout: float | timedelta) -> object:
        """Return the next object.

        Raises: TimeoutError: none came in time. EOFError: the other end has closed. An exception that was sent.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"pipe.recv() timed out after {seconds} seconds")
        received = self._pipe.recv()
        if isinstance(received, Exception):
            raise received
        return received

    def close(self) -> None:
        """Close this end."""
        self._pipe.close()

    def closed(self) -> bool:
        """Return whether this end is closed."""
        return self._pipe.closed
