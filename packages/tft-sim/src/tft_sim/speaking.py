"""A trainer's side of standing quorums: the word at the end of a round, over its process group.

Law of this file: send words and receive their sums. The step core decides what a word says, what its sum means, and
whether the next round asks.
"""

from __future__ import annotations

from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.types import Plan
from tft_sim.group import SimulatedGroup
from tft_sim.invariants import Round
from tft_sim.rank import Rank
from tft_sim.waiting import Life, ReplicaLostError, Waiter

LINGER_MS = 1_000  # a leaving rank keeps its process group for up to this time, for its last word


class Speaking:
    """The words of one rank.

    Args:
        trainer: the rank.
    """

    def __init__(self, trainer: Rank) -> None:
        self._trainer = trainer
        self._sent = Waiter()  # sum of the words of the round of the newest sent word

    # --- the beginning of a round -----------------------------------------------------------------------------------

    def record_begin(self, order: do.Ask | None) -> None:
        """Record the start of a round. `order`: its request. None: the round makes no request."""
        trainer, status = self._trainer, self._trainer.status
        if order is not None:
            if order.breaks:
                why = "its lease was over" if "lease" in order.breaks else "it had changed"
                trainer.mark(f"a rank asked where its quorum stood: {why}")
                trainer.note(f"asks for a quorum, although its own stands: {order.breaks}")
            return
        trainer.mark("a round began without a request")
        if status.error is not None:
            trainer.mark("a rank began a round with its group that it could not commit")
            trainer.note(f"begins a step with an error: {status.error}")
        plan = status.plan
        if plan is not None and plan.num_participants < plan.replica_world_size:
            trainer.mark("a quorum with spares stood")
        if status.num_deferred:
            trainer.mark("a sync began without a request, with others in flight")

    # --- its end ----------------------------------------------------------------------------------------------------

    def send(self, order: do.SendWord) -> None:
        """Send the word of a round."""
        trainer, group = self._trainer, self._trainer.group
        every = trainer.settings.check_every
        if order.why_asks and every and (order.round_number + 1) % every == 0:
            trainer.mark("a word said that states are compared next")
        if "lease expires soon" in order.why_asks:
            trainer.mark("a word said that the lease runs out")
        if not order.hears:
            trainer.mark("a word was sent before its step ended")
        if group is None or group.key != order.key:
            self._sent = Waiter()
            self._sent.resolve(None)
            return
        sent = group.exchange_word(order.round_number, trainer.replica_id, order.values)
        sent.then(lambda total: self._word_ended(group, total))
        self._sent = sent

    def _word_ended(self, group: SimulatedGroup, total: object) -> None:
        trainer = self._trainer
        if total is None and trainer.alive and trainer.group is group:
            trainer.note_unreached(group)

    def hear(self, order: do.SendWord | do.HearWord, vote: Round, plan: Plan) -> Life:
        """Wait for the sum of the words of a round. Returns: the event that reports it."""
        trainer = self._trainer
        attempt, within_ms = order.attempt, trainer.outside.timeouts.timeout_ms
        if isinstance(order, do.SendWord) and order.within_ms is not None:
            trainer.mark("an error was said by a word for a moment")
            within_ms = min(within_ms, order.within_ms)
        trainer.phase = "word"
        total = yield trainer.within(self._sent, within_ms)
        if total is None:
            trainer.mark("the word of a round failed")
            if trainer.outside.invariants.was_committed(vote, trainer.rank):
                trainer.mark("the word of a round came to some members alone")
            trainer.note("has lost the word of its round")
            return on.WordEnded(attempt, None, ReplicaLostError("the word of the round did not complete"))
        if plan.lease_ms:
            asks, leaves = total[1], total[2]
            if 0 < asks < plan.replica_world_size:
                trainer.mark("the word of some told the others to ask")
            if asks and leaves:
                trainer.mark("one word said that all ask and that one leaves")
        return on.WordEnded(attempt, total)

    def let_the_last_word_pass(self) -> Life:
        """Keep the process group until the others have received the last word of this rank."""
        trainer, since_ms = self._trainer, self._trainer.clock.now_ms
        while trainer.group is not None and not trainer.group.words_delivered:
            if trainer.clock.now_ms - since_ms >= LINGER_MS:
                return
            trainer.mark("a leaver let its last word pass")
            yield trainer.sleep(1)
