"""A group whose errors don't reach the training loop: after one, every collective is a finished dummy.

The loop goes on with wrong results until somebody asks `error()`, throws the step away and configures again. The
law of this file: only errors of the group are swallowed; a wrong argument is still the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from tft_pg.base import ProcessGroup
from tft_pg.forwarding import forward
from tft_pg.ops import Collective
from tft_pg.work import DummyWork
from tft_pg.wrappers.wrapping import WrappingProcessGroup

__all__ = ["ErrorSwallowingProcessGroupWrapper"]


@final
class ErrorSwallowingProcessGroupWrapper(WrappingProcessGroup):
    """Swallows the errors of every collective, until the next `configure`.

    Args:
        pg: the group inside.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg)
        self._error: Exception | None = None

    def error(self) -> Exception | None:
        """The first error since the last `configure`; None if all went well."""
        return self._error

    def report_error(self, error: Exception) -> None:
        """Treat the group as failed from now on; the first error counts."""
        if self._error is None:
            self._error = error

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        results = collective.results(args, kwargs)
        if self._error is not None:
            return DummyWork(results)
        try:
            return _SwallowingWork(forward(self._parent, collective, args, kwargs), self.report_error, results)
        except RuntimeError as error:
            self.report_error(error)
            return DummyWork(results)

    def _forget(self) -> None:
        self._error = None

    def _end(self) -> None:
        return None


@final
class _SwallowingWork(dist.Work):
    """A Work that never fails: `wait` gives False instead, and the future holds the tensors as they are."""

    def __init__(self, work: dist.Work, report: Callable[[Exception], None], results: list[torch.Tensor]) -> None:
        super().__init__()
        self._work = work
        self._report = report
        self._results = results

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return self._work.wait(timeout) if timeout else self._work.wait()
        except RuntimeError as error:
            self._report(error)
            return False

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future().then(self._settle)

    def _settle(self, future: torch.futures.Future[Any]) -> object:
        try:
            return future.value()
        except RuntimeError as error:
            self._report(error)
            return self._results

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._results

    def synchronize(self) -> None:
        self._work.synchronize()
