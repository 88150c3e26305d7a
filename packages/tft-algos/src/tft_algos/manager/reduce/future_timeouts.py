"""The user's own futures with time-outs. They never fail, and their errors become errors of the step.

Law of this file: one future in, one future out, and the alarm between them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias, TypeVar, final

import torch

from tft_algos.manager.interfaces import Clock
from tft_coord.core.step import StepName

T = TypeVar("T")
Report: TypeAlias = Callable[[Exception, StepName], object]


@final
class FutureTimeouts:
    """The futures of one Manager.

    Args:
        clock: runs the alarms.
        report: receives each failure and its step.
    """

    def __init__(self, clock: Clock, report: Report) -> None:
        self._clock = clock
        self._report = report
        self._alarms: dict[object, Callable[[], object]] = {}  # of the pending futures
        self._give_up: dict[object, Callable[[], object]] = {}  # of the same futures

    def wrap(
        self, future: torch.futures.Future[T], default: T, limit_s: float, name: StepName
    ) -> torch.futures.Future[T]:
        """Return a future with the same result, or with `default` if `future` fails or is too late.

        Args:
            future: any future.
            default: the result in place of an error.
            limit_s: maximum wait in seconds, from now.
            name: the step to which an error of the future belongs.
        """
        wrapped: torch.futures.Future[T] = torch.futures.Future()
        once = threading.Lock()

        def end(error: Exception | None, result: T) -> None:
            if not once.acquire(blocking=False):
                return
            self._give_up.pop(wrapped, None)
            if error is not None:
                self._report(error, name)
            wrapped.set_result(result)

        def expired() -> None:
            self._alarms.pop(wrapped, None)
            end(TimeoutError(f"future did not complete within {limit_s:g} s"), default)

        def done(finished: torch.futures.Future[T]) -> None:
            no_alarm = self._alarms.pop(wrapped, None)
            if no_alarm is not None:
                no_alarm()
            try:
                result = finished.value()
            except Exception as error:
                end(error, default)
            else:
                end(None, result)

        if not future.done():
            self._give_up[wrapped] = lambda: end(None, default)
            self._alarms[wrapped] = self._clock.after(limit_s, expired)
        future.add_done_callback(done)
        return wrapped

    def close(self) -> None:
        """Cancel all alarms. Pending futures get their defaults, and no error is reported."""
        for no_alarm in list(self._alarms.values()):
            no_alarm()
        for give_up in list(self._give_up.values()):
            give_up()
