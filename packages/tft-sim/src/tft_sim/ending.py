"""How a step of a simulated trainer ends: its word, where the quorum speaks one, and its vote.

Law of this file: the word and the vote of one step. What is voted, the step core says; what a word means, `standing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tft_coord.core.standing import Vote
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.types import Plan, Purpose
from tft_sim.invariants import Round
from tft_sim.waiting import Life, Lost, Waiter

if TYPE_CHECKING:
    from tft_sim.trainer import Trainer


class Ending:
    """The end of one step of one rank.

    Args:
        trainer: the rank.
        number: of a step that was put aside; 0: the open one.
        step: committed steps before it; None: as its plan says.
        word: the sum of its words, where this rank has sent its own before.
    """

    def __init__(self, trainer: Trainer, number: int, step: int | None, word: Waiter | None) -> None:
        self._trainer = trainer
        self._number = number
        self._step = step
        self._word = word
        self._agreed: Vote | None = None
        self.vote: Round | None = None  # that was voted on

    def _plan(self) -> Plan:
        status = self._trainer.status
        aside = status.attempt(self._number) if self._number else None
        plan = aside.plan if aside is not None else status.plan
        assert plan is not None
        return plan

    def _round(self, step: int, *, as_planned: bool = False) -> Round:
        """Return the round of that step. `as_planned`: this rank may hold another state of it, and recover."""
        trainer, plan = self._trainer, self._plan()
        own = trainer.lineage if trainer.step == step and not (as_planned and step == plan.step) else None
        return Round(plan.key, step, own if own is not None else plan.lineage, Purpose.COMMIT)

    def speak(self, good: bool | None = None, *, leaves: bool | None = None) -> Life:
        """Exchange the word of the round, once, where the quorum speaks one.

        Args:
            good: this rank has no error in it; None: as the status says.
            leaves: this rank wishes that the group leaves; None: as the status says.
        """
        trainer, speaking = self._trainer, self._trainer.speaking
        if not speaking.speaks or self._agreed is not None:
            return
        status, plan = trainer.status, self._plan()
        if good is None:
            good = status.error is None and plan.num_participants >= plan.min_replica_size
        vote = self._round(self._step if self._step is not None else plan.step, as_planned=True)
        wishes = status.wishes if leaves is None else leaves
        sent = self._word or speaking.send(plan, vote, good, leaves=wishes)
        self._agreed = yield from speaking.hear(plan, vote, sent)
        if good and not self._agreed.yes:
            name = status.name
            aside = status.attempt(self._number) if self._number else None
            trainer.tell(on.ErrorReported(Lost(self._agreed.why), aside.name if aside is not None else name))

    def cast(self, order: do.CastVote) -> Life:
        """Vote. Returns: what came of it."""
        trainer = self._trainer
        if trainer.status.wishes and not order.leaving:
            trainer.mark("the last holder of the state stayed for another step")
            trainer.note("stays, for nobody else holds the state")
        yield from self.speak(order.yes, leaves=order.leaving)
        agreed = self._agreed or Vote(yes=True)
        yes = order.yes and agreed.yes
        vote = self.vote = self._round(order.step)
        verdict = yield from trainer.vote(vote, yes, leaving=order.leaving, stands=agreed.stands)
        if yes and not verdict.yes and trainer.speaking.speaks:
            trainer.mark("a rank had its word, and another one of its group did not")
        trainer.speaking.decided(verdict)
        return on.VerdictArrived(order.attempt, verdict.yes, verdict.leaves)
