"""The waits of this rank in its log: which replicas it waits for, since when, and which time-out ends the wait.

The training thread reports nothing and sets no timer. A thread of the coordinator checks once a beat, about once a
second, as for the beat itself. The lighthouse and the manager server say which replicas all others wait for.

Law of this file: checking and logging. `tft_coord.core.waits` decides when a line is due.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, final

from tft_algos.manager.config import ResolvedConfig
from tft_algos.manager.step.error_reporter import ErrorReporter
from tft_algos.manager.step.mailbox import StepMailbox
from tft_algos.manager.step.progress import StepProgress
from tft_coord.core.names import shorten
from tft_coord.core.progress import Phase
from tft_coord.core.step import Healing, StepStatus
from tft_coord.core.step import Phase as StepPhase
from tft_coord.core.types import Plan
from tft_coord.core.waits import LEFT_OUT, NAMES_MOST, WaitNotice

QUORUM: Final = "a quorum"
GROUP: Final = "the process group of the new quorum"
REDUCTION: Final = "a reduction"
STATE: Final = "live state"
VOTE: Final = "the vote of its group"
WORD: Final = "the end of the step at the other replicas"
# Validity of the lighthouse's message, which is sent once a second unless another message replaces it.
LEFT_OUT_FOR_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Wait:
    """A current wait.

    Args:
        kind: what this rank waits for, one of the texts above.
        who: the replicas it waits for, a clause with short ids.
        seconds: how long the checks have seen it.
    """

    kind: str
    who: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Seen:
    """The result of a check. `key`: identifies the wait, with attempt and kind first. Empty: no wait."""

    key: tuple[object, ...] = ()
    kind: str = ""
    since_s: float = 0.0


@final
class WaitWatch:
    """The waits of one rank.

    Args:
        step: says whether a step is open, planned, and heals.
        step_progress: says where in the step the training thread is.
        config: its time-outs end the waits.
        reports: the log.
        monotonic: returns the time in seconds.
        failed_before: returns why the last process group was not built, as a clause; "" if it was built.
        left_out: returns why no quorum comes, if this replica is left out as a straggler; otherwise "".
    """

    def __init__(
        self,
        step: StepMailbox,
        step_progress: StepProgress,
        config: ResolvedConfig,
        reports: ErrorReporter,
        monotonic: Callable[[], float],
        *,
        failed_before: Callable[[], str] = lambda: "",
        left_out: Callable[[], str] = lambda: "",
    ) -> None:
        self._step = step
        self._step_progress = step_progress
        self._config = config
        self._reports = reports
        self._monotonic = monotonic
        self._failed_before_by = failed_before
        self._notice = WaitNotice()
        self._seen = _Seen()  # of the last check; one value, because other threads read it
        self._first_asked_s = 0.0  # the first of the requests in a row that got no quorum
        self._failed_before = 0  # when the wait for a quorum began
        self._has_failed = False  # the last wait for a quorum ended without one
        self._reported = ("", 0.0)
        self._left_out_reported_s: float | None = None
        self._left_out = left_out
        self.quorum_limit: timedelta = config.quorum_timeout  # of the last request for a quorum

    def reported(self, sentence: str) -> None:
        """Record a sentence of the lighthouse or the manager server that says what this rank waits for."""
        self._reported = (sentence, self._monotonic())
        if sentence.startswith(LEFT_OUT):
            self._left_out_reported_s = self._reported[1]

    @property
    def is_left_out(self) -> bool:
        """Return whether the last check saw a wait for a quorum while the others train without this replica."""
        reported_s = self._left_out_reported_s
        heard = (
            reported_s is not None
            and self._seen.since_s <= reported_s
            and self._monotonic() - reported_s < LEFT_OUT_FOR_S
        )
        return self._seen.kind == QUORUM and (heard or bool(self._left_out()))

    @property
    def round_waits_ms(self) -> int | None:
        """Return how long the checks have seen a wait in the reductions or the word of a round; None: no such wait."""
        seen = self._seen
        if seen.kind not in (REDUCTION, WORD):
            return None
        return round(1_000 * (self._monotonic() - seen.since_s))

    def now(self, status: StepStatus) -> Wait | None:
        """Return the current wait, on any thread; None: this rank does not wait. `status`: of the step."""
        kind = self._kind_now(status)
        if not kind:
            return None
        seen = self._seen
        is_the_same = (status.name.attempt, kind) == seen.key[:2]
        return Wait(kind, self._who(kind), self._monotonic() - seen.since_s if is_the_same else 0.0)

    def look(self, reductions: int) -> None:
        """Log the line that is due, if there is one. `reductions`: how many this Manager has started."""
        now_s = self._monotonic()
        status = self._step.status
        kind = self._kind_now(status)
        key = (status.name.attempt, kind, reductions) if kind else ()
        if key != self._seen.key:
            before, self._seen = self._seen.kind, _Seen(key, kind, now_s)
            if before:
                failed = status.phase is StepPhase.FAILED or status.failed_quorums > self._failed_before
                self._has_failed = before == QUORUM and failed
            self._write(None, before, now_s)
            if kind == QUORUM:
                self._failed_before = status.failed_quorums
                if not self._has_failed:
                    self._first_asked_s = now_s
        if kind:
            self._write(self._seen.since_s, kind, now_s)

    def _write(self, since_s: float | None, kind: str, now_s: float) -> None:
        notice = self._notice.look(None if since_s is None else round(since_s * 1_000), round(now_s * 1_000))
        if notice is None:
            return
        if notice.is_over and kind == QUORUM and self._has_failed:
            self._reports.log(
                logging.INFO,
                "timed out waiting for a quorum after %d s (%d s in total); the next step requests it again",
                notice.seconds,
                max(notice.seconds, now_s - self._first_asked_s),
            )
            return
        if notice.is_over:
            self._reports.log(logging.INFO, "the wait for %s is over after %d s", kind, notice.seconds)
            return
        self._reports.log(
            logging.WARNING,
            "waiting for %s for %d s: %s; time limit: %s",
            kind,
            notice.seconds,
            self._who(kind),
            self._limit(kind),
        )

    def _kind_now(self, status: StepStatus) -> str:
        phase = self._step_progress.phase(status)
        if phase is not Phase.WAITING:
            return REDUCTION if phase is Phase.REDUCING else ""
        if status.pends:
            return QUORUM if status.phase is StepPhase.ASKED else GROUP
        if self._step_progress.awaits_words:
            return WORD
        return STATE if status.healing is Healing.FETCHING else VOTE

    def _limit(self, kind: str) -> str:
        if kind == GROUP:
            return "the process group's own timeout"
        if kind == QUORUM:
            return f"quorum_timeout ({self.quorum_limit.total_seconds():g} s)"
        if kind == STATE:
            return f"heal_timeout ({self._config.heal_timeout.total_seconds():g} s)"
        return f"timeout ({self._config.timeout.total_seconds():g} s)"

    def _who(self, kind: str) -> str:
        if kind == QUORUM and (why := self._left_out()):
            return shorten(why)
        sentence, reported_s = self._reported
        if sentence and reported_s >= self._seen.since_s:
            return shorten(sentence)
        plan = self._step.status.plan
        if kind == QUORUM:
            return "the lighthouse has not reported the missing replicas yet"
        if plan is None:
            return "the missing replicas are unknown"
        if kind == STATE and plan.sources:
            source = plan.sources[0]
            return f"the state of step {plan.step} from {shorten(source.replica_id)} at {source.address}"
        if kind == VOTE:
            return f"the other ranks of this group of {self._config.world_size}"
        return self._members(kind, plan)

    def _members(self, kind: str, plan: Plan) -> str:
        others = [shorten(name) for name in plan.replica_ids if name != plan.replica_id]
        more = f" and {len(others) - NAMES_MOST} more" if len(others) > NAMES_MOST else ""
        failure = self._failed_before_by() if kind == GROUP else ""
        before = f" (the last one failed: {shorten(failure)})" if failure else ""
        if others:
            return f"the other members of quorum {plan.key.quorum_id}: {', '.join(others[:NAMES_MOST])}{more}{before}"
        alone = f"no other replica is in quorum {plan.key.quorum_id}"
        return f"the group itself is starting, and {alone}{before}" if kind == GROUP else alone
