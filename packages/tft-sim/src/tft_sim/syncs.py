"""A trainer that synchronizes now and then: LocalSGD, DiLoCo, Streaming DiLoCo, as far as the quorum sees them.

It trains by itself for a while, starts to reduce one fragment of its model, trains on, and commits what came out of it
some starts later. So several syncs are in flight: started in one quorum, one after another, voted on in that order. A
quorum of another key, or one that fails, fails all of them.

Law of this file: one rank's syncs, from start to end; what it has in common with other trainers is `trainer.py`'s.
Source: protocol.md section 5.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

from tft_coord.core.types import Plan, Purpose, QuorumKey, RankRequest
from tft_sim.invariants import Contribution, InvariantBroken, Reduced, Round
from tft_sim.trainer import NUM_BUCKETS, Group, Life, Refused, Trainer, Waiter

INNER_STEPS = 3  # between a start and the next end


@final
@dataclass(slots=True, eq=False)
class Sync:
    """One sync, from its start to its end.

    Args:
        plan: under which it was started; None: there was none.
        step: committed steps when it is voted on, if those before it are committed.
        fragment: that it reduces.
        results: of its reductions; none: they could not be started.
        numbers: of its reductions.
        failed: it can't be committed any more, as all members know, and is not voted on.
        good: it has had no error here so far; else it is voted no.
        word: the sum of all words, where this rank has sent its own before its end, because it recovers.
    """

    plan: Plan | None
    step: int = 0
    fragment: int = 0
    results: list[Waiter] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    failed: bool = False
    good: bool = True
    word: Waiter | None = None


@final
class Syncs:
    """The life of a trainer that synchronizes now and then.

    Args:
        trainer: whose.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._outside = trainer.outside
        self._num_fragments = trainer.settings.num_fragments
        self._most = trainer.settings.most_in_flight
        self._syncs: list[Sync] = []  # in the order of their starts; those that failed stay until their end is due
        self._asked: Waiter | None = None
        self._unheard_in: QuorumKey | None = None  # which it held when a request of its own got no answer

    @property
    def in_flight(self) -> list[Sync]:
        """Those that are still to be voted on."""
        return [sync for sync in self._syncs if not sync.failed]

    @property
    def _keys_in_flight(self) -> list[QuorumKey]:
        return [sync.plan.key for sync in self.in_flight if sync.plan is not None]

    @property
    def asks(self) -> bool:
        """Whether it waits for a quorum beside its training."""
        return self._asked is not None

    def one(self) -> Life:
        """A start, inner steps, and the end of the oldest when as many as may be are in flight."""
        trainer = self._trainer
        yield from trainer.between_steps()
        if trainer.loads_step is not None:
            yield from self._settle()  # what was asked is about the state before
            trainer.load_by_hand()
            self._spoil("a state was loaded by hand")
        yield from self._start()
        yield from self._train()
        if len(self._syncs) + self.asks >= self._most:
            yield from self._end()

    def _train(self) -> Life:
        """Inner steps; what the start has asked for is used as soon as it is known."""
        trainer = self._trainer
        step_ms = self._outside.step_ms(trainer)
        long = step_ms >= self._outside.timeouts.slowest_step_ms
        for _ in range(INNER_STEPS):
            if self._asked is not None and (self._asked.done or long):
                yield from self._settle()
            if long and trainer.excused:
                self._outside.marks.hit("a first step took longer than slowest_step")
            trainer.phase = "forward"
            yield trainer.sleep(step_ms if long else step_ms // INNER_STEPS)
            if long:
                break
        if self._asked is None:
            yield from trainer.hang_if_asked("forward")

    # --- starting ---------------------------------------------------------------------------------------------------

    def _start(self) -> Life:
        """Ask for a quorum, in the background. Who is fresh waits for it, to begin with the others' weights."""
        trainer = self._trainer
        yield from self._settle()
        plan = trainer.goes_on(self._keys_in_flight)
        if plan is not None:
            yield from self._planned(plan)
            return
        trainer.num_requests += 1
        self._asked = trainer.ask(self._request())
        if not trainer.live:
            yield from self._settle()

    def _request(self) -> RankRequest:
        """What is in flight lives in a quorum in which nothing has failed. What failed before raised the id once, and
        said again until the next commit it would raise it with every start. And what has failed here alone must be
        said, because the others may wait in the next reduction of that quorum, or may have begun what this one asked
        for in vain."""
        request = self._trainer.request()
        if request.held is not None and request.held == self._unheard_in:
            request = replace(request, needs_configure=True)
        if not self.in_flight:
            return request
        spoiled = any(not sync.good for sync in self.in_flight)
        return replace(request, commit_failures=0, needs_configure=request.needs_configure or spoiled)

    def _settle(self) -> Life:
        """What the newest start has asked for is known, and its reductions are started."""
        trainer = self._trainer
        if self._asked is None:
            return
        trainer.phase = "quorum"
        answer = yield self._asked
        self._asked = None
        if isinstance(answer, Refused):
            if self.in_flight:
                self._outside.marks.hit("a request failed with syncs in flight")
            self._spoil("nobody knows whether their quorum stands")
            self._unheard_in = trainer.held
            self._syncs.append(Sync(None, failed=True))
            yield from trainer.refused(answer)
            return
        plan = trainer.given(answer, self._keys_in_flight)
        self._outside.invariants.quorum_known(trainer.host, trainer.rank, plan.key)
        self._look_if_another(plan)
        yield from self._planned(plan)

    def _look_if_another(self, plan: Plan) -> None:
        """In another quorum all that are in flight have failed, at every member."""
        flight = [sync for sync in self.in_flight if sync.plan is not None and sync.plan.key != plan.key]
        if not flight:
            return
        self._outside.marks.hit("a new id failed what was in flight")
        if len(flight) > 1:
            self._outside.marks.hit("a new id failed several syncs in flight")
        self._outside.note(self._trainer, f"drops {_syncs(len(flight))} in flight: the quorum is another")
        self._fail()

    def _spoil(self, why: str) -> None:
        """None of them can be committed here any more; the others don't know. They end in their turn, with a no, and
        count as in flight until then: the others start the next beside them."""
        if self.in_flight:
            self._outside.note(self._trainer, f"will not commit {_syncs(len(self.in_flight))} in flight: {why}")
        for sync in self.in_flight:
            sync.good = False

    def _fail(self) -> None:
        for sync in self.in_flight:
            sync.failed = True

    def _planned(self, plan: Plan) -> Life:
        trainer = self._trainer
        # The first step after a start, a healing or a reconfiguration may take any time.
        trainer.excused = trainer.held != plan.key or plan.heal or trainer.healed_before
        trainer.healed_before = plan.heal
        ahead = len(self.in_flight)
        sync = Sync(plan, plan.step + ahead, self._fragment(plan.step, ahead))
        self._syncs.append(sync)
        sync.good = yield from trainer.configure(plan)
        if not plan.heal and trainer.lineage is None:
            trainer.lineage = plan.lineage
        opens = plan.step == 0
        if sync.good and not opens:
            self._reduce(sync, plan)
        # Sources and those who heal meet here: what is in flight changes no global weights before its end.
        if plan.serve:
            trainer.take_snapshot(plan, "at the start of its sync")
        if plan.heal:
            self._look_if_behind(plan, ahead)
            if trainer.standing.speaks and ahead == 0:
                reduced = yield from self._results(sync, plan)
                ok = sync.good and (reduced is not None or opens)
                sync.word = trainer.send_word(plan, self._vote_on(sync, plan), ok, leaves=False)
            healed = yield from trainer.heal(plan, Round(plan.key, plan.step, plan.lineage, Purpose.COMMIT))
            sync.good = sync.good and healed
        if opens:
            # All begin with the same weights: there is nothing to reduce.
            sync.failed = True  # nothing is left to be done when its end is due
            yield from self._conclude(sync, plan)

    def _look_if_behind(self, plan: Plan, ahead: int) -> None:
        """Who heals with syncs in flight (its state was torn, perhaps) holds again what they were started from."""
        trainer, spoiled = self._trainer, any(not sync.good for sync in self.in_flight[:ahead])
        if ahead and not spoiled:
            self._outside.marks.hit("one healed with syncs in flight")
            if plan.step != trainer.step:
                raise InvariantBroken(
                    "F1", f"{trainer.name} heals from step {trainer.step} to {plan.step} in {plan.key}"
                )

    def _fragment(self, step: int, ahead: int) -> int:
        """Which one a sync reduces that is started at a step, with so many in flight."""
        return (step - 1 + ahead) % self._num_fragments

    def _reduce(self, sync: Sync, plan: Plan) -> None:
        """All its reductions, at once."""
        trainer, group = self._trainer, self._trainer.group
        assert group is not None
        if trainer.is_broken(plan.key):
            sync.good = False
            return
        self._outside.invariants.started(trainer.host, trainer.rank, plan.key, sync.fragment)
        self._outside.note(
            trainer, f"starts fragment {sync.fragment}, with {_syncs(len(self.in_flight) - 1)} in flight"
        )
        counts = plan.participating_rank is not None and trainer.step == plan.step and not plan.heal
        for bucket in range(NUM_BUCKETS):
            part = f"fragment {sync.fragment}, bucket {bucket}"
            gradient = f"{trainer.replica_id}:{sync.step}:{sync.fragment}.{bucket}" if counts else None
            trainer.num_reductions += 1
            contribution = Contribution(trainer.replica_id, trainer.state_held, gradient, part)
            waiter = group.reduce(trainer.num_reductions, contribution)
            sync.numbers.append(trainer.num_reductions)
            sync.results.append(trainer.within(waiter, self._outside.timeouts.timeout_ms))
        for waiter in sync.results:
            waiter.then(partial(self._learned, group))

    def _learned(self, group: Group, result: Reduced | None) -> None:
        """A reduction has ended; one that fails takes its group with it."""
        trainer = self._trainer
        if result is None and trainer.group is group and trainer.alive:
            self._outside.marks.hit("a reduction failed")
            self._outside.note(trainer, "sees a reduction fail")
            trainer.note_unreached(group)
            trainer.leave_group()

    # --- ending -----------------------------------------------------------------------------------------------------

    def _end(self) -> Life:
        """What is due for the oldest. One that has failed before is not voted on."""
        yield from self._settle()
        sync = self._oldest()
        if not sync.failed and sync.plan is not None:
            yield from self._conclude(sync, sync.plan)

    def _conclude(self, sync: Sync, plan: Plan) -> Life:
        """The vote, and the commit."""
        trainer = self._trainer
        reduced = None
        good = sync.good and not trainer.torn
        if good and sync.results:
            reduced = yield from self._results(sync, plan)
        fails, trainer.fails_once = trainer.fails_once, False
        if fails:
            self._outside.note(trainer, "has an error of its own in this step")
        good = good and not fails and plan.num_participants >= plan.min_replica_size and trainer.step == sync.step
        if plan.step == 0:
            reduced = Reduced(plan.key, trainer.rank, (), ())
        vote = self._vote_on(sync, plan)
        wishes = trainer.wishes_to_leave(trainer.plan)
        good, stands = good and reduced is not None, False
        if trainer.standing.speaks:
            sent = sync.word or trainer.send_word(plan, vote, good, leaves=wishes)
            agreed = yield from trainer.hear_word(plan, vote, sent)
            good, stands = good and agreed.yes, agreed.stands
        verdict = yield from trainer.vote(vote, good, leaving=wishes, stands=stands)
        trainer.has_decided(verdict)
        if verdict.yes:
            assert reduced is not None
            self._commit(sync, plan, vote, reduced)
        else:
            self._not_committed(vote)
        if verdict.leaves:
            if not wishes:
                self._outside.marks.hit("a rank left because another one was told to")
            yield from trainer.leaves(trainer.plan)
        if verdict.yes:
            yield from trainer.hang_if_asked("optimizer")

    def _vote_on(self, sync: Sync, plan: Plan) -> Round:
        trainer = self._trainer
        lineage = trainer.lineage if trainer.step == sync.step and trainer.lineage is not None else plan.lineage
        return Round(plan.key, sync.step, lineage, Purpose.COMMIT)

    def _oldest(self) -> Sync:
        return self._syncs.pop(0)

    def _results(self, sync: Sync, plan: Plan) -> Life:
        """What came out of a sync's reductions; None when one of them has failed."""
        trainer = self._trainer
        trainer.phase = "reduction"
        gradients: list[str] = []
        for waiter in sync.results:
            result = yield waiter
            if result is None:
                return None
            gradients += result.gradients
        return Reduced(plan.key, trainer.rank, tuple(sync.numbers), tuple(gradients))

    def _commit(self, sync: Sync, plan: Plan, vote: Round, reduced: Reduced) -> None:
        trainer = self._trainer
        if self.in_flight:
            self._outside.marks.hit("a sync was committed with others in flight")
        if plan.step > 0:
            self._outside.invariants.landed(trainer.host, trainer.rank, plan.key, sync.fragment)
        trainer.commit(plan, vote, reduced)

    def _not_committed(self, vote: Round) -> None:
        trainer = self._trainer
        trainer.commit_failures += 1
        self._outside.marks.hit("a commit failed")
        if self._outside.invariants.was_committed(vote, trainer.rank):
            self._outside.marks.hit("one group committed what another lost")
        self._outside.invariants.fell(trainer.host, trainer.rank)
        self._outside.note(trainer, f"does not commit step {vote.step + 1}")
        if self.in_flight:
            self._outside.marks.hit("a failed vote failed what was in flight")
            self._outside.note(trainer, f"drops {_syncs(len(self.in_flight))} in flight: one before has failed")
        self._fail()


def _syncs(number: int) -> str:
    return f"{number} sync" + ("s" if number != 1 else "")
