"""From the request for a quorum to a process group that is built for it, on its own thread.

The training thread continues meanwhile. It waits here when it needs to know the participants.

Law of this file: one request at a time, its thread and its end. The step core decides the meaning of an answer.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, final

from tft_algos.errors import LeftJob, ServerRestartedError, StepAbandonedError
from tft_algos.manager.context import ManagerContext
from tft_algos.manager.interfaces import ProcessGroupLike
from tft_algos.manager.quorum.aborter import QuorumAborter
from tft_algos.manager.quorum.fingerprint import OwnFingerprint
from tft_algos.manager.quorum.rank0_groups import global_ranks
from tft_algos.manager.quorum.unreached import UnreachedPeers
from tft_algos.manager.step.error_reporter import raise_reported
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.types import QuorumKey
from tft_coord.errors import CoordinationClosedError, RefusedError, ReplicaGroupLostError


@dataclass(frozen=True, slots=True)
class _Question:
    """One negotiation to run, and the future that it sets."""

    future: Future[None]
    run: Callable[[], None]


def _ask_all(questions: queue.SimpleQueue[_Question | None]) -> None:
    """Run the negotiations one after the other, until a None arrives.

    This is a function and not a method, so that between two steps the thread only keeps the queue alive.
    """
    while (question := questions.get()) is not None:
        try:
            question.run()
        except BaseException as error:
            question.future.set_exception(error)
        else:
            question.future.set_result(None)
        del question


END_WITHIN_S: Final = 10.0
_NOTHING_ASKED: Final[Future[None]] = Future()
_NOTHING_ASKED.set_result(None)


@final
class QuorumTask:
    """The negotiation of one rank.

    Args:
        shared: what all parts share.
        group: the process group across replicas. Only this class builds it.
        aborter: knows the quorum for which the group is built.
        fingerprint: sent whole to a manager server that has received none.
        unreached: told of each configure, so that the next request names the unreachable peers.
        before_configure: called before each configure. After it, no operation of the previous configuration starts.
    """

    def __init__(
        self,
        shared: ManagerContext,
        *,
        group: ProcessGroupLike,
        aborter: QuorumAborter,
        fingerprint: OwnFingerprint,
        unreached: UnreachedPeers,
        before_configure: Callable[[], object] = lambda: None,
    ) -> None:
        self._before_configure = before_configure
        self._config = shared.config
        self._step = shared.step
        self._coordinator = shared.coordinator
        self._reports = shared.reports
        self._clock = shared.clock
        self._times = shared.times
        self._group = group
        self._aborter = aborter
        self._fingerprint = fingerprint
        self._unreached = unreached
        self._closing = shared.closing
        # This is not an executor, because at exit the interpreter first joins the threads of executors, and a request
        # may wait for minutes. `close`, which the Manager calls at exit, ends this thread.
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[None] | None = None

    # --- the training thread ------------------------------------------------------------------------------------------

    def start(self, ask: do.Ask, timeout: timedelta) -> None:
        """Start a request. Call this after the last request has ended."""
        if self._thread is None:
            self._thread = threading.Thread(target=_ask_all, args=[self._questions], name="tft-quorum", daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        self._last = future
        self._questions.put(_Question(future, lambda: self._negotiate(ask, timeout)))

    def begin_without_request(self) -> None:
        """Record that a step begins in the current quorum, so no request is sent."""
        self._last = _NOTHING_ASKED
        if self._reports.records.wants_quorums:
            self._record(reconfigures=False, duration_s=0.0)

    @property
    def has_begun(self) -> bool:
        """Return whether a request was ever started."""
        return self._last is not None

    @property
    def has_ended(self) -> bool:
        """Return whether nothing is pending: the plan is here and the group is built, or there is no plan."""
        return self._last is None or self._last.done()

    def wait(self) -> None:
        """Wait for the end of the request.

        Raises: the reason why there is no plan.
        """
        if self._last is not None:
            try:
                self._last.result()
            except (ReplicaGroupLostError, RefusedError) as error:
                raise_reported(error)

    def settle(self) -> None:
        """Wait for the end of the request, whatever its result."""
        with contextlib.suppress(Exception, LeftJob):  # the error was recorded when it happened
            self.wait()

    def close(self, *, wait: bool) -> None:
        """End the thread. No request follows. `wait`: wait until the thread has ended."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._questions.put(None)
        if not wait:
            return
        # The thread ends wherever it waits, because the coordinator is closed and the process group shut down.
        thread.join(END_WITHIN_S)
        if thread.is_alive():
            self._reports.log(logging.WARNING, "the quorum thread did not end within %g s", END_WITHIN_S)

    # --- the quorum thread --------------------------------------------------------------------------------------------

    def _negotiate(self, ask: do.Ask, timeout: timedelta) -> None:
        """Request a quorum, and configure the group."""
        begun = self._clock.monotonic()
        try:
            configures = self._ask(ask, timeout)
            if configures is not None:
                self._configure(configures)
            self._record(reconfigures=configures is not None, duration_s=self._clock.monotonic() - begun)
        except Exception as error:
            if self._closing.is_set() and isinstance(error, CoordinationClosedError):
                raise  # the end of this Manager ended the request, which is not an error to report
            for report in self._step.tell(on.QuorumFailed(ask.attempt, error)):
                if isinstance(report, do.ReportNoQuorum):
                    self._reports.no_quorum(report.name, report.error)
                    if isinstance(report.error, StepAbandonedError):
                        raise LeftJob(str(report.error)) from error
            raise

    def _ask(self, ask: do.Ask, timeout: timedelta) -> do.Configure | None:
        """Repeat the request until there is an answer.

        Returns: the process group to build for it, if one is needed.
        Raises: the errors of the coordinator. StaleQuorumError: the answer names a quorum that this rank does not hold.
        """
        deadline = self._clock.monotonic() + timeout.total_seconds()
        request = ask.request
        while True:
            remaining = timedelta(seconds=max(deadline - self._clock.monotonic(), 0.001))
            try:
                answer = self._coordinator.quorum(request, remaining)
            except ServerRestartedError:
                for again in self._step.tell(on.ServerRestarted()):
                    if isinstance(again, do.Ask):
                        request = replace(again.request, fingerprint=self._fingerprint.whole())
                continue
            self._fingerprint.was_sent(request.fingerprint)
            if isinstance(answer, QuorumKey):
                self._times.planned(heals=False)
                effects = self._step.tell(on.UnchangedArrived(ask.attempt, answer))
            else:
                self._times.planned(heals=answer.heal)
                effects = self._step.tell(on.PlanArrived(ask.attempt, answer))
            return next((effect for effect in effects if isinstance(effect, do.Configure)), None)

    def _record(self, *, reconfigures: bool, duration_s: float) -> None:
        if not self._reports.records.wants_quorums:
            return
        status = self._step.status
        if status.plan is not None:
            reconfigured = reconfigures and status.configured == status.plan.key
            self._reports.records.quorum(status.name, status.plan, reconfigured=reconfigured, duration_s=duration_s)

    def _configure(self, order: do.Configure) -> None:
        """Build the process group for a plan. A failure is an error of the step, not of the quorum."""
        config, plan = self._config, order.plan
        begun = self._clock.monotonic()
        store = f"{plan.store_address}/tft/{config.job}/{plan.key}/{config.rank}"
        try:
            with self._aborter.configuring(plan.key):
                broken = self._step.status.broken
                if broken is not None:
                    raise broken
                self._before_configure()
                self._group.configure(  # by keyword, because the groups of others have another order
                    store_addr=store,
                    rank=plan.replica_rank,
                    world_size=plan.replica_world_size,
                    replica_id=plan.replica_id,
                    quorum_id=plan.key.quorum_id,
                    group_rank=config.rank,
                    group_world_size=config.world_size,
                    global_ranks=global_ranks(plan.replica_world_size, config),
                )
        except Exception as error:
            found = self._unreached.configure_failed(plan, error, broken=self._step.status.broken is not None)
            self._step.tell(on.ConfigureFailed(order.attempt, found.error))
            self._reports.configure_failed(self._step.status.name, found.error, warning=found.warning)
            return
        self._unreached.group_configured()
        self._step.tell(on.GroupConfigured(order.attempt, plan.key))
        self._reports.log(
            logging.INFO,
            "reconfigured: quorum %s, rank %d of %d, %d participants, %.0f ms",
            plan.key,
            plan.replica_rank,
            plan.replica_world_size,
            plan.num_participants,
            1_000 * (self._clock.monotonic() - begun),
        )
