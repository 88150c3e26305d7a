"""Which sources failed lately.

A process keeps it from one receive to the next: a source that hung in one quorum is asked last in the following ones.
An address belongs to one life of a process, so a source that was started anew begins without a record.

Law of this file: pure; the time is given. The owner locks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, final

__all__ = ["SourceRecord"]

KEPT_S: Final = 600.0
"""How long a failure is remembered."""
KEPT_MOST: Final = 64


@final
class SourceRecord:
    """The sources that hung, lied or were slow."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[str, float]] = {}  # oldest first

    def note(self, failures: Mapping[str, str], gave: Collection[str], now_s: float) -> None:
        """Take in what came of a receive.

        Args:
            failures: the sources that failed, and a sentence for each.
            gave: those that gave data. One that gave, and did not fail, is forgiven.
        """
        for source in gave:
            self._failures.pop(source, None)
        for source, sentence in failures.items():
            self._failures.pop(source, None)
            self._failures[source] = sentence, now_s
        while len(self._failures) > KEPT_MOST:
            del self._failures[next(iter(self._failures))]

    def failures(self, now_s: float) -> dict[str, str]:
        """The sources that failed within the last ten minutes, and a sentence for each."""
        return {source: sentence for source, (sentence, noted_s) in self._failures.items() if now_s - noted_s < KEPT_S}
