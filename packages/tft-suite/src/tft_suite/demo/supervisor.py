"""The processes of a run: started, listened to, killed, and ended, all from one thread.

Intuition: the hands of the director. One loop waits for whatever comes first (a message, the end of a process, the next
look at the clock), tells the director, and does what it says.

Law of this file: processes, pipes and the clock. What is to happen is decided by the director alone. Whatever ends the
loop, no process outlives it: replicas are killed and waited for, their manager servers end with them, and if this very
process is killed the replicas see the end of their pipes.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import final

from tft_suite.demo.director import Director, EndRun, HoldReplica, KillReplica, Order, StartReplica, StopReplica
from tft_suite.demo.events import Event, ProcessEnded, ProcessKilled, ProcessStarted, decode
from tft_suite.demo.link import ReplicaOrder, give, take
from tft_suite.demo.process import ReplicaTask, replica_main
from tft_suite.demo.schedule import draw_kills
from tft_suite.demo.settings import DemoSettings
from tft_suite.demo.view import View

LOOK_EVERY_S = 0.1
JOIN_S = 10.0


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left: its events, and how it ended.

    Args:
        error: why it was given up; None if all replicas came to their end.
        signal_number: the signal that ended it; None if none did.
        wall_s: seconds it took.
    """

    events: Sequence[Event]
    error: str | None
    signal_number: int | None
    wall_s: float


@final
@dataclass(slots=True)
class Child:
    """A living process of a replica, and our ends of its pipes."""

    process: ForkServerProcess
    events: Connection
    orders: Connection
    is_heard: bool = True  # False once it was killed, or closed its end: what it said last is of no use


@final
class Supervisor:
    """Runs the replicas of one demo. Use once: `run()`.

    Args:
        settings: what to do.
        lighthouse_addr: of a running lighthouse.
        token: the secret of this run.
        view: shows the run while it lasts.
        body: what each replica does: `module:function`, imported by the replicas alone; takes (ReplicaTask, Link).
        caught: the numbers of the signals that asked this run to end, as `caught_signals` gives it.
    """

    def __init__(
        self, settings: DemoSettings, *, lighthouse_addr: str, token: str, view: View, body: str, caught: Sequence[int]
    ) -> None:
        self._settings = settings
        self._lighthouse_addr = lighthouse_addr
        self._token = token
        self._view = view
        self._body = body
        self._caught = caught
        self._context = multiprocessing.get_context("forkserver")
        kills = draw_kills(replicas=settings.replicas, steps=settings.steps, kills=settings.kills, seed=settings.seed)
        self._director = Director(replicas=settings.replicas, kills=kills)
        self._children: dict[int, Child] = {}
        self._events: list[Event] = []
        self._end: EndRun | None = None
        self._began = time.monotonic()

    def run(self) -> Outcome:
        """Run to the end, or until a signal is caught. Blocks.

        Raises: OSError: a process could not be started. Nothing is left then either.
        """
        with self._view as view:
            try:
                view.show(self._director.story, self._now_s())  # before the first start, which takes seconds
                self._obey(self._director.begin())
                while self._end is None and not self._caught:
                    self._wait_for_news()
                    self._obey(self._director.tick(self._now_s()))
                    view.show(self._director.story, self._now_s())
            finally:
                self._end_children()
        failed = self._end is not None and self._end.error is not None
        # A signal to all processes may reach the replicas first; it was the signal then, not their end.
        by_signal = bool(self._caught) and (self._end is None or failed)
        return Outcome(
            events=tuple(self._events),
            error=None if self._end is None or by_signal else self._end.error,
            signal_number=self._caught[0] if by_signal else None,
            wall_s=self._now_s(),
        )

    def _now_s(self) -> float:
        return time.monotonic() - self._began

    def _wait_for_news(self) -> None:
        """Take what has come, for at most LOOK_EVERY_S; messages of a process always before its end."""
        by_pipe = {child.events: replica for replica, child in self._children.items() if child.is_heard}
        by_sentinel = {child.process.sentinel: replica for replica, child in self._children.items()}
        ready = wait([*by_pipe, *by_sentinel], timeout=LOOK_EVERY_S)
        for connection, replica in by_pipe.items():
            if connection in ready:
                self._take_messages(replica)
        for sentinel, replica in by_sentinel.items():
            if sentinel in ready:
                self._take_messages(replica)
                self._reap(replica)

    def _take_messages(self, replica: int) -> None:
        child = self._children[replica]
        while child.is_heard and child.events.poll():
            message = take(child.events)
            if message is None:
                child.is_heard = False
            else:
                self._happened(decode(message, replica=replica, at_s=self._now_s()))

    def _reap(self, replica: int) -> None:
        child = self._children.pop(replica)
        child.process.join()
        exit_code = child.process.exitcode
        assert exit_code is not None
        close(child)
        self._happened(ProcessEnded(at_s=self._now_s(), replica=replica, exit_code=exit_code))

    def _happened(self, event: Event) -> None:
        self._events.append(event)
        self._obey(self._director.on_event(event))

    def _obey(self, orders: Sequence[Order]) -> None:
        for order in orders:
            match order:
                case StartReplica(replica):
                    self._start(replica)
                case KillReplica(replica, step):
                    self._children[replica].process.kill()
                    self._children[replica].is_heard = False
                    self._happened(ProcessKilled(at_s=self._now_s(), replica=replica, step=step))
                case HoldReplica(replica):
                    give(self._children[replica].orders, ReplicaOrder.HOLD)
                case StopReplica(replica):
                    give(self._children[replica].orders, ReplicaOrder.STOP)
                case EndRun():
                    self._end = order

    def _start(self, replica: int) -> None:
        task = ReplicaTask(
            replica=replica,
            steps=self._settings.steps,
            seed=self._settings.seed,
            lighthouse_addr=self._lighthouse_addr,
            token=self._token,
            log=log_of(self._settings.out, replica),
        )
        events, their_events = self._context.Pipe(duplex=False)
        their_orders, orders = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=replica_main, args=(self._body, task, their_events, their_orders), name=f"tft-demo-replica-{replica}"
        )
        with their_events, their_orders:
            # The first start makes the forkserver, which Ctrl-C would reach while it imports.
            resource_tracker.ensure_running()  # would let signals through again if it came in between
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        assert process.pid is not None
        self._children[replica] = Child(process, events, orders)
        self._happened(ProcessStarted(at_s=self._now_s(), replica=replica, pid=process.pid))

    def _end_children(self) -> None:
        """Kill what still runs and wait for it. Nothing here can be interrupted: the signals are caught."""
        for child in self._children.values():
            if child.process.is_alive():  # else its number may be another's by now: it is the forkserver's child
                child.process.kill()
        for child in self._children.values():
            child.process.join(JOIN_S)
            if child.process.exitcode is not None:
                close(child)
        self._children.clear()


def close(child: Child) -> None:
    child.events.close()
    child.orders.close()
    child.process.close()


def log_of(folder: Path, replica: int) -> Path:
    """Where a replica's output goes."""
    return folder / f"replica-{replica}.log"


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Inside, SIGINT and SIGTERM only add their number to the list that is yielded; a second one changes nothing."""
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
