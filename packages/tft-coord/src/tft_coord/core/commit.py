"""The vote of one replica group: the group steps only if all ranks vote yes.

A round belongs to its quorum key, step and purpose, so a late vote can never meet another round. The verdict is final.
Every late or repeated vote of that round gets the same verdict, because a lost answer must not become another answer.
The first deadline to pass, or the loss of a rank, seals an open round as no.

With its vote a rank can request that the group leaves. The request does not change the verdict. The verdict repeats
it, so that all ranks leave after the same step. Ranks whose round is decided already leave in the next one. The verdict
also tells whether the quorum stands. The quorum stands if the word of every rank agrees.

Law of this file: rounds and verdicts; the caller keeps the waiting calls by their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tft_coord.core.types import Purpose, QuorumKey, Verdict

MAX_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class RoundName:
    """The name of a round: what a vote belongs to."""

    key: QuorumKey | None
    step: int
    purpose: Purpose


@dataclass(slots=True)
class _Round:
    votes: dict[int, bool] = field(default_factory=dict)
    stands: bool = True  # by every vote so far
    # rank -> its first deadline; stays when its call goes away
    deadlines_ms: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)  # call -> rank
    verdict: Verdict | None = None
    answered: set[int] = field(default_factory=set)  # ranks, for rounds without a key


class Votes:
    """All rounds of one replica group that a rank may still ask about.

    Args:
        world_size: ranks in the group; a round is yes when each has voted yes.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._rounds: dict[RoundName, _Round] = {}
        self._lost: str | None = None
        self._leave_requested = False  # by some rank, for the whole group
        self._sealed: QuorumKey | None = None  # no round of that quorum can be a yes
        # the key of the newest verdict, if that verdict says that the quorum stands
        self.stands_in: QuorumKey | None = None

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
        """Record a rank's vote; it waits as `call` unless the verdict is among the answers returned.

        A rank that votes again gets the verdict, or replaces its old call; its first vote stands.

        Args:
            leaving: the rank requests that the group leaves; kept until a round is decided in which the ranks can
                agree on it.
            stands: by the word of the round, no replica asked, left or recovered.
        Returns: (call, rank, verdict) for each call that is answered now.
        """
        self._leave_requested = self._leave_requested or leaving
        current = self._rounds.get(name)
        if current is None or (name.key is None and rank in current.answered):
            # Some clients name no quorum: a rank that votes after its answer opens the next round.
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
                self._seal(name, current, yes=False)  # one no decides, without a wait for the other ranks
            elif len(current.votes) == self._world_size:
                self._seal(name, current, yes=True)
        answers = self._release(current)
        if name.key is not None and len(current.votes) == self._world_size and len(self._rounds) > MAX_ROUNDS // 2:
            self._forget_earlier(name)
        return answers

    def seal(self, key: QuorumKey) -> list[tuple[int, int, Verdict]]:
        """Answer every open and every later round of that quorum with no: one of the ranks does not go on in it."""
        self._sealed = key
        return self._seal_open(lambda name, _: name.key == key)

    def unseal(self) -> None:
        """Begin another quorum, or the same one again: all ranks get it together."""
        self._sealed = None

    def _forget_earlier(self, name: RoundName) -> None:
        """Forget the rounds of earlier steps, because in a standing quorum no request ends them.

        All ranks have voted on this step, and a repeated vote belongs to one of the last few rounds.
        """
        over = [each for each, one in self._rounds.items() if not one.waiting and each.step < name.step]
        for each in over:
            if each.key == name.key:
                del self._rounds[each]

    def has_room(self, name: RoundName) -> bool:
        """Return whether a vote of that name can be kept.

        Rounds end when every rank has asked for its next quorum. Before that a caller could open any number of rounds.
        """
        return name in self._rounds or len(self._rounds) < MAX_ROUNDS

    def _seal(self, name: RoundName, current: _Round, *, yes: bool) -> None:
        # A healing's rounds do not end a step, and a client that names no quorum does not know about leaving.
        leaves = self._leave_requested and name.purpose is Purpose.COMMIT and name.key is not None
        is_commit = name.purpose is Purpose.COMMIT
        stands = yes and is_commit and current.stands
        current.verdict = Verdict(yes, leaves, stands)
        if is_commit:
            self.stands_in = name.key if stands else None

    def missing_to(self, rank: int) -> list[int]:
        """Return the ranks that have not voted in the open round in which that rank waits; [] if it waits in none."""
        for current in self._rounds.values():
            if current.verdict is None and rank in current.waiting.values():
                return [other for other in range(self._world_size) if other not in current.votes]
        return []

    def withdraw(self, call: int) -> None:
        """Forget a call whose caller has gone. Its vote stands, because the verdict must not depend on a connection."""
        for current in self._rounds.values():
            current.waiting.pop(call, None)

    def tick(self, now_ms: int) -> list[tuple[int, int, Verdict]]:
        """Seal as no every open round of which a deadline has passed."""
        return self._seal_open(lambda _, each: any(now_ms >= at_ms for at_ms in each.deadlines_ms.values()))

    def next_deadline_ms(self) -> int | None:
        """Return when `tick` has something to do next."""
        deadlines = [
            deadline_ms
            for current in self._rounds.values()
            if current.verdict is None
            for deadline_ms in current.deadlines_ms.values()
        ]
        return min(deadlines, default=None)

    def leave(self) -> list[tuple[int, int, Verdict]]:
        """Seal all open rounds as no, because a rank has left; all ranks leave."""
        self._leave_requested = True
        return self.lose_rank("the group has left")

    def lose_rank(self, reason: str) -> list[tuple[int, int, Verdict]]:
        """Seal all open rounds as no, because a rank is lost; no later round can be a yes."""
        self._lost = reason
        return self._seal_open(lambda *_: True)

    def _seal_open(self, is_over: Callable[[RoundName, _Round], bool]) -> list[tuple[int, int, Verdict]]:
        """Seal as no the open rounds that are over. Decided rounds have no waiting calls."""
        answers: list[tuple[int, int, Verdict]] = []
        for name, current in self._rounds.items():
            if current.verdict is None and is_over(name, current):
                self._seal(name, current, yes=False)
                answers += self._release(current)
        return answers

    def forget_before(self, step: int) -> None:
        """Forget decided rounds: every rank has asked for its next quorum at that step.

        A kept verdict would answer another vote of the same name: a step without a key that is tried again, or a step
        that repeats because a state was loaded by hand. An open round stays for the ranks that still vote in it (syncs
        in flight). The bound keeps the number of rounds that no rank ends from growing.
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
