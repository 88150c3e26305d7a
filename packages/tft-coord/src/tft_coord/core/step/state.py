"""The facts about one rank's steps, in one place for the handlers of the step's events.

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


def _round_timeouts(timeouts: Timeouts) -> Timeouts:
    """Return the timeouts after which a round counts as late.

    If the reductions of a round time out sooner than `join_timeout`, the round is late shortly before that. The
    lighthouse then learns of it in time.
    """
    ends_ms = max(timeouts.timeout_ms // 2, timeouts.timeout_ms - LATE_BEATS * timeouts.beat_interval_ms)
    return replace(timeouts, join_timeout_ms=min(timeouts.join_timeout_ms, ends_ms))


@final
class StepState:
    """The facts about one rank's steps.

    Attributes:
        settings: the decisions depend on them.
        own: the state that this rank holds.
        attempts: its attempts.
        losses: of other members.
        standing: decides whether the next round asks the lighthouse.
        lease_ms: in its requests; None: it exchanges no control words.
        changed: why this rank must ask for a quorum before its next step, one phrase; or empty.
        num_reductions: of the attempt that was committed last.
        abort_at_start: the process group must be aborted before the next request.
        ask_reason: why the next round must ask the lighthouse, one phrase; or empty.
        leaving: whether and how it leaves.
        held, configured: keys of the newest quorum that it was given, and of the one that its process group is built
            for.
        is_aborted: this rank has aborted the configured process group.
        group_lost: why this replica group is lost, or None.
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
        self.attempts = StepsInFlight()
        self.losses = Losses()
        self.standing = StandingQuorum(_round_timeouts(settings.timeouts))
        self.lease_ms = settings.lease_ms
        self.changed = ""
        self.ask_reason = ""
        self.num_reductions = 0
        self.abort_at_start = False
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
        """Make the quorum of that key the current one."""
        self.held = key
        self.losses.hold(key)

    def abort(self) -> None:
        """Note that the process group is aborted, so that the next request reports it as unusable.

        Its key stays: a late answer may name it again, and a rendezvous is used once.
        """
        self.is_aborted = True

    def fatal_of(self, attempt: Attempt) -> Exception | None:
        """Return the error that this process can't recover from, in that attempt or in general; or None."""
        if isinstance(attempt.fatal, ReplicaGroupLostError):
            return self.group_lost or attempt.fatal  # the manager server knows which rank was lost
        return attempt.fatal or self.group_lost

    @property
    def is_awaited(self) -> bool:
        """Return whether the other members of this plan wait in the rendezvous for this rank, whose configuration has
        failed.

        They learn it when this rank asks again. Until then no source reaches the end of its step, where it serves.
        """
        plan = self.attempts.last.plan
        return plan is not None and self.configured != plan.key and self.losses.broken is None

    @property
    def has_group(self) -> bool:
        """Return whether the process group is configured for this plan, and its quorum is not broken."""
        plan = self.attempts.last.plan
        built = plan is not None and self.configured == plan.key and not self.is_aborted
        return built and self.losses.broken is None

    def status(self) -> StepStatus:
        """Return the status of the step as a frozen value."""
        own, attempts, leaving = self.own, self.attempts, self.leaving
        last = attempts.last
        return StepStatus(
            own.step,
            own.batches_committed,
            own.lineage,
            own.live,
            own.torn,
            own.check,
            own.divergences,
            last.name,
            attempts.phase,
            last.plan,
            last.healing,
            last.is_asynchronous,
            last.is_participating,
            last.num_reductions > 0,
            last.abandoned is not None,
            last.errors,
            attempts.verdict,
            last.exchanged,
            self.fatal_of(last),
            self.losses.broken,
            self.held,
            self.configured,
            self.pends,
            self.excused,
            self.healed_in,
            len(attempts.deferred),
            tuple(attempt.status for attempt in attempts.aside.values()) if attempts.aside else (),
            attempts.failed_quorums,
            attempts.commit_failures,
            self.is_left_out,
            self.by_strategy,
            leaving.is_requested,
            leaving.left,
            leaving.reason,
            self.losses.of_current_quorum,
            self.standing.state,
        )
