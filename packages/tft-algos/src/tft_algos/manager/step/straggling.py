"""The lighthouse's messages about this replica's pace, stored and passed to the user.

Law of this file: storing the newest message, from any thread, and reporting it once. Nothing is decided.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import final

from tft_algos.manager.config import OnStraggler
from tft_algos.manager.step.error_reporter import ErrorReporter
from tft_coord.core.stragglers import PaceKind, StragglerNotice

_WELL = (PaceKind.KEEPS_UP, PaceKind.LET_BACK)
_OF_SHARES = (PaceKind.SHARE, PaceKind.KEEPS_UP)  # a replica that keeps up takes its whole batch


@final
class Straggling:
    """This replica's pace as the lighthouse reports it.

    Args:
        reports: the log.
        listener: the user's function, called at each change. None: no function.
    """

    def __init__(self, reports: ErrorReporter, listener: OnStraggler | None = None) -> None:
        self._reports = reports
        self._newest: StragglerNotice | None = None
        self._listener = listener
        self.share = 1.0  # the share of its batch that this replica should take

    @property
    def left_out(self) -> str:
        """Return why no quorum comes, in one sentence; "" if this replica is not left out."""
        newest = self._newest
        return newest.sentence if newest is not None and newest.kind is PaceKind.LEFT_OUT else ""

    def notified(self, notice: StragglerNotice) -> None:
        """Record a change of pace. The newest change may come again after a broken stream."""
        says_nothing = notice.kind is PaceKind.SHARE and notice.share == self.share
        is_new = notice != self._newest and not says_nothing
        self._newest = notice
        if is_new and notice.kind is PaceKind.SHARE and notice.share == 1.0:
            # This is another lighthouse, which does not know of a straggler.
            sentence = (
                f"replica {notice.replica_id} takes its whole batch, because this lighthouse requests no smaller share"
            )
            notice = replace(notice, kind=PaceKind.KEEPS_UP, sentence=notice.sentence or sentence)
        if notice.kind in _OF_SHARES:
            self.share = notice.share
        if not is_new:
            return
        is_well = notice.kind in _WELL
        self._reports.log(logging.INFO if is_well else logging.WARNING, "%s", notice.sentence or f"{notice.kind.name}")
        if self._listener is not None:
            try:
                self._listener(notice)
            except Exception as error:
                # The step is valid, whatever the user's function did.
                self._reports.log_traceback(error, "a function given to on_straggler raised at: %s", notice.sentence)
