"""Which beats carry the trainer's report to the lighthouse: few, because the lighthouse reads the beats of thousands.

A report that is lost with its stream comes again, because each one has all totals and the newest stalls.

Law of this file: whether a report is due; the caller gives the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, final

from tft_coord.core.progress import Progress

REPORT_EVERY_MS: Final = 5_000


@final
class ReportGate:
    """The reports of one group to the lighthouse.

    Args:
        progress: returns the group's progress at a time in milliseconds, with its newest report.
    """

    def __init__(self, progress: Callable[[int], Progress | None]) -> None:
        self._progress = progress
        self._due_ms = 0
        self._newest = 0  # the number of the newest stall that was sent

    def progress(self, now_ms: int) -> Progress | None:
        """Return the progress for a beat that is sent now: with the report if it has a new stall, or after a while."""
        progress = self._progress(now_ms)
        if progress is None or progress.report is None:
            return progress
        if progress.report.newest <= self._newest and now_ms < self._due_ms:
            return replace(progress, report=None)
        self._newest, self._due_ms = progress.report.newest, now_ms + REPORT_EVERY_MS
        return progress
