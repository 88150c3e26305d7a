"""The rounds of a standing quorum: the content of a rank's word, the meaning of the sum, and the effect of news.

Law of this file: the step's additions to `tft_coord.core.standing`, which decides. An attempt without a word passes
here unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

from tft_coord.core.standing import NUM_WORDS, Vote, Word
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.step.effects import Effects
from tft_coord.core.step.errors import QuorumBrokenError
from tft_coord.core.step.values import Healing, Phase
from tft_coord.core.types import Plan

if TYPE_CHECKING:
    from tft_coord.core.step.attempt import Attempt
    from tft_coord.core.step.state import StepState


# A rank with an error waits for the others' words for so long. The others may wait in a reduction that it has left, and
# then only an abort of its process group tells them.
ERROR_IS_SAID_FOR_MS: Final = 1_000


@final
class Rounds:
    """The rounds of one rank.

    Args:
        books: what the rank knows.
    """

    def __init__(self, books: StepState) -> None:
        self._books = books

    # --- the word -----------------------------------------------------------------------------------------------------

    def word(self, attempt: Attempt, now_ms: int) -> Word | None:
        """Return this rank's word at the end of its reductions; None: its round has failed with another one."""
        books, plan = self._books, attempt.plan
        assert plan is not None, "a word without a quorum"
        attempt.says_leave = books.leaving.is_due(now_ms)
        if books.standing.round_step is None:
            return None
        asks = books.asks_next
        if not asks and books.own.is_due_next(books.settings.check_every):
            asks = "the state is compared at the next step"
        return books.standing.word(
            now_ms,
            ok=attempt.error is None and plan.num_participants >= plan.min_replica_size,
            lineage=self._lineage(attempt, plan),
            participates=attempt.is_participating,
            leave=attempt.says_leave,
            ask=asks,
        )

    def can_send(self, plan: Plan) -> bool:
        """Return whether the process group of that quorum can send a word."""
        books = self._books
        return books.losses.broken is None and books.configured == plan.key and not books.is_aborted

    def has_left_reductions(self, attempt: Attempt) -> bool:
        """Return whether this rank has an error and did another number of reductions than in its last commit.

        The others may wait in one of these reductions, where no word reaches them.
        """
        return attempt.error is not None and attempt.num_reductions != self._books.num_reductions

    def unheard(self, attempt: Attempt) -> Effects:
        """Abort, because the word does not complete and this group does not commit: no member may wait for this
        rank."""
        attempt.is_unheard = True
        return self._aborted()

    def summed(self, attempt: Attempt, sums: Sequence[int] | None) -> None:
        """Take the sum of all words; None: it did not complete."""
        standing, plan = self._books.standing, attempt.plan
        assert plan is not None, "a word without a quorum"
        attempt.heard_a_no = sums is not None and sums[0] != plan.replica_world_size
        if standing.round_step is None:
            attempt.agreed = Vote(yes=False, why="its round has failed with another one")
        elif sums is not None and len(sums) != NUM_WORDS:
            attempt.agreed = Vote(yes=False, why=f"the word came with {len(sums)} integers instead of {NUM_WORDS}")
        else:
            attempt.agreed = standing.summed(sums, self._lineage(attempt, plan))

    def _lineage(self, attempt: Attempt, plan: Plan) -> int | None:
        """Return the lineage that the round started from.

        A rank that has not received the reference yet uses the plan's. So does a rank that has compared its state for a
        later attempt while this one was in flight.
        """
        own = self._books.own
        holds = attempt.healing is Healing.LOADED or plan.replica_rank in plan.up_to_date
        return own.lineage if holds and own.lineage_before_check != plan.lineage else plan.lineage

    def decided(self, attempt: Attempt | None, *, yes: bool, stands: bool) -> Effects:
        """Take the verdict; a group that does not commit aborts, so that no member waits for it.

        If the sum of all words is a no, no member goes on, and all know it. The abort can then wait until the next
        request: until then the members may run reductions about the step that is over.
        """
        if attempt is None or not attempt.speaks or attempt.abandoned is not None:
            return ()
        if not self._books.standing.decided(yes=yes, stands=stands):
            return ()
        if attempt.is_unheard:
            return ()
        if attempt.heard_a_no:
            self._books.aborts_at_start = True
            return ()
        return self._aborted()

    def given_up(self) -> Effects:
        """Give up what is in flight or open: it never ends here, and the others wait for its word in vain."""
        books = self._books
        if books.standing.speaks and books.standing.round_step is not None:
            books.standing.decided(yes=False, stands=False)
            return self._aborted()
        return ()

    def left_open(self) -> Effects:
        """Abort at the start of the next attempt if the last one was a no, or was not ended."""
        flights = self._books.flights
        aborts, self._books.aborts_at_start = self._books.aborts_at_start, False
        if aborts:
            return self._aborted()
        is_open = flights.phase is not Phase.IDLE and flights.last.speaks and flights.last.abandoned is None
        return self.given_up() if is_open else ()

    def _aborted(self) -> Effects:
        self._books.abort()
        return (do.AbortGroup(),)

    # --- news ---------------------------------------------------------------------------------------------------------

    def words_refused(self, event: on.WordsRefused, now_ms: int) -> Effects:
        self._books.lease_ms = None
        return ()

    def beat_due(self, event: on.BeatDue, now_ms: int) -> Effects:
        number = self._books.standing.beat(now_ms)
        return (do.NumberBeat(number),) if number else ()

    def quorum_named(self, event: on.QuorumNamed, now_ms: int) -> Effects:
        standing = self._books.standing
        breaks = standing.told(event.news)
        return self.broken() if breaks and standing.speaks else ()

    def broken(self) -> Effects:
        """Note that the held quorum is over, although no loss was reported."""
        books, key = self._books, self._books.standing.key
        if key is None or key != books.held or books.losses.broken is not None:
            return ()
        why = f"quorum {key} is over for this replica, as the lighthouse says"
        books.losses.ends(QuorumBrokenError(f"{why}; the next step asks for another", replica_id=""))
        return (do.EndQuorum(key, why),)
