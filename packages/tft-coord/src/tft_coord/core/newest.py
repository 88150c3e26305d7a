"""A manager server's knowledge of the newest quorum of its job, for the leases of its ranks.

The lighthouse names the newest quorum in the answer to each beat of the manager server. A rank beats too. The answer to
it names the same quorum, and says how long ago the manager server sent the beat for that news. A rank's lease therefore
counts from the sending of a beat, whatever is late on the way.

Law of this file: one group's memory of it; the caller gives the time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

from tft_coord.core.types import QuorumKey, QuorumNews


@final
class NewestQuorum:
    """The newest quorum, as the lighthouse named it last."""

    def __init__(self) -> None:
        self._news = QuorumNews(None)
        self._sent_ms: int | None = None  # when the beat or the request was sent whose answer named it
        self._asked_ms = 0
        self._late: tuple[QuorumKey, int] | None = None

    @property
    def is_news(self) -> bool:
        """Return whether the ranks must know more than is in their plan."""
        return self._news.broken or self._news.recalled

    def asked(self, now_ms: int) -> None:
        """Note that the group's request is sent now; the age of its answer counts from here."""
        self._asked_ms = now_ms

    def given(self, key: QuorumKey) -> None:
        """Note that the request was answered: that quorum is the newest, and is not recalled."""
        self._news, self._sent_ms = QuorumNews(key), self._asked_ms

    def named(self, news: QuorumNews, sent_ms: int | None, current: QuorumKey | None) -> bool:
        """Take the lighthouse's name of the newest quorum.

        Args:
            news: the lighthouse's message.
            sent_ms: when the beat was sent that it answers; None: it answers none.
            current: the quorum that this group is in.
        Returns: whether that changes something for its ranks.
        """
        before = self._news
        self._news = replace(news, beat=0, age_ms=0)
        if news.key != before.key:
            self._sent_ms = None
        if sent_ms is not None and (self._sent_ms is None or sent_ms > self._sent_ms):
            self._sent_ms = sent_ms
        if current is None or news.key is None or self._news == before:
            return False
        return news.key > current or (news.key == current and self.is_news)

    def pushed(self) -> QuorumNews:
        """Return the news for the ranks, out of turn."""
        return self._news

    def answer(self, beat: int, now_ms: int) -> list[QuorumNews]:
        """Return the answer to a rank's beat; [] as long as nothing is known."""
        if self._sent_ms is None:
            return []
        return [replace(self._news, beat=beat, age_ms=max(0, now_ms - self._sent_ms))]

    def is_late(self, key: QuorumKey, step: int) -> bool:
        """Return whether a rank is the first of its group to report that this round waits for a member."""
        first, self._late = self._late != (key, step), (key, step)
        return first
