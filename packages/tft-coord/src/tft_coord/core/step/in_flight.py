"""The attempts of one rank: the open one, those in flight beside it, and how often in a row they failed.

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
        deferred: in flight beside it, oldest first; those that have not failed with others.
        aside: all that were put aside and are not over, by number.
        left_others: this rank has left reductions of the configured group in which the others may still wait, or steps
            that they have begun. Its next request therefore breaks their quorum.
        failure_is_news: the last failed commit came after the held key.
        commit_failures, failed_quorums, lost_flights: in a row; the last are flights that another quorum ended.
    """

    def __init__(self) -> None:
        self.last = Attempt(StepName(0, 0))
        self.phase = Phase.IDLE
        self.verdict: bool | None = None
        self.deferred: list[Attempt] = []
        self.aside: dict[int, Attempt] = {}
        self.left_others = False
        self.failure_is_news = False
        self.commit_failures = 0
        self.failed_quorums = 0
        self.lost_flights = 0

    # --- beginning ----------------------------------------------------------------------------------------------------

    def begin(self, step: int, *, is_asynchronous: bool) -> bool:
        """Begin the next attempt; what an earlier one left open is over.

        Returns: whether the others may still wait in what this rank has left.
        """
        # After an error of its own this rank may have left out reductions in which the others still wait. The others do
        # not wait for those of an attempt in flight before its end, and others in flight may end well before that.
        last = self.last
        left_others = self.left_others or (
            last.plan is not None and last.own_error is not None and last not in self.deferred
        )
        name = StepName(last.name.attempt + 1, step + len(self.deferred))
        self.last = Attempt(name, is_asynchronous=is_asynchronous)
        self.phase = Phase.ASKED
        self.verdict = None
        return left_others

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
        self.commit_failures = self.lost_flights = 0

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
            self.left_others = self.left_others or others_go_on
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

    def counting(self, name: StepName | None) -> Attempt | None:
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
        """Put the open attempt aside: it goes on beside later ones, and ends before them."""
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
            self.left_others = self.left_others or attempt.plan is not None

    def fail_own(self, error: Exception) -> None:
        """Fail the open attempt and those in flight for a reason of this rank's own: its state has changed
        under them."""
        if self.phase is not Phase.IDLE:
            self.last.note(error)
            self.left_others = self.left_others or self.last.plan is not None
        self.fail_deferred(error)

    def _abandon_those_of_other_quorums(self, key: QuorumKey) -> None:
        others = [attempt for attempt in self.deferred if attempt.plan is None or attempt.plan.key != key]
        for attempt in others:
            self.deferred.remove(attempt)
            attempt.abandoned = SyncAbandonedError(
                f"{attempt.name} was in flight when quorum {key} came; all that are in flight fail with it"
            )
        self.failed_quorums += sum(attempt.plan is None for attempt in others)
        self.lost_flights += any(attempt.plan is not None for attempt in others)

    def give_up(self, error: Exception) -> None:
        """Abandon all attempts while the other members have theirs in flight: the next request breaks the quorum."""
        self.left_others = self.left_others or bool(self.deferred)
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
            self.left_others = self.left_others or self.last.plan is not None

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
                left_others = attempt.plan is not None and attempt.own_error is not None
                self.left_others = self.left_others or left_others
                self.abandon_all(
                    SyncAbandonedError(
                        f"{attempt.name} was not committed; all that were in flight with it fail with it"
                    )
                )
        self._count(attempt, yes=yes, planned=attempt.plan is not None, is_left_out=is_left_out)

    def _count(self, attempt: Attempt, *, yes: bool, planned: bool, is_left_out: bool) -> None:
        if yes:
            self.commit_failures = self.failed_quorums = self.lost_flights = 0
        elif attempt.abandoned is not None:
            pass  # counted once, with the attempt it failed with
        elif planned:
            self.commit_failures += 1
            self.failure_is_news = True
        elif not is_left_out:
            self.failed_quorums += 1

    @property
    def failures(self) -> int:
        """Return how many failed in a row."""
        return self.commit_failures + self.failed_quorums + self.lost_flights
