"""The newest quorum while its members go on in it without asking: recall, late members, members that may still live.

The lighthouse does not see the rounds of a standing quorum. It therefore recalls the members when another replica wants
to join. It breaks the quorum when a member waits for another one that does not come. It forms no quorum beside one
whose members may still make progress out of its reach.

A quorum whose members ask in every step (lease 0, or a member that exchanges no word) needs none of this.

Law of this file: what is known of one job's newest quorum; the caller gives the time, sends and forms.
Source: docs/protocol/sessions-and-quorums.md, "Standing quorums".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, final

from tft_coord.core.assignment import all_at
from tft_coord.core.liveness import Replica
from tft_coord.core.progress import Phase
from tft_coord.core.types import Quorum, QuorumKey, QuorumNews
from tft_coord.timeouts import Timeouts

BEATS_TO_ASK: Final = 2  # after so many beats a waiting member that was recalled has asked
LIVES: Final = "may still train without this lighthouse"  # part of the wait sentences
UNKNOWN_MEMBERS: Final = "unknown members of quorum"  # the start of a wait sentence


@final
class LivingQuorum:
    """The lighthouse's view of one job's newest quorum.

    Args:
        timeouts: of the lighthouse.
        listens_ms: since when it hears the members.
        had_earlier_life: a durable counter says that a lighthouse served before this one started, and its memory is
            lost.
    """

    def __init__(self, timeouts: Timeouts, listens_ms: int, *, had_earlier_life: bool = False) -> None:
        self._timeouts = timeouts
        self._listens_ms = listens_ms
        self._earlier_life_ends_ms = (
            listens_ms + timeouts.silence_after_lease_ms(timeouts.lease_ms) if had_earlier_life else listens_ms
        )
        self._lease_ms = 0  # of the newest quorum
        self._is_whole = False  # no member recovers in it
        self._recalled = False
        # the first member that asked since the quorum was given, and when
        self._first_asked: tuple[str, int] | None = None
        self._late: tuple[str, int] | None = None  # the member that waits in it for too long, and the step
        self._is_late_broken = False  # the quorum was broken because of a late member
        # Members of earlier quorums that are in no later one, and how long each may go on by itself.
        self._earlier: dict[str, int] = {}

    @property
    def stands(self) -> bool:
        """Return whether the members of the newest quorum may go on in it without asking."""
        return self._lease_ms > 0

    @property
    def stands_whole(self) -> bool:
        """Return whether they may, and all hold the state of the newest step that one of them has committed."""
        return self._is_whole

    @property
    def remember_ms(self) -> int:
        """Return for how long a lost member must be remembered."""
        return self._timeouts.silence_after_lease_ms(self._lease_ms) if self._lease_ms else 0

    def given(self, quorum: Quorum, before: Quorum | None) -> None:
        """Make a quorum the newest, or note that its members get it once more.

        Args:
            quorum: the newest.
            before: the one before it, or None.
        """
        if before is not None and before.key != quorum.key and self._lease_ms:
            silence_ms = self._timeouts.silence_after_lease_ms(self._lease_ms)
            self._earlier |= dict.fromkeys(before.replica_ids, silence_ms)
        for replica_id in quorum.replica_ids if self._earlier else ():
            self._earlier.pop(replica_id, None)
        self._lease_ms = quorum.lease_ms or 0
        first = quorum.members[0]
        self._is_whole = self._lease_ms > 0 and all_at(quorum.members, first.step, first.lineage)
        self._recalled, self._first_asked, self._late, self._is_late_broken = False, None, None, False

    # --- recall -----------------------------------------------------------------------------------------------------

    def recall(self) -> bool:
        """Recall the members; return whether they must be told, because no earlier recall has told them."""
        is_news = self.stands and not self._recalled
        self._recalled = self.stands
        return is_news

    def news(self, key: QuorumKey | None, beat: int, *, broken: bool) -> QuorumNews:
        """Return the news about the newest quorum for a member, in answer to a beat, or out of turn with `beat` 0."""
        return QuorumNews(key, broken, self._recalled, beat)

    # --- members that do not come -----------------------------------------------------------------------------------

    def asked(self, replica_id: str, now_ms: int) -> None:
        """Note that a member of the newest quorum asks for the next one."""
        if self._first_asked is None and self.stands:
            self._first_asked = replica_id, now_ms

    @property
    def joins_from_ms(self) -> int:
        """Return the time from which join_timeout counts for the next quorum.

        Until a member asks, the members train, and a replica that waits for them does not hurry them.
        """
        return self._first_asked[1] if self._first_asked is not None else 0

    @property
    def has_begun_to_end(self) -> bool:
        """Return whether a member of a standing quorum has asked or left, or waits for another one for too long."""
        return self.stands and (self._first_asked is not None or self._late is not None)

    def overdue(self, members: Iterable[Replica], now_ms: int) -> tuple[str, tuple[str, ...]] | None:
        """Find the members that still wait in the quorum although another one has asked for the next.

        The word of a round tells all members to ask. A member whose word did not complete waits in that round, and
        would wait until its deadline. A member that is busy, or between two steps, asks by itself.

        Args:
            members: healthy ones that have not asked.
        Returns: the member that asked first, and the ids of those that wait; None: there are none.
        """
        if self._first_asked is None or not self.stands:
            return None
        who, asked_ms = self._first_asked
        if now_ms - asked_ms < BEATS_TO_ASK * self._timeouts.beat_interval_ms:
            return None
        waiting = tuple(replica.replica_id for replica in members if _waits(replica))
        return (who, waiting) if waiting else None

    def late(self, replica_id: str, step: int) -> None:
        """Note a member's report that the round of that step waits for others for longer than `join_timeout`."""
        self._late = replica_id, step

    def breaks_for(self, members: Iterable[Replica]) -> tuple[str, tuple[str, ...]] | None:
        """Find the members that a late round waits for in vain: they are between two steps, or report no progress.

        A member inside its step may take as long as any step may.

        Args:
            members: healthy ones that have not asked.
        Returns: the member that reported the late round, and the ids of those that it waits for; None: nothing to
            break.
        """
        if self._late is None or not self.stands:
            return None
        who, step = self._late
        out = []
        for replica in members:
            progress = replica.where[0] if replica.where is not None else None
            if progress is not None and progress.step > step:
                self._late = None  # that round was committed after all
                return None
            if replica.replica_id != who and (progress is None or progress.phase is Phase.OUTSIDE):
                out.append(replica.replica_id)
        return (who, tuple(out)) if out else None

    def break_for_late(self) -> None:
        """Note that the quorum is broken because of late members. The others have waited for `join_timeout` already."""
        self._late = None
        self._is_late_broken = True

    def join_timeout_ms(self) -> int:
        """Return how long the next quorum waits for healthy replicas that have not asked.

        If the quorum was broken because of a late member, the others get only a moment to ask.
        """
        join_timeout_ms = self._timeouts.join_timeout_ms
        if not self._is_late_broken:
            return join_timeout_ms
        return min(join_timeout_ms, BEATS_TO_ASK * self._timeouts.beat_interval_ms)

    # --- a fresh start, refused --------------------------------------------------------------------------------------

    def waits_for(
        self,
        waiting: Collection[str],
        members: Collection[str],
        replicas: Mapping[str, Replica],
        now_ms: int,
    ) -> str | None:
        """Return why no quorum may form of those that wait: a member that was not heard lately may be in a round.

        With one member of the newest quorum among them there is no such wait, because that quorum can't complete a
        round without it.

        Args:
            waiting: the replicas that have asked.
            members: of the newest quorum.
            replicas: all known ones.
        Returns: one phrase, or None: a quorum may form.
        """
        if not (self.stands or self._earlier) or any(name in members for name in waiting):
            return None
        silence_ms = self.remember_ms
        awaited = dict.fromkeys(members, silence_ms) if self.stands else {}
        for name, earlier_ms in list(self._earlier.items()):
            replica = replicas.get(name)
            if replica is None or _is_gone(replica):
                del self._earlier[name]
            elif replica.lost is not None:
                awaited.setdefault(name, earlier_ms)
        left = {
            name: bound_ms - (now_ms - max(replica.heard_ms, self._listens_ms))
            for name, bound_ms in awaited.items()
            if name not in waiting and (replica := replicas.get(name)) is not None and not _is_gone(replica)
        }
        name = max(sorted(left), key=lambda each: left[each], default="")
        if not name or left[name] <= 0:
            return None
        return f"{name} {LIVES}; restart it, or the others resume without it in {-(-left[name] // 1_000)} s"

    def waits_for_unnamed(
        self, held: QuorumKey | None, lease_ms: int, holds: bool, previous: QuorumKey | None, now_ms: int
    ) -> str | None:
        """Return why a lighthouse without memory may form no quorum yet.

        Args:
            held: the newest quorum that a hello has named, or None.
            lease_ms: of that quorum, by the hello.
            holds: one of those that wait is a member of it.
            previous: the newest quorum whose members are known, or None.
        Returns: one phrase, or None: a quorum may form.
        """
        if held is not None and (previous is None or previous < held):
            ends_ms = self._listens_ms + self._timeouts.silence_after_lease_ms(lease_ms) if lease_ms else now_ms
            who = f"{UNKNOWN_MEMBERS} {held}"
        elif held is None and previous is None:
            ends_ms, holds = self._earlier_life_ends_ms, False
            who = "replicas of an earlier lighthouse"
        else:
            return None
        if holds or now_ms >= ends_ms:
            return None
        return f"{who} {LIVES}, for {-(-(ends_ms - now_ms) // 1_000)} s more"


def _waits(replica: Replica) -> bool:
    """Return whether a member reports that it waits for others, or reports no progress."""
    return replica.where is None or replica.where[0].phase in (Phase.WAITING, Phase.REDUCING)


def _is_gone(replica: Replica) -> bool:
    """Return whether a replica can complete no round any more: it is dead, was replaced, or left."""
    return replica.dead or replica.left is not None
