"""A group that hides its errors from the training loop. After an error, every collective is a finished dummy.

The loop continues with wrong results until the caller checks `error()`, discards the step and configures again.

Law of this file: only errors of the group are swallowed; wrong arguments still raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist

from tft_pg.base import ProcessGroup
from tft_pg.errors import ConfigError, OperationRefusedError, ProcessGroupError, UnsupportedOperationError
from tft_pg.forwarding import forward
from tft_pg.ops import Collective
from tft_pg.word import WordExchange
from tft_pg.work import DummyWork
from tft_pg.wrappers.wrapping import WrappingProcessGroup, takes_one_group

__all__ = ["ErrorSwallowingProcessGroupWrapper"]

# Every rank gets these errors before any data is sent, some at the call and some in `wait`. A new `configure` does not
# fix them.
_CALLER_ERRORS = (OperationRefusedError, ConfigError, UnsupportedOperationError)


@final
class ErrorSwallowingProcessGroupWrapper(WrappingProcessGroup):
    """A wrapper that swallows the errors of every collective until the next `configure`.

    An invalid call still raises `OperationRefusedError`, `ConfigError` or `UnsupportedOperationError`, some at the call
    and some in `wait`. It is no error of the group, because no `configure` would fix it. Only in the future of a Work,
    which holds the backend's own error, a late refusal can't be told from an error of the group, and is swallowed.

    Args:
        pg: the wrapped group.
    """

    @takes_one_group
    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg)
        self._errors = _Errors()

    def error(self) -> Exception | None:
        """Return the first error since the last `configure`, or None if there was none."""
        return self._errors.first

    def report_error(self, error: Exception) -> None:
        """Treat the group as failed from now on. The first error counts."""
        self._errors.report(error)

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        errors = self._errors
        results = collective.results(args, kwargs)
        if errors.first is not None:
            return DummyWork(results, source=self._another_rank())
        try:
            work = forward(self._parent, collective, args, kwargs)
            return _SwallowingWork(work, partial(self._report_error, errors), results, self._another_rank)
        except _CALLER_ERRORS:
            raise
        except RuntimeError as error:  # torch raises other types for wrong arguments
            errors.report(error)
            return DummyWork(results, source=self._another_rank())

    def exchange_word(self, words: Sequence[int], *, round_number: int, timeout: timedelta) -> WordExchange:
        """Start an exchange of the wrapped group, also after an error, because a word reports errors to other ranks.

        Errors of the exchange are raised, because no sum can replace them. They also mark the group as failed.
        """
        errors = self._errors
        try:
            exchange = self._parent.exchange_word(words, round_number=round_number, timeout=timeout)
        except _CALLER_ERRORS:
            raise
        except RuntimeError as error:
            errors.report(error)
            raise
        return _ReportingExchange(exchange, errors.report)

    def _another_rank(self) -> int:
        """Return the source rank that a failed receive reports. `dist.recv` accepts only an existing rank."""
        try:
            return 0 if self.rank() else 1
        except ProcessGroupError:
            return 0

    def _report_error(self, errors: _Errors, error: Exception) -> None:
        """Report an error of a future. The future holds the backend's error, and the group holds the converted one."""
        errors.report(error if isinstance(error, ProcessGroupError) else self._parent.errored() or error)

    def _forget(self) -> None:
        # Operations of the previous configuration fail late. Their errors go to the old object, which has no reader.
        self._errors = _Errors()


@final
class _Errors:
    """The first error of one configured group."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    def report(self, error: Exception) -> None:
        if self.first is None:
            self.first = error


@final
class _ReportingExchange(WordExchange):
    """An exchange that reports its error to the wrapper."""

    def __init__(self, exchange: WordExchange, report: Callable[[Exception], None]) -> None:
        self._exchange = exchange
        self._report = report

    def wait(self) -> tuple[int, ...]:
        try:
            return self._exchange.wait()
        except _CALLER_ERRORS:
            raise
        except RuntimeError as error:
            self._report(error)
            raise


@final
class _SwallowingWork(dist.Work):
    """A Work that fails only if the call was invalid.

    After an error of the group `wait` returns False, and the future holds the unchanged tensors.
    """

    def __init__(
        self,
        work: dist.Work,
        report: Callable[[Exception], None],
        results: list[torch.Tensor],
        another_rank: Callable[[], int],
    ) -> None:
        super().__init__()
        self._work = work
        self._report = report
        self._results = results
        self._another_rank = another_rank

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None and not isinstance(timeout, timedelta):
            raise ConfigError(f"wait got the timeout {timeout!r}; pass timedelta(seconds=...)")
        try:
            return self._work.wait(timeout) if timeout else self._work.wait()
        except _CALLER_ERRORS:
            raise
        except Exception as error:
            self._report(error)
            return False

    def get_future(self) -> torch.futures.Future[Any]:
        try:
            return self._work.get_future().then(self._settle)
        except _CALLER_ERRORS:
            raise
        except RuntimeError as error:
            self._report(error)
            return DummyWork(self._results).get_future()

    def _settle(self, future: torch.futures.Future[Any]) -> object:
        try:
            return future.value()
        except _CALLER_ERRORS:
            raise
        except Exception as error:
            self._report(error)
            return self._results

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._results

    def source_rank(self) -> int:
        try:
            return self._work._source_rank()
        except _CALLER_ERRORS:
            raise
        except Exception as error:
            self._report(error)
            return self._another_rank()

    _source_rank = source_rank  # torch's own functions use this name

    def synchronize(self) -> None:
        try:
            self._work.synchronize()
        except _CALLER_ERRORS:
            raise
        except Exception as error:
            self._report(error)
