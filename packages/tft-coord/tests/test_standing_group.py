"""Standing quorums at the manager server: the verdict, a rank that asks alone, what beats bring, what it passes on."""

from __future__ import annotations

from dataclasses import replace

from tft_coord.core import effects, events
from tft_coord.core.commit import MAX_ROUNDS, RoundName, Votes
from tft_coord.core.effects import GroupEffect, TellRank
from tft_coord.core.replica_group import ReplicaGroupCore
from tft_coord.core.session import UNANSWERED_MOST, SendBeat, SendHello, SessionCore
from tft_coord.core.types import Member, Purpose, Quorum, QuorumKey, QuorumNews, RankRequest, Verdict
from tft_coord.timeouts import Timeouts

Q, NEXT = QuorumKey(7, 1), QuorumKey(8, 2)
LEASE_MS = 60_000


def member(name: str = "a", **changes: object) -> Member:
    return Member(name, **{"step": 3, "lineage": 103, "lease_ms": LEASE_MS, **changes})  # type: ignore[arg-type]


class Group:
    """A group of two ranks that was given quorum Q, for which it asked at 1,000 ms."""

    def __init__(self, world_size: int = 2) -> None:
        self.now_ms = 1_000
        self.calls = 0
        self.world_size = world_size
        self.core = ReplicaGroupCore(
            replica_id="a", address="a:1", store_address="a:2", world_size=world_size, timeouts=Timeouts()
        )
        for rank in range(world_size):
            self.core.handle(events.RankConnected(rank, rank + 1, 100), 0)
        self.begin(Q)

    def begin(self, key: QuorumKey, held: QuorumKey | None = None) -> None:
        for rank in range(self.world_size):
            self.ask(rank, held)
        self.give(events.QuorumArrived(self.core._last_request, Quorum(key, (member(), member("b")))))

    def give(self, event: events.GroupEvent) -> list[GroupEffect]:
        return self.core.handle(event, self.now_ms)

    def ask(self, rank: int, held: QuorumKey | None = Q, **changes: object) -> list[GroupEffect]:
        self.calls += 1
        said = RankRequest(**{"step": 3, "lineage": 103, "held": held, "lease_ms": LEASE_MS, **changes})  # type: ignore[arg-type]
        return self.give(events.RankAsked(rank, self.calls, said, 60_000))

    def vote(self, rank: int, step: int = 3, *, yes: bool = True, stands: bool = True) -> list[Verdict]:
        self.calls += 1
        event = events.RankVoted(rank, self.calls, Q, step, Purpose.COMMIT, yes, 60_000, stands=stands)
        return [order.verdict for order in self.give(event) if isinstance(order, effects.AnswerVote)]


def told(orders: list[GroupEffect]) -> dict[int, object]:
    return {order.rank: order.news for order in orders if isinstance(order, TellRank)}


class TestTheVerdict:
    def test_it_stands_where_every_rank_says_so(self) -> None:
        group = Group()
        group.vote(0)
        assert group.vote(1) == 2 * [Verdict(yes=True, stands=True)]

    def test_one_rank_whose_word_did_not_ends_it(self) -> None:
        group = Group()
        group.vote(0, stands=False)
        assert group.vote(1) == 2 * [Verdict(yes=True, stands=False)]

    def test_a_no_never_stands(self) -> None:
        group = Group()
        assert group.vote(0, yes=False) == [Verdict(yes=False)]
        assert group.vote(1) == [Verdict(yes=False)]

    def test_it_does_not_stand_at_a_server_that_does_not_hold_the_quorum(self) -> None:
        """Seed 301063: a rank went on in its quorum at a new server, and a restarted lighthouse did not know of it."""
        group = Group(world_size=1)
        assert group.vote(0) == [Verdict(yes=True, stands=True)]
        group.core = ReplicaGroupCore(
            replica_id="a", address="a:3", store_address="a:2", world_size=1, timeouts=Timeouts()
        )
        group.core.handle(events.RankConnected(0, 1, 100), group.now_ms)
        assert group.vote(0, 4) == [Verdict(yes=True, stands=False)]

    def test_it_is_final_for_votes_that_are_said_again(self) -> None:
        group = Group()
        group.vote(0)
        group.vote(1)
        assert group.vote(1, stands=False) == [Verdict(yes=True, stands=True)]

    def test_only_a_commit_stands(self) -> None:
        votes = Votes(1)
        ((_, _, verdict),) = votes.cast(RoundName(Q, 3, Purpose.STAGED), 0, 1, True, 100, stands=True)
        assert verdict == Verdict(yes=True)
        assert votes.stands_in is None

    def test_rounds_that_no_request_ends_are_bounded(self) -> None:
        group = Group()
        for step in range(3, 3 + 10 * MAX_ROUNDS):
            group.vote(0, step)
            assert group.vote(1, step) == 2 * [Verdict(yes=True, stands=True)]
        assert len(group.core._votes._rounds) <= MAX_ROUNDS // 2
        assert group.vote(1, 2 + 10 * MAX_ROUNDS, yes=False) == [Verdict(yes=True, stands=True)], "it is kept"


class TestARankThatAsksAlone:
    def stands(self) -> Group:
        group = Group()
        group.vote(0)
        group.vote(1)
        return group

    def test_the_others_are_told_that_the_quorum_is_broken(self) -> None:
        assert told(self.stands().ask(1)) == {0: QuorumNews(Q, broken=True)}

    def test_no_later_round_of_the_quorum_is_a_yes(self) -> None:
        group = self.stands()
        group.ask(1)
        assert group.vote(0, 4) == [Verdict(yes=False)]

    def test_an_open_round_is_sealed(self) -> None:
        group = self.stands()
        group.vote(0, 4)
        (no,) = [order for order in group.ask(1) if isinstance(order, effects.AnswerVote)]
        assert (no.rank, no.verdict) == (0, Verdict(yes=False))

    def test_once_all_have_asked_the_next_quorum_is_voted_on_as_ever(self) -> None:
        group = self.stands()
        group.ask(1)
        group.begin(Q, Q)
        group.vote(0, 5)
        assert group.vote(1, 5) == 2 * [Verdict(yes=True, stands=True)]

    def test_a_rank_that_was_told_to_ask_breaks_nothing(self) -> None:
        group = Group()
        group.vote(0, stands=False)
        group.vote(1)
        assert told(group.ask(1)) == {}
        assert group.vote(0, 4) == []

    def test_a_rank_that_holds_another_quorum_breaks_nothing(self) -> None:
        assert told(self.stands().ask(1, NEXT)) == {}


class TestTheRequest:
    def test_the_smallest_lease_of_the_ranks_counts(self) -> None:
        group = Group()
        group.ask(0, lease_ms=5_000)
        (order,) = [each for each in group.ask(1) if isinstance(each, effects.AskLighthouse)]
        assert order.member.lease_ms == 5_000

    def test_one_rank_that_speaks_no_word_makes_the_group_ask(self) -> None:
        group = Group()
        group.ask(0, lease_ms=None)
        (order,) = [each for each in group.ask(1) if isinstance(each, effects.AskLighthouse)]
        assert order.member.lease_ms is None


class TestNews:
    def test_a_rank_is_told_how_long_ago_the_lighthouse_was_asked(self) -> None:
        group = Group()
        group.now_ms = 1_300
        assert told(group.give(events.RankBeat(1, 5))) == {1: QuorumNews(Q, beat=5, age_ms=300)}, "since the request"
        group.give(events.NewestNamed(QuorumNews(Q, beat=1), 2_000))
        group.now_ms = 2_700
        assert told(group.give(events.RankBeat(0, 6))) == {0: QuorumNews(Q, beat=6, age_ms=700)}

    def test_a_late_answer_to_an_old_beat_makes_nothing_newer(self) -> None:
        group = Group()
        group.give(events.NewestNamed(QuorumNews(Q, beat=2), 3_000))
        group.give(events.NewestNamed(QuorumNews(Q, beat=1), 2_000))
        group.give(events.NewestNamed(QuorumNews(Q)))
        group.now_ms = 4_000
        assert told(group.give(events.RankBeat(0, 1))) == {0: QuorumNews(Q, beat=1, age_ms=1_000)}

    def test_another_quorum_begins_anew(self) -> None:
        group = Group()
        group.give(events.NewestNamed(QuorumNews(QuorumKey(6, 0), beat=2), None))
        assert told(group.give(events.RankBeat(0, 1))) == {}
        group.give(events.NewestNamed(QuorumNews(None, beat=3), 900))
        assert told(group.give(events.RankBeat(0, 2))) == {0: QuorumNews(None, beat=2, age_ms=100)}

    def test_before_the_first_answer_a_beat_is_not_answered(self) -> None:
        core = ReplicaGroupCore(replica_id="a", address="a:1", store_address="a:2", world_size=1, timeouts=Timeouts())
        assert core.handle(events.RankBeat(0, 1), 0) == []

    def test_a_recall_is_passed_on_at_once_and_once(self) -> None:
        group = Group()
        recall = QuorumNews(Q, recalled=True)
        assert told(group.give(events.NewestNamed(recall))) == {0: recall, 1: recall}
        assert told(group.give(events.NewestNamed(replace(recall, beat=4), 1_000))) == {}
        assert told(group.give(events.RankBeat(0, 9))) == {0: QuorumNews(Q, recalled=True, beat=9)}

    def test_a_rank_whose_stream_was_broken_is_told_again(self) -> None:
        group = Group()
        recall = QuorumNews(Q, recalled=True)
        group.give(events.NewestNamed(recall))
        assert told(group.give(events.RankConnected(1, 9, 100))) == {1: recall}

    def test_a_newer_quorum_and_a_broken_one_are_passed_on(self) -> None:
        for news in (QuorumNews(NEXT), QuorumNews(Q, broken=True)):
            assert told(Group().give(events.NewestNamed(news))) == {0: news, 1: news}

    def test_an_older_quorum_and_none_are_not(self) -> None:
        for news in (QuorumNews(None), QuorumNews(QuorumKey(6, 0), broken=True, recalled=True), QuorumNews(Q)):
            assert told(Group().give(events.NewestNamed(news))) == {}

    def test_the_next_answer_ends_a_recall(self) -> None:
        group = Group()
        group.give(events.NewestNamed(QuorumNews(Q, recalled=True)))
        group.begin(Q, Q)
        assert told(group.give(events.RankConnected(1, 9, 100))) == {}

    def test_the_first_rank_that_is_late_tells_the_lighthouse(self) -> None:
        group = Group()
        assert group.give(events.RankLate(1, Q, 4)) == [effects.ReportLate(Q, 4)]
        assert group.give(events.RankLate(0, Q, 4)) == []
        assert group.give(events.RankLate(0, Q, 5)) == [effects.ReportLate(Q, 5)]


class TestTheSession:
    def session(self, lease_ms: int | None = LEASE_MS) -> SessionCore:
        core = SessionCore(
            job="job", replica_id="a", address="a:1", session=100, timeouts=Timeouts(), jitter=lambda: 0.5
        )
        core.start(0)
        core.stream_opened(0)
        core.welcomed(100, 50, 0)
        core.ask(1, member(lease_ms=lease_ms), None, 0)
        return core

    def test_beats_are_numbered_where_the_group_has_a_lease(self) -> None:
        core = self.session()
        assert [core.tick(at_ms) for at_ms in (1_000, 2_000)] == [[SendBeat(0, number=1)], [SendBeat(0, number=2)]]
        assert core.beat_answered(2) == 2_000

    def test_groups_that_ask_in_every_step_beat_as_ever(self) -> None:
        for lease_ms in (0, None):
            assert self.session(lease_ms).tick(1_000) == [SendBeat(0)]

    def test_an_answer_counts_once_and_those_before_it_not_at_all(self) -> None:
        core = self.session()
        for at_ms in (1_000, 2_000, 3_000):
            core.tick(at_ms)
        assert [core.beat_answered(number) for number in (2, 2, 1, 0, 77, 3)] == [2_000, None, None, None, None, 3_000]

    def test_an_answer_to_a_beat_of_an_older_stream_counts_for_nothing(self) -> None:
        core = self.session()
        core.tick(1_000)
        core.stream_broke(1_100)
        core.stream_opened(1_200)
        assert core.beat_answered(1) is None

    def test_unanswered_beats_are_bounded(self) -> None:
        core = self.session()
        for at_ms in range(1_000, 1_000 * (2 * UNANSWERED_MOST), 1_000):
            core.tick(at_ms)
        assert len(core._beats) == UNANSWERED_MOST

    def test_the_hello_says_the_lease(self) -> None:
        core = self.session()
        core.stream_broke(100)
        (hello,) = core.stream_opened(200)
        assert isinstance(hello, SendHello)
        assert hello.hello.lease_ms == LEASE_MS
