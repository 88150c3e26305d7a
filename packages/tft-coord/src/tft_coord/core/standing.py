"""One rank's side of standing quorums: whether its next round asks the lighthouse, and the content of its word.

A quorum stands for a group after a round that all members committed and in which no member wished to ask. The next
round then begins without a message. Each rank exchanges one word with all members at the end of a round. The sum of the
words is the same for every member whose exchange completes. All members therefore learn in the same round that they
must ask. A rank goes on without asking only while its lease holds. Answers to its beats renew the lease. The lease
counts from the sending of the beat, so a late answer renews less.

Law of this file: the decisions of one rank. It sends nothing and aborts nothing; the caller gives the time of a
monotonic clock.
Source: docs/protocol/sessions-and-quorums.md, "Standing quorums".
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from tft_coord.core.lineage import state_check
from tft_coord.core.types import Plan, QuorumKey, QuorumNews
from tft_coord.errors import ProtocolError
from tft_coord.timeouts import Timeouts

NUM_WORDS: Final = 5  # integers in the word of a round
UNANSWERED_MOST: Final = 64  # beats whose send times are kept
BROKEN_MOST: Final = 16  # quorums that were broken before this rank got them
FAILED_BEATS: Final = 2  # beats have failed after so many beat intervals without a renewal
BROKEN: Final = "its quorum is broken"


class State(enum.Enum):
    """The state of a rank in its quorum."""

    ASKS = "asks"  # the next round asks the lighthouse, or this rank waits for its answer
    RUNS = "runs"  # a round runs that the lighthouse gave
    STANDS = "stands"  # the current or next round needs no request
    RECALLED = "recalled"  # as STANDS, and the next word tells all members to ask
    BROKEN = "broken"  # the quorum can't complete another round


@dataclass(frozen=True, slots=True)
class Word:
    """The word: what a rank sends to the same rank of all members at the end of a round.

    Args:
        ok: it has no error in this round.
        ask: why the next round must ask the lighthouse, one phrase, or empty.
        leave: its group leaves after this round.
        recovering: it recovers in this round.
        check: digest of the participant's (step, lineage); 0 from others.
    """

    ok: bool
    ask: str
    leave: bool
    recovering: bool
    check: int

    def values(self) -> tuple[int, int, int, int, int]:
        """Return the integers to exchange; members add them up."""
        return int(self.ok), int(bool(self.ask)), int(self.leave), int(self.recovering), self.check


@dataclass(frozen=True, slots=True)
class Vote:
    """The meaning of the sum of a round's words for this rank's vote.

    Args:
        yes: the word completed, every member is ok, and the participants stood at one state.
        stands: no member asks, leaves or recovers.
        why: of a no, one phrase.
    """

    yes: bool
    stands: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class GoOn:
    """The order to begin the next round of the standing quorum, at that step, and to send nothing.

    Args:
        fails: why this rank can't go on, one phrase: it aborts its process group and has an error in this round. Empty:
            it can.
    """

    step: int
    fails: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """The order to ask the lighthouse for the next quorum.

    Args:
        why: one phrase.
        breaks: the quorum still stood. This rank aborts its process group first, because the other members have begun
            the next round. Its request reports the group as unusable.
    """

    why: str
    breaks: bool = False


@dataclass(frozen=True, slots=True)
class Late:
    """The order to tell the lighthouse that a standing round waits for a member for longer than `join_timeout`."""

    key: QuorumKey
    step: int


@final
class Lease:
    """The time for which a rank may go on in its quorum without asking.

    Args:
        patience_ms: beats have failed after so long without a renewal.
    """

    def __init__(self, patience_ms: int) -> None:
        self._patience_ms = patience_ms
        self._lease_ms = 0
        self._from_ms = 0
        self._beats: dict[int, int] = {}  # number -> send time, of the unanswered beats
        self._number = 0

    def begin(self, lease_ms: int, sent_ms: int) -> None:
        """Start the lease of a quorum that answers a request sent at that time."""
        self._lease_ms, self._from_ms = lease_ms, sent_ms
        self._forget_the_answered()

    def beat(self, now_ms: int) -> int:
        """Return the number of a beat that is sent now."""
        self._number += 1
        self._beats[self._number] = now_ms
        if len(self._beats) > UNANSWERED_MOST:
            # The oldest one stays: it shows since when no beat was answered.
            del self._beats[list(self._beats)[1]]
        return self._number

    def answered(self, number: int, age_ms: int, *, renews: bool) -> None:
        """Take the answer to a beat.

        Args:
            number: of the beat.
            age_ms: how old the answer's news was when the answer was sent.
            renews: the answer names the quorum as the newest.
        """
        sent_ms = self._beats.get(number)
        if sent_ms is None:
            return  # a beat of an earlier life, or answered before
        if renews and sent_ms - age_ms > self._from_ms:
            self._from_ms = sent_ms - age_ms
            self._forget_the_answered()

    def _forget_the_answered(self) -> None:
        self._beats = {number: at_ms for number, at_ms in self._beats.items() if at_ms > self._from_ms}

    def holds(self, now_ms: int) -> bool:
        """Return whether a round may begin now."""
        return now_ms - self._from_ms < self._lease_ms

    def runs_out(self, now_ms: int) -> bool:
        """Return whether less than a third is left and beats have failed since the last renewal."""
        if 3 * (now_ms - self._from_ms) <= 2 * self._lease_ms:
            return False
        oldest_ms = next(iter(self._beats.values()), now_ms)
        return now_ms - oldest_ms >= self._patience_ms


@dataclass(slots=True)
class _Round:
    """A round that has begun and is not decided. Several syncs in flight end in the order of their start."""

    plan: Plan
    step: int
    began_ms: int
    without_request: bool
    reported_late: bool = False

    @property
    def recovers(self) -> bool:
        """Return whether a member recovers in it."""
        return not self.without_request and _somebody_recovers(self.plan)


def _somebody_recovers(plan: Plan) -> bool:
    return len(plan.up_to_date) < plan.replica_world_size


@final
class StandingQuorum:
    """One rank's quorum, from one plan to the next.

    The caller's order in a round is fixed. `next_round` comes first. If it returns `Ask`, `asked` follows before
    the request is sent, and `planned` with the answer. After the reductions comes `word`, with the sum of all words
    `summed`, and with the group's verdict `decided`. News and beats come at any time. With syncs in flight further
    rounds begin before the first has ended. `word`, `summed` and `decided` are about the oldest one.

    Args:
        timeouts: of the job.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._join_timeout_ms = timeouts.join_timeout_ms
        self._lease = Lease(FAILED_BEATS * timeouts.beat_interval_ms)
        self._plan: Plan | None = None
        self._state = State.ASKS
        self._rounds: deque[_Round] = deque()
        self._recalled = False
        self._broken: dict[QuorumKey, None] = {}
        self._next_step = 0  # of the round that begins next without a request
        self._asked_ms = 0
        self._why = "it has no quorum yet"
        self._group_goes_on = False  # by the last verdict, whatever this rank has heard since

    @property
    def state(self) -> State:
        """Return the rank's state in its quorum."""
        if self._state is State.STANDS and self._recalled:
            return State.RECALLED
        return self._state

    @property
    def key(self) -> QuorumKey | None:
        """Return the key of the newest plan."""
        return self._plan.key if self._plan is not None else None

    @property
    def round_step(self) -> int | None:
        """Return the step of the running round, of the oldest where several are in flight; None: no round runs."""
        return self._rounds[0].step if self._rounds else None

    @property
    def speaks(self) -> bool:
        """Return whether all members of the quorum exchange the word of a round."""
        return self._plan is not None and self._plan.lease_ms is not None

    # --- the beginning of a round -----------------------------------------------------------------------------------

    def next_round(self, now_ms: int, unfit: str = "", *, together: bool = False) -> GoOn | Ask:
        """Decide whether the next round asks the lighthouse.

        Args:
            unfit: why this rank can't go on as it is, one phrase: its state changed outside of the rounds, or its
                process group is unusable. Empty: it can.
            together: the ranks of its group begin each round alike, because they compute together in it. If one of them
                asked, it would wait for the others to ask, and they for it. If the verdict said that the group goes on,
                this rank therefore goes on too. A problem that only this rank knows fails the round, and then all ask.
        """
        begins = self._state is State.STANDS or (together and self._group_goes_on and self._state is State.BROKEN)
        if not begins:
            return Ask(unfit or self._why)
        if self._state is State.BROKEN:
            unfit = BROKEN
        elif not unfit and not self._lease.holds(now_ms):
            unfit = "the lease of its quorum expired: the lighthouse has not answered its heartbeats"
        if unfit and not together:
            self._state, self._why = State.ASKS, unfit
            return Ask(unfit, breaks=True)
        step = self._next_step
        self._begin(step, now_ms, without_request=True)
        return GoOn(step, unfit)

    def asked(self, now_ms: int) -> None:
        """Note that the request is sent now for the first time; the lease of its answer counts from here."""
        self._asked_ms = now_ms
        self._group_goes_on = False
        self._state, self._why = State.ASKS, "its last request was not answered"

    def planned(self, plan: Plan, now_ms: int, in_flight: int = 0) -> None:
        """Take the answer to the request: a plan, which may be the standing one at its new step.

        Args:
            in_flight: rounds of this quorum that have begun before and are not decided.
        """
        before, self._plan = self.key, plan
        if before != plan.key or plan.lease_ms is None:
            self._rounds.clear()  # another quorum fails what is in flight; without words nothing ends a round here
        self._recalled = False
        self._lease.begin(plan.lease_ms or 0, self._asked_ms)
        is_broken = plan.key in self._broken
        self._broken = {key: None for key in self._broken if key >= plan.key}
        self._begin(plan.step + in_flight, now_ms, without_request=False)
        self._state, self._why = State.RUNS, "the round before has not ended"
        if is_broken:
            self._state, self._why = State.BROKEN, BROKEN

    def _begin(self, step: int, now_ms: int, *, without_request: bool) -> None:
        assert self._plan is not None
        self._rounds.append(_Round(self._plan, step, now_ms, without_request))
        self._next_step = step + 1

    # --- its end ----------------------------------------------------------------------------------------------------

    def word(
        self, now_ms: int, *, ok: bool, lineage: int | None, participates: bool, leave: bool = False, ask: str = ""
    ) -> Word:
        """Return this rank's word of the running round, to be sent when its own reductions have ended.

        Args:
            ok: it has no error in this round.
            lineage: of the state that the round started from; None: not known, which is an error.
            participates: its gradients count.
            leave: its group leaves after this round.
            ask: why this rank wants the next round to ask, one phrase, or empty.
        """
        current = self._running()
        ok = ok and lineage is not None and self._state is not State.BROKEN
        check = state_check(current.step, lineage) if participates and lineage is not None else 0
        return Word(
            ok,
            ask or self._asks_next(current.plan, now_ms),
            leave,
            current.plan.heal and not current.without_request,
            check,
        )

    def _asks_next(self, plan: Plan, now_ms: int) -> str:
        if self._recalled:
            return "the lighthouse recalled its quorum"
        if not plan.lease_ms:
            return "a member of its quorum asks in every step"
        runs_out = self._lease.runs_out(now_ms)
        return "its lease expires soon: the lighthouse has not answered its heartbeats" if runs_out else ""

    def summed(self, total: Sequence[int] | None, lineage: int | None) -> Vote:
        """Take the sum of all words of the running round; None: it did not complete.

        Args:
            lineage: of the state that the round started from.
        """
        current = self._running()
        num_members, num_participants = current.plan.replica_world_size, current.plan.num_participants
        if total is None:
            return Vote(yes=False, why="the exchange of words in this round did not complete")
        if len(total) != NUM_WORDS:
            raise ProtocolError(f"the word of a round has {NUM_WORDS} integers, not {len(total)}; give the whole sum")
        ok, ask, leave, recovering, check = total
        if ok != num_members:
            return Vote(yes=False, why=f"{num_members - ok} of {num_members} members did not complete this round")
        if lineage is None or check != num_participants * state_check(current.step, lineage):
            return Vote(yes=False, why=f"the participants of step {current.step} hold different states")
        return Vote(yes=True, stands=not (ask or leave or recovering))

    def decided(self, *, yes: bool, stands: bool) -> bool:
        """Take the group's verdict on the running round. A no fails all rounds that have begun.

        Returns: whether the process group must be aborted now, because this group does not commit the round and no
            member may wait for it.
        """
        current = self._rounds.popleft() if self._rounds else None
        self._group_goes_on = False
        if not yes or current is None:
            self._rounds.clear()
            if self._state is not State.BROKEN:
                self._state, self._why = State.ASKS, "its group did not commit the last round"
            return not yes
        why = ""
        if not stands:
            why = "a member asked, left or recovered in the last round"
        elif current.recovers or any(each.recovers for each in self._rounds):
            why = "a member recovered in the last round"
        elif not current.plan.lease_ms:
            why = "a member of its quorum asks in every step"
        self._group_goes_on = not why
        if self._state is not State.BROKEN:
            self._state, self._why = (State.ASKS, why) if why else (State.STANDS, self._why)
        return False

    # --- news -------------------------------------------------------------------------------------------------------

    def beat(self, now_ms: int) -> int:
        """Return the number of a beat to the manager server that is sent now; 0: it needs no answer."""
        return self._lease.beat(now_ms) if self._plan is not None and self._plan.lease_ms else 0

    def told(self, news: QuorumNews) -> bool:
        """Take the manager server's news about the newest quorum of the job.

        Returns: whether the news breaks this rank's quorum, so that its running round must be aborted.
        """
        own = self.key
        if news.beat:
            self._lease.answered(news.beat, news.age_ms, renews=news.key is not None and news.key == own)
        if news.key is None:
            return False
        if news.key == own and news.recalled:
            self._recalled = True
        if own is not None and news.key > own:
            return self.broke(own)
        return self.broke(news.key) if news.broken else False

    def broke(self, key: QuorumKey) -> bool:
        """Take the news that a quorum can't complete another round.

        Returns: as `told`.
        """
        own = self.key
        if own is not None and key < own:
            return False
        self._broken[key] = None
        while len(self._broken) > BROKEN_MOST:
            del self._broken[next(iter(self._broken))]
        if key != own or self._state in (State.ASKS, State.BROKEN):
            return False  # the news overtook the plan, or this rank asks already
        self._state, self._why = State.BROKEN, BROKEN
        return True

    def late(self, now_ms: int, waits_since_ms: int) -> Late | None:
        """Return the report for the lighthouse if this rank waits too long for other members; None: no report, yet or
        again.

        Args:
            waits_since_ms: since when it has waited in the reductions or the word of the running round.
        """
        current = self._rounds[0] if self._rounds else None
        if current is None or current.reported_late or not current.without_request or self._state is State.BROKEN:
            return None
        if now_ms - max(current.began_ms, waits_since_ms) < self._join_timeout_ms:
            return None
        current.reported_late = True
        return Late(current.plan.key, current.step)

    def _running(self) -> _Round:
        if not self._rounds:
            raise ProtocolError("no round is running; ask for a quorum first")
        return self._rounds[0]
