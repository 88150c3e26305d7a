"""The state of a run so far: each replica's state, and a sentence for each notable event.

This is the view model. Everything that is shown, live or in lines, comes from it.

Law of this file: a fold over events. It decides nothing and draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from signal import Signals
from typing import final

from tft_suite.demo.events import (
    Event,
    HealingStarted,
    ProcessEnded,
    ProcessKilled,
    ProcessStarted,
    ReplicaFailed,
    StepCommitted,
    StepDiscarded,
    TrainingEnded,
)

REASON_SHOWN_MAX = 100


@final
class State(Enum):
    """The activity of a replica."""

    STARTING = "starting"
    HEALING = "healing"
    TRAINING = "training"
    DEAD = "dead"
    DONE = "done"


@final
@dataclass(slots=True)
class ReplicaState:
    """One replica. `step` and `loss` are of its last commit. None: its current process has not committed yet."""

    replica: int
    state: State = State.STARTING
    step: int | None = None
    loss: float | None = None
    num_starts: int = 0
    num_commits: int = 0  # of its current process
    ended: TrainingEnded | None = None
    discarded_after: int | None = None
    is_gone: bool = False  # its process ended normally


@final
@dataclass(frozen=True, slots=True)
class Note:
    """One sentence about a moment."""

    at_s: float
    text: str
    is_bad: bool = False


@final
class RunState:
    """The run so far. `apply` receives each event once, in order."""

    def __init__(self, replicas: int) -> None:
        self.replicas: Sequence[ReplicaState] = tuple(ReplicaState(replica) for replica in range(replicas))
        self.notes: list[Note] = []
        self.step = 0  # the highest committed step of any replica
        self.participants = 0  # in that step
        self._killed_at_s: dict[int, float] = {}

    def apply(self, event: Event) -> None:
        """Handle one event."""
        who = self.replicas[event.replica]
        name = f"replica {event.replica}"
        match event:
            case ProcessStarted():
                who.state, who.num_starts, who.num_commits = State.STARTING, who.num_starts + 1, 0
                who.step = who.loss = who.ended = who.discarded_after = None
                self._note(event, f"{name} starts{'' if who.num_starts == 1 else ' again'} (pid {event.pid})")
            case HealingStarted():
                if who.state is not State.HEALING:
                    self._note(event, f"{name} heals from a peer")
                who.state = State.HEALING
            case StepCommitted():
                self._committed(who, event)
            case StepDiscarded():
                # The replica tries again until it commits, and this is noted once.
                if who.discarded_after != event.step:
                    self._note(
                        event, f"{name} discards the step after {event.step}: {shortened(event.reason)}", is_bad=True
                    )
                who.discarded_after = event.step
            case TrainingEnded():
                if who.ended is None:
                    self._note(event, f"{name} is at its last step, {event.step}")
                who.state, who.step, who.ended = State.DONE, event.step, event
            case ReplicaFailed():
                self._note(event, f"{name} failed: {event.error}", is_bad=True)
            case ProcessKilled():
                self._killed_at_s[event.replica] = event.at_s
                who.state = State.DEAD
                self._note(event, f"{name} is killed (kill -9) after its commit of step {event.step}", is_bad=True)
            case ProcessEnded():
                if who.state is State.DONE and event.exit_code == 0:
                    who.is_gone = True
                elif who.state is not State.DEAD:
                    self._note(event, f"{name} ended: {exit_words(event.exit_code)}", is_bad=True)
                    self._killed_at_s[event.replica] = event.at_s
                    who.state = State.DEAD

    def _committed(self, who: ReplicaState, event: StepCommitted) -> None:
        if who.num_commits == 0:
            text = f"replica {who.replica} commits step {event.step}, its first"
            killed_at_s = self._killed_at_s.pop(who.replica, None)
            if killed_at_s is not None:
                text += f" since its death {event.at_s - killed_at_s:.1f} s ago"
            self._note(event, text)
        if event.step > self.step:
            if event.participants != self.participants and self.step > 0:
                self._note(event, f"participants {self.participants} -> {event.participants} in step {event.step}")
            self.step, self.participants = event.step, event.participants
        who.state, who.step = State.TRAINING, event.step
        if event.took_part:  # otherwise the loss is from before the healing
            who.loss = event.loss
        who.num_commits += 1

    def _note(self, event: Event, text: str, *, is_bad: bool = False) -> None:
        self.notes.append(Note(event.at_s, text, is_bad))


def shortened(reason: str) -> str:
    """Return the part of a reason that fits on a line. The log of the replica has all of it."""
    return reason if len(reason) <= REASON_SHOWN_MAX else reason[: REASON_SHOWN_MAX - 1] + "…"


def exit_words(exit_code: int) -> str:
    """Return in words how a process ended."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"by {Signals(-exit_code).name}"
    except ValueError:
        return f"by signal {-exit_code}"
