"""The start of a simulated trainer's step: the comparison of states, the request, its answer, the process group.

Law of this file: report events to the core, and perform its orders, beside the training thread.
"""

from __future__ import annotations

import hashlib

from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.types import Plan
from tft_sim.rank import Rank
from tft_sim.recovery import Recovery
from tft_sim.speaking import Speaking
from tft_sim.waiting import Life, Refused, ReplicaLostError, Waiter, error_of


class Quorum:
    """The quorum of the open attempt of one rank.

    Args:
        trainer: the rank.
        recovery, speaking: parts of it.
    """

    def __init__(self, trainer: Rank, recovery: Recovery, speaking: Speaking) -> None:
        self._trainer = trainer
        self._recovery = recovery
        self._speaking = speaking
        self._known = Waiter()  # resolved when the plan has arrived and the group is built, or there is none
        self._known.resolve(None)

    @property
    def is_known(self) -> bool:
        """Return whether the plan has arrived and the group is built, or there is none."""
        return self._known.done

    def start(self) -> Life:
        """Begin a step. Returns: whether a step began. False: this replica has left."""
        trainer = self._trainer
        if trainer.report(on.StartAsked()):
            return False
        yield self._known
        trainer.report(on.AttemptSettled(self._recovery.offers(trainer.plan)))
        for effect in trainer.report(on.StartReady(bool(trainer.unreached))):
            match effect:
                case do.Pause(ms):
                    trainer.mark("a rank paused before it asked again")
                    yield trainer.sleep(ms)
                case do.CompareState(name):
                    yield from self._compare(name)
        trainer.phase = "quorum"
        unreached, trainer.unreached = tuple(trainer.unreached.values()), {}
        started = on.StepStarted(
            checkpoint_metadata=trainer.name,
            group_usable=trainer.group is not None,
            shrink_only=trainer.shrink_only,
            poor_sources=tuple(sorted(self._recovery.poor_sources)),
            unreached=unreached,
        )
        asked = next((each for each in trainer.report(started) if isinstance(each, do.Ask)), None)
        self._speaking.record_begin(asked)
        if asked is not None:
            self._recovery.take_speculative_snapshot()
            self._known = trainer.spawn(self._negotiate(asked))
        return True

    def _compare(self, name: str) -> Life:
        """Reduce the states of all ranks of this group to a digest."""
        trainer, sound = self._trainer, self._trainer.weights
        if trainer.corrupts_once and not trainer.torn:
            trainer.corrupts_once = False
            self._recovery.num_corruptions += 1
            trainer.mark("a state went astray")
            trainer.note("holds a corrupted state")
            trainer.weights = f"astray/{trainer.name}/{trainer.clock.now_ms}"
        trainer.phase = "compare"
        own = "" if trainer.torn or trainer.outside.chance.take_raises(trainer.name) else trainer.weights
        digests = (yield trainer.outside.gather(trainer, name, own)) if trainer.world_size > 1 else (own,)
        if digests is None or not all(digests):
            trainer.mark("a state could not be compared")
            trainer.weights = sound  # an undetectable corruption is undone, because a failed comparison can't find it
            trainer.report(on.StateCompared(None))
        else:
            trainer.mark("states were compared")
            trainer.report(on.StateCompared(hashlib.blake2b("|".join(digests).encode(), digest_size=16).digest()))

    def wait(self) -> Life:
        """Wait until the plan has arrived and the group is built, or there is no plan."""
        trainer = self._trainer
        if not self._known.done:
            trainer.phase = "quorum"
            yield self._known

    # --- the quorum, beside the training thread -----------------------------------------------------------------------

    def _negotiate(self, order: do.Ask) -> Life:
        trainer = self._trainer
        attempt, request = order.attempt, order.request
        patience_ms = trainer.gives_up_after_ms or trainer.outside.timeouts.quorum_timeout_ms
        trainer.gives_up_after_ms = None
        deadline_ms = trainer.clock.now_ms + patience_ms
        while (answer := (yield trainer.outside.ask(trainer, request, deadline_ms))) is None:
            trainer.mark("a request was made again of a new manager server")
            trainer.outside.invariants.manager_restarted(trainer.host, None)
            for effect in trainer.report(on.ServerRestarted()):
                assert isinstance(effect, do.Ask)
                request = effect.request
        if isinstance(answer, Refused):
            self._refused(attempt, answer)
            return
        if isinstance(answer, Plan):
            arrived: on.Event = on.PlanArrived(attempt, answer)
        else:
            arrived = on.UnchangedArrived(attempt, answer)
            trainer.mark("a rank was told unchanged")
        for effect in trainer.report(arrived):
            if isinstance(effect, do.Configure):
                yield from self._configure(effect)
        trainer.restart_phase()

    def _refused(self, attempt: int, answer: Refused) -> None:
        trainer = self._trainer
        trainer.note(f"is refused a quorum ({answer.code})")
        if trainer.core.status.num_deferred:
            trainer.mark("a request failed with syncs in flight")
        trainer.report(on.QuorumFailed(attempt, error_of(answer)))
        trainer.restart_phase()

    def _configure(self, order: do.Configure) -> Life:
        trainer = self._trainer
        attempt, plan = order.attempt, order.plan
        if trainer.phase == "quorum":  # the training thread waits for this
            trainer.phase = "configure"
        trainer.leave_group()
        broken: Exception | None = trainer.core.status.broken
        if broken is not None:
            trainer.mark("a broken quorum was not configured")
            trainer.note("receives a broken quorum, and does not configure its group")
            trainer.report(on.ConfigureFailed(attempt, broken))
            return
        trainer.outside.invariants.joined_group(plan, trainer.rank)
        group = trainer.group = trainer.outside.group(plan.key, trainer.rank, plan.replica_ids, plan.store_replica_id)
        trainer.group_since_ms = trainer.clock.now_ms
        joined = yield trainer.within(group.join(trainer.replica_id), trainer.outside.timeouts.timeout_ms)
        # The group may have been aborted by a message that was read after a stop, just after the members met.
        if not joined or trainer.group is not group:
            trainer.mark("a rendezvous failed")
            trainer.note("can't form the group of its quorum")
            trainer.note_unreached(group)
            if trainer.group is group:
                trainer.leave_group()
            trainer.report(on.ConfigureFailed(attempt, ReplicaLostError("a rendezvous failed")))
            return
        trainer.num_reductions = 0
        trainer.report(on.GroupConfigured(attempt, plan.key))
