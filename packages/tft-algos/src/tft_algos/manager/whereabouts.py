"""Where in its step this rank is, as its beats tell it: what finds a trainer that hangs.

The training thread tells nothing. Where it is follows from what the Manager knows anyhow: whether a step is open, its
plan is here, a reduction is under way, it waits in the vote or for state, or the optimizer steps. So this costs the
step nothing, and a thread that looks ten times a second sees all of it that lasts.

Of a reduction that is under way nobody can tell whether the training thread waits for it; it is taken to. A strategy
whose trainer goes on meanwhile says so, once an inner step. It is then busy until it waits for the end of its step.

Law of this file: looking, from any thread, and noting since when it is so; nothing is decided and nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from tft_algos.manager.mailbox import StepMailbox
from tft_algos.manager.own_time import OwnTime
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.step import StepStatus


@final
class Whereabouts:
    """One rank's place in its step.

    Args:
        step: says whether a step is open and planned.
        slowest_step_ms: longest time that a step may take; 0: any.
        num_reductions: gives how many reductions this Manager has started so far.
        reduces: whether one of them is under way.
        monotonic: the time, in seconds.
        own_time: of this rank's steps.
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
    ) -> None:
        self._step = step
        self.own_time = own_time
        self._slowest_step_ms = slowest_step_ms
        self._num_reductions = num_reductions
        self._reduces = reduces
        self._monotonic = monotonic
        self._last: tuple[object, ...] = ()
        self._since_s = monotonic()
        self.finishes = False  # the training thread, with all that was begun in a step
        self._goes_on = False  # the training thread, while a step is open
        self._inner_steps = 0
        self.waits = False  # the training thread, in the vote or for state
        self.speaks = False  # the training thread waits for the others' words
        self.applies = False  # the training thread, what was committed: the optimizer steps

    def step_begins(self) -> None:
        """Record that a step begins. What was recorded about the last step is cleared."""
        self.waits = self._goes_on = False

    def inner_step_ended(self) -> None:
        """Record that the training thread continues, even if reductions are under way."""
        self.own_time.mark()
        self._goes_on = True
        self._inner_steps += 1

    def look(self) -> Progress:
        """For the next beat, or to find a long wait. Since when it is so, the first look that found it so tells."""
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
        )

    def phase(self, status: StepStatus) -> Phase:
        """Where the training thread is just now. `status`: of the step."""
        if not status.is_open and not status.num_deferred:
            return Phase.OWN if self.applies else Phase.OUTSIDE
        if self.waits or status.pends:
            return Phase.WAITING
        goes_on = (self._goes_on or status.num_deferred) and not self.finishes
        return Phase.REDUCING if self._reduces() and not goes_on else Phase.OWN
