"""The attempts of one rank: the open one, those in flight beside it, and how often in a row they failed.

Those in flight together belong to one quorum and end in the order in which they were begun. What is begun later builds
on what is begun before: so another quorum, or one no, fails all of them, here and at every other member.

Law of this file: which attempts there are and which fail with which. What a commit does to the state is elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

from tft_coord.core.step.attempt import Attempt
from tft_coord.core.step.errors import SyncAbandoned
from tft_coord.core.step.values import Healing, Phase, StepName
from tft_coord.core.types import Plan, QuorumKey

FIRST_PAUSE_MS: Final = 10
LONGEST_PAUSE_MS: Final = 1_000


@final
class Flights:
    """The attempts of one rank.

    Attributes:
        last: the attempt that was begun last, whether it is open or not.
        phase, verdict: of that.
        deferred: in flight beside it, oldest first; those that have not failed with others.
        aside: all that were put aside and are not over, by number.
        left_others: the others may still wait in reductions of the group that is configured, or have begun steps, that
            this rank has left; so its next request breaks their quorum.
        failure_is_news: the last failed commit came after the key that is held.
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
        # After an error of its own this rank may have left out reductions in which the others still wait. Those of an
        # attempt that is in flight they do not wait for before its end, and others in flight may end well before that.
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
        """Go on from the reference, which the open attempt has loaded: what failed before says nothing of it."""
        last = self.last
        last.healing = Healing.LOADED
        last.name = StepName(last.name.attempt, step + len(self.deferred), last.name.key)
        self.commit_failures = self.lost_flights = 0

    def without_quorum(self, error: Exception, *, others_go_on: bool) -> None:
        """Fail the open attempt, and those in flight, because nobody knows whether their quorum stands.

        Args:
            error: why.
            others_go_on: the other members begin the next step before they have ended this one, as strategies do that
                put steps aside. They may have been given the plan, and would have one more in flight than this rank.
        """
        if self.phase is Phase.ASKED:
            self.phase = Phase.FAILED
            self.fail_deferred(error)
            self.left_others = self.left_others or others_go_on
        self.last.note(error)

    @property
    def pause_ms(self) -> int:
        """Return how long to wait before asking again, milliseconds.

        One failure is a peer's death, and the next attempt is what everybody waits for. What fails again and again
        fails as fast as it is tried, and would keep a core busy with it.
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
        """Forget those that nobody will end. One that may still commit is kept."""
        for number in numbers:
            attempt = self.aside.get(number)
            if attempt is not None and attempt not in self.deferred:
                del self.aside[number]

    def fail_deferred(self, error: Exception) -> None:
        """Fail those in flight for a reason of this rank's own, which the group's other ranks may not share.

        So it votes no on the oldest. The other members do not share it either: they have theirs in flight.
        """
        for attempt in self.deferred:
            attempt.note(error)
            self.left_others = self.left_others or attempt.plan is not None

    def fail_own(self, error: Exception) -> None:
        """Fail the open one and those in flight for a reason of this rank's own: it has another state than they."""
        if self.phase is not Phase.IDLE:
            self.last.note(error)
            self.left_others = self.left_others or self.last.plan is not None
        self.fail_deferred(error)

    def _abandon_those_of_other_quorums(self, key: QuorumKey) -> None:
        others = [attempt for attempt in self.deferred if attempt.plan is None or attempt.plan.key != key]
        for attempt in others:
            self.deferred.remove(attempt)
            attempt.abandoned = SyncAbandoned(
                f"{attempt.name} was in flight when quorum {key} came; all that are in flight fail with it"
            )
        self.failed_quorums += sum(attempt.plan is None for attempt in others)
        self.lost_flights += any(attempt.plan is not None for attempt in others)

    def give_up(self, error: Exception) -> None:
        """Abandon all where the other members have theirs in flight still: the next request breaks the quorum."""
        self.left_others = self.left_others or bool(self.deferred)
        if self.phase is not Phase.IDLE:
            self.last.note(error)  # its plan may come yet, and others begin by it
        self.abandon_all(error)

    def abandon_all(self, error: Exception) -> None:
        """Have nothing that is in flight commit any more, the open one included, as all ranks of the group know."""
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
        """Close one that was put aside: the oldest, or one that has failed with others. None: it was dropped.

        A no fails all that were begun after it, the open one included; and none of them is voted on.
        """
        if self.phase is Phase.IDLE:
            self.verdict = yes  # of what is reduced between two steps
        if attempt is None:
            return
        self.aside.pop(attempt.name.attempt, None)
        if attempt in self.deferred:
            self.deferred.remove(attempt)
            if not yes:
                left_others = attempt.plan is not None and attempt.own_error is not None
                self.left_others = self.left_others or left_others
                self.abandon_all(
                    SyncAbandoned(f"{attempt.name} was not committed; all that were in flight with it fail with it")
                )
        self._count(attempt, yes=yes, planned=attempt.plan is not None, is_left_out=is_left_out)

    def _count(self, attempt: Attempt, *, yes: bool, planned: bool, is_left_out: bool) -> None:
        if yes:
            self.commit_failures = self.failed_quorums = self.lost_flights = 0
        elif attempt.abandoned is not None:
            pass  # counted once, with what it failed with
        elif planned:
            self.commit_failures += 1
            self.failure_is_news = True
        elif not is_left_out:
            self.failed_quorums += 1

    @property
    def failures(self) -> int:
        """Return how many failed in a row."""
        return self.commit_failures + self.failed_quorums + self.lost_flights
