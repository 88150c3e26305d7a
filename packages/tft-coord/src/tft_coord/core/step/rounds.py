"""The rounds of a standing quorum: a rank's control word, the meaning of the sum, and the effect of notifications.

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


# How long a rank with an error waits for the others' control words. The others may wait in a reduction that it has
# left, and then only an abort of its process group reaches them.
ERROR_WORD_WITHIN_MS: Final = 1_000


@final
class Rounds:
    """The rounds of one rank.

    Args:
        state: the facts about the rank's steps, which all handlers share.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state

    # --- the word -----------------------------------------------------------------------------------------------------

    def word(self, attempt: Attempt, now_ms: int) -> Word | None:
        """Return this rank's control word at the end of its reductions; None: an earlier step in flight has failed."""
        state, plan = self._state, attempt.plan
        assert plan is not None, "a word without a quorum"
        attempt.wants_leave = state.leaving.is_due(now_ms)
        if state.standing.round_step is None:
            return None
        asks = state.ask_reason
        if not asks and state.own.is_due_next(state.settings.check_every):
            asks = "the state is compared at the next step"
        return state.standing.word(
            now_ms,
            ok=attempt.error is None and plan.num_participants >= plan.min_replica_size,
            lineage=self._lineage(attempt, plan),
            participates=attempt.is_participating,
            leave=attempt.wants_leave,
            ask=asks,
        )

    def can_send(self, plan: Plan) -> bool:
        """Return whether the process group of that quorum can send a control word."""
        state = self._state
        return state.losses.broken is None and state.configured == plan.key and not state.is_aborted

    def has_left_reductions(self, attempt: Attempt) -> bool:
        """Return whether this rank has an error and did another number of reductions than in its last commit.

        The others may wait in one of these reductions, where no control word reaches them.
        """
        return attempt.error is not None and attempt.num_reductions != self._state.num_reductions

    def abort_incomplete(self, attempt: Attempt) -> Effects:
        """Abort, because the control words did not complete and this group does not commit: no member may wait for this
        rank."""
        attempt.is_word_incomplete = True
        return self._aborted()

    def summed(self, attempt: Attempt, sums: Sequence[int] | None) -> None:
        """Handle the sum of all control words; None: the exchange did not complete."""
        standing, plan = self._state.standing, attempt.plan
        assert plan is not None, "a word without a quorum"
        attempt.has_failed_member = sums is not None and sums[0] != plan.replica_world_size
        if standing.round_step is None:
            attempt.agreed = Vote(yes=False, why="an earlier step in flight has failed")
        elif sums is not None and len(sums) != NUM_WORDS:
            attempt.agreed = Vote(yes=False, why=f"the control word has {len(sums)} integers instead of {NUM_WORDS}")
        else:
            attempt.agreed = standing.summed(sums, self._lineage(attempt, plan))

    def _lineage(self, attempt: Attempt, plan: Plan) -> int | None:
        """Return the lineage that the round started from.

        A rank that has not received the reference yet uses the plan's. So does a rank that has compared its state for a
        later attempt while this one was in flight.
        """
        own = self._state.own
        holds = attempt.healing is Healing.LOADED or plan.replica_rank in plan.up_to_date
        return own.lineage if holds and own.lineage_before_check != plan.lineage else plan.lineage

    def decided(self, attempt: Attempt | None, *, yes: bool, stands: bool) -> Effects:
        """Take the verdict; a group that does not commit aborts, so that no member waits for it.

        If the sum of all control words is a no, no member continues, and all know it. The abort can then wait until the
        next request: until then the members may run reductions about the step that is over.
        """
        if attempt is None or not attempt.sends_word or attempt.abandoned is not None:
            return ()
        if not self._state.standing.decided(yes=yes, stands=stands):
            return ()
        if attempt.is_word_incomplete:
            return ()
        if attempt.has_failed_member:
            self._state.abort_at_start = True
            return ()
        return self._aborted()

    def given_up(self) -> Effects:
        """Abort an open round: this rank never sends its control word, and the others would wait for it."""
        state = self._state
        if state.standing.speaks and state.standing.round_step is not None:
            state.standing.decided(yes=False, stands=False)
            return self._aborted()
        return ()

    def close_open(self) -> Effects:
        """Abort at the start of the next attempt if the last one was a no, or was not ended."""
        attempts = self._state.attempts
        aborts, self._state.abort_at_start = self._state.abort_at_start, False
        if aborts:
            return self._aborted()
        is_open = attempts.phase is not Phase.IDLE and attempts.last.sends_word and attempts.last.abandoned is None
        return self.given_up() if is_open else ()

    def _aborted(self) -> Effects:
        self._state.abort()
        return (do.AbortGroup(),)

    # --- notifications ------------------------------------------------------------------------------------------------

    def words_refused(self, event: on.WordsRefused, now_ms: int) -> Effects:
        self._state.lease_ms = None
        return ()

    def beat_due(self, event: on.BeatDue, now_ms: int) -> Effects:
        number = self._state.standing.beat(now_ms)
        return (do.NumberBeat(number),) if number else ()

    def quorum_named(self, event: on.QuorumNamed, now_ms: int) -> Effects:
        standing = self._state.standing
        breaks = standing.told(event.news)
        return self.broken() if breaks and standing.speaks else ()

    def broken(self) -> Effects:
        """Note that the current quorum is over, although no loss was reported."""
        state, key = self._state, self._state.standing.key
        if key is None or key != state.held or state.losses.broken is not None:
            return ()
        why = f"the lighthouse reports that quorum {key} is over for this replica"
        state.losses.end_quorum(QuorumBrokenError(f"{why}; the next step asks for another quorum", replica_id=""))
        return (do.EndQuorum(key, why),)
