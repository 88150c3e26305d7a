"""The position of this rank in its step, as its beats report it, to detect a trainer that hangs.

The training thread reports nothing. Its position follows from facts that the Manager has. A step is open or not, its
plan is here or not, and a reduction is under way or not. The thread waits in the vote or for state, or the optimizer
steps. So a step has no extra cost. A thread that checks ten times a second sees every phase that lasts.

During a reduction, it is unknown whether the training thread waits for it. The thread is assumed to wait. A strategy
whose trainer continues meanwhile reports each inner step. The trainer then counts as busy until it waits for the end of
its step.

Law of this file: checking, from any thread, and recording since when a phase lasts. Nothing is decided and nothing
waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from tft_algos.manager.step.mailbox import StepMailbox
from tft_algos.manager.step.own_time import OwnTime
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.stalls import TrainerReport
from tft_coord.core.step import StepStatus


@final
class StepProgress:
    """One rank's position in its step.

    Args:
        step: says whether a step is open and planned.
        slowest_step_ms: maximum time of a step. 0: no limit.
        num_reductions: returns how many reductions this Manager has started.
        reduces: returns whether one of them is under way.
        monotonic: returns the time in seconds.
        own_time: the own part of this rank's steps.
        report: returns what its time went to.
    """

    def __init__(
        self,
        step: StepMailbox,
        *,
        slowest_step_ms: int,
        num_reductions: Callable[[], int],
        reduces: Callable[[], bool],
        monotonic: Callable[[], float],
        own_time: OwnTime,
        report: Callable[[], TrainerReport | None] = lambda: None,
    ) -> None:
        self._step = step
        self.own_time = own_time
        self._report = report
        self._slowest_step_ms = slowest_step_ms
        self._num_reductions = num_reductions
        self._reduces = reduces
        self._monotonic = monotonic
        self._last: tuple[object, ...] = ()
        self._since_s = monotonic()
        self.finishes = False  # the training thread finishes what was begun in a step
        self._goes_on = False  # the training thread continues while a step is open
        self._inner_steps = 0
        self.waits = False  # the training thread waits in the vote or for state
        self.awaits_words = False  # the training thread waits for the others' words
        self.applies = False  # the training thread applies what was committed: the optimizer steps

    def step_begins(self) -> None:
        """Record that a step begins. What was recorded about the last step is cleared."""
        self.waits = self._goes_on = False

    def inner_step_ended(self) -> None:
        """Record that the training thread continues, even if reductions are under way."""
        self.own_time.mark()
        self._goes_on = True
        self._inner_steps += 1

    def look(self) -> Progress:
        """Return the current progress, for a beat or to find a long wait.

        `since` is the time of the first check that saw this phase.
        """
        status, now_s = self._step.status, self._monotonic()
        phase = self.phase(status)
        plan = status.plan
        here = (status.name.attempt, phase, self._num_reductions(), self._inner_steps)
        if here != self._last:
            self._last, self._since_s = here, now_s
        is_between = not status.is_open and not status.num_deferred
        return Progress(
            step=status.step if plan is None or is_between else plan.step,
            phase=phase,
            since_ms=round((now_s - self._since_s) * 1_000),
            excused=status.excused or status.pends,
            slowest_step_ms=self._slowest_step_ms,
            own_ms=self.own_time.median_ms,
            report=self._report(),
        )

    def phase(self, status: StepStatus) -> Phase:
        """Return the current phase of the training thread. `status`: of the step."""
        if not status.is_open and not status.num_deferred:
            return Phase.OWN if self.applies else Phase.OUTSIDE
        if self.waits or status.pends:
            return Phase.WAITING
        goes_on = (self._goes_on or status.num_deferred) and not self.finishes
        return Phase.REDUCING if self._reduces() and not goes_on else Phase.OWN
