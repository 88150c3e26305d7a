"""What a process group with a life cycle says about its place and its state.

Law of this file: words and places; how a group is configured and ended stands in its own file.
"""

from __future__ import annotations

import os

from tft_pg.base import ProcessGroup
from tft_pg.errors import AbortedError, NotConfiguredError, ProcessGroupClosedError, ProcessGroupError, Where

__all__ = ["PlacedProcessGroup"]


class PlacedProcessGroup(ProcessGroup):
    """Abstract base of the groups that keep their place, their last error and their end. A subclass sets the fields."""

    _where: Where
    _error: ProcessGroupError | None
    _closed: bool
    _parent_pid: int

    def _unusable(self, operation: str) -> ProcessGroupError:
        if self._closed:
            return self._closed_error(operation)
        error = self._error
        if error is None:
            return NotConfiguredError(f"{operation} was called before the first configure; configure the group")
        kind = AbortedError if isinstance(error, AbortedError) else NotConfiguredError
        return kind(f"{operation} was called on an unusable group: {error}", where=error.where)

    def _closed_error(self, operation: str) -> ProcessGroupClosedError:
        if self._parent_pid:
            return ProcessGroupClosedError(
                f"{operation} was called in process {os.getpid()}, which was forked from process {self._parent_pid}, "
                f"the owner of this group ({self._where}); use the group there, or make a new one here",
                where=self._where,
            )
        return ProcessGroupClosedError(
            f"{operation} was called after shutdown ({self._where}); make a new group", where=self._where
        )

    def size(self) -> int:
        return self._placed("size").world_size or 1

    def rank(self) -> int:
        return self._placed("rank").rank or 0

    def _placed(self, operation: str) -> Where:
        if self._closed or self._where.rank is None:
            raise self._unusable(operation)
        return self._where

    def __repr__(self) -> str:
        state = "closed" if self._closed else "configured" if self.errored() is None else "unusable"
        if self._where.rank is None and not self._closed:
            state = "unconfigured"
        return f"{type(self).__name__}({self._where}, {state})"
