"""The user's training loop with LocalSGD, DiLoCo or Streaming DiLoCo, as a script: syncs that run beside the training.

The loop trains by itself for a while, starts to reduce one fragment of its model, and trains on. It ends that sync some
starts later. So several syncs are in flight, each one a step of the core.

Law of this file: the strategy's actions and their moments, as in `tft_algos.local_sgd.synchronizer`. The step core
decides the consequences. Source: docs/protocol/the-step.md, "Deferred steps".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.types import Plan
from tft_sim.invariants import InvariantError, Reduced, Round
from tft_sim.loops import NUM_BUCKETS, Loop
from tft_sim.trainer import Trainer
from tft_sim.waiting import Life, Waiter

INNER_STEPS = 3  # between a start and the next end


def fragment_of(step: int, ahead: int, num_fragments: int) -> int:
    """Return the fragment that a sync reduces if it starts at that step, with that many syncs in flight."""
    return (step - 1 + ahead) % num_fragments


@final
@dataclass(slots=True, eq=False)
class Sync:
    """One sync, from its start to its end.

    Args:
        fragment: number of the reduced fragment.
        step: committed steps at the sync's vote, if the syncs before it are committed.
        number: of its attempt, once a later sync has begun beside it. 0: it is open.
        has_begun: its plan has arrived, so its reductions have begun, if there is anything to reduce.
        results: of its reductions.
    """

    fragment: int = 0
    step: int = 0
    number: int = 0
    has_begun: bool = False
    results: list[Waiter] = field(default_factory=list)


@final
class SyncLoop(Loop):
    """The life of a trainer that synchronizes now and then.

    Args:
        trainer: the trainer that runs the loop.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._num_fragments = trainer.settings.num_fragments
        self._most = trainer.settings.most_in_flight
        self._flight: list[Sync] = []  # oldest first

    def one_step(self) -> Life:
        """Run a start, inner steps, and the end of the oldest sync when the maximum number is in flight."""
        yield from self.load_by_hand()
        if self.trainer.restarts_strategy:
            yield from self._break_off()
        if not (yield from self._start()):
            return
        yield from self._train()
        if len(self._flight) >= self._most:
            yield from self._end()

    def _train(self) -> Life:
        """Run inner steps. The newest sync begins as soon as its plan is known."""
        trainer = self.trainer
        step_ms = trainer.outside.chance.step_ms(trainer.outside.name)
        long = step_ms >= trainer.outside.timeouts.slowest_step_ms
        for _ in range(INNER_STEPS):
            if self._flight and not self._flight[-1].has_begun and (trainer.quorum.is_known or long):
                yield from self._begin()
            if long and trainer.excused:
                trainer.mark("a first step took longer than slowest_step")
            trainer.phase = "forward"
            yield trainer.sleep(step_ms if long else step_ms // INNER_STEPS)
            if long:
                break
        yield from trainer.hang_if_asked("forward")

    # --- starting ---------------------------------------------------------------------------------------------------

    def _start(self) -> Life:
        """Ask for a quorum, in the background. A fresh member waits for it, to begin with the others' weights.

        Returns: whether the request was made. False: this replica has left.
        """
        trainer = self.trainer
        if self._flight and not self._flight[-1].has_begun:
            yield from self._begin()
        if self._flight:
            (aside,) = trainer.report(on.DeferAsked())
            assert isinstance(aside, do.PutAside)
            self._flight[-1].number = aside.name.attempt
        if not (yield from trainer.quorum.start()):
            return False
        self._flight.append(Sync())
        if not trainer.live:
            yield from self._begin()
        return True

    def _begin(self) -> Life:
        """Wait for the plan of the newest sync, then start its reductions and the transfer of state for healing
        members."""
        trainer, sync = self.trainer, self._flight[-1]
        sync.has_begun = True
        yield from trainer.quorum.wait()
        plan = trainer.status.plan
        if plan is None:
            return  # the vote will be a no
        trainer.outside.invariants.quorum_known(trainer.host, trainer.rank, plan.key)
        yield from self._end_abandoned()
        sync.step = plan.step + len(self._flight) - 1
        if plan.step == 0:
            # All members begin with the same weights, so there is nothing to reduce.
            yield from trainer.exchange_now()
            self._flight.clear()
            yield from self._conclude(sync)
            return
        sync.fragment = fragment_of(plan.step, len(self._flight) - 1, self._num_fragments)
        self._start_reductions(sync, plan)
        self._look_if_behind(plan)
        yield from trainer.exchange_now(sync.results)

    def _end_abandoned(self) -> Life:
        """End, without a vote, the syncs that failed with their quorum."""
        trainer, sync = self.trainer, self._flight[-1]
        failed = [each for each in self._flight[:-1] if self._is_abandoned(each)]
        if not failed:
            return
        trainer.mark("a new id failed what was in flight")
        if len(failed) > 1:
            trainer.mark("a new id failed several syncs in flight")
        trainer.note(f"discards {_syncs(len(failed))} in flight, because the quorum has changed")
        self._flight = [sync]
        for each in failed:
            yield from self._conclude(each)

    def _is_abandoned(self, sync: Sync) -> bool:
        status = self.trainer.status.attempt(sync.number)
        return status is not None and status.abandoned is not None

    def _look_if_behind(self, plan: Plan) -> None:
        """Check that a member that heals with syncs in flight (its state may be torn) returns to their starting
        step."""
        trainer = self.trainer
        aside = trainer.status.aside
        if plan.heal and aside and not any(each.error for each in aside):
            trainer.mark("one healed with syncs in flight")
            if plan.step != trainer.step:
                raise InvariantError("F1", f"{trainer.name} heals from {trainer.step} to {plan.step} in {plan.key}")

    def _start_reductions(self, sync: Sync, plan: Plan) -> None:
        """Start all reductions of a sync at once."""
        trainer = self.trainer
        if trainer.status.broken is None or plan.replica_world_size == 1:  # a lone member needs no peer
            trainer.outside.invariants.sync_started(trainer.host, trainer.rank, plan.key, sync.fragment)
            trainer.note(f"starts fragment {sync.fragment}, with {_syncs(len(self._flight) - 1)} in flight")
        for bucket in range(NUM_BUCKETS):
            part = f"fragment {sync.fragment}, bucket {bucket}"
            gradient = f"{trainer.replica_id}:{sync.step}:{sync.fragment}.{bucket}"
            sync.results.append(trainer.spawn(trainer.reduce(part, gradient)))

    # --- ending -----------------------------------------------------------------------------------------------------

    def _end(self) -> Life:
        """End the oldest sync."""
        oldest = self._flight[0]
        if not self._flight[-1].has_begun:
            yield from self._begin()
            if not self._flight or self._flight[0] is not oldest:
                return  # the sync has failed
        self._flight.pop(0)
        self.fail_if_asked(oldest.number)
        yield from self._conclude(oldest)

    def _conclude(self, sync: Sync) -> Life:
        """Conclude a sync, with a vote or without. A no fails the syncs that began after it."""
        trainer = self.trainer
        concluded, vote = yield from trainer.should_commit(sync.number, sync.results)
        reduced: Reduced | None = None
        plan = concluded.plan
        results = [result.value for result in sync.results]
        if concluded.committed and plan is not None and None not in results:  # `concluded` refuses a lost result
            numbers = tuple(number for result in results for number in result.numbers)
            gradients = tuple(gradient for result in results for gradient in result.gradients)
            reduced = Reduced(plan.key, trainer.rank, numbers, gradients)
            if self._flight:
                trainer.mark("a sync was committed with others in flight")
            if sync.results:
                trainer.outside.invariants.sync_committed(trainer.host, trainer.rank, plan.key, sync.fragment)
        yield from self.concluded(concluded, vote, reduced)
        if not concluded.committed and vote is not None:
            failed, self._flight = self._flight, []
            for each in failed:
                yield from self._conclude(each)

    def _break_off(self) -> Life:
        """End the strategy in the middle of its work. The loop enters it again."""
        trainer = self.trainer
        trainer.restarts_strategy = False
        if not self._flight:
            return
        trainer.mark("a strategy ended with syncs in flight")
        trainer.note(f"discards {_syncs(len(self._flight))} in flight, because the strategy ended")
        trainer.report(on.FlightsGivenUp())
        trainer.outside.invariants.syncs_discarded(trainer.host, trainer.rank)
        failed, self._flight = self._flight, []
        for each in failed:
            yield from self._conclude(each)

    def not_committed(self, vote: Round, step: int) -> None:
        """Record the syncs that fail with this vote."""
        super().not_committed(vote, step)
        trainer = self.trainer
        trainer.outside.invariants.syncs_discarded(trainer.host, trainer.rank)
        if self._flight:
            trainer.mark("a failed vote failed what was in flight")
            trainer.note(f"discards {_syncs(len(self._flight))} in flight, because an earlier sync has failed")


def _syncs(number: int) -> str:
    return f"{number} sync" + ("s" if number != 1 else "")
