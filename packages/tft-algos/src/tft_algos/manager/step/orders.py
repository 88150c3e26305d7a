"""The performers of the step's effects, on the thread that delivered the event.

Law of this file: one line for each effect. Effects that the delivering thread performs itself, such as a vote, are
elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from tft_algos.errors import ManagerClosedError, StateLoadError
from tft_algos.manager.context import ManagerContext
from tft_algos.manager.interfaces import ProcessGroupLike
from tft_algos.manager.lifecycle.graceful_shutdown import GracefulShutdown
from tft_algos.manager.quorum.aborter import QuorumAborter
from tft_algos.manager.recovery.exchange import StateExchange
from tft_algos.manager.recovery.speculative import SpeculativeSnapshot
from tft_algos.manager.recovery.state_check import StateCheck
from tft_algos.manager.reduce.reducer import Reducer
from tft_algos.manager.step.error_reporter import raise_reported
from tft_algos.manager.step.mailbox import Perform
from tft_algos.manager.step.own_time import OwnTime
from tft_algos.manager.step.time_account import Wait
from tft_algos.manager.step.time_log import log_stall, log_step
from tft_coord.core.step import effects as do


@final
@dataclass(frozen=True, slots=True)
class Orders:
    """The parts of one Manager that perform the effects of its step.

    Args:
        shared: what all parts share.
        group: the process group across replicas.
        aborter: aborts the group for one quorum.
        speculative, exchange, check, graceful_shutdown, own_time, reducer: parts of the Manager.
    """

    shared: ManagerContext
    group: ProcessGroupLike
    aborter: QuorumAborter
    speculative: SpeculativeSnapshot
    exchange: StateExchange
    check: StateCheck
    graceful_shutdown: GracefulShutdown
    own_time: OwnTime
    reducer: Reducer

    def performers(self) -> Mapping[type, Perform]:
        """Return the performer of each type of effect."""
        return {
            do.RefuseState: lambda order: self.exchange.refuse(order.plan, order.why),
            do.EndFetch: self.exchange.end_fetch,
            do.Pause: self.pause,
            do.CompareState: self.check.compare,
            do.UsePlan: self.use_plan,
            do.ForgetPace: lambda _: self.own_time.forget(),
            do.Fetch: self.exchange.start_fetch,
            do.BreakQuorum: self.break_quorum,
            do.EndQuorum: self.end_quorum,
            do.BreakAll: lambda _: self.aborter.break_all(),
            do.AbortGroup: self.abort_group,
            do.ReportHealed: self.exchange.healed,
            do.ReportHealFailed: self.exchange.heal_failed,
            do.RecordCommit: self.record_commit,
            do.ReportError: self.report_error,
            do.ReportLateLoss: self.report_late_loss,
            do.ReportGroupLost: self.report_group_lost,
            do.ReportTooFew: self.report_too_few,
            do.ReportAbandoned: self.report_abandoned,
            do.ReportLeft: self.graceful_shutdown.left,
            do.TellLeaving: self.graceful_shutdown.notify,
            do.Raise: self.raise_error,
        }

    def pause(self, order: do.Pause) -> None:
        """Wait, unless this Manager ends.

        Raises: ManagerClosedError.
        """
        shared = self.shared
        with shared.times.waiting(Wait.ROUND, also=self.own_time):
            shared.clock.wait(shared.closing, order.ms / 1_000)
        if shared.closing.is_set():
            raise ManagerClosedError(
                f"the Manager of replica {shared.coordinator.replica_id} was shut down; make a new one"
            )

    def use_plan(self, order: do.UsePlan) -> None:
        self.shared.reports.plan_arrived(order.plan)
        self.speculative.plan_arrived(order.plan)

    def break_quorum(self, order: do.BreakQuorum) -> None:
        notice = order.notice
        self.shared.times.broke()
        self.shared.reports.quorum_broke(notice, is_closing=self.shared.closing.is_set())
        self.aborter.break_quorum(notice.key)
        self.exchange.source_lost(notice)

    def abort_group(self, _: do.AbortGroup) -> None:
        self.shared.times.broke()
        self.group.abort()

    def end_quorum(self, order: do.EndQuorum) -> None:
        if not self.shared.closing.is_set():
            self.shared.reports.log(logging.INFO, "%s; its running operations are aborted", order.why)
        self.aborter.break_quorum(order.key)

    def record_commit(self, order: do.RecordCommit) -> None:
        name, plan = order.name, order.plan
        self.shared.reports.records.commit(
            name, order.committed, num_participants=plan.num_participants if plan is not None else 0
        )
        self.reducer.step_ended(name, committed=order.committed)
        self.own_time.step_ended(counts=order.committed and not order.excused)
        self.times_ended(order)
        if order.excused:  # the excuse is over, and the silence of a rank that now holds its interpreter's lock counts
            self.shared.coordinator.beat()
        if plan is not None:
            self.speculative.step_ended(name.attempt, plan)

    def times_ended(self, order: do.RecordCommit) -> None:
        shared, plan, name = self.shared, order.plan, order.name
        times, stall = shared.times.step_ended(
            committed=order.committed,
            key=plan.key if plan is not None else None,
            step=name.step + order.committed,
        )
        config = shared.config
        if config.log_steps:
            log_step(shared.reports, config.job, name, plan, times, committed=order.committed)
        if stall is not None and config.rank == 0:
            log_stall(shared.reports, config.job, stall)

    def report_error(self, order: do.ReportError) -> None:
        if order.counts:
            self.shared.times.broke()
        self.shared.reports.error(order.name, order.error, counts=order.counts, is_between=order.is_between)

    def report_late_loss(self, order: do.ReportLateLoss) -> None:
        if not self.shared.closing.is_set():
            self.shared.reports.loss_came_late(order.notice)

    def report_group_lost(self, order: do.ReportGroupLost) -> None:
        self.graceful_shutdown.released.set()
        self.shared.reports.group_lost(order.name, order.error)

    def report_too_few(self, order: do.ReportTooFew) -> None:
        self.shared.reports.log(
            logging.WARNING,
            "%d replicas take part, and min_replica_size is %d, so no step commits until more have joined",
            order.plan.num_participants,
            order.plan.min_replica_size,
        )

    def report_abandoned(self, order: do.ReportAbandoned) -> None:
        self.shared.reports.log(logging.INFO, "should_commit=False: %s", order.error)

    def raise_error(self, order: do.Raise) -> None:
        cause: BaseException | None = order.cause
        if isinstance(cause, StateLoadError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if cause is not None:
            raise order.error from cause
        raise_reported(order.error)
