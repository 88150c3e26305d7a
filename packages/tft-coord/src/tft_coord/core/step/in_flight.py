"""The attempts of one rank: the open one, the deferred ones in flight, and the number of failures in a row.

Attempts that are in flight together belong to one quorum and end in the order of their start. Each builds on the
earlier ones. Another quorum, or one no, therefore fails all of them, here and at every other member.

Law of this file: which attempts there are and which fail with which. Other files decide what a commit does to the
state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

from tft_coord.core.step.attempt import Attempt
from tft_coord.core.step.errors import SyncAbandonedError
from tft_coord.core.step.values import Healing, Phase, StepName
from tft_coord.core.types import Plan, QuorumKey

FIRST_PAUSE_MS: Final = 10
LONGEST_PAUSE_MS: Final = 1_000


@final
class StepsInFlight:
    """The attempts of one rank.

    Attributes:
        last: the attempt that was begun last, whether it is open or not.
        phase, verdict: of that.
        deferred: earlier attempts in flight, oldest first, without those that have failed with others.
        aside: all that were put aside and are not over, by number.
        peers_may_wait: this rank has left reductions of the configured group, or steps, in which the others may still
            wait. Its next request therefore breaks their quorum.
        has_unreported_failure: a commit has failed since the current quorum formed.
        commit_failures, failed_quorums, lost_attempts: in a row. Another quorum has ended the lost ones.
    """

    def __init__(self) -> None:
        self.last = Attempt(StepName(0, 0))
        self.phase = Phase.IDLE
        self.verdict: bool | None = None
        self.deferred: list[Attempt] = []
        self.aside: dict[int, Attempt] = {}
        self.peers_may_wait = False
        self.has_unreported_failure = False
        self.commit_failures = 0
        self.failed_quorums = 0
        self.lost_attempts = 0

    # --- beginning ----------------------------------------------------------------------------------------------------

    def begin(self, step: int, *, is_asynchronous: bool) -> bool:
        """Begin the next attempt; what an earlier one left open is over.

        Returns: whether the others may still wait in what this rank has left.
        """
        # After an error of its own this rank may have left out reductions in which the others still wait. The others do
        # not wait for those of an attempt in flight before its end, and others in flight may end well before that.
        last = self.last
        peers_may_wait = self.peers_may_wait or (
            last.plan is not None and last.own_error is not None and last not in self.deferred
        )
        name = StepName(last.name.attempt + 1, step + len(self.deferred))
        self.last = Attempt(name, is_asynchronous=is_asynchronous)
        self.phase = Phase.ASKED
        self.verdict = None
        return peers_may_wait

    def planned(self, plan: Plan, step: int) -> None:
        """Give the open attempt its plan. Those in flight that belong to another quorum fail."""
        self.last.plan = plan
        if self.deferred:
            self._abandon_those_of_other_quorums(plan.key)
        self.last.name = StepName(self.last.name.attempt, step + len(self.deferred), plan.key)
        self.phase = Phase.PLANNED

    def healed(self, step: int) -> None:
        """Go on from the reference, which the open attempt has loaded; earlier failures do not count for it."""
        last = self.last
        last.healing = Healing.LOADED
        last.name = StepName(last.name.attempt, step + len(self.deferred), last.name.key)
        self.commit_failures = self.lost_attempts = 0

    def without_quorum(self, error: Exception, *, others_go_on: bool) -> None:
        """Fail the open attempt and those in flight, because it is unknown whether their quorum stands.

        Args:
            error: the reason.
            others_go_on: the other members begin the next step before they have ended this one, as strategies do that
                put steps aside. They may have got the plan, and would have one more in flight than this rank.
        """
        if self.phase is Phase.ASKED:
            self.phase = Phase.FAILED
            self.fail_deferred(error)
            self.peers_may_wait = self.peers_may_wait or others_go_on
        self.last.note(error)

    @property
    def pause_ms(self) -> int:
        """Return how long to wait before the next request, milliseconds.

        One failure is a peer's death, and all members wait for the next attempt. A failure that repeats fails as fast
        as it is tried, and would keep a core busy.
        """
        again = self.commit_failures + self.failed_quorums - 2
        return 0 if again < 0 else min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS << min(again, 16))

    # --- finding ------------------------------------------------------------------------------------------------------

    def find(self, name: StepName | None) -> Attempt | None:
        """Return the attempt for which an error of that name counts; None if it is over. `name`: None: the open one."""
        last = self.last
        if self.phase is not Phase.IDLE and (name is None or last.name.attempt == name.attempt):
            return last
        if name is not None:
            for attempt in self.deferred:
                if attempt.name.attempt == name.attempt:
                    return attempt
        return None

    # --- several in flight --------------------------------------------------------------------------------------------

    def defer(self) -> Attempt:
        """Defer the open attempt: it continues while later ones run, and ends before them."""
        attempt, self.phase = self.last, Phase.IDLE
        self.aside[attempt.name.attempt] = attempt
        if attempt.abandoned is None:
            self.deferred.append(attempt)
        return attempt

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget attempts that will never end. An attempt that may still commit is kept."""
        for number in numbers:
            attempt = self.aside.get(number)
            if attempt is not None and attempt not in self.deferred:
                del self.aside[number]

    def fail_deferred(self, error: Exception) -> None:
        """Fail those in flight for a reason of this rank's own, which the group's other ranks may not share.

        The rank therefore votes no on the oldest. The other members do not share the reason either, and have theirs in
        flight.
        """
        for attempt in self.deferred:
            attempt.note(error)
            self.peers_may_wait = self.peers_may_wait or attempt.plan is not None

    def fail_own(self, error: Exception) -> None:
        """Fail the open attempt and those in flight for a reason of this rank's own: its state has changed
        under them."""
        if self.phase is not Phase.IDLE:
            self.last.note(error)
            self.peers_may_wait = self.peers_may_wait or self.last.plan is not None
        self.fail_deferred(error)

    def _abandon_those_of_other_quorums(self, key: QuorumKey) -> None:
        others = [attempt for attempt in self.deferred if attempt.plan is None or attempt.plan.key != key]
        for attempt in others:
            self.deferred.remove(attempt)
            attempt.abandoned = SyncAbandonedError(
                f"{attempt.name} was in flight when quorum {key} replaced its quorum; all steps in flight fail"
            )
        self.failed_quorums += sum(attempt.plan is None for attempt in others)
        self.lost_attempts += any(attempt.plan is not None for attempt in others)

    def give_up(self, error: Exception) -> None:
        """Abandon all attempts while the other members have theirs in flight: the next request breaks the quorum."""
        self.peers_may_wait = self.peers_may_wait or bool(self.deferred)
        if self.phase is not Phase.IDLE:
            self.last.note(error)  # its plan may still come, and others begin by it
        self.abandon_all(error)

    def abandon_all(self, error: Exception) -> None:
        """Abandon all attempts in flight, the open one included; all ranks of the group know that."""
        for attempt in self.deferred:
            attempt.abandoned = error
        self.deferred.clear()
        if self.phase is not Phase.IDLE:
            self.last.abandoned = error
            self.peers_may_wait = self.peers_may_wait or self.last.plan is not None

    # --- ending -------------------------------------------------------------------------------------------------------

    def open_ended(self, *, yes: bool, is_left_out: bool) -> None:
        """Close the open attempt with its verdict."""
        planned, self.phase = self.phase is Phase.PLANNED, Phase.IDLE
        self.verdict = yes
        self._count(self.last, yes=yes, planned=planned, is_left_out=is_left_out)

    def aside_ended(self, attempt: Attempt | None, *, yes: bool, is_left_out: bool) -> None:
        """Close an attempt that was put aside: the oldest, or one that has failed with others. None: it was dropped.

        A no fails all later attempts, the open one included, without a vote on them.
        """
        if self.phase is Phase.IDLE:
            self.verdict = yes  # of reductions between two steps
        if attempt is None:
            return
        self.aside.pop(attempt.name.attempt, None)
        if attempt in self.deferred:
            self.deferred.remove(attempt)
            if not yes:
                peers_may_wait = attempt.plan is not None and attempt.own_error is not None
                self.peers_may_wait = self.peers_may_wait or peers_may_wait
                self.abandon_all(
                    SyncAbandonedError(f"{attempt.name} was not committed; all steps in flight fail with it")
                )
        self._count(attempt, yes=yes, planned=attempt.plan is not None, is_left_out=is_left_out)

    def _count(self, attempt: Attempt, *, yes: bool, planned: bool, is_left_out: bool) -> None:
        if yes:
            self.commit_failures = self.failed_quorums = self.lost_attempts = 0
        elif attempt.abandoned is not None:
            pass  # counted once, with the attempt it failed with
        elif planned:
            self.commit_failures += 1
            self.has_unreported_failure = True
        elif not is_left_out:
            self.failed_quorums += 1

    @property
    def failures(self) -> int:
        """Return how many failed in a row."""
        return self.commit_failures + self.failed_quorums + self.lost_attempts
