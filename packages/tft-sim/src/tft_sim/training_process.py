"""The position of a simulated trainer in its step: what its beats report, and what the watches compare.

Law of this file: the position of the training thread, its hangs and its time. The loop decides the thread's work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from tft_coord.core.progress import Phase, Progress
from tft_coord.core.step import StepCore
from tft_coord.core.suspicion import WAITS_MS
from tft_coord.core.types import Plan
from tft_coord.timeouts import Timeouts
from tft_sim.clock import VirtualClock
from tft_sim.intervals import Intervals
from tft_sim.marks import Marks
from tft_sim.own_time import OwnTime
from tft_sim.process import Process, State
from tft_sim.waiting import Life, Waiter

OUTSIDE_PHASES = ("start", "between steps", "compare")
OWN_PHASES = ("forward", "optimizer")
PROGRESS_PHASES = {
    **dict.fromkeys(OWN_PHASES, Phase.OWN),
    "reduction": Phase.REDUCING,
    **dict.fromkeys(OUTSIDE_PHASES, Phase.OUTSIDE),
}
HangPoint = Literal["forward", "optimizer"]  # positions in a step where a trainer can hang


class TrainingProcess(Process):
    """A process with a training thread.

    Args:
        name: of the process.
        clock: of the simulation.
        core: its step core.
        marks: are hit by its hangs.
        timeouts: of the job.
    """

    def __init__(self, name: str, clock: VirtualClock, core: StepCore, marks: Marks, timeouts: Timeouts) -> None:
        self._phase = "start"
        self._core = core
        self._marks = marks
        self._timeouts = timeouts
        self.report_long_wait: Callable[[], None] = lambda: None  # sends an extra message to its manager server
        self.phase_since_ms = clock.now_ms
        self.stopped_since_ms = 0  # start of the newest stop
        self.is_seen_running = False  # its kernel sees it running, although it sends nothing
        self.stop_seen_ms = 0, 0  # start and end of the newest stop that its kernel saw
        self.busy = Intervals()  # busy with its own work in a step that is not excused, or stopped
        self.reducing = Intervals()  # waiting in one reduction
        self.own_time = OwnTime()
        self.will_hang: HangPoint | None = None
        self._hang: Waiter | None = None
        super().__init__(name, clock)

    @property
    def plan(self) -> Plan | None:
        """Return the plan of the newest attempt."""
        return self._core.status.plan

    @property
    def excused(self) -> bool:
        """Return whether the current step may take any time."""
        status = self._core.status
        return status.excused or status.pends

    # --- where it is ------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """Return its position in its step, as one word."""
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        if self._phase in (*OWN_PHASES, "between steps"):
            self.own_time.add(self.clock.now_ms - self.phase_since_ms)
        self._phase = name
        self.phase_since_ms = self.clock.now_ms
        self._record_intervals(restart=True)
        since_ms = self.clock.now_ms
        if self.progress_phase in (Phase.WAITING, Phase.REDUCING):
            self.after(WAITS_MS, lambda: self._report_if_waiting(since_ms))

    def restart_phase(self) -> None:
        """Restart the time of the current phase: the quorum is known now, or there is none, while the training went
        on."""
        self.phase = self._phase

    def _report_if_waiting(self, since_ms: int) -> None:
        if self.phase_since_ms == since_ms and self.progress_phase in (Phase.WAITING, Phase.REDUCING):
            self.report_long_wait()

    def _record_intervals(self, *, restart: bool = False) -> None:
        if not self.alive:
            return  # a stopped process whose host is gone stays silent even if resumed
        now_ms, stopped = self.clock.now_ms, self.state is State.STOPPED
        inside = self._phase not in OUTSIDE_PHASES
        self.busy.record((stopped and inside) or (self._phase in OWN_PHASES and not self.excused), now_ms)
        self.reducing.record(self._phase == "reduction", now_ms, restart=restart)

    @property
    def progress_phase(self) -> Phase:
        """Return its position in its step, as its beats report it."""
        if self._phase in OWN_PHASES and self._core.status.pends:
            return Phase.WAITING
        return PROGRESS_PHASES.get(self._phase, Phase.WAITING)

    def progress(self) -> Progress:
        """Return what its beats report."""
        status = self._core.status
        is_between = status.plan is None or not (status.is_open or status.num_deferred)
        return Progress(
            step=status.step if is_between or status.plan is None else status.plan.step,
            phase=self.progress_phase,
            since_ms=self.clock.now_ms - self.phase_since_ms,
            excused=self.excused,
            slowest_step_ms=self._timeouts.slowest_step_ms,
            own_ms=self.own_time.median_ms,
        )

    # --- stops and hangs --------------------------------------------------------------------------------------------

    def hold_lock(self) -> None:
        """Hold the interpreter's lock until `resume`: it neither speaks nor hears, and its kernel sees it running."""
        self._note_stop()
        self.stop()
        self.is_seen_running = True

    def _note_stop(self) -> None:
        if self.state is State.STOPPED and not self.is_seen_running:
            self.stop_seen_ms = self.stopped_since_ms, self.clock.now_ms

    def stop(self) -> None:
        """Stop with SIGSTOP. Only the kernel can tell this from a held interpreter lock."""
        self.is_seen_running = False
        was_running = self.state is State.RUNNING
        super().stop()
        self._record_intervals()
        if was_running:
            self.stopped_since_ms = self.clock.now_ms
            if self._phase in (*OWN_PHASES, "reduction") and not self.excused:
                self._hang_began()

    def end(self, *, vanish: bool = False) -> None:
        """End, killed or gone with its host. A stop ends with that."""
        self._note_stop()
        if self.state is State.STOPPED:
            self.running_since_ms = self.clock.now_ms
        super().end(vanish=vanish)

    def resume(self) -> None:
        """Resume with SIGCONT."""
        self._note_stop()
        super().resume()
        self._record_intervals()

    def _hang_began(self) -> None:
        raise NotImplementedError

    @property
    def hangs(self) -> bool:
        """Return whether it hangs. A hang lasts until `wake`."""
        return self._hang is not None and not self._hang.done

    def wake(self) -> None:
        """End its hang, or the hang that is due."""
        self.will_hang = None
        if self._hang is not None:
            self._hang.resolve(None)

    def hang_if_asked(self, where: HangPoint) -> Life:
        """Hang there if a script or a fault wants it, in a step that is not excused."""
        if self.will_hang != where or self.excused:
            return
        self.will_hang = None
        if self.phase != where:
            self.phase = where
        self._marks.hit(f"a trainer hung in its {where}")
        self.note("hangs" if where == "forward" else f"hangs in its {where}")
        self._hang = Waiter()
        self._hang_began()
        yield self._hang
        self.note("stops hanging")

    def note(self, text: str) -> None:
        """Report an event to the transcript."""
        raise NotImplementedError

    # --- running ----------------------------------------------------------------------------------------------------

    def spawn(self, life: Life) -> Waiter:
        """Run a thread of this process. Returns: a waiter that resolves to the thread's result."""
        done = Waiter()

        def go_on(value: Any) -> None:
            try:
                waiter = life.send(value)
            except StopIteration as stop:
                done.resolve(stop.value)
                return
            waiter.then(lambda result: self.run(lambda: go_on(result)))

        go_on(None)
        return done

    def sleep(self, delay_ms: int) -> Waiter:
        """Return a waiter that resolves after that time."""
        waiter = Waiter()
        self.after(delay_ms, lambda: waiter.resolve(None))
        return waiter

    def within(self, waiter: Waiter, timeout_ms: int) -> Waiter:
        """Return the same waiter, which resolves to None if the timeout passes first."""
        timer = self.clock.after(timeout_ms, lambda: waiter.resolve(None))
        waiter.then(lambda _: timer.cancel())
        return waiter
