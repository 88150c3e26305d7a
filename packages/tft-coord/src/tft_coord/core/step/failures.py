"""Failures, from any source: errors of an attempt, losses of members, the loss of this group.

Law of this file: which attempt an error counts for, and what a loss breaks.
"""

from __future__ import annotations

from typing import final

from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.step.effects import Effects
from tft_coord.core.step.state import StepState
from tft_coord.core.step.values import Phase, StepName


@final
class Failures:
    """The errors and losses that are reported to one rank.

    Args:
        state: the facts about the rank's steps, which all handlers share.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state

    def error_reported(self, event: on.ErrorReported, now_ms: int) -> Effects:
        return self._noted(event.error, event.name)

    def user_reported_error(self, event: on.UserReportedError, now_ms: int) -> Effects:
        """Note an error that the user reports. One between two steps fails no step, but makes a shutdown before the
        next one unclean."""
        self._state.failed_between = self._state.attempts.phase is Phase.IDLE
        return self._noted(event.error, None)

    def _noted(self, error: Exception, name: StepName | None) -> Effects:
        attempts = self._state.attempts
        attempt = attempts.find(name)
        if attempt is not None:
            attempt.note(error)
        is_between = name is None and attempt is None
        return (do.ReportError(name or attempts.last.name, error, attempt is not None, is_between),)

    def loss_noticed(self, event: on.LossNoticed, now_ms: int) -> Effects:
        self._state.standing.broke(event.notice.key)
        if self._state.losses.add(event.notice):
            return (do.BreakQuorum(event.notice),)
        return (do.ReportLateLoss(event.notice),)

    def group_was_lost(self, event: on.GroupWasLost, now_ms: int) -> Effects:
        state, attempts = self._state, self._state.attempts
        state.group_lost = state.group_lost or event.error
        if attempts.phase is not Phase.IDLE:
            attempts.last.note(event.error)
        return do.ReportGroupLost(attempts.last.name, event.error), do.BreakAll()

    def pace_heard(self, event: on.PaceHeard, now_ms: int) -> Effects:
        self._state.is_left_out = event.left_out
        return ()
