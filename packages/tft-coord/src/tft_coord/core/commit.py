"""The vote of one replica group: all ranks yes, or nobody steps.

A round belongs to its quorum key, step and purpose, so a late vote can never meet another round. The verdict is
final: it is kept, and given again to every late or repeated vote of that round, because an answer that was lost must
not become another answer. The first deadline to pass, or the loss of a rank, seals an open round as no.

A rank that wishes that the group leaves says so with its vote. The wish changes no verdict; it is part of it, so that
all ranks leave after the same step: those whose round is decided already, in the next one. The verdict also says
whether the quorum stands: every rank says so of the word of its own round.

Law of this file: rounds and verdicts; who waits for an answer is the caller's business by call number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tft_coord.core.types import Purpose, QuorumKey, Verdict

MAX_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class RoundName:
    """What a vote belongs to."""

    key: QuorumKey | None
    step: int
    purpose: Purpose


@dataclass(slots=True)
class _Round:
    votes: dict[int, bool] = field(default_factory=dict)
    stands: bool = True  # all that have voted say so
    deadlines_ms: dict[int, int] = field(default_factory=dict)  # rank -> its first; stays when its call goes away
    waiting: dict[int, int] = field(default_factory=dict)  # call -> rank
    verdict: Verdict | None = None
    answered: set[int] = field(default_factory=set)  # ranks, for rounds without a key


class Votes:
    """All rounds of one replica group that may still be asked about.

    Args:
        world_size: ranks in the group; a round is yes when each has voted yes.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._rounds: dict[RoundName, _Round] = {}
        self._lost: str | None = None
        self._wished = False  # some rank wishes that the group leaves
        self._sealed: QuorumKey | None = None  # no round of that quorum can be a yes
        self.stands_in: QuorumKey | None = None  # of the newest verdict, if that says so

    def cast(
        self,
        name: RoundName,
        rank: int,
        call: int,
        yes: bool,
        deadline_ms: int,
        *,
        leaving: bool = False,
        stands: bool = False,
    ) -> list[tuple[int, int, Verdict]]:
        """A rank votes; it waits as `call` unless the verdict is among the answers returned.

        A rank that votes again gets the verdict, or takes its old call's place; its first vote stands.
        Args:
            leaving: it wishes that the group leaves; kept until a round is decided in which that can be agreed on.
            stands: in the word of its round nobody asked, left or recovered.
        Returns: (call, rank, verdict) for each call that is answered now.
        """
        self._wished = self._wished or leaving
        current = self._rounds.get(name)
        if current is None or (name.key is None and rank in current.answered):
            # Clients that name no quorum: a rank that votes after its answer opens the next round.
            current = self._rounds[name] = _Round()
        if rank not in current.votes:
            current.votes[rank] = yes
            current.stands = current.stands and stands
        current.deadlines_ms.setdefault(rank, deadline_ms)
        for other, waiting_rank in list(current.waiting.items()):
            if waiting_rank == rank:
                del current.waiting[other]
        current.waiting[call] = rank
        if current.verdict is None:
            sealed = self._lost is not None or (name.key is not None and name.key == self._sealed)
            if sealed or not all(current.votes.values()):
                self._seal(name, current, yes=False)  # one no decides; the others need not be waited for
            elif len(current.votes) == self._world_size:
                self._seal(name, current, yes=True)
        answers = self._release(current)
        if name.key is not None and len(current.votes) == self._world_size and len(self._rounds) > MAX_ROUNDS // 2:
            self._forget_earlier(name)
        return answers

    def seal(self, key: QuorumKey) -> list[tuple[int, int, Verdict]]:
        """Answer every open and every later round of that quorum with no: one of the ranks does not go on in it."""
        self._sealed = key
        answers: list[tuple[int, int, Verdict]] = []
        for name, current in self._rounds.items():
            if current.verdict is None and name.key == key:
                self._seal(name, current, yes=False)
                answers += self._release(current)
        return answers

    def unseal(self) -> None:
        """Begin another quorum, or the same one anew: all ranks are given it together."""
        self._sealed = None

    def _forget_earlier(self, name: RoundName) -> None:
        """Forget the rounds of the steps before: in a quorum that stands no request ends them. All ranks have voted on
        this one, and a vote that is said again is one of the last few."""
        over = [each for each, one in self._rounds.items() if not one.waiting and each.step < name.step]
        for each in over:
            if each.key == name.key:
                del self._rounds[each]

    def has_room(self, name: RoundName) -> bool:
        """Whether a vote of that name can be kept: rounds end when every rank has asked for its next quorum, and before
        that a caller could open any number of them."""
        return name in self._rounds or len(self._rounds) < MAX_ROUNDS

    def _seal(self, name: RoundName, current: _Round, *, yes: bool) -> None:
        # A healing's rounds are no end of a step; and who names no quorum has not heard of leaving.
        leaves = self._wished and name.purpose is Purpose.COMMIT and name.key is not None
        is_commit = name.purpose is Purpose.COMMIT
        stands = yes and is_commit and current.stands
        current.verdict = Verdict(yes, leaves, stands)
        if is_commit:
            self.stands_in = name.key if stands else None

    def missing_to(self, rank: int) -> list[int]:
        """The ranks that have not voted in the open round in which that rank waits; none if it waits in none."""
        for current in self._rounds.values():
            if current.verdict is None and rank in current.waiting.values():
                return [other for other in range(self._world_size) if other not in current.votes]
        return []

    def withdraw(self, call: int) -> None:
        """The caller went away. Its vote stands, for the verdict must not depend on a connection."""
        for current in self._rounds.values():
            current.waiting.pop(call, None)

    def tick(self, now_ms: int) -> list[tuple[int, int, Verdict]]:
        """Seal as no every open round of which a deadline has passed."""
        answers: list[tuple[int, int, Verdict]] = []
        for name, current in self._rounds.items():
            if current.verdict is None and any(now_ms >= deadline_ms for deadline_ms in current.deadlines_ms.values()):
                self._seal(name, current, yes=False)
                answers += self._release(current)
        return answers

    def next_deadline_ms(self) -> int | None:
        """When `tick` has something to do next."""
        deadlines = [
            deadline_ms
            for current in self._rounds.values()
            if current.verdict is None
            for deadline_ms in current.deadlines_ms.values()
        ]
        return min(deadlines, default=None)

    def leave(self) -> list[tuple[int, int, Verdict]]:
        """A rank has left: what is open is a no, and all leave."""
        self._wished = True
        return self.lose_rank("the group has left")

    def lose_rank(self, reason: str) -> list[tuple[int, int, Verdict]]:
        """A rank is lost: no open or later round can be a yes."""
        self._lost = reason
        answers: list[tuple[int, int, Verdict]] = []
        for name, current in self._rounds.items():
            if current.verdict is None:
                self._seal(name, current, yes=False)
            answers += self._release(current)
        return answers

    def forget_before(self, step: int) -> None:
        """Every rank has asked for its next quorum at that step: what was decided is asked about no more.

        A verdict that stayed would be given to another vote of the same name: that of a step which is tried again
        without a key, or which comes again because a state was loaded by hand. A round that is open stays for those who
        will still vote in it (syncs in flight); the bound keeps rounds that nobody ends from growing.
        """
        over = [
            name
            for name, current in self._rounds.items()
            if not current.waiting and (current.verdict is not None or name.step < step or name.key is None)
        ]
        for name in over:
            del self._rounds[name]
        idle = [name for name, current in self._rounds.items() if not current.waiting]
        for name in idle[: max(0, len(self._rounds) - MAX_ROUNDS)]:
            del self._rounds[name]

    def _release(self, current: _Round) -> list[tuple[int, int, Verdict]]:
        if current.verdict is None:
            return []
        answers = [(call, rank, current.verdict) for call, rank in current.waiting.items()]
        current.waiting.clear()
        current.answered.update(rank for _, rank, _ in answers)
        return answers
