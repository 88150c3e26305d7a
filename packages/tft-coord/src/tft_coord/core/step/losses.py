"""Losses of other members, by the quorum that each of them breaks.

Law of this file: keeping notices; other files decide the aborts.
"""

from __future__ import annotations

from typing import Final, final

from tft_coord.core.step.errors import QuorumBrokenError
from tft_coord.core.types import LossNotice, QuorumKey

MAX_NOTICES_KEPT: Final = 1024


@final
class Losses:
    """The notices that one rank has received, about its current quorum and quorums still to come."""

    def __init__(self) -> None:
        self._notices: list[LossNotice] = []
        self._current: QuorumKey | None = None
        self._ended: QuorumBrokenError | None = None  # set if the current quorum is over without a reported loss
        self.broken: QuorumBrokenError | None = None  # why nothing can start in the held quorum

    def hold(self, key: QuorumKey | None) -> None:
        """Make that quorum the current one; earlier ones are over."""
        if key != self._current:
            self._ended = None
        self._current = key
        if key is not None and self._notices:
            self._notices = [notice for notice in self._notices if notice.key >= key]
        self._update_broken()

    def add(self, notice: LossNotice) -> bool:
        """Keep a notice.

        A notice that comes before its quorum is kept for it. A notice of a quorum that is over, or a repeated one,
        changes nothing. If there are too many, those of the newest quorums are dropped.

        Returns: whether it breaks the current quorum, so that everything that runs in it must be aborted.
        """
        is_over = self._current is not None and notice.key < self._current
        if is_over or _identity(notice) in map(_identity, self._notices):
            return False
        self._notices = sorted([*self._notices, notice], key=lambda kept: kept.key)[:MAX_NOTICES_KEPT]
        if notice.key != self._current:
            return False
        self._update_broken()
        return True

    def end_quorum(self, error: QuorumBrokenError) -> None:
        """Note that the current quorum is over, although no loss was reported."""
        self._ended = error
        self._update_broken()

    @property
    def of_current_quorum(self) -> tuple[LossNotice, ...]:
        """Return the notices that have broken the current quorum; () while it stands."""
        return tuple(notice for notice in self._notices if notice.key == self._current) if self._notices else ()

    def _update_broken(self) -> None:
        first = next(iter(self.of_current_quorum), None)
        self.broken = (
            self._ended
            if first is None
            else QuorumBrokenError(f"{first}; the next step asks for another quorum", replica_id=first.replica_id)
        )


def _identity(notice: LossNotice) -> tuple[QuorumKey, str, int, bool]:
    """Return the parts of a notice that identify it; the reason is only for people."""
    return notice.key, notice.replica_id, notice.session, notice.lives
