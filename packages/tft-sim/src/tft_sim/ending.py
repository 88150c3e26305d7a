"""The end of a simulated trainer's step: its word, if the quorum speaks one, and its vote.

Law of this file: the word and the vote of one step, as the step core orders them.
"""

from __future__ import annotations

from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.types import Plan, Purpose
from tft_sim.invariants import Round
from tft_sim.rank import Rank
from tft_sim.speaking import Speaking
from tft_sim.waiting import Life


class Ending:
    """The end of one step of one rank.

    Args:
        trainer: the rank.
        speaking: its words.
        number: of a deferred step. 0: the open step.
    """

    def __init__(self, trainer: Rank, speaking: Speaking, number: int) -> None:
        self._trainer = trainer
        self._speaking = speaking
        self._number = number
        self._heard: Round | None = None  # the round whose word has completed
        self.vote: Round | None = None  # the round that was voted on

    def _plan(self) -> Plan:
        status = self._trainer.status
        aside = status.attempt(self._number) if self._number else None
        plan = aside.plan if aside is not None else status.plan
        assert plan is not None
        return plan

    def _round(self, step: int, *, as_planned: bool = False) -> Round:
        """Return the round of that step. `as_planned`: the plan's state counts, even if this rank holds another one."""
        trainer, plan = self._trainer, self._plan()
        own = trainer.lineage if trainer.step == step and not (as_planned and step == plan.step) else None
        return Round(plan.key, step, own if own is not None else plan.lineage, Purpose.COMMIT)

    def speak(self, order: do.SendWord) -> Life:
        """Send the word of the round, and hear the sum. Returns: the event that reports it."""
        self._speaking.send(order)
        return (yield from self.hear(order))

    def hear(self, order: do.SendWord | do.HearWord) -> Life:
        """Hear the sum of a word that was sent. Returns: the event that reports it."""
        vote = self._round(order.round_number, as_planned=True)
        ended = yield from self._speaking.hear(order, vote, self._plan())
        self._heard = vote if ended.sums is not None else None
        return ended

    def cast(self, order: do.CastVote) -> Life:
        """Vote. Returns: the event that reports the verdict."""
        trainer, plan = self._trainer, self._plan()
        if trainer.status.wishes and not order.leaving:
            trainer.mark("the last holder of the state stayed for another step")
            trainer.note("stays, because no other replica holds the state")
        vote = self.vote = self._round(order.step)
        speaks = plan.lease_ms is not None
        if speaks:
            self._check_word(order, vote, is_alone=plan.replica_world_size == 1)
        verdict = yield from trainer.vote(vote, order.yes, leaving=order.leaving, stands=order.stands)
        if speaks and order.yes and not verdict.yes:
            trainer.mark("a rank had its word, and another one of its group did not")
        return on.VerdictArrived(order.attempt, verdict.yes, verdict.leaves, verdict.stands)

    def _check_word(self, order: do.CastVote, vote: Round, *, is_alone: bool) -> None:
        """Let the invariants check the meaning of the round's word for this rank, as its vote shows it."""
        trainer = self._trainer
        heard = self._heard or (vote if is_alone and order.yes else None)
        if order.why and (trainer.torn or trainer.lineage is None):
            heard = None  # the rank no longer knows its own state, so the others agree without it
        trainer.outside.invariants.word_completed(
            trainer.replica_id, trainer.rank, heard or vote, not order.why if heard is not None else None
        )
        if heard is not None and order.why:
            trainer.mark("the word of a round was a no")
