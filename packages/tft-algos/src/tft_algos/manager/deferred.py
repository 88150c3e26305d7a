"""A step that was put aside: it goes on beside later ones, and ends before them.

A strategy that trains on while it reduces need not end a step before it begins the next. What it put aside is held by
this: what the step was, what was started in it, and its end.

Law of this file: the handle that a strategy holds. How a step ends is the Manager's, and what a verdict means for the
others is decided by the step's core.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, final

from tft_algos.manager.mailbox import StepMailbox
from tft_coord.core.step import AttemptStatus, StepName
from tft_coord.core.step import events as on
from tft_coord.core.types import Plan

if TYPE_CHECKING:
    from tft_algos.manager.reducer import Started


@final
class DeferredStep:
    """What `StepControl.defer` returns.

    Args:
        name: of its attempt.
        step: the mailbox of the steps.
        started: its reductions.
        end: ends it.
    """

    def __init__(
        self,
        name: StepName,
        step: StepMailbox,
        started: Started,
        *,
        end: Callable[[DeferredStep, timedelta | None], bool],
    ) -> None:
        self.started = started
        self.is_over = False
        self._number = name.attempt
        self._step = step
        self._end = end
        self._newest = step.status.attempt(name.attempt) or AttemptStatus(name, None, None, None)

    def look(self) -> AttemptStatus:
        """Return what is known of it; when it is over, what was known at the last look."""
        found = self._step.status.attempt(self._number)
        if found is not None:
            self._newest = found
        return self._newest

    @property
    def name(self) -> StepName:
        """Return the name of its attempt."""
        return self._newest.name

    @property
    def plan(self) -> Plan | None:
        """The plan that it was begun with; None if there was no quorum for it."""
        return self.look().plan

    @property
    def failure(self) -> Exception | None:
        """The first thing that failed in it or with it, as far as is known before its end; None: nothing.

        Other ranks of the group may not know it. It counts in flight until it ends, or `is_abandoned`.
        """
        return self.look().error

    @property
    def is_abandoned(self) -> bool:
        """It has failed with others, on all ranks of the group: there was another quorum, or an earlier one's no. When
        that is known of a quorum, all that were in flight before it are."""
        return self.look().abandoned is not None

    def report_error(self, error: Exception) -> None:
        """Say that this step has failed, whatever was begun since: it votes no."""
        self._step.tell(on.ErrorReported(error, self.name))

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End this step: wait for its reductions and vote, as `Manager.should_commit` does.

        The oldest ends first. If it is not committed all that were begun after it fail too, the one included that is
        open. One that was abandoned may end at any time, or never, and without a vote; this only waits until nothing
        writes into its tensors any more. If a step is open, its quorum is waited for, because another one fails all in
        flight, and its state is exchanged, because it is that from before this step.

        Args:
            timeout: for the vote; None: the Manager's.
        Returns: True: what this step is about is applied now, on every rank of this group. False: it must not be.
        Raises: as `Manager.should_commit`; UsageError: it has ended, or is not the oldest.
        """
        return self._end(self, timeout)
