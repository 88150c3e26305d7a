"""The knowledge of one rank about its steps, in one place for the handlers of the step's events.

Law of this file: the kept facts, and what follows from several of them. The handlers change them, one event at a time;
no code outside this package sees them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, final

from tft_coord.core.standing import StandingQuorum
from tft_coord.core.step.in_flight import StepsInFlight
from tft_coord.core.step.leaving import GracefulShutdown
from tft_coord.core.step.losses import Losses
from tft_coord.core.step.own_state import OwnState
from tft_coord.core.step.status import StepStatus
from tft_coord.core.types import QuorumKey
from tft_coord.errors import ReplicaGroupLostError
from tft_coord.timeouts import Timeouts

if TYPE_CHECKING:
    from tft_coord.core.step.attempt import Attempt
    from tft_coord.core.step.values import StepSettings


LATE_BEATS: Final = 5  # a late round is reported so many beats before its reductions time out


def _patient(timeouts: Timeouts) -> Timeouts:
    """Return the timeouts by which a round is late.

    If the reductions of a round time out sooner than `join_timeout`, the round is late shortly before that. The
    lighthouse then hears of it in time.
    """
    ends_ms = max(timeouts.timeout_ms // 2, timeouts.timeout_ms - LATE_BEATS * timeouts.beat_interval_ms)
    return replace(timeouts, join_timeout_ms=min(timeouts.join_timeout_ms, ends_ms))


@final
class StepState:
    """The knowledge of one rank.

    Attributes:
        settings: the decisions depend on them.
        own: the state that this rank holds.
        flights: its attempts.
        losses: of other members.
        standing: decides whether the next round asks the lighthouse.
        lease_ms: in its requests; None: it exchanges no word.
        changed: why this rank can't go on in its quorum without asking, one phrase; empty: it can.
        num_reductions: of the attempt that was committed last.
        aborts_at_start: the process group must be aborted before the next request.
        asks_next: why this rank wants the next round to ask, one phrase, or empty.
        leaving: whether and how it leaves.
        held, configured: keys of the newest quorum that it was given, and of the one that its process group is built
            for.
        is_aborted: this rank has aborted the configured process group.
        group_lost: why this replica group can't go on, or None.
        failed_heals: recoveries in a row that failed.
        healed_in: the last attempt in which the state came from a source, or None.
        is_left_out: as a straggler: no quorum comes, and that is no failure.
        by_strategy: a strategy decides when state is exchanged, and begins steps before earlier ones have ended.
        pends: the plan of the open attempt has not arrived, or its process group is not built.
        excused: the attempt is the first after a start, a recovery or a reconfiguration, or has no quorum.
        failed_between: an error was raised or reported since the last verdict and before the next start was done.
    """

    def __init__(self, settings: StepSettings) -> None:
        self.settings = settings
        self.own = OwnState(settings.job)
        self.flights = StepsInFlight()
        self.losses = Losses()
        self.standing = StandingQuorum(_patient(settings.timeouts))
        self.lease_ms = settings.lease_ms
        self.changed = ""
        self.asks_next = ""
        self.num_reductions = 0
        self.aborts_at_start = False
        self.leaving = GracefulShutdown()
        self.held: QuorumKey | None = None
        self.configured: QuorumKey | None = None
        self.is_aborted = False
        self.group_lost: ReplicaGroupLostError | None = None
        self.failed_heals = 0
        self.healed_in: int | None = None
        self.is_left_out = False
        self.by_strategy = False
        self.pends = False
        self.excused = True
        self.failed_between = False

    def hold(self, key: QuorumKey | None) -> None:
        """Hold the quorum of that key from now on."""
        self.held = key
        self.losses.hold(key)

    def abort(self) -> None:
        """Note that the process group is aborted, so that the next request reports it as unusable.

        Its key stays: a late answer may name it again, and a rendezvous is used once.
        """
        self.is_aborted = True

    def fatal_of(self, attempt: Attempt) -> Exception | None:
        """Return why this process can't go on with that attempt or any other, or None."""
        if isinstance(attempt.fatal, ReplicaGroupLostError):
            return self.group_lost or attempt.fatal  # the manager server knows which rank was lost
        return attempt.fatal or self.group_lost

    @property
    def is_awaited(self) -> bool:
        """Return whether the other members of this plan wait in the rendezvous for this rank, whose configuration has
        failed.

        They learn it when this rank asks again. Until then no source reaches the end of its step, where it serves.
        """
        plan = self.flights.last.plan
        return plan is not None and self.configured != plan.key and self.losses.broken is None

    def status(self) -> StepStatus:
        """Return all of it as a frozen value."""
        own, flights, leaving = self.own, self.flights, self.leaving
        last = flights.last
        return StepStatus(
            own.step,
            own.batches_committed,
            own.lineage,
            own.live,
            own.torn,
            own.check,
            own.divergences,
            last.name,
            flights.phase,
            last.plan,
            last.healing,
            last.is_asynchronous,
            last.is_participating,
            last.num_reductions > 0,
            last.abandoned is not None,
            last.errors,
            flights.verdict,
            last.exchanged,
            self.fatal_of(last),
            self.losses.broken,
            self.held,
            self.configured,
            self.pends,
            self.excused,
            self.healed_in,
            len(flights.deferred),
            tuple(attempt.status for attempt in flights.aside.values()) if flights.aside else (),
            flights.failed_quorums,
            flights.commit_failures,
            self.is_left_out,
            self.by_strategy,
            leaving.is_wished,
            leaving.left,
            leaving.reason,
            self.losses.of_held,
            self.standing.state,
        )
