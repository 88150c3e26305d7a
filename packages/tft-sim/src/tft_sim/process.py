"""A process of the simulated cluster: it runs, is stopped, is killed, or its host is gone.

All actions of a process go through `run`. So a stopped process (SIGSTOP) performs them in order when it resumes, and a
dead one never does.

Law of this file: life and death of one process. Its subclasses define its work.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from tft_sim.clock import Timer, VirtualClock


class State(enum.Enum):
    """The state of a process, as the rest of the cluster sees it."""

    RUNNING = "running"
    STOPPED = "stopped"  # SIGSTOP: its connections stay open, and nothing is read or sent
    KILLED = "killed"  # its kernel closes its connections
    VANISHED = "vanished"  # its host is gone: no process is told anything


class Process:
    """A named process on a virtual clock.

    Args:
        name: unique in its network.
        clock: of the simulation.
    """

    def __init__(self, name: str, clock: VirtualClock) -> None:
        self.name = name
        self.clock = clock
        self.state = State.RUNNING
        self.running_since_ms = clock.now_ms
        self._inbox: list[Callable[[], None]] = []

    @property
    def alive(self) -> bool:
        """Return whether the process exists, stopped or not."""
        return self.state in (State.RUNNING, State.STOPPED)

    def run(self, action: Callable[[], None]) -> None:
        """Perform an action now, on resuming, or never."""
        if self.state is State.RUNNING:
            action()
        elif self.state is State.STOPPED:
            self._inbox.append(action)

    def after(self, delay_ms: int, action: Callable[[], None]) -> Timer:
        """Start a timer of this process."""
        return self.clock.after(delay_ms, lambda: self.run(action))

    def stop(self) -> None:
        """Stop with SIGSTOP."""
        if self.state is State.RUNNING:
            self.state = State.STOPPED

    def resume(self) -> None:
        """Resume with SIGCONT: all actions that came in between happen now."""
        if self.state is not State.STOPPED:
            return
        self.state = State.RUNNING
        self.running_since_ms = self.clock.now_ms
        while self._inbox and self.state is State.RUNNING:
            self._inbox.pop(0)()

    def end(self, *, vanish: bool = False) -> None:
        """End the process: it was killed, or its host is gone."""
        if self.alive:
            self.state = State.VANISHED if vanish else State.KILLED
            self._inbox.clear()
