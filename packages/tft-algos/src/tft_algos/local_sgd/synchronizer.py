"""The common part of all outer updates: syncs that begin and end while the inner optimizer continues.

A sync is one step of the Manager. At its start, the data to send is captured and a quorum is requested, and training
continues. When the quorum is known, the reductions begin. Members that heal get the global weights, which do not change
in flight. At the end of the sync, the group votes. The fragment then takes the result, or returns to its last global
weights.

The first sync of a job is its opening. It reduces nothing, and all members begin with the weights of one member. A
member that joins later also requests a quorum at once, and its plan says that a sync of the others is running. This
member gives zeros, takes the global weights, trains from them during the reductions, and adopts the result with all
others.

Law of this file: the actions at the moments that `schedule` names, and their order. The numbers are in `fragment`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch.optim import Optimizer as TorchOptimizer

from tft_algos.errors import UsageError
from tft_algos.local_sgd.checks import check_still_synchronized
from tft_algos.local_sgd.fragment import Fragment
from tft_algos.local_sgd.optimizer_step_hook import OptimizerStepHook
from tft_algos.local_sgd.outer_update import OuterUpdate
from tft_algos.local_sgd.quantization import SyncQuantization
from tft_algos.local_sgd.schedule import Due, Schedule, fragment_of
from tft_algos.manager import Manager
from tft_algos.manager.step.deferred import DeferredStep


@final
class Sync:
    """A sync in flight.

    Attributes:
        index: the index of its fragment.
        age: inner steps since its start.
        reduces: its reductions have begun.
        has_begun: its reductions, if any, have begun, and state was exchanged.
        is_restored: the sync has failed, and its fragment is at its last global weights again.
        deferred: the Manager's deferred step, if a later sync has begun beside this one.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.age = 0
        self.reduces = False
        self.has_begun = False
        self.is_restored = False
        self.deferred: DeferredStep | None = None


@final
class Synchronizer:
    """The syncs of one member, driven by the hook of its inner optimizer.

    Args:
        manager: the syncs are its steps.
        fragments: in the order of their syncs.
        schedule: the schedule for this number of fragments.
        update: decides what is sent, and what is made of the mean.
        optimizer: the inner optimizer.
        modules: the modules whose parameters the fragments hold.
        alpha: the share of the live parameters that stays when a sync has ended.
        codecs: of what is sent. None: it is sent as it is.
    """

    def __init__(
        self,
        manager: Manager,
        fragments: Sequence[Fragment],
        schedule: Schedule,
        update: OuterUpdate,
        optimizer: TorchOptimizer,
        modules: Sequence[torch.nn.Module],
        *,
        alpha: float = 0.0,
        codecs: SyncQuantization | None = None,
    ) -> None:
        self._codecs = codecs
        self._manager = manager
        self._control = manager.strategy
        self._fragments = fragments
        self._schedule = schedule
        self._update = update
        self._alpha = alpha
        self._optimizer = optimizer
        self._modules = modules
        self._flight: list[Sync] = []
        self._was_broken_off = False
        self._follower = OptimizerStepHook(optimizer, self.inner_step, patience=schedule.period)
        # The ranks of a larger group learn of a quorum at different inner steps, but must exchange state together. So
        # they begin at a fixed number of inner steps, which is the same on all ranks.
        self._begins_at_age = max(schedule.delay // 2, 1) if self._control.config.world_size > 1 else None

    # --- the public methods ----------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Open the job, or join it, and then follow the inner optimizer.

        Raises: UsageError: this strategy is entered already.
        """
        if self._follower.follows:
            raise UsageError(
                "this strategy is already entered, so it would count each step of the inner optimizer twice; leave it "
                "before entering it again"
            )
        with self._rolling_back():
            self._end_leftovers()
            self._schedule.begin_period()
            self._open()
        self._control.inner_step_ended()
        self._follower.begin()

    def leave(self) -> None:
        """Stop following the inner optimizer, and fail the syncs in flight.

        Their fragments are restored here, so that the user may change the weights until the next `enter`.
        """
        self._follower.end()
        if self._flight:
            self._control.give_up_deferred()
            self._restore(self._flight)

    def state_loaded(self) -> None:
        """Record that other global weights were loaded. Syncs in flight fail, because they captured the old weights."""
        if self._flight:
            self._control.give_up_deferred()
            self._was_broken_off = True

    def inner_step(self) -> None:
        """Count a step of the inner optimizer, and do what is due.

        Raises: LeftJob: this replica has left, and its loop still runs.
        """
        with self._rolling_back():
            self._control.raise_if_left()
            if self._was_broken_off:
                self._end_leftovers()
            self._count()
        self._control.inner_step_ended()

    def _count(self) -> None:
        for sync in self._flight:
            sync.age += 1
        for due in self._schedule.inner_step():
            if self._manager.left:
                return
            match due:
                case Due.START:
                    self._start()
                case Due.END if self._flight:
                    self._end()
        if self._flight and not self._flight[-1].has_begun and not self._manager.left:
            if self._may_begin():
                self._begin()
            elif self._control.quorum_is_known():
                self._reduce_ahead()

    def sync_now(self) -> None:
        """Begin a sync and end it. Only allowed while no sync is in flight."""
        if self._manager.left:
            return
        with self._rolling_back():
            if self._was_broken_off:
                self._end_leftovers()
            self._schedule.begin_period()
            self._start()
            if self._flight:
                self._end()

    @contextlib.contextmanager
    def _rolling_back(self) -> Iterator[None]:
        """Roll back the syncs in flight if an error, or Ctrl-C, interrupts a sync.

        The caller may catch the error and continue from the last global weights. No interrupted sync commits, because
        some of its reductions may be missing.
        """
        try:
            yield
        except BaseException:
            self._was_broken_off = True
            self._control.give_up_deferred()
            self._restore(self._flight)
            raise

    # --- the parts of a sync ---------------------------------------------------------------------------------------

    def _end_leftovers(self) -> None:
        """Wait until no operation of an interrupted or abandoned sync writes into the buffers any more."""
        leftovers, self._flight = self._flight, []
        self._was_broken_off = False
        self._schedule.failed()
        self._give_up(leftovers)

    def _open(self) -> None:
        """Repeat the opening until this member holds the global weights, or joins a running sync of the others."""
        manager = self._manager
        while manager.current_step() == 0 and not manager.left:
            manager.start_quorum(use_async_quorum=True)
            plan = self._control.wait_plan()
            if plan is not None and plan.step > 0:
                self._schedule.joined()
                self._flight.append(Sync(0))
                self._begin()
                if self._schedule.delay == 0:
                    self._end()
                return
            self._control.exchange_state()
            manager.should_commit()

    def _start(self) -> None:
        manager = self._manager
        check_still_synchronized(self._optimizer, self._modules, self._fragments)
        if self._flight and not self._flight[-1].has_begun:
            self._begin()
        if self._flight:
            self._flight[-1].deferred = self._control.defer()
        sync = Sync(fragment_of(max(manager.current_step(), 1), len(self._flight), len(self._fragments)))
        self._capture(sync)
        manager.start_quorum(use_async_quorum=True)
        self._flight.append(sync)
        self._schedule.started()
        if self._schedule.delay == 0 or manager.current_step() == 0:
            self._begin()

    def _may_begin(self) -> bool:
        """Return whether the reductions of the latest sync may begin now without blocking the training."""
        if self._begins_at_age is not None:
            return self._flight[-1].age >= self._begins_at_age
        return self._control.quorum_is_known()

    def _has_abandoned(self) -> bool:
        """Return whether the syncs before the latest one have failed with its quorum."""
        return any(older.deferred is not None and older.deferred.is_abandoned for older in self._flight[:-1])

    def _reduce_ahead(self) -> None:
        """Start this rank's reductions before its group exchanges state, if the plan is the expected one."""
        plan, sync = self._control.wait_plan(), self._flight[-1]
        if plan is None or plan.step == 0 or self._has_abandoned():
            return
        if fragment_of(plan.step, len(self._flight) - 1, len(self._fragments)) == sync.index:
            self._reduce(sync)

    def _reduce(self, sync: Sync) -> None:
        if not sync.reduces:
            sync.reduces = True
            for number, part in enumerate(self._fragments[sync.index].slices):
                quantizer = None if self._codecs is None else self._codecs.quantizer(sync.index, number)
                self._control.reduce_in_sync(part, quantizer)

    def _begin(self) -> None:
        """Wait for the plan of the latest sync, start its reductions, and exchange state with the members that heal."""
        manager, sync = self._manager, self._flight[-1]
        sync.has_begun = True
        plan = self._control.wait_plan()
        if plan is None:
            return  # the vote of this sync will be a no
        if self._has_abandoned():
            failed, self._flight = self._flight[:-1], [sync]
            self._schedule.failed(latest_succeeded=True)
            self._give_up(failed)
        if plan.step == 0:
            # No member with progress is left, so this sync is the opening.
            self._control.exchange_state()
            manager.should_commit()
            self._flight.clear()
            self._schedule.failed()
            return
        index = fragment_of(plan.step, len(self._flight) - 1, len(self._fragments))
        if index != sync.index:
            sync.index = index
            self._capture(sync)
        self._reduce(sync)
        self._control.exchange_state()

    def _capture(self, sync: Sync) -> None:
        fragment = self._fragments[sync.index]
        with torch.no_grad():
            self._update.capture(sync.index, fragment)
        fragment.give()

    def _end(self) -> None:
        manager = self._manager
        if not self._flight[-1].has_begun:
            oldest = self._flight[0]
            self._begin()
            if not self._flight or self._flight[0] is not oldest:
                return  # the oldest sync has failed
        sync, step = self._flight[0], manager.current_step()
        try:
            committed = self._conclude(sync)
        except BaseException as error:
            failed, self._flight = self._flight, [each for each in self._flight if not self._is_over(each)]
            self._schedule.failed()
            self._restore(failed)
            if manager.current_step() != step:
                self._control.report_torn(error)  # the sync was committed, and is not applied
            raise
        if not committed:
            others, self._flight = self._flight[1:], []
            self._schedule.failed()
            self._restore([sync])
            self._give_up(others)
            return
        self._flight.pop(0)
        self._schedule.ended()
        try:
            with self._control.applying():
                self._apply(sync.index)
        except BaseException as error:  # also Ctrl-C, after which a notebook continues
            self._control.report_torn(error)
            raise

    def _apply(self, index: int) -> None:
        """Apply a committed sync: make new global and live weights from the mean of its fragment."""
        fragment = self._fragments[index]
        fragment.take_result()
        if self._alpha > 0:
            fragment.keep_local()
        with torch.no_grad():
            self._update.apply(index, fragment)
        fragment.save()
        if self._alpha > 0:
            fragment.merge(self._alpha)

    def _conclude(self, sync: Sync) -> bool:
        """End a sync with its vote, or without one if it was abandoned.

        Afterwards no operation writes into its buffers.
        """
        return (sync.deferred or self._manager).should_commit()

    def _is_over(self, sync: Sync) -> bool:
        return sync.deferred.is_over if sync.deferred is not None else self._control.verdict is not None

    def _give_up(self, syncs: Sequence[Sync]) -> None:
        """End syncs that have failed together with another one."""
        self._restore(syncs)
        for sync in syncs:
            self._conclude(sync)

    def _restore(self, syncs: Sequence[Sync]) -> None:
        """Restore the last global weights of the fragments of these syncs."""
        for sync in syncs:
            if not sync.is_restored:
                self._fragments[sync.index].restore()
                sync.is_restored = True
