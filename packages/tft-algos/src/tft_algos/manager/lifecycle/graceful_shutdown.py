"""The calls and waits of a replica that leaves the job on purpose.

Law of this file: telling the manager server, and waiting for the members that heal from here. The step core decides
whether and when this replica leaves.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from datetime import timedelta
from typing import Final, final

from tft_algos.errors import ServerRestartedError
from tft_algos.manager.context import ManagerContext
from tft_coord.core.step.effects import ReportLeft, ServeOn, TellLeaving
from tft_coord.errors import CoordinationError, RequestTimeoutError
from tft_pg.threads import join_within

LEAVE_TAKEN_WITHIN: Final = timedelta(seconds=5)


@final
class GracefulShutdown:
    """The graceful shutdown of one rank.

    Args:
        shared: what all parts share.
    Attributes:
        released: set when no member heals from this group any more.
    """

    def __init__(self, shared: ManagerContext) -> None:
        self.released = threading.Event()
        self._shared = shared
        self._notifier: threading.Thread | None = None

    def left(self, order: ReportLeft) -> None:
        """Log that this replica leaves."""
        self._shared.reports.log(logging.INFO, "leaving the job: %s", order.reason)

    def notify(self, order: TellLeaving) -> None:
        """Tell the manager server that this group leaves."""
        if order.waits:
            self._call(order)
        elif not self._shared.closing.is_set():
            self._notifier = threading.Thread(target=self._call, args=[order], name="tft-leave", daemon=True)
            self._notifier.start()

    def _call(self, order: TellLeaving) -> None:
        config, serve = self._shared.config, timedelta(milliseconds=order.serve_ms)
        within = min(LEAVE_TAKEN_WITHIN, config.timeout)
        try:
            self._shared.coordinator.leave(order.reason, serve, within, finished_step=order.finished_step)
        except (CoordinationError, ServerRestartedError) as error:
            # The other replicas then detect that this process ends, and lose the running step. In a group that has
            # finished, one report is enough, and the manager server may have ended with rank 0.
            level = logging.WARNING if order.finished_step is None or config.world_size == 1 else logging.DEBUG
            self._shared.reports.log(
                level, "could not notify the manager server that this replica is leaving: %s", error
            )
            self.released.set()

    def serve_on(self, order: ServeOn) -> None:
        """Wait until the members that heal from here have their state, and then for this group's other ranks."""
        shared = self._shared
        remaining_s = order.until_ms / 1_000 - shared.clock.monotonic()
        if remaining_s > 0 and not shared.clock.wait(self.released, remaining_s):
            shared.reports.log(
                logging.WARNING,
                "the deadline to leave has passed, so this replica ends although others may still heal from it",
            )
        if order.meets and shared.step.status.fatal is None:
            # The manager server, which knows the location of each rank's state, ends with rank 0.
            with contextlib.suppress(RequestTimeoutError, CoordinationError):
                shared.coordinator.gather("left", "", shared.config.timeout)

    def close(self) -> None:
        """Wait for a report that is still being sent."""
        if self._notifier is not None:
            join_within(self._notifier)
