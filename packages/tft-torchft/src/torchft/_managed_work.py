"""The Work of `Manager.allreduce`, whose future is a chain that `wait` runs.

Code for torchft adds steps to the future of a reduction with `then`, and relies on their end when `wait` returns. A
future of torch would run them on the thread that ends the reduction, some time later. So the steps are kept here, and
the thread that waits runs them, in order.

Law of this file: the chain. The reduction is tft_algos's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist

_Step = Callable[[torch.futures.Future[Any]], Any]


@final
class _ManagedWork(dist.Work):
    """A Work that never raises, and the chain of its future.

    Args:
        manager: told of errors of the steps.
        work: the reduction.
        value: the value of the future before the first step.
    """

    def __init__(self, manager: Any, work: dist.Work, value: object) -> None:
        super().__init__()
        self._manager = manager
        self._work = work
        self._value = value
        self._steps: list[_Step] = []
        self._lock = threading.RLock()

    def add(self, step: _Step) -> None:
        """Add a step to the chain."""
        with self._lock:
            self._steps.append(step)

    @property
    def value(self) -> object:
        """Return the value at the end of the steps that have run."""
        return self._value

    def _run_steps(self) -> None:
        with self._lock:
            while self._steps:
                future: torch.futures.Future[Any] = torch.futures.Future()
                future.set_result(self._value)
                self._value = self._steps.pop(0)(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the reduction, and run the chain. Returns: whether both succeeded."""
        try:
            succeeded = self._work.wait(timeout) if timeout else self._work.wait()
            self._run_steps()
        except Exception as error:
            self._manager.report_error(error)
            return False
        return succeeded

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the end of the chain."""
        return _ManagedFuture(self)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


@final
class _ManagedFuture(torch.futures.Future[Any]):
    """The end of a chain of steps. The steps run when this future, or its Work, is waited for.

    Args:
        work: holds the chain.
    """

    def __init__(self, work: _ManagedWork) -> None:
        super().__init__()
        self._work = work

    def then(self, callback: _Step) -> torch.futures.Future[Any]:
        """Add a step, which gets a done future of the value before it. Returns: the end of the chain."""
        self._work.add(callback)
        return _ManagedFuture(self._work)

    def wait(self) -> Any:
        """Wait for the Work, and return the value at the end of the chain."""
        self._work.wait()
        return self._work.value

    def value(self) -> Any:
        """Return the value at the end of the chain, and wait for it first."""
        return self.wait()

    def done(self) -> bool:
        """Return whether the reduction has ended."""
        return self._work.is_completed()

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        """Add a step that leaves the value as it is."""

        def step(future: torch.futures.Future[Any]) -> Any:
            callback(future)
            return future.value()

        self._work.add(step)

    def set_result(self, result: object) -> NoReturn:
        raise NotImplementedError("the reduction sets the result of this future")

    def set_exception(self, result: object) -> NoReturn:
        raise NotImplementedError("the reduction sets the result of this future")
