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
    """The notices that one rank has heard, of the held quorum and of quorums still to come."""

    def __init__(self) -> None:
        self._notices: list[LossNotice] = []
        self._held: QuorumKey | None = None
        self._over: QuorumBrokenError | None = None  # set if the held quorum is over without a reported loss
        self.broken: QuorumBrokenError | None = None  # why nothing can start in the held quorum

    def hold(self, key: QuorumKey | None) -> None:
        """Hold that quorum from now on; earlier ones are over."""
        if key != self._held:
            self._over = None
        self._held = key
        if key is not None and self._notices:
            self._notices = [notice for notice in self._notices if notice.key >= key]
        self._judge()

    def heard(self, notice: LossNotice) -> bool:
        """Keep a notice.

        A notice that comes before its quorum is kept for it. A notice of a quorum that is over, or a repeated one in
        any words, changes nothing. If there are too many, those of the newest quorums are dropped.

        Returns: whether it breaks the held quorum, so that what runs in it must be aborted.
        """
        if (self._held is not None and notice.key < self._held) or _identity(notice) in map(_identity, self._notices):
            return False
        self._notices = sorted([*self._notices, notice], key=lambda kept: kept.key)[:MAX_NOTICES_KEPT]
        if notice.key != self._held:
            return False
        self._judge()
        return True

    def ends(self, error: QuorumBrokenError) -> None:
        """Note that the held quorum is over, although no loss was reported."""
        self._over = error
        self._judge()

    @property
    def of_held(self) -> tuple[LossNotice, ...]:
        """Return the notices that have broken the held quorum; () while it stands."""
        return tuple(notice for notice in self._notices if notice.key == self._held) if self._notices else ()

    def _judge(self) -> None:
        first = next(iter(self.of_held), None)
        self.broken = (
            self._over
            if first is None
            else QuorumBrokenError(f"{first}; the next step asks for another", replica_id=first.replica_id)
        )


def _identity(notice: LossNotice) -> tuple[QuorumKey, str, int, bool]:
    """Return what a notice is about; the reason is a sentence for people."""
    return notice.key, notice.replica_id, notice.session, notice.lives
