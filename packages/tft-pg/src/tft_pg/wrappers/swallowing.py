"""A group whose errors don't reach the training loop: after one, every collective is a finished dummy.

The loop goes on with wrong results until somebody asks `error()`, throws the step away and configures again. The
law of this file: only errors of the group are swallowed; a wrong argument is still the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist

from tft_pg.base import ProcessGroup
from tft_pg.errors import InvalidSetting, OperationRefused, ProcessGroupError, Unsupported
from tft_pg.forwarding import forward
from tft_pg.ops import Collective
from tft_pg.word import WordExchange
from tft_pg.work import DummyWork
from tft_pg.wrappers.wrapping import WrappingProcessGroup, takes_one_group

__all__ = ["ErrorSwallowingProcessGroupWrapper"]

# Every rank gets these at the call, before anything is sent, and gets them again however often it configures.
_THE_CALLERS = (OperationRefused, InvalidSetting, Unsupported)


@final
class ErrorSwallowingProcessGroupWrapper(WrappingProcessGroup):
    """Swallows the errors of every collective, until the next `configure`.

    A call that is wrong in itself still raises `OperationRefused`, `InvalidSetting` or `Unsupported`, and is no error
    of the group: no `configure` would mend it.

    Args:
        pg: the group inside.
    """

    @takes_one_group
    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg)
        self._errors = _Errors()

    def error(self) -> Exception | None:
        """The first error since the last `configure`; None if all went well."""
        return self._errors.first

    def report_error(self, error: Exception) -> None:
        """Treat the group as failed from now on; the first error counts."""
        self._errors.report(error)

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        errors = self._errors
        results = collective.results(args, kwargs)
        if errors.first is not None:
            return DummyWork(results, source=self._another_rank())
        try:
            work = forward(self._parent, collective, args, kwargs)
            return _SwallowingWork(work, partial(self._tell, errors), results, self._another_rank)
        except _THE_CALLERS:
            raise
        except RuntimeError as error:  # of another type is what torch says of wrong arguments
            errors.report(error)
            return DummyWork(results, source=self._another_rank())

    def exchange_word(self, words: Sequence[int], *, round_number: int, timeout: timedelta) -> WordExchange:
        """Start an exchange of the group inside, also after an error: a word is how a rank tells others of one.

        Its errors are raised, as there is no sum to give instead, and treat the group as failed too.
        """
        errors = self._errors
        try:
            exchange = self._parent.exchange_word(words, round_number=round_number, timeout=timeout)
        except _THE_CALLERS:
            raise
        except RuntimeError as error:
            errors.report(error)
            raise
        return _ToldExchange(exchange, errors.report)

    def _another_rank(self) -> int:
        """From whom a receive that failed says that it has received: `dist.recv` takes no rank that can't be."""
        try:
            return 0 if self.rank() else 1
        except ProcessGroupError:
            return 0

    def _tell(self, errors: _Errors, error: Exception) -> None:
        """A future's error is the backend's own; the group has it in its words."""
        errors.report(error if isinstance(error, ProcessGroupError) else self._parent.errored() or error)

    def _forget(self) -> None:
        # What ran before fails late, and tells of it where nobody asks any more.
        self._errors = _Errors()

    def _end(self) -> None:
        return None


@final
class _Errors:
    """The first error of one configured group."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    def report(self, error: Exception) -> None:
        if self.first is None:
            self.first = error


@final
class _ToldExchange(WordExchange):
    """An exchange whose error the wrapper hears of."""

    def __init__(self, exchange: WordExchange, report: Callable[[Exception], None]) -> None:
        self._exchange = exchange
        self._report = report

    def wait(self) -> tuple[int, ...]:
        try:
            return self._exchange.wait()
        except _THE_CALLERS:
            raise
        except RuntimeError as error:
            self._report(error)
            raise


@final
class _SwallowingWork(dist.Work):
    """A Work that never fails: `wait` gives False instead, and the future holds the tensors as they are."""

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
            raise InvalidSetting(f"a wait takes a timedelta, and got {timeout!r}; give timedelta(seconds=...)")
        try:
            return self._work.wait(timeout) if timeout else self._work.wait()
        except Exception as error:
            self._report(error)
            return False

    def get_future(self) -> torch.futures.Future[Any]:
        try:
            return self._work.get_future().then(self._settle)
        except _THE_CALLERS:
            raise
        except RuntimeError as error:
            self._report(error)
            return DummyWork(self._results).get_future()

    def _settle(self, future: torch.futures.Future[Any]) -> object:
        try:
            return future.value()
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
        except Exception as error:
            self._report(error)
            return self._another_rank()

    _source_rank = source_rank  # torch's own functions ask by this name

    def synchronize(self) -> None:
        try:
            self._work.synchronize()
        except Exception as error:
            self._report(error)
