"""The processes of a run: started, observed, killed and ended, all from one thread.

One loop waits for the next event: a message, the end of a process, or the next check of the clock. It gives the event
to the controller, and performs the controller's orders.

Law of this file: processes, pipes and the clock. Only the controller decides the actions. However the loop ends, no
process outlives it. Replicas are killed and waited for, and their manager servers end with them. If this process itself
is killed, the replicas see the end of their pipes.
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

from tft_suite.demo.demo_controller import (
    DemoController,
    EndRun,
    HoldReplica,
    KillReplica,
    Order,
    StartReplica,
    StopReplica,
)
from tft_suite.demo.events import Event, ProcessEnded, ProcessKilled, ProcessStarted, decode
from tft_suite.demo.link import ReplicaOrder, receive_event, send_order
from tft_suite.demo.process import ReplicaTask, replica_main
from tft_suite.demo.schedule import draw_kills
from tft_suite.demo.settings import DemoSettings
from tft_suite.demo.view import View

LOOK_EVERY_S = 0.1
JOIN_S = 10.0


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run: its events, and how it ended.

    Args:
        error: why the run was given up. None: all replicas came to their end.
        signal_number: the signal that ended the run. None: no signal did.
        wall_s: duration in seconds.
    """

    events: Sequence[Event]
    error: str | None
    signal_number: int | None
    wall_s: float


@final
@dataclass(slots=True)
class Child:
    """A living process of a replica, and this process's ends of its pipes."""

    process: ForkServerProcess
    events: Connection
    orders: Connection
    is_read: bool = True  # False after a kill, or after the replica closed its end, because later messages are useless


@final
class Supervisor:
    """The supervisor of one demo's replicas. Use it once, by `run()`.

    Args:
        settings: the settings of the run.
        lighthouse_addr: of a running lighthouse.
        token: the secret of this run.
        view: shows the run while it lasts.
        body: the work of each replica: `module:function`, with the arguments (ReplicaTask, Link). Only the replicas
            import it.
        caught: the numbers of the signals that asked this run to end, from `caught_signals`.
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
        self._controller = DemoController(replicas=settings.replicas, kills=kills)
        self._children: dict[int, Child] = {}
        self._events: list[Event] = []
        self._end: EndRun | None = None
        self._began = time.monotonic()

    def run(self) -> Outcome:
        """Run to the end, or until a signal is caught. Blocks.

        Raises: OSError: a process could not be started. No process is left then either.
        """
        with self._view as view:
            try:
                view.show(self._controller.run_state, self._now_s())  # before the first start, which takes seconds
                self._perform(self._controller.begin())
                while self._end is None and not self._caught:
                    self._wait_for_events()
                    self._perform(self._controller.tick(self._now_s()))
                    view.show(self._controller.run_state, self._now_s())
            finally:
                self._end_children()
        failed = self._end is not None and self._end.error is not None
        # A signal to all processes may reach the replicas first. Their end is then an effect of the signal.
        by_signal = bool(self._caught) and (self._end is None or failed)
        return Outcome(
            events=tuple(self._events),
            error=None if self._end is None or by_signal else self._end.error,
            signal_number=self._caught[0] if by_signal else None,
            wall_s=self._now_s(),
        )

    def _now_s(self) -> float:
        return time.monotonic() - self._began

    def _wait_for_events(self) -> None:
        """Handle what arrives within LOOK_EVERY_S. Messages of a process are handled before its end."""
        by_pipe = {child.events: replica for replica, child in self._children.items() if child.is_read}
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
        while child.is_read and child.events.poll():
            message = receive_event(child.events)
            if message is None:
                child.is_read = False
            else:
                self._record(decode(message, replica=replica, at_s=self._now_s()))

    def _reap(self, replica: int) -> None:
        child = self._children.pop(replica)
        child.process.join()
        exit_code = child.process.exitcode
        assert exit_code is not None
        close(child)
        self._record(ProcessEnded(at_s=self._now_s(), replica=replica, exit_code=exit_code))

    def _record(self, event: Event) -> None:
        self._events.append(event)
        self._perform(self._controller.on_event(event))

    def _perform(self, orders: Sequence[Order]) -> None:
        for order in orders:
            match order:
                case StartReplica(replica):
                    self._start(replica)
                case KillReplica(replica, step):
                    self._children[replica].process.kill()
                    self._children[replica].is_read = False
                    self._record(ProcessKilled(at_s=self._now_s(), replica=replica, step=step))
                case HoldReplica(replica):
                    send_order(self._children[replica].orders, ReplicaOrder.HOLD)
                case StopReplica(replica):
                    send_order(self._children[replica].orders, ReplicaOrder.STOP)
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
            # The first start makes the forkserver, which Ctrl-C would interrupt during its imports.
            resource_tracker.ensure_running()  # it would unblock the signals if it started between these calls
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        assert process.pid is not None
        self._children[replica] = Child(process, events, orders)
        self._record(ProcessStarted(at_s=self._now_s(), replica=replica, pid=process.pid))

    def _end_children(self) -> None:
        """Kill the remaining replicas and wait for their end. Signals can't interrupt this, because they are caught."""
        for child in self._children.values():
            if child.process.is_alive():  # otherwise its pid may be reused, because it is a child of the forkserver
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
    """Return the path of a replica's output."""
    return folder / f"replica-{replica}.log"


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Catch SIGINT and SIGTERM while the context is open. A signal only adds its number to the yielded list."""
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
