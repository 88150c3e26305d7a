"""The life of one Manager outside its steps: notifications, beats, leaving and the end.

Law of this file: calls of other threads arrive here, and the end starts here. The step core decides the effect of a
notification on the step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Final, final

from tft_algos.errors import ConfigError, ManagerClosedError, UsageError
from tft_algos.manager.assembly import Parts
from tft_algos.manager.config import limit_of
from tft_algos.manager.lifecycle import at_exit
from tft_algos.manager.lifecycle.descriptor_check import DescriptorCheck
from tft_algos.manager.lifecycle.signals import SignalHandlers
from tft_algos.manager.step.control_words import standing_coordinator
from tft_coord.core.progress import Progress
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.stragglers import StragglerNotice
from tft_coord.core.types import DrainComplete, KillOrder, LeaveRequest, LossNotice, NewcomerAsks, QuorumNews, WaitsFor
from tft_coord.errors import ReplicaGroupLostError
from tft_coord.notifications import Notification

MILLISECOND: Final = timedelta(milliseconds=1)
LAST_WORDS_S: Final = 1.0
LOOK_EVERY_BEATS: Final = 0.9  # below 1, because the next beat may come a little early


@final
class Lifecycle:
    """The life of one rank's Manager, from its start to its end.

    Args:
        parts: of the Manager. From now on, its coordinator sends notifications to this object.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._pid = os.getpid()
        self._closing = parts.shared.closing
        self._exits = False  # the interpreter exits and has shut the Manager down
        self._signals = SignalHandlers()
        self._ends: list[Callable[[], object]] = []
        self._next_look_s = 0.0
        self._descriptors = DescriptorCheck(parts.shared.reports, parts.shared.clock)
        self._standing = standing_coordinator(parts.shared.coordinator)
        if self._standing is not None:
            self._standing.number_beats(self._number_beat)
        parts.shared.coordinator.listen(self.hear)
        parts.shared.coordinator.follow(self.poll)
        at_exit.shut_down_at_exit(self)

    @property
    def is_closed(self) -> bool:
        """Return whether the Manager was shut down."""
        return self._closing.is_set()

    def check_open(self) -> None:
        """Raise if the Manager can't be used here any more.

        Raises: ManagerClosedError: the Manager was shut down. UsageError: this process was forked from the Manager's
        process.
        """
        if self._closing.is_set():
            if self._exits and threading.current_thread().daemon:
                sys.exit()  # the interpreter is about to end this thread anyway; this avoids a traceback
            raise ManagerClosedError(f"the Manager of replica {self._replica_id} was shut down; make a new one")
        if os.getpid() != self._pid:  # a forked child has none of its threads
            raise UsageError(
                f"the Manager of replica {self._replica_id} belongs to process {self._pid}, the parent of this "
                "process; use it there, or make a new one here"
            )

    @property
    def _replica_id(self) -> str:
        return self._parts.shared.coordinator.replica_id

    # --- notifications, on threads of the coordinator, without waits -------------------------------------------------

    def hear(self, notification: Notification) -> None:
        """Handle a notification: a loss in a quorum or of this group, a newcomer, or an order for this process."""
        parts, shared = self._parts, self._parts.shared
        match notification:
            case LossNotice():
                if not notification.lives:
                    parts.speculative.lost()
                shared.step.tell(on.LossNoticed(notification))
            case QuorumNews():
                shared.step.tell(on.QuorumNamed(notification))
            case NewcomerAsks(replica_id=replica_id):
                parts.speculative.newcomer_asked(replica_id)
            case ReplicaGroupLostError():
                shared.step.tell(on.GroupWasLost(notification))
            case LeaveRequest(reason, serve_ms):
                shared.reports.log(logging.WARNING, "received a request to leave the job: %s", reason)
                self.leave(timedelta(milliseconds=serve_ms) if serve_ms else None, reason=reason)
            case DrainComplete():
                parts.graceful_shutdown.released.set()
            case WaitsFor(sentence, warns):
                if warns:
                    shared.reports.log(logging.WARNING, "%s", sentence)
                else:
                    parts.waits.reported(sentence)
            case StragglerNotice():
                parts.straggling.notified(notification)
                shared.step.tell(on.PaceHeard(bool(parts.straggling.left_out)))
            case KillOrder(message):
                self._end_process(message)

    def _number_beat(self) -> int:
        """Return the number of a beat that is sent now; 0: the beat needs no answer."""
        for order in self._parts.shared.step.tell(on.BeatDue()):
            if isinstance(order, do.NumberBeat):
                return order.number
        return 0

    def _end_process(self, message: str) -> None:
        """End the process with exit code 1, at once, whatever other threads do or which locks they hold."""

        def last_words() -> None:
            self._parts.shared.reports.log(logging.CRITICAL, "ending this process: %s", message)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()

        speaker = threading.Thread(target=last_words, name="tft-last-words", daemon=True)
        speaker.start()
        speaker.join(LAST_WORDS_S)
        os._exit(1)

    def poll(self) -> Progress:
        """Return this rank's progress, several times a beat. Check everything else once a beat."""
        parts, now_s = self._parts, self._parts.shared.clock.monotonic()
        if now_s < self._next_look_s:
            return parts.step_progress.look()
        self._next_look_s = now_s + LOOK_EVERY_BEATS * parts.shared.config.timeouts.beat_interval_ms / 1_000
        return self.look()

    def look(self) -> Progress:
        """Return this rank's progress, and log what is due about its waits and errors. Called once a beat."""
        parts = self._parts
        if not self._closing.is_set():
            parts.waits.look(parts.reducer.num_started)
            looked = on.Looked(parts.waits.is_left_out, parts.waits.round_waits_ms)
            for order in parts.shared.step.tell(looked):
                if isinstance(order, do.TellLate) and self._standing is not None:
                    self._standing.late(order.key, order.step)
            self._descriptors.look()
        parts.shared.reports.look()
        return parts.step_progress.look()

    # --- leaving ------------------------------------------------------------------------------------------------------

    def leave(self, deadline: timedelta | None, *, reason: str) -> None:
        """Record a request to leave. See `Manager.leave`."""
        limit = self._deadline(deadline)
        if not isinstance(reason, str):
            raise ConfigError(f"reason is a {type(reason).__name__}; give a text")
        shared = self._parts.shared
        by_ms = round((shared.clock.monotonic() + limit.total_seconds()) * 1_000)
        shared.step.post(on.LeaveWished(reason or "it was told to", by_ms))

    def leave_on_signal(self, signals: tuple[int, ...], deadline: timedelta | None) -> None:
        """Install the signal handlers. See `Manager.leave_on_signal`."""
        self.check_open()
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("leave_on_signal was called outside the main thread; call it there, once")
        self._deadline(deadline)
        self._signals.handle(signals, lambda name: self.leave(deadline, reason=f"it was sent {name}"))

    def _deadline(self, deadline: timedelta | None) -> timedelta:
        return limit_of(deadline, self._parts.shared.config.heal_timeout, "deadline")

    # --- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self, *, wait: bool, finished: bool) -> None:
        """Shut the Manager down. See `Manager.shutdown`."""
        if self._closing.is_set() or os.getpid() != self._pid:
            return  # the copies in a forked child belong to its parent
        parts, shared = self._parts, self._parts.shared
        try:
            # sys.exc_info shows an error inside an `except`, a `finally` or a `with` that the error passes. A script
            # that ends without `shutdown` may have been told to exit. Its end counts as a loss for the others.
            clean = finished and not self._exits and sys.exc_info()[0] is None
            serve_ms = round(shared.config.heal_timeout / MILLISECOND)
            for order in shared.step.tell(on.EndingAsked(clean, serve_ms)):
                if isinstance(order, do.ServeOn):
                    parts.graceful_shutdown.serve_on(order)
        finally:
            shared.reports.write_pending()  # later errors are caused by this end
            self._closing.set()
            parts.end(last=self._end_last, wait=wait)
            at_exit.forget(self)

    def at_end(self, end: Callable[[], object]) -> None:
        """Call `end` when everything else of the Manager has ended."""
        self._ends.append(end)

    def _end_last(self) -> None:
        # The signal handlers go last, because a launcher that sends a signal twice would otherwise kill this process
        # during its shutdown.
        with contextlib.ExitStack() as rest:
            rest.callback(self._signals.give_back)
            for end in self._ends:
                rest.callback(end)

    def end_at_exit(self) -> None:
        """Shut down because the interpreter exits. Only `at_exit` calls this."""
        self._exits = True
        self.shutdown(wait=True, finished=True)
