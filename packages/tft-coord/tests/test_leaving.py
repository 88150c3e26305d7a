"""Leaving, draining and killing in the cores: the wish travels in the vote, and nobody waits for who has left."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tft_coord.core import effects, events
from tft_coord.core.commit import RoundName, Votes
from tft_coord.core.lighthouse import LighthouseConfig, LighthouseCore
from tft_coord.core.quorum import Form, Situation, Wait, decide
from tft_coord.core.replica_group import ReplicaGroupCore
from tft_coord.core.session import GiveUp, SendHello, SendLeave, SendRequest, SessionCore
from tft_coord.core.types import (
    DrainComplete,
    Hello,
    KillOrder,
    LeaveRequest,
    Member,
    Purpose,
    Quorum,
    QuorumKey,
    RankRequest,
    Refusal,
    Verdict,
)
from tft_coord.timeouts import Timeouts

KEY = QuorumKey(7, 9)
NAME = RoundName(KEY, 3, Purpose.COMMIT)
YES, NO = Verdict(yes=True), Verdict(yes=False)
YES_AND_LEAVE, NO_AND_LEAVE = Verdict(yes=True, leaves=True), Verdict(yes=False, leaves=True)
UUID, OTHER = "0f3a9c1d-1234-4abc-8def-0123456789ab", "1f3a9c1d-1234-4abc-8def-0123456789ab"
GRACE_MS = Timeouts().reconnect_grace_ms


class TestTheVote:
    """Ranks see SIGTERM on different sides of a vote (docs/protocol/appendix.md, scenario 20)."""

    def test_one_wish_makes_all_leave_after_the_same_step(self) -> None:
        votes = Votes(2)
        assert votes.cast(NAME, 0, 10, True, 100, leaving=True) == []
        assert votes.cast(NAME, 1, 11, True, 100) == [(10, 0, YES_AND_LEAVE), (11, 1, YES_AND_LEAVE)]

    def test_a_wish_changes_no_verdict_and_a_no_changes_no_wish(self) -> None:
        votes = Votes(2)
        votes.cast(NAME, 0, 10, True, 100, leaving=True)
        assert votes.cast(NAME, 1, 11, False, 100) == [(10, 0, NO_AND_LEAVE), (11, 1, NO_AND_LEAVE)]

    def test_a_wish_that_comes_when_the_round_is_decided_waits_for_the_next(self) -> None:
        votes = Votes(2)
        assert votes.cast(NAME, 0, 10, False, 100) == [(10, 0, NO)]
        assert votes.cast(NAME, 1, 11, True, 100, leaving=True) == [(11, 1, NO)]  # rank 0 has gone on
        later = RoundName(KEY, 4, Purpose.COMMIT)
        votes.cast(later, 0, 12, True, 200)
        assert votes.cast(later, 1, 13, True, 200) == [(12, 0, YES_AND_LEAVE), (13, 1, YES_AND_LEAVE)]

    def test_a_verdict_that_says_leave_is_given_again(self) -> None:
        votes = Votes(2)
        votes.cast(NAME, 0, 10, True, 100, leaving=True)
        votes.cast(NAME, 1, 11, True, 100)
        assert votes.cast(NAME, 1, 12, True, 100) == [(12, 1, YES_AND_LEAVE)]

    @pytest.mark.parametrize("purpose", [Purpose.STAGED, Purpose.WITHOUT_OWN, Purpose.MATCHED])
    def test_nobody_leaves_in_the_middle_of_a_healing(self, purpose: Purpose) -> None:
        votes = Votes(2)
        healing = RoundName(KEY, 3, purpose)
        votes.cast(healing, 0, 10, True, 100, leaving=True)
        assert votes.cast(healing, 1, 11, True, 100) == [(10, 0, YES), (11, 1, YES)]

    def test_a_deadline_seals_no_and_leaves(self) -> None:
        votes = Votes(2)
        votes.cast(NAME, 0, 10, True, 100, leaving=True)
        assert votes.tick(100) == [(10, 0, NO_AND_LEAVE)]

    def test_who_names_no_quorum_is_not_told_to_leave(self) -> None:
        votes = Votes(2)
        votes.cast(replace(NAME, key=None), 0, 10, True, 100, leaving=True)
        assert votes.cast(replace(NAME, key=None), 1, 11, True, 100) == [(10, 0, YES), (11, 1, YES)]


def group(world_size: int = 2) -> ReplicaGroupCore:
    core = ReplicaGroupCore(
        replica_id="a", address="a:1", store_address="a:2", world_size=world_size, timeouts=Timeouts()
    )
    for rank in range(world_size):
        core.handle(events.RankConnected(rank, rank + 1, 100), 0)
    return core


def left(rank: int, call: int) -> events.RankLeft:
    return events.RankLeft(rank, call, "it is preempted", 5_000)


def vote(core: ReplicaGroupCore, rank: int, call: int, *, yes: bool = True, leaving: bool = False) -> list[object]:
    return [*core.handle(events.RankVoted(rank, call, KEY, 3, Purpose.COMMIT, yes, 900, leaving), 0)]


def ask(core: ReplicaGroupCore, rank: int, call: int) -> list[object]:
    return [*core.handle(events.RankAsked(rank, call, RankRequest(3, lineage=1), 900), 0)]


class TestTheGroup:
    def test_the_first_rank_that_leaves_takes_the_group_with_it_once(self) -> None:
        core = group()
        vote(core, 0, 10, leaving=True)
        assert vote(core, 1, 11) == [effects.AnswerVote(10, 0, YES_AND_LEAVE), effects.AnswerVote(11, 1, YES_AND_LEAVE)]
        assert core.handle(left(1, 12), 0) == [
            effects.LeaveJob("it is preempted", 5_000),
            effects.AnswerVote(12, 1, NO_AND_LEAVE),
        ]
        assert core.handle(left(0, 13), 0) == [effects.AnswerVote(13, 0, NO_AND_LEAVE)]
        assert vote(core, 0, 14) == [effects.AnswerVote(14, 0, YES_AND_LEAVE)]  # its answer was lost

    def test_who_has_no_quorum_to_leave_after_takes_the_others_out_of_theirs(self) -> None:
        core = group()
        ask(core, 0, 10)
        told = core.handle(left(1, 11), 0)
        assert effects.LeaveJob("it is preempted", 5_000) in told
        (failed,) = [each for each in told if isinstance(each, effects.FailRank)]
        assert (failed.call, failed.code) == (10, "left")
        (refused,) = ask(core, 0, 12)
        assert isinstance(refused, effects.FailRank)
        assert (refused.code, "has left the job (it is preempted)" in refused.message) == ("left", True)

    def test_a_vote_that_is_open_then_is_a_no(self) -> None:
        core = group()
        vote(core, 0, 10)
        assert effects.AnswerVote(10, 0, NO_AND_LEAVE) in core.handle(left(1, 11), 0)
        assert vote(core, 1, 12) == [effects.AnswerVote(12, 1, NO_AND_LEAVE)]

    def test_an_open_request_is_taken_back(self) -> None:
        core = group(1)
        (asked,) = ask(core, 0, 10)
        assert isinstance(asked, effects.AskLighthouse)
        assert effects.WithdrawFromLighthouse(asked.request) in core.handle(left(0, 11), 0)

    def test_a_goodbye_of_one_that_has_left_is_no_loss(self) -> None:
        core = group()
        core.handle(left(0, 10), 0)
        assert core.handle(events.RankDisconnected(1, 2, left=True), 0) == []
        assert core.handle(events.RankDied(0, "it was shut down", left=True), 0) == []
        assert core.lost is None

    def test_a_rank_is_told_that_its_server_ends_with_rank_0_which_has_left(self) -> None:
        core = group()
        core.handle(left(0, 10), 0)
        (told,) = core.handle(events.RankDied(0, "it was shut down", left=True), 0)
        message = "replica a has left the job (it is preempted); end this process"
        assert told == effects.TellGroupLost(1, message, left=True)

    def test_the_step_at_which_a_group_has_finished_is_told_on(self) -> None:
        core = group()
        told = core.handle(events.RankLeft(0, 10, "finished at step 8", 5_000, 8), 0)
        assert effects.LeaveJob("finished at step 8", 5_000, 8) in told

    def test_a_death_of_one_that_has_left_is_reported(self) -> None:
        core = group()
        core.handle(left(0, 10), 0)
        assert effects.ReportDeath("rank 0 ended: signal 9") in core.handle(events.RankDied(0, "signal 9"), 0)

    @pytest.mark.parametrize(
        ("event", "news"),
        [
            (events.LeaveAsked("its host goes down", 9_000), LeaveRequest("its host goes down", 9_000)),
            (events.NobodyHeals(), DrainComplete()),
            (events.KillAsked("it is wedged"), KillOrder("it is wedged")),
        ],
    )
    def test_every_rank_is_told_one_that_comes_back_too(self, event: events.GroupEvent, news: LeaveRequest) -> None:
        core = group()
        core.handle(events.RankDisconnected(1, 2), 0)
        assert core.handle(event, 0) == [effects.TellRank(0, news)]
        assert core.handle(event, 0) == []  # the lighthouse says it on every stream
        assert core.handle(events.RankConnected(1, 3, 100), 0) == [effects.TellRank(1, news)]


class TestTheSession:
    def test_it_says_that_it_has_left_now_and_on_every_stream(self) -> None:
        core = SessionCore(
            job="job", replica_id="a", address="a:1", session=100, timeouts=Timeouts(), jitter=lambda: 0.5
        )
        core.start(0)
        core.stream_opened(1)
        assert core.leave("it is preempted", 5_000, 8) == []  # not before the welcome
        said = SendLeave("it is preempted", 5_000, 8)
        assert core.welcomed(100, 50, 2) == [said]
        assert core.leave("again", 1) == []
        core.stream_broke(20)
        (hello,) = core.stream_opened(100)
        assert isinstance(hello, SendHello)
        assert hello.hello.left
        assert core.welcomed(100, 50, 101) == [said]

    def test_an_open_request_comes_after_it(self) -> None:
        core = SessionCore(
            job="job", replica_id="a", address="a:1", session=100, timeouts=Timeouts(), jitter=lambda: 0.5
        )
        core.start(0)
        core.stream_opened(1)
        core.ask(1, Member("a"), None, 2)
        core.leave("it is preempted", 0)
        assert core.welcomed(100, 50, 3) == [SendLeave("it is preempted", 0), SendRequest(1, Member("a"), None)]
        assert not any(isinstance(each, GiveUp) for each in core.tick(9_000))


def member(name: str, step: int = 5, **changes: object) -> Member:
    return Member(name, address=f"{name}:1", step=step, lineage=100 + step, live=True, init_sync=False, **changes)  # type: ignore[arg-type]


class TestTheRule:
    PREVIOUS = Quorum(KEY, (member("a"), member("b"), member("c")))

    def situation(self, *waiting: str, healthy: tuple[str, ...], left: tuple[str, ...]) -> Situation:
        return Situation(
            waiting={name: member(name) for name in waiting},
            healthy=healthy,
            previous=self.PREVIOUS,
            min_replicas=1,
            join_timeout_ms=60_000,
            asked_ms=dict.fromkeys(waiting, 0),
            now_ms=1,
            left=left,
        )

    def test_the_fast_path_does_without_who_has_left(self) -> None:
        """A newcomer that is slow is not waited for, as if nobody had left."""
        decision = decide(self.situation("a", "b", healthy=("a", "b", "d"), left=("c",)))
        assert isinstance(decision, Form)
        assert [each.replica_id for each in decision.members] == ["a", "b"]

    def test_who_has_not_left_is_waited_for(self) -> None:
        assert isinstance(decide(self.situation("a", healthy=("a", "b"), left=("c",))), Wait)

    def test_when_all_have_left_there_is_no_fast_path(self) -> None:
        assert isinstance(decide(self.situation("d", healthy=("d", "e"), left=("a", "b", "c"))), Wait)


class Table:
    """A lighthouse, and replicas whose stream number is their place in the alphabet."""

    def __init__(self) -> None:
        self.core = LighthouseCore(
            LighthouseConfig(timeouts=Timeouts()),
            started_ms=1_000_000,
            cluster_id="cluster",
            nonces=itertools.count(1).__next__,
            now_ms=0,
        )
        self.now_ms = 0
        self.held: dict[str, QuorumKey] = {}
        self.requests = itertools.count(1)

    def give(self, event: events.LighthouseEvent) -> list[effects.LighthouseEffect]:
        return self.learn(self.core.handle(event, self.now_ms, 1_000_000 + self.now_ms))

    def learn(self, orders: list[effects.LighthouseEffect]) -> list[effects.LighthouseEffect]:
        for order in orders:
            if isinstance(order, effects.AnswerQuorum):
                self.held[chr(96 + order.stream)] = order.quorum.key
        return orders

    def hello(self, name: str, **changes: object) -> list[effects.LighthouseEffect]:
        said = Hello("job", name, **{"session": 1, "address": f"{name}:1", "ready": True, **changes})  # type: ignore[arg-type]
        return self.give(events.HelloReceived(ord(name[0]) - 96, said))

    def ask(self, name: str, step: int = 5, **changes: object) -> list[effects.LighthouseEffect]:
        asked = member(name, step, **changes)
        return self.give(events.QuorumRequested(ord(name[0]) - 96, next(self.requests), asked, self.held.get(name)))

    def leave(self, name: str) -> list[effects.LighthouseEffect]:
        return self.give(events.LeaveReceived(ord(name[0]) - 96, "it is preempted", 5_000))

    def close(self, name: str) -> list[effects.LighthouseEffect]:
        return self.give(events.StreamClosed(ord(name[0]) - 96))

    def pass_ms(self, ms: int, *beating: str) -> list[effects.LighthouseEffect]:
        out: list[effects.LighthouseEffect] = []
        for _ in range(ms // 100):
            self.now_ms += 100
            for name in beating:
                out += self.give(events.BeatReceived(ord(name[0]) - 96))
            out += self.learn(self.core.tick(self.now_ms, 1_000_000 + self.now_ms))
        return out

    def trains(self, *names: str, healing: str = "") -> Quorum:
        """All of these train together."""
        self.pass_ms(400)
        for name in names:
            self.hello(name)
        for name in names:
            self.ask(name, 2 if name == healing else 5)
        quorum = self.core.quorum("job")
        assert quorum is not None
        assert quorum.replica_ids == names
        return quorum


def formed(orders: list[effects.LighthouseEffect]) -> list[tuple[tuple[str, ...], str]]:
    return [(each.quorum.replica_ids, each.reason) for each in orders if isinstance(each, effects.QuorumFormed)]


def noticed(orders: list[effects.LighthouseEffect]) -> list[effects.LighthouseEffect]:
    return [each for each in orders if isinstance(each, effects.NotifyLoss | effects.ReplicaLost)]


class TestTheLighthouse:
    def test_leaving_costs_the_others_nothing(self) -> None:
        table = Table()
        table.trains("a", "b", "c")
        told = table.leave("c")
        assert told == [
            effects.ReplicaLeft("job", "c", 1, "it is preempted", 5_000),
            effects.Release(3),
        ]
        told = [*table.ask("a", 6), *table.ask("b", 6)]
        assert formed(told) == [(("a", "b"), "c has left")]
        assert noticed(told) == []

    def test_a_quorum_that_waits_for_it_alone_forms_at_once(self) -> None:
        table = Table()
        table.trains("a", "b", "c")
        table.ask("a", 6)
        table.ask("b", 6)
        assert formed(table.leave("c")) == [(("a", "b"), "c has left")]

    @pytest.mark.parametrize("end", ["closes", "dies", "falls silent"])
    def test_its_end_is_no_loss(self, end: str) -> None:
        table = Table()
        table.trains("a", "b", "c")
        table.leave("c")
        told: list[effects.LighthouseEffect] = []
        if end == "closes":
            told += table.close("c")
        elif end == "dies":
            told += table.give(events.DeathReported(3, "signal 9"))
        told += table.pass_ms(6_000, "a", "b")
        assert noticed(told) == []

    def test_it_is_forgotten_in_time(self) -> None:
        table = Table()
        table.trains("a", "b", "c")
        table.leave("c")
        table.close("c")
        table.pass_ms(Timeouts().forget_after_ms, "a", "b")
        assert table.core.drain(events.DrainRequested(1, "job", "c", ""))[0].__class__ is effects.RefuseUnary

    def test_who_heals_goes_on_and_then_it_is_released(self) -> None:
        table = Table()
        table.trains("a", "b", "c", healing="b")
        told = table.leave("a")
        assert not any(isinstance(each, effects.Release) for each in told)
        told = table.pass_ms(1_000, "a", "b", "c")
        assert not any(isinstance(each, effects.Release) for each in told)
        table.ask("c", 6)
        assert formed(table.ask("b", 6)) == [(("b", "c"), "a has left")]
        assert table.pass_ms(100) == [effects.Release(1)]

    @pytest.mark.parametrize("end", ["closes", "dies", "falls silent"])
    def test_its_end_is_a_loss_while_somebody_may_heal_from_it(self, end: str) -> None:
        table = Table()
        table.trains("a", "b", "c", healing="b")
        table.leave("a")
        told: list[effects.LighthouseEffect] = []
        if end == "closes":
            told += table.close("a")
        elif end == "dies":
            told += table.give(events.DeathReported(1, "signal 9"))
        told += table.pass_ms(6_000, "b", "c")
        lost = [each.replica_id for each in told if isinstance(each, effects.ReplicaLost)]
        assert lost == ["a"]
        assert [each.stream for each in told if isinstance(each, effects.NotifyLoss)] == [2, 3]

    def test_so_it_is_when_its_manager_server_was_started_anew(self) -> None:
        """The one that dies is in no quorum, but the trainer that it is of was."""
        table = Table()
        quorum = table.trains("a", "b", "c", healing="b")
        table.leave("a")
        assert noticed(table.hello("a", session=2, left=True)) == []  # it serves on
        told = noticed(table.give(events.DeathReported(1, "signal 9")))
        assert told[0] == effects.ReplicaLost("job", "a", 2, "its manager server reports: signal 9")
        notices = [(each.stream, each.notice) for each in told if isinstance(each, effects.NotifyLoss)]
        assert [stream for stream, _ in notices] == [2, 3]
        assert {(each.key, each.replica_id, each.session) for _, each in notices} == {(quorum.key, "a", 1)}

    def test_it_is_refused_by_name_when_it_asks_again(self) -> None:
        table = Table()
        table.trains("a", "b")
        table.leave("b")
        (refused,) = table.ask("b", 6)
        assert isinstance(refused, effects.RefuseRequest)
        assert (refused.refusal, "replica b has left the job" in refused.message) == (Refusal.LEFT, True)

    def test_a_redial_of_it_stays_left(self) -> None:
        table = Table()
        table.trains("a", "b", "c")
        table.leave("c")
        table.close("c")
        assert effects.Release(3) in table.hello("c", left=True)
        assert effects.Release(3) in table.hello("c", session=2)  # another manager server, which knows nothing of it
        table.ask("a", 6)
        assert formed(table.ask("b", 6)) == [(("a", "b"), "c has left")]

    def test_a_lighthouse_without_memory_hears_of_it_by_its_hello(self) -> None:
        before = Table()
        quorum = before.trains("a", "b", "c")
        table = Table()
        told = table.hello("c", held=quorum.key, left=True)
        assert effects.ReplicaLeft("job", "c", 1, "reported in its hello", 0) in told
        assert effects.AskForQuorum(3, quorum.key) in told  # it may be the one that knows
        table.give(events.QuorumReported(3, quorum))
        for name in ("a", "b"):
            table.hello(name, held=quorum.key)
        table.held = dict.fromkeys("ab", quorum.key)
        told = [*table.ask("a", 6), *table.ask("b", 6)]
        assert formed(told) == [(("a", "b"), "c has left")]
        assert table.pass_ms(100) == [effects.Release(3)]

    def test_a_new_life_of_it_joins_as_any_newcomer(self) -> None:
        table = Table()
        table.trains("a", "b")
        table.leave("b")
        table.close("b")
        told = table.hello("c", replaces="b")
        assert noticed(told) == []
        table.ask("c", 0)
        assert formed(table.ask("a", 6)) == [(("a", "c"), "c joined, b has left")]


class TestDraining:
    def drain(self, table: Table, replica: str, job: str = "job") -> list[effects.AskToLeave | effects.RefuseUnary]:
        return table.core.drain(events.DrainRequested(9, job, replica, "its host goes down", 7_000))

    def test_a_replica_is_asked_to_leave_again_on_every_stream_until_it_has(self) -> None:
        table = Table()
        table.trains("a", "b")
        asked = effects.AskToLeave(2, "its host goes down", 7_000)
        assert self.drain(table, "b") == [asked]
        table.close("b")
        assert asked in table.hello("b")
        table.leave("b")
        assert asked not in table.hello("b", left=True)
        (refused,) = self.drain(table, "b")
        assert isinstance(refused, effects.RefuseUnary)
        assert "has no running replica 'b': b left the job (" in refused.message
        assert refused.message.endswith("; running replicas: a")

    def test_who_is_lost_cannot_be_asked_and_is_to_be_ended(self) -> None:
        table = Table()
        table.trains("a", "b")
        table.give(events.DeathReported(2, "over"))
        (refused,) = self.drain(table, "b")
        assert isinstance(refused, effects.RefuseUnary)
        assert "has no running replica 'b': b is lost (its manager server reports:" in refused.message
        assert refused.message.endswith("): end its process; running replicas: a")

    def test_a_name_is_enough_where_one_replica_has_it(self) -> None:
        table = Table()
        table.pass_ms(400)
        table.hello(f"a:{UUID}")
        table.hello(f"b:eu:{OTHER}")
        table.give(events.HelloReceived(5, Hello("job", f"b:{UUID}", 1, "b2:1")))
        assert self.drain(table, "b") == [effects.AskToLeave(5, "its host goes down", 7_000)]

    def test_a_name_is_not_that_of_a_replica_whose_name_begins_so(self) -> None:
        table = Table()
        table.pass_ms(400)
        table.hello(f"b:eu:{UUID}")
        (refused,) = self.drain(table, "b")
        assert isinstance(refused, effects.RefuseUnary)
        assert "has no running replica 'b'; running replicas: b:eu:" in refused.message

    def test_the_short_id_of_logs_is_enough(self) -> None:
        table = Table()
        table.pass_ms(400)
        table.hello("a:1f3a9c1d-1234-4abc-8def-0123456789ab")
        table.give(events.HelloReceived(5, Hello("job", "a:0f3a9c1d-1234-4abc-8def-0123456789ab", 1, "a2:1")))
        assert self.drain(table, "a:0f3a9c1d") == [effects.AskToLeave(5, "its host goes down", 7_000)]

    def test_a_name_that_two_have_is_refused_with_both(self) -> None:
        table = Table()
        table.pass_ms(400)
        table.hello(f"a:{UUID}")
        table.give(events.HelloReceived(5, Hello("job", f"a:{OTHER}", 1, "a2:1")))
        (refused,) = self.drain(table, "a")
        assert isinstance(refused, effects.RefuseUnary)
        assert (refused.call, refused.refusal) == (9, Refusal.UNKNOWN)
        assert f"has 2 replicas named 'a'; give the id of one of them: a:{UUID}, a:{OTHER}" in refused.message

    @pytest.mark.parametrize(
        ("job", "replica", "words"),
        [
            ("other", "a", "this lighthouse knows no job 'other'; known jobs: job"),
            ("job", "z", "job job has no running replica 'z'; running replicas: a, b"),
        ],
    )
    def test_whom_nobody_knows_is_refused_with_who_is_there(self, job: str, replica: str, words: str) -> None:
        table = Table()
        table.trains("a", "b")
        (refused,) = self.drain(table, replica, job)
        assert isinstance(refused, effects.RefuseUnary)
        assert refused.message == words

    def test_a_lighthouse_that_another_has_succeeded_knows_nobody(self) -> None:
        table = Table()
        table.trains("a")
        table.hello("b", lighthouse_started_ms=1_000_500, cluster_id="cluster")
        (refused,) = self.drain(table, "a")
        assert isinstance(refused, effects.RefuseUnary)
        assert refused.message == "this lighthouse knows no job 'job'; known jobs: none so far"
