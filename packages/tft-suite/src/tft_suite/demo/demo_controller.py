"""The next actions in a run, decided from the events so far.

The controller knows the scheduled kills, receives the events, and returns orders. Three rules need care. A replica is
killed only while another one trains, because the state exists only in living replicas. A replica that died for another
reason than kill -9 is not restarted, because a restart would hide a bug. A replica does not leave before all are at the
last step and have reported their figures. Until then, replicas that are behind heal from the others.

The last rule covers this case: the last commit of a replica failed, so it stays at a lower step while the others are
done. After a pause, the controller orders *hold*. All replicas then take further steps together, so that the one behind
heals. All vote no in these steps, so that no replica goes beyond the last step.

Law of this file: pure. Events and the time in, orders out.
"""

from __future__ import annotations

from dataclasses import dataclass
from signal import SIGKILL
from typing import TypeAlias, final

from tft_suite.demo.events import (
    Event,
    HealingStarted,
    ProcessEnded,
    ProcessStarted,
    ReplicaFailed,
    StepCommitted,
    StepDiscarded,
    TrainingEnded,
)
from tft_suite.demo.run_state import RunState, State, exit_words
from tft_suite.demo.schedule import Kill

HOLD_AFTER_S = 2.0
"""Without news for so long while some are done and some are not: the others hold."""

SILENCE_MAX_S = 120.0
"""Without a commit or an end for so long, the run is given up. Above each time-out of the packages below."""

FRUITLESS_STARTS_MAX = 3
"""Killed so often without a commit between: the run is given up."""


@final
@dataclass(frozen=True, slots=True)
class StartReplica:
    replica: int


@final
@dataclass(frozen=True, slots=True)
class KillReplica:
    """kill -9, now. `step` is the commit that the replica just reported."""

    replica: int
    step: int


@final
@dataclass(frozen=True, slots=True)
class HoldReplica:
    """An order to the replica: further steps, but no further commit."""

    replica: int


@final
@dataclass(frozen=True, slots=True)
class StopReplica:
    """An order to the replica: it may end."""

    replica: int


@final
@dataclass(frozen=True, slots=True)
class EndRun:
    """The end of all processes. `error` says what went wrong. None: the run is complete."""

    error: str | None


Order: TypeAlias = StartReplica | KillReplica | HoldReplica | StopReplica | EndRun


@final
class DemoController:
    """The state machine of one run. It receives each event once, and a periodic `tick`."""

    def __init__(self, *, replicas: int, kills: tuple[Kill, ...]) -> None:
        self.run_state = RunState(replicas)
        self._pending = list(kills)
        self._fruitless_starts = dict.fromkeys(range(replicas), 0)
        self._last_progress_s = 0.0
        self._held_since_s: float | None = None
        self._is_stopping = False
        self._is_over = False

    def begin(self) -> tuple[Order, ...]:
        """Return the first orders of a run."""
        return tuple(StartReplica(who.replica) for who in self.run_state.replicas)

    def on_event(self, event: Event) -> tuple[Order, ...]:
        """Handle an event. Return the orders to perform now, in this order.

        The effects of a kill arrive as events too (ProcessKilled, then ProcessEnded), and so does each start.
        """
        # Repeated reports of a replica that waits or tries again do not count as news.
        is_repeated = isinstance(event, TrainingEnded) and self._is_done(event.replica)
        if not (is_repeated or isinstance(event, HealingStarted | StepDiscarded)):
            self._last_progress_s = event.at_s
        self.run_state.apply(event)
        if self._is_over:
            return ()
        match event:
            case StepCommitted():
                return self._kills_due(event)
            case ProcessStarted() if self._held_since_s is not None:
                return (HoldReplica(event.replica),)
            case TrainingEnded():
                return self._stop_if_all_are_done()
            case ReplicaFailed():
                return self._end(f"replica {event.replica} failed: {event.error}")
            case ProcessEnded():
                return self._ended(event)
            case _:
                return ()

    def tick(self, now_s: float) -> tuple[Order, ...]:
        """Handle the time, in the same seconds as the events' `at_s`."""
        if self._is_over:
            return ()
        silent_s = now_s - self._last_progress_s
        if silent_s >= SILENCE_MAX_S:
            states = ", ".join(f"replica {who.replica} {who.state.value}" for who in self.run_state.replicas)
            return self._end(f"no step was committed for {silent_s:.0f} s after step {self.run_state.step} ({states}).")
        if self._held_since_s is not None and now_s - self._held_since_s >= SILENCE_MAX_S:
            behind = [str(who.replica) for who in self.run_state.replicas if not self._is_done(who.replica)]
            return self._end(
                f"replica {', '.join(behind)} did not reach the last step in {SILENCE_MAX_S:.0f} s of healing."
            )
        some_are_done = any(self._is_done(who.replica) for who in self.run_state.replicas)
        if some_are_done and not self._is_stopping and self._held_since_s is None and silent_s >= HOLD_AFTER_S:
            self._held_since_s = now_s
            # The replica that is behind receives the order first. It may already wait for a quorum, and must
            # see the order when the quorum forms.
            behind_first = sorted(self.run_state.replicas, key=lambda who: self._is_done(who.replica))
            return tuple(HoldReplica(who.replica) for who in behind_first if who.state is not State.DEAD)
        return ()

    def _is_done(self, replica: int) -> bool:
        return self.run_state.replicas[replica].state is State.DONE

    def _kills_due(self, event: StepCommitted) -> tuple[Order, ...]:
        due = next((kill for kill in self._pending if kill.replica == event.replica), None)
        others = (who for who in self.run_state.replicas if who.replica != event.replica)
        if due is None or event.step < due.step or not any(who.state is State.TRAINING for who in others):
            return ()
        self._pending.remove(due)
        return (KillReplica(event.replica, event.step),)

    def _stop_if_all_are_done(self) -> tuple[Order, ...]:
        ended = [who.ended for who in self.run_state.replicas]
        steps = {end.step for end in ended if end is not None}
        if self._is_stopping or None in ended or len(steps) != 1:
            return ()
        self._is_stopping = True
        return tuple(StopReplica(who.replica) for who in self.run_state.replicas)

    def _ended(self, event: ProcessEnded) -> tuple[Order, ...]:
        if self._is_stopping:
            if event.exit_code != 0:
                return self._end(f"replica {event.replica} ended with an error: {exit_words(event.exit_code)}.")
            return self._end(None) if all(who.is_gone for who in self.run_state.replicas) else ()
        if event.exit_code != -SIGKILL:
            return self._end(f"replica {event.replica} ended unexpectedly: {exit_words(event.exit_code)}.")
        who = self.run_state.replicas[event.replica]
        self._fruitless_starts[event.replica] = 0 if who.num_commits else self._fruitless_starts[event.replica] + 1
        if self._fruitless_starts[event.replica] == FRUITLESS_STARTS_MAX:
            return self._end(
                f"replica {event.replica} was killed {FRUITLESS_STARTS_MAX} times in a row before it committed a step; "
                "check whether this machine is out of memory."
            )
        return (StartReplica(event.replica),)

    def _end(self, error: str | None) -> tuple[Order, ...]:
        self._is_over = True
        return (EndRun(error),)
