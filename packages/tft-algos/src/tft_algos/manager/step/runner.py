"""A rank's steps on the training thread: begin, wait for the plan, reduce, exchange state, vote.

Law of this file: the calls of a step in their order. The decisions about a step are in `tft_coord.core.step`, and each
part does its work in its own file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import final

import torch

from tft_algos.errors import ConfigError, LeftJob, ServerRestartedError, TooManyFailuresError, UsageError
from tft_algos.manager.assembly import Parts
from tft_algos.manager.config import limit_of
from tft_algos.manager.step.control_words import standing_coordinator
from tft_algos.manager.step.deferred import DeferredStep
from tft_algos.manager.step.error_reporter import text_of
from tft_coord.core.step import Effects, Healing
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.types import Plan, Purpose, Verdict
from tft_coord.errors import RequestTimeoutError


@final
class StepRunner:
    """The steps of one rank. The training thread calls its methods, unless they say otherwise.

    Args:
        parts: of the Manager.
        check_open: raises if the Manager can't be used any more.
    Attributes:
        strategy: the name of the strategy whose syncs the steps are. None: there is no strategy.
    """

    def __init__(self, parts: Parts, *, check_open: Callable[[], None]) -> None:
        self.strategy: str | None = None
        self._check_open = check_open
        self._parts = parts
        self._shared = parts.shared
        self._step = parts.shared.step
        self._config = parts.shared.config
        self._reports = parts.shared.reports
        self._quorum_task = parts.quorum_task
        self._reducer = parts.reducer
        self._step_progress = parts.step_progress
        self._own_time = parts.step_progress.own_time
        self._times = parts.shared.times
        self._standing = standing_coordinator(parts.shared.coordinator)
        self._deferred: list[DeferredStep] = []  # deferred steps that have not ended
        self._synchronize: Callable[[], None] | None = (
            torch.accelerator.synchronize if torch.accelerator.is_available() else None
        )

    # --- a step begins ------------------------------------------------------------------------------------------------

    def start(self, allow_heal: bool, shrink_only: bool, timeout: timedelta | None, asynchronous: bool | None) -> None:
        """Begin a step. See `Manager.start_quorum`."""
        if self._step.tell(on.StartAsked()):
            self.raise_if_left()
        limit = limit_of(timeout, self._config.quorum_timeout)
        for name, value in (("allow_heal", allow_heal), ("shrink_only", shrink_only)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}; give True or False")
        if asynchronous is not None and not isinstance(asynchronous, bool):
            raise ConfigError(f"use_async_quorum is {asynchronous!r}; give True, False or None")
        with self._own_time, self._times.of_round:
            self.settle()
        parts = self._parts
        parts.audit.step_begins()
        last = self._step.status
        if last.errors:
            silent = parts.unreached.step_failed(last.plan, last.errors)
            if silent:
                self._reports.log(logging.WARNING, "%s", silent)
        self._reducer.step_begins()
        self._step.tell(on.StartReady(urgent=parts.unreached.has_unsent))
        self._times.step_begins()
        effects = self._step.tell(
            on.StepStarted(
                checkpoint_metadata=self._shared.transport.metadata(),
                group_usable=parts.group.errored() is None,
                allow_heal=allow_heal,
                shrink_only=shrink_only,
                use_async_quorum=asynchronous,
                poor_sources=parts.exchange.poor_sources(),
                unreached=parts.unreached.take(),
                fingerprint=parts.fingerprint.unsent(),
            )
        )
        (begin,) = effects
        if isinstance(begin, do.GoOn):
            self._begin_without_request(begin)
        else:
            assert isinstance(begin, do.Ask), begin
            self._asked(begin, limit)

    def _begin_without_request(self, order: do.GoOn) -> None:
        """Begin a step without a request."""
        if order.looks_at_state:
            self._takes_snapshot()
        if order.prepares_to_serve:
            self._shared.transport.prepare_to_send()
        self._step_progress.step_begins()
        self._quorum_task.begin_without_request()
        if not self._step.status.is_asynchronous:
            self._reports.raise_fatal()

    def _asked(self, ask: do.Ask, limit: timedelta) -> None:
        """Send the request for a quorum, and do other work during the request."""
        parts = self._parts
        if ask.breaks:
            self._reports.log(
                logging.INFO, "requesting a new quorum, while the others continue in the current one: %s", ask.breaks
            )
        own_state = self._step.status.own_state() if self._takes_early(ask) else None
        self._step_progress.step_begins()
        parts.waits.quorum_limit = limit
        self._quorum_task.start(ask, limit)
        if own_state is not None:
            parts.speculative.take(own_state)
        if ask.prepares_to_serve:
            self._shared.transport.prepare_to_send()
        if not ask.request.use_async_quorum:
            self.wait_quorum()
            self._perform_exchange()
            self._reports.raise_fatal()  # if this group was lost meanwhile, it can't train

    def _takes_early(self, ask: do.Ask) -> bool:
        """Return whether the state is taken at this step boundary, for a newcomer."""
        return ask.may_take_early and self._takes_snapshot(asks=True)

    def _takes_snapshot(self, *, asks: bool = False) -> bool:
        """Return whether the state is taken at this step boundary. Check it periodically to know if it may be."""
        status, user = self._step.status, self._shared.user_state
        lineage = status.lineage if user.readable and not status.torn else None
        return self._parts.speculative.step_begins(
            status.name.attempt, status.step, lineage, len(user.names), asks=asks
        )

    def raise_if_left(self) -> None:
        """Raise LeftJob if this replica has left. See `StepControl.raise_if_left`."""
        status = self._step.status
        if status.left:
            self._reports.log(logging.INFO, "the training loop ends here, because this replica has left the job")
            replica_id = self._shared.coordinator.replica_id
            raise LeftJob(f"replica {replica_id} has left the job ({status.leave_reason})")

    def settle(self) -> None:
        """End what an attempt has left running: its quorum request, its fetch, its reductions."""
        self._quorum_task.settle()
        plan = self._step.status.plan
        self._step.tell(on.AttemptSettled(offers=plan is not None and self._parts.speculative.serves(plan)))
        self._reducer.finish()
        self._reducer.release()
        dropped = [step for step in self._deferred if step.is_abandoned and not step.started.runs]
        for step in dropped:
            self._reducer.forget(step.started)
            self._deferred.remove(step)
        if dropped:
            self._step.tell(on.FlightsDropped(tuple(step.name.attempt for step in dropped)))

    # --- the quorum ---------------------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Return whether a quorum was ever requested. Any thread may call this."""
        return self._quorum_task.has_begun

    def wait_quorum(self) -> None:
        """Wait for the quorum. See `Manager.wait_quorum`."""
        if not self._quorum_task.has_begun:
            raise UsageError("wait_quorum was called before start_quorum; call start_quorum first")
        with self._own_time, self._times.of_quorum:
            self._quorum_task.wait()

    def quorum_is_known(self) -> bool:
        """Return whether the quorum is known. See `StepControl.quorum_is_known`."""
        if not self._quorum_task.has_begun:
            raise UsageError("quorum_is_known was called before start_quorum; call start_quorum first")
        return self._quorum_task.has_ended

    def plan(self) -> Plan | None:
        """Wait for the plan of this step, on any thread.

        Returns: the plan; None if there is none.
        Raises: as `await_plan`.
        """
        self.await_plan()
        return self._step.status.plan

    def await_plan(self) -> None:
        """Wait until the plan of this step is here, or it is known that there is none. Any thread may call this.

        Raises: UsageError: no quorum was started. Errors of the quorum are not raised here.
        """
        if not self._quorum_task.has_begun:
            raise UsageError("a reduction needs a quorum; call start_quorum first")
        if not self._quorum_task.has_ended:
            with self._own_time, self._times.of_quorum:
                self._quorum_task.settle()

    def check_no_sync(self) -> None:
        """Refuse `Manager.allreduce` while a sync of the attached strategy is in flight.

        Raises: UsageError: a sync is in flight.
        """
        if self.strategy is None:
            return
        status = self._step.status
        if status.is_open or status.num_deferred:
            raise UsageError(
                f"allreduce was called while a sync of {self.strategy} is in flight, and its reductions may begin in "
                "another order on other members; call allreduce while no sync is in flight, for example after the "
                "inner step in which current_step() rises, with a fragment_sync_delay shorter than a period"
            )

    # --- a step ends --------------------------------------------------------------------------------------------------

    def end(self, timeout: timedelta | None) -> bool:
        """End a step. See `Manager.should_commit`."""
        limit = self._vote_limit(timeout)
        self._step.tell(on.EndAsked())
        self._own_time.finishes()
        self.await_plan()
        self._wait_for(self._reducer.finish)
        effects = self._step.tell(on.ReductionsEnded())
        if isinstance(effects[-1], do.Concluded):
            self._reducer.release_all()
            return self._concluded(effects[-1])
        if self._synchronize is not None:
            self._synchronize()
        self._reducer.release()
        self._parts.speculative.reductions_ended(readable=self._shared.user_state.readable)
        self._step_progress.waits = True  # for the word, for state, and for the verdict
        effects = self._step.tell(
            on.DeviceSynchronized(group_error=self._parts.group.errored(), on_device=self._synchronize is not None)
        )
        effects = self._worded(effects)
        if isinstance(effects[-1], do.ExchangeState):
            self._perform_exchange()
            effects = self._step.tell(on.VoteAsked())
        return self._concluded(self._vote(effects, limit))

    def _perform_exchange(self) -> None:
        with self._times.of_state:
            self._parts.exchange.perform()

    def _worded(self, effects: Effects) -> Effects:
        """Exchange the word of the round, if it has one. Return the effects that follow."""
        order = effects[-1]
        if not isinstance(order, do.SendWord | do.HearWord):
            return effects
        self._step_progress.awaits_words = True
        control_words = self._parts.control_words
        try:
            with self._times.of_round:
                ended = control_words.exchange(order) if isinstance(order, do.SendWord) else control_words.hear(order)
        finally:
            self._step_progress.awaits_words = False
        return self._step.tell(ended)

    def _wait_for(self, finish: Callable[[], None]) -> None:
        """Wait for what was begun in a step."""
        self._step_progress.finishes = True
        try:
            with self._times.of_round:
                finish()
        finally:
            self._step_progress.finishes = False

    def _vote_limit(self, timeout: timedelta | None) -> timedelta:
        limit = limit_of(timeout, self._config.timeout)
        if self._config.is_passive_rank:
            limit += self._config.timeout  # rank 0 votes after its reductions, which may take this long
        return limit

    def _vote(self, effects: Effects, limit: timedelta) -> do.Effect:
        """Vote, and end the step with the verdict.

        Raises: RequestTimeoutError, and other errors of the coordinator: there is no verdict.
        """
        (cast,) = effects
        assert isinstance(cast, do.CastVote), cast
        if not cast.yes:
            # An error has its own log line, together with the loss that caused it.
            self._reports.log(
                logging.INFO if cast.error is None else logging.DEBUG,
                "should_commit=False enough_replicas=%s errored=%s%s",
                cast.enough_replicas,
                None if cast.error is None else type(cast.error).__name__,
                f" ({cast.why})" if cast.why else "",
            )
        try:
            verdict = self._verdict(cast, limit)
        except ServerRestartedError:
            self._step.tell(on.ServerRestarted())
            self._reports.log(logging.WARNING, "the manager server ended during the vote, which counts as no")
            verdict = Verdict(yes=False)
        except RequestTimeoutError:
            self._reports.raise_fatal()  # raises the reason if it became known during the wait
            raise
        (end,) = self._step.tell(on.VerdictArrived(cast.attempt, verdict.yes, verdict.leaves, verdict.stands))
        return end

    def _verdict(self, cast: do.CastVote, limit: timedelta) -> Verdict:
        with self._times.of_round:
            return self._voted(cast, limit)

    def _voted(self, cast: do.CastVote, limit: timedelta) -> Verdict:
        if cast.stands and self._standing is not None:
            return self._standing.vote(
                cast.step, cast.yes, limit, key=cast.key, purpose=Purpose.COMMIT, leaving=cast.leaving, stands=True
            )
        return self._shared.coordinator.vote(
            cast.step, cast.yes, limit, key=cast.key, purpose=Purpose.COMMIT, leaving=cast.leaving
        )

    def _concluded(self, end: do.Effect, failure: Exception | None = None) -> bool:
        """Return whether the step was committed. `failure`: the error of a deferred step.

        Raises: TooManyFailuresError: more steps in a row failed than max_retries allows.
        """
        assert isinstance(end, do.Concluded), end
        error = failure or end.error
        if end.exhausted:
            raise TooManyFailuresError(
                f"replica {self._shared.coordinator.replica_id} failed to commit {end.failures} times in a row, and "
                f"max_retries is {self._config.max_retries}; {_last_failure(error, end.plan)}",
                failures=end.failures,
            ) from error
        return end.committed

    # --- several steps in flight --------------------------------------------------------------------------------------

    def defer(self) -> DeferredStep:
        """Detach the open step. See `StepControl.defer`."""
        if self._step.status.is_open:
            self._exchange_open()
        (aside,) = self._step.tell(on.DeferAsked())
        assert isinstance(aside, do.PutAside), aside
        step = DeferredStep(aside.name, self._step, self._reducer.detach(), end=self._end_deferred)
        self._deferred.append(step)
        return step

    def _exchange_open(self) -> None:
        """Finish what the open step has deferred: wait for its quorum, then give or take state.

        The control word waits for the end of the step, because its reductions may not have been asked for yet.
        """
        self._step.tell(on.StrategyExchanges())
        if self.plan() is not None:
            self._perform_exchange()

    def _exchange(self) -> None:
        """Give or take state before the step ends.

        A replica that recovers first sends its word of the round. So the others do not wait for its transfer at the end
        of the step.
        """
        if self._step.status.speaks_first:
            self._wait_for(self._reducer.finish)
            if self._synchronize is not None:
                self._synchronize()
            for order in self._step.tell(on.WordAsked(self._parts.group.errored())):
                assert isinstance(order, do.SendWord), order
                self._parts.control_words.send(order)
        self._perform_exchange()

    def _end_deferred(self, step: DeferredStep, timeout: timedelta | None) -> bool:
        """End a deferred step. See `DeferredStep.should_commit`."""
        self._check_open()
        limit = self._vote_limit(timeout)
        number = step.name.attempt
        if step.is_over:
            raise UsageError(f"{step.name} has ended; should_commit is called once for each deferred step")
        self._own_time.finishes()
        if self._step.status.is_open:
            self._exchange_open()
        self._step.tell(on.EndAsked(number))
        self._wait_for(step.started.finish)
        step.look()
        (end,) = self._step.tell(on.ReductionsEnded(number))
        if not isinstance(end, do.Concluded):
            if self._synchronize is not None:
                # Only the group's stream is synchronized, because later work on the device may run for long.
                torch.accelerator.current_stream().synchronize()
            step.started.release()
            effects = self._step.tell(
                on.DeviceSynchronized(number, self._parts.group.errored(), on_device=self._synchronize is not None)
            )
            step.look()
            before, self._step_progress.waits = self._step_progress.waits, True
            end = self._vote(self._worded(effects), limit)
            self._step_progress.waits = before
        self._reducer.forget(step.started)
        step.is_over = True
        if step in self._deferred:  # `settle` may have removed it
            self._deferred.remove(step)
        return self._concluded(end, step.failure)

    def exchange_state(self) -> bool:
        """Exchange state now. See `StepControl.exchange_state`."""
        self._step.tell(on.StrategyExchanges())
        self.await_plan()
        status = self._step.status
        if status.plan is None or status.exchanged or status.is_abandoned:
            return False
        self._reports.raise_fatal()
        self._exchange()
        self._reports.raise_fatal()
        return self._step.status.healing is Healing.LOADED


def _last_failure(error: BaseException | None, plan: Plan | None) -> str:
    if error is None and plan is not None and plan.num_participants < plan.min_replica_size:
        return f"{plan.num_participants} replicas take part, and min_replica_size is {plan.min_replica_size}"
    return f"the last error was: {text_of(error)}" if error is not None else "another rank of the group voted no"
