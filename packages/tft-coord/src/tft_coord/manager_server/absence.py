"""The absence of every lighthouse of a job, and the log lines about it.

Law of this file: what is said, and when. The link dials.
"""

from __future__ import annotations

from typing import Final, final

from tft_coord.logs import logger_for_people

__all__ = ["Absence"]

logger = logger_for_people(__name__)

WARN_AWAY_AFTER_MS: Final = 2_000  # a restart of the lighthouse is shorter than this, a wrong address is not
AWAY: Final = "replica %s: %s; retrying. A job with a quorum trains on for two thirds of its lease"
BACK: Final = "replica %s: the lighthouse at %s answers again, after %.1f s"
REPORT_AWAY_EVERY_MS: Final = 2_000  # a rank's next wait may begin at any time, and its log line comes after 5 s


@final
class Absence:
    """How long no lighthouse has answered, and what was logged about it."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._since_ms: int | None = None
        self._warned = False
        self._reported_ms: int | None = None

    def lasts(self, now_ms: int, failure: str) -> bool:
        """Note a failed dial. Returns: whether waiting ranks must be told of it now."""
        if self._since_ms is None:
            self._since_ms = now_ms
        if now_ms - self._since_ms < WARN_AWAY_AFTER_MS:
            return False
        if not self._warned:
            self._warned = True
            logger.warning(AWAY, self._replica_id, failure)
        if self._reported_ms is not None and now_ms - self._reported_ms < REPORT_AWAY_EVERY_MS:
            return False
        self._reported_ms = now_ms
        return True

    def ends(self, now_ms: int, target: str) -> None:
        """Note that the lighthouse at this address answers."""
        if self._warned and self._since_ms is not None:
            # As loud as the line about its absence, which would stand as the last word otherwise.
            logger.warning(BACK, self._replica_id, target, (now_ms - self._since_ms) / 1000)
        self._since_ms, self._warned, self._reported_ms = None, False, None
