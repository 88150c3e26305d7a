"""A process of the simulated cluster: it runs, is stopped, is killed, or its host is gone.

Everything that happens to a process goes through `run`, so that a stopped one (SIGSTOP) does it all when it wakes up,
in order, and a dead one never does.

Law of this file: life and death of one process; what it does is the business of whoever derives from it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from tft_sim.clock import Timer, VirtualClock


class State(enum.Enum):
    """What the rest of the cluster sees of a process."""

    RUNNING = "running"
    STOPPED = "stopped"  # SIGSTOP: its connections stay open, nothing is read or sent
    KILLED = "killed"  # its kernel closes its connections
    VANISHED = "vanished"  # its host is gone: nobody is told anything


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
        """Whether it exists, stopped or not."""
        return self.state in (State.RUNNING, State.STOPPED)

    def run(self, action: Callable[[], None]) -> None:
        """Do it now, on waking up, or never."""
        if self.state is State.RUNNING:
            action()
        elif self.state is State.STOPPED:
            self._inbox.append(action)

    def after(self, delay_ms: int, action: Callable[[], None]) -> Timer:
        """A timer of this process."""
        return self.clock.after(delay_ms, lambda: self.run(action))

    def stop(self) -> None:
        """SIGSTOP."""
        if self.state is State.RUNNING:
            self.state = State.STOPPED

    def resume(self) -> None:
        """SIGCONT: everything that came in between happens now."""
        if self.state is not State.STOPPED:
            return
        self.state = State.RUNNING
        self.running_since_ms = self.clock.now_ms
        while self._inbox and self.state is State.RUNNING:
            self._inbox.pop(0)()

    def end(self, *, vanish: bool = False) -> None:
        """Killed, or gone with its host."""
        if self.alive:
            self.state = State.VANISHED if vanish else State.KILLED
            self._inbox.clear()
