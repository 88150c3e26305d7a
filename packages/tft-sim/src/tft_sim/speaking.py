"""A trainer's side of standing quorums: whether its next round asks, the word at the end of a round, its lease.

Law of this file: what the shell does with `tft_coord.core.standing`, which decides. What a round is the step core says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tft_coord.core.standing import Ask, Standing
from tft_coord.core.standing import State as Stand
from tft_coord.core.types import Plan, QuorumKey, QuorumNews, Verdict
from tft_sim.group import Group
from tft_sim.invariants import Round
from tft_sim.waiting import Life, Waiter

if TYPE_CHECKING:
    from tft_sim.trainer import Trainer

LINGER_MS = 1_000  # so long one that leaves keeps its process group, for its last word


class Speaking:
    """The standing quorums of one rank.

    Args:
        trainer: the rank.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.core = Standing(trainer.outside.timeouts)
        self.unfit = ""  # why it can't go on without asking, though its quorum stands

    @property
    def speaks(self) -> bool:
        """Whether all members of the quorum speak the word of a round."""
        return self.core.speaks

    def is_broken(self, key: QuorumKey) -> bool:
        """Whether that quorum, which was given last, can't complete another round."""
        return self.core.key == key and self.core.state is Stand.BROKEN

    # --- the beginning of a round -----------------------------------------------------------------------------------

    def goes_on(self) -> bool:
        """Whether the next round asks nobody. Where it asks though its quorum stands, the group is left first."""
        trainer = self._trainer
        unfit, self.unfit = self.unfit, ""
        if trainer.torn:
            unfit = "its state is torn"
        elif trainer.group is None:
            unfit = unfit or "its process group is unusable"
        going = self.core.next_round(trainer.outside.own_ms(), unfit)
        if isinstance(going, Ask):
            if going.breaks:
                why = "its lease was over" if "lease" in going.why else "it had changed"
                trainer.mark(f"a rank asked where its quorum stood: {why}")
                trainer.note(f"asks though its quorum stands: {going.why}")
                trainer.leave_group()
            return False
        trainer.mark("a round began without a request")
        plan = trainer.plan
        if plan is not None and plan.num_participants < plan.replica_world_size:
            trainer.mark("a quorum with spares stood")
        if trainer.status.num_deferred:
            trainer.mark("a sync began without a request, with others in flight")
        return True

    def asked(self) -> None:
        """Note that the request is sent now."""
        self.core.asked(self._trainer.outside.own_ms())

    def planned(self, plan: Plan) -> None:
        """Take the plan that was given."""
        trainer = self._trainer
        in_flight = sum(each.plan is not None and each.plan.key == plan.key for each in trainer.status.aside)
        self.core.planned(plan, trainer.outside.own_ms(), in_flight)
        if trainer.settings.speaks and plan.lease_ms is None:
            trainer.mark("an older member made all ask in every step")

    # --- its end ----------------------------------------------------------------------------------------------------

    def send(self, plan: Plan, vote: Round, good: bool, *, leaves: bool) -> Waiter:
        """Send the word of a round, when the own reductions have ended; resolves to the sum, or to None."""
        trainer, now_ms = self._trainer, self._trainer.outside.own_ms()
        counts = self._counts(plan, vote)
        lineage = trainer.lineage if counts else vote.lineage
        ends = trainer.finishes_at is not None and vote.step + 1 >= trainer.finishes_at
        every = trainer.settings.check_every
        # The lighthouse is told what the states are compared to, and so all ask after this round.
        ask = "the states are compared next" if every and (vote.step + 1) % every == 0 else ""
        if ask and plan.lease_ms:
            trainer.mark("a word said that states are compared next")
        word = self.core.word(now_ms, ok=good, lineage=lineage, participates=counts, leave=leaves or ends, ask=ask)
        if plan.lease_ms and self.core.lease_runs_out(now_ms):
            trainer.mark("a word said that the lease runs out")
        group = trainer.group
        if group is None or group.key != plan.key or self.is_broken(plan.key) or trainer.status.broken is not None:
            failed = Waiter()
            failed.resolve(None)
            return failed
        sent = group.exchange_word(vote.step, trainer.replica_id, word.values())
        sent.then(lambda total: self._learned(group, total))
        return trainer.within(sent, trainer.outside.timeouts.timeout_ms)

    def _learned(self, group: Group, total: object) -> None:
        trainer = self._trainer
        if total is None and trainer.alive and trainer.group is group:
            trainer.note_unreached(group)

    def _counts(self, plan: Plan, vote: Round) -> bool:
        return plan.participating_rank is not None and self._trainer.step == vote.step

    def hear(self, plan: Plan, vote: Round, sent: Waiter) -> Life:
        """Wait for the sum of a round's words. Returns: what it means."""
        trainer, invariants = self._trainer, self._trainer.outside.invariants
        trainer.phase = "word"
        total = yield sent
        agreed = self.core.summed(total, trainer.lineage if self._counts(plan, vote) else vote.lineage)
        invariants.worded(trainer.replica_id, trainer.rank, vote, agreed.yes if total is not None else None)
        if total is not None and plan.lease_ms:
            asks, leaves = total[1], total[2]
            if 0 < asks < plan.replica_world_size:
                trainer.mark("the word of some told the others to ask")
            if asks and leaves:
                trainer.mark("one word said that all ask and that one leaves")
        if total is None:
            trainer.mark("the word of a round failed")
            if invariants.was_committed(vote, trainer.rank):
                trainer.mark("the word of a round came to some members alone")
            trainer.note("sees the word of its round fail")
        elif not agreed.yes:
            trainer.mark("the word of a round was a no")
        return agreed

    def exchange(self, plan: Plan, vote: Round, good: bool, *, leaves: bool) -> Life:
        """Send the word, and hear the sum of all."""
        return (yield from self.hear(plan, vote, self.send(plan, vote, good, leaves=leaves)))

    def decided(self, verdict: Verdict) -> None:
        """Take the group's verdict on the round."""
        if self.speaks and self.core.decided(yes=verdict.yes, stands=verdict.stands):
            self._trainer.leave_group()  # nobody shall wait for it in a round that can't complete

    def let_the_last_word_pass(self) -> Life:
        """Keep the process group until the others have what this rank said last."""
        trainer, since_ms = self._trainer, self._trainer.clock.now_ms
        while trainer.group is not None and not trainer.group.word_has_passed:
            if trainer.clock.now_ms - since_ms >= LINGER_MS:
                return
            trainer.mark("a leaver let its last word pass")
            yield trainer.sleep(1)

    # --- news -------------------------------------------------------------------------------------------------------

    def told(self, news: QuorumNews) -> bool:
        """Take what the manager server says of the newest quorum. Returns: whether what runs has to be aborted."""
        trainer, before = self._trainer, self.core.state
        breaks = self.core.told(news)
        if news.beat and news.age_ms > 2 * trainer.outside.timeouts.beat_interval_ms:
            trainer.mark("an answer to an old beat came to a rank")
        if self.core.state is Stand.RECALLED is not before:
            trainer.mark("a standing rank was recalled")
            trainer.note("is told to ask after its next word")
        if breaks:
            trainer.mark("the newest quorum broke the one that was held")
            trainer.note(f"hears that its quorum is over ({trainer.phase})")
        return breaks

    def waits(self, since_ms: int) -> None:
        """Say to the lighthouse that this rank waits for other members for too long, if it does."""
        trainer, now_ms = self._trainer, self._trainer.outside.own_ms()
        waits_ms = trainer.clock.now_ms - since_ms
        late = self.core.late(now_ms, now_ms - waits_ms) if trainer.phase_since_ms == since_ms else None
        if late is not None:
            trainer.mark("a standing round was late")
            trainer.note(f"says that step {late.step + 1} waits for a member for too long")
            trainer.outside.say_late(trainer, late)
