"""A deferred step: it continues beside later steps, and ends before them.

A strategy that trains during its reductions need not end a step before it begins the next. The deferred step holds the
facts of the step, the reductions that were started in it, and its end.

Law of this file: the handle that a strategy holds. The Manager ends a step, and the step core decides the effect of a
verdict on the other steps.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, final

from tft_algos.manager.step.mailbox import StepMailbox
from tft_coord.core.step import AttemptStatus, StepName
from tft_coord.core.step import events as on
from tft_coord.core.types import Plan

if TYPE_CHECKING:
    from tft_algos.manager.reduce.reducer import Started


@final
class DeferredStep:
    """The result of `StepControl.defer`.

    Args:
        name: the name of its attempt.
        step: the mailbox of the steps.
        started: its reductions.
        end: ends the step.
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
        """Return the status of the step. After its end, return the last known status."""
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
        """Return the plan with which the step began; None if there was no quorum."""
        return self.look().plan

    @property
    def failure(self) -> Exception | None:
        """Return the first failure of the step that is known so far; None: no failure.

        Other ranks of the group may not know the failure. While the step is in flight, a failure counts only at its
        end, or if `is_abandoned`.
        """
        return self.look().error

    @property
    def is_abandoned(self) -> bool:
        """Return whether the step has failed with other steps, on all ranks of the group.

        The reason is another quorum, or an earlier step's verdict of no. When another quorum is known, all steps in
        flight before it are abandoned.
        """
        return self.look().abandoned is not None

    def report_error(self, error: Exception) -> None:
        """Report that this step has failed, so that it votes no. Later steps may have begun since."""
        self._step.tell(on.ErrorReported(error, self.name))

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End this step: wait for its reductions and vote, as `Manager.should_commit` does.

        The oldest step ends first. If it does not commit, all later steps fail too, including the open one. An
        abandoned step may end at any time, or never. Its end needs no vote, and only waits until no operation writes
        into its tensors any more. If a step is open, this waits for its quorum, because another quorum fails all steps
        in flight. This also exchanges the state of the open step, because that state is from before this step.

        Args:
            timeout: for the vote. None: the Manager's timeout.
        Returns: True: the strategy applies this step now, on every rank of this group. False: the step must not be
            applied.
        Raises: as `Manager.should_commit`. UsageError: the step has ended, or is not the oldest.
        """
        return self._end(self, timeout)
