"""A record of the sources that failed recently.

A process keeps it from one receive to the next. A source that hung in one quorum is asked last in the following ones.
An address belongs to one run of a process, so a restarted source begins without a record.

Law of this file: pure; the time is given. The owner locks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, final

__all__ = ["SourceRecord"]

KEPT_S: Final = 600.0
"""How long a failure is kept."""
KEPT_MOST: Final = 64


@final
class SourceRecord:
    """The sources that hung, sent wrong data or were slow."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[str, float]] = {}  # oldest first

    def note(self, failures: Mapping[str, str], delivered: Collection[str], now_s: float) -> None:
        """Record the outcome of a receive.

        Args:
            failures: the sources that failed, and a sentence for each.
            delivered: the sources that gave data. If such a source did not fail, its record is cleared.
            now_s: the present time.
        """
        for source in delivered:
            self._failures.pop(source, None)
        for source, sentence in failures.items():
            self._failures.pop(source, None)
            self._failures[source] = sentence, now_s
        while len(self._failures) > KEPT_MOST:
            del self._failures[next(iter(self._failures))]

    def failures(self, now_s: float) -> dict[str, str]:
        """Return the sources that failed within the last ten minutes, and a sentence for each."""
        return {source: sentence for source, (sentence, noted_s) in self._failures.items() if now_s - noted_s < KEPT_S}
