"""The vote: final verdicts, repeated votes, deadlines, lost ranks, and clients that name no quorum."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tft_coord.core.commit import MAX_ROUNDS, RoundName, Votes
from tft_coord.core.types import Purpose, QuorumKey, Verdict

YES, NO = Verdict(yes=True), Verdict(yes=False)
KEY = QuorumKey(5, 1)
NAME = RoundName(KEY, 3, Purpose.COMMIT)


def test_yes_needs_all_and_answers_all() -> None:
    votes = Votes(2)
    assert votes.cast(NAME, 0, 10, True, 100) == []
    assert votes.cast(NAME, 1, 11, True, 100) == [(10, 0, YES), (11, 1, YES)]


def test_one_no_answers_at_once() -> None:
    votes = Votes(3)
    assert votes.cast(NAME, 0, 10, True, 100) == []
    assert votes.cast(NAME, 1, 11, False, 100) == [(10, 0, NO), (11, 1, NO)]
    assert votes.cast(NAME, 2, 12, True, 100) == [(12, 2, NO)]


def test_the_verdict_is_given_again_to_every_repeated_vote() -> None:
    votes = Votes(2)
    votes.cast(NAME, 0, 10, True, 100)
    votes.cast(NAME, 1, 11, True, 100)
    for call, yes in ((12, True), (13, False), (14, True)):
        assert votes.cast(NAME, 1, call, yes, 200) == [(call, 1, YES)]


def test_the_first_vote_of_a_rank_stands() -> None:
    votes = Votes(2)
    votes.cast(NAME, 0, 10, True, 100)
    assert votes.cast(NAME, 0, 11, False, 100) == []  # it asks again; it can't take its yes back
    assert votes.cast(NAME, 1, 12, True, 100) == [(11, 0, YES), (12, 1, YES)]


def test_the_first_deadline_seals_the_vote_as_no() -> None:
    votes = Votes(2)
    votes.cast(NAME, 0, 10, True, 100)
    assert votes.next_deadline_ms() == 100
    assert votes.tick(99) == []
    assert votes.tick(100) == [(10, 0, NO)]
    assert votes.next_deadline_ms() is None
    assert votes.cast(NAME, 1, 11, True, 500) == [(11, 1, NO)]


def test_a_deadline_outlives_the_call_that_brought_it() -> None:
    """Else rank 1's later yes would let it step, though rank 0 has ended without a verdict."""
    votes = Votes(2)
    votes.cast(NAME, 0, 10, True, 100)
    votes.withdraw(10)
    assert votes.tick(100) == []
    assert votes.cast(NAME, 1, 11, True, 500) == [(11, 1, NO)]


def test_asking_again_does_not_move_the_deadline() -> None:
    votes = Votes(2)
    votes.cast(NAME, 0, 10, True, 100)
    votes.cast(NAME, 0, 11, True, 900)
    assert votes.tick(100) == [(11, 0, NO)]


def test_a_vote_stands_when_its_caller_goes_away() -> None:
    votes = Votes(2)
    votes.cast(NAME, 0, 10, True, 100)
    votes.withdraw(10)
    assert votes.cast(NAME, 1, 11, True, 100) == [(11, 1, YES)]
    assert votes.cast(NAME, 0, 12, True, 100) == [(12, 0, YES)]


def test_a_lost_rank_seals_open_rounds_and_those_to_come_but_no_verdict() -> None:
    votes = Votes(2)
    votes.cast(NAME, 0, 10, True, 100)
    votes.cast(NAME, 1, 11, True, 100)
    later = RoundName(KEY, 4, Purpose.COMMIT)
    votes.cast(later, 0, 12, True, 100)
    assert votes.lose_rank("rank 1 ended") == [(12, 0, NO)]
    assert votes.cast(RoundName(KEY, 5, Purpose.COMMIT), 0, 13, True, 100) == [(13, 0, NO)]
    assert votes.cast(NAME, 0, 14, True, 100) == [(14, 0, YES)]


def test_rounds_of_other_quorums_steps_and_purposes_do_not_meet() -> None:
    votes = Votes(2)
    votes.cast(NAME, 0, 10, False, 100)
    for call, other in enumerate(
        (
            RoundName(QuorumKey(5, 2), 3, Purpose.COMMIT),
            RoundName(KEY, 4, Purpose.COMMIT),
            RoundName(KEY, 3, Purpose.STAGED),
        )
    ):
        assert votes.cast(other, 0, 20 + call, True, 100) == []
        assert votes.cast(other, 1, 30 + call, True, 100) == [(20 + call, 0, YES), (30 + call, 1, YES)]


class TestForgetting:
    def test_decided_rounds_go_when_every_rank_has_asked(self) -> None:
        """A state was loaded by hand: the same step comes again in the same quorum, and must be voted on again."""
        votes = Votes(1)
        assert votes.cast(NAME, 0, 10, True, 100) == [(10, 0, YES)]
        votes.forget_before(3)
        assert votes.cast(NAME, 0, 11, False, 100) == [(11, 0, NO)]

    def test_open_rounds_and_rounds_with_callers_stay(self) -> None:
        votes = Votes(2)
        votes.cast(NAME, 0, 10, True, 100)
        votes.forget_before(9)
        assert votes.cast(NAME, 1, 11, True, 100) == [(10, 0, YES), (11, 1, YES)]

    def test_rounds_that_nobody_ends_are_bounded(self) -> None:
        votes = Votes(2)
        for number in range(3 * MAX_ROUNDS):
            votes.cast(RoundName(QuorumKey(number, 0), 3, Purpose.COMMIT), 0, number, True, 100)
            votes.withdraw(number)
            votes.forget_before(3)
        assert len(votes._rounds) <= MAX_ROUNDS


class TestClientsThatNameNoQuorum:
    """torchft's. A vote that timed out must not poison the next one, in which both ranks vote yes."""

    NAME = RoundName(None, 3, Purpose.COMMIT)

    def test_one_open_round(self) -> None:
        votes = Votes(2)
        votes.cast(self.NAME, 0, 10, True, 100)
        assert votes.cast(self.NAME, 1, 11, True, 100) == [(10, 0, YES), (11, 1, YES)]

    def test_a_rank_that_votes_after_its_answer_opens_the_next(self) -> None:
        votes = Votes(2)
        votes.cast(self.NAME, 0, 10, True, 100)
        assert votes.tick(100) == [(10, 0, NO)]
        assert votes.cast(self.NAME, 0, 12, True, 300) == []
        assert votes.cast(self.NAME, 1, 13, True, 300) == [(12, 0, YES), (13, 1, YES)]

    def test_a_round_that_one_rank_missed_does_not_meet_the_next_attempt(self) -> None:
        votes = Votes(2)
        votes.cast(self.NAME, 0, 10, True, 100)
        votes.tick(100)
        votes.forget_before(3)  # both have asked for the next quorum, at the same step
        assert votes.cast(self.NAME, 1, 11, True, 300) == []
        assert votes.cast(self.NAME, 0, 12, True, 300) == [(11, 1, YES), (12, 0, YES)]

    def test_the_late_vote_of_the_old_round_gets_its_verdict(self) -> None:
        votes = Votes(2)
        votes.cast(self.NAME, 0, 10, True, 100)
        votes.tick(100)
        assert votes.cast(self.NAME, 1, 11, True, 300) == [(11, 1, NO)]


@dataclass
class Told:
    verdicts: dict[int, set[Verdict]] = field(default_factory=dict)
    votes: dict[int, dict[int, bool]] = field(default_factory=dict)


class VotesNeverContradictThemselves(RuleBasedStateMachine):
    """Any order of votes, repeats, withdrawals, deadlines and losses: one verdict a round, yes only of all yes."""

    def __init__(self) -> None:
        super().__init__()
        self.votes = Votes(2)
        self.now_ms = 0
        self.call = 0
        self.told = Told()
        self.calls: dict[int, int] = {}

    def note(self, answers: list[tuple[int, int, Verdict]]) -> None:
        for call, _, verdict in answers:
            self.told.verdicts.setdefault(self.calls.pop(call), set()).add(verdict)

    @rule(
        step=st.integers(0, 2),
        rank=st.integers(0, 1),
        yes=st.booleans(),
        patience_ms=st.integers(1, 50),
        leaving=st.booleans(),
    )
    def vote(self, step: int, rank: int, yes: bool, patience_ms: int, leaving: bool) -> None:
        self.call += 1
        self.calls[self.call] = step
        self.told.votes.setdefault(step, {}).setdefault(rank, yes)
        name = RoundName(KEY, step, Purpose.COMMIT)
        self.note(self.votes.cast(name, rank, self.call, yes, self.now_ms + patience_ms, leaving=leaving))

    @rule(ms=st.integers(1, 40))
    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.note(self.votes.tick(self.now_ms))

    @rule()
    def withdraw(self) -> None:
        for call in list(self.calls):
            self.votes.withdraw(call)
        self.calls.clear()

    @rule()
    def lose(self) -> None:
        self.note(self.votes.lose_rank("gone"))

    @invariant()
    def one_verdict(self) -> None:
        for step, verdicts in self.told.verdicts.items():
            assert len(verdicts) == 1
            if next(iter(verdicts)).yes:
                assert self.told.votes[step] == {0: True, 1: True}


TestVotesNeverContradictThemselves = VotesNeverContradictThemselves.TestCase
TestVotesNeverContradictThemselves.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
