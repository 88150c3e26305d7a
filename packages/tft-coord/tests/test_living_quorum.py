"""The lighthouse and a quorum whose members go on without asking: recall, the newest, late members, no second start.

Each test has its twin without a lease: a quorum with a member that asks in every step is treated as it always was.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tft_coord.core import effects, events
from tft_coord.core.effects import AnswerQuorum, LighthouseEffect, NotifyLoss, QuorumFormed, TellNewest
from tft_coord.core.lighthouse import LighthouseConfig, LighthouseCore
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.quorum import decide
from tft_coord.core.stragglers import StragglerAction, StragglerPolicy
from tft_coord.core.types import Hello, Member, Quorum, QuorumKey, QuorumNews
from tft_coord.timeouts import Timeouts

WALL_MS = 1_000_000
LEASE_MS = 20_000
TIMES: dict[str, Any] = {"heartbeat_timeout_ms": 5_000, "join_timeout_ms": 10_000, "lease_ms": LEASE_MS}
BOUND_MS = 26_000  # 1.05 leases and heartbeat_timeout


class Table:
    """A lighthouse, and replicas whose stream number is their place in the alphabet."""

    def __init__(self, *, lease_ms: int | None = LEASE_MS, earlier: bool = False, **config: Any) -> None:
        self.lease_ms = lease_ms
        self.core = LighthouseCore(
            LighthouseConfig(timeouts=Timeouts(**TIMES), **config),
            started_ms=WALL_MS,
            cluster_id="cluster",
            nonces=itertools.count(1).__next__,
            now_ms=0,
            had_earlier_life=earlier,
        )
        self.now_ms = 0
        self.held: dict[str, QuorumKey] = {}
        self.requests = itertools.count(1)
        self.beats = itertools.count(1)
        self.silent: set[str] = set()

    def give(self, event: events.LighthouseEvent) -> list[LighthouseEffect]:
        return self.learn(self.core.handle(event, self.now_ms, WALL_MS + self.now_ms))

    def learn(self, orders: list[LighthouseEffect]) -> list[LighthouseEffect]:
        for order in orders:
            if isinstance(order, AnswerQuorum):
                self.held[chr(96 + order.stream)] = order.quorum.key
        return orders

    def pass_ms(self, ms: int, *beating: str) -> list[LighthouseEffect]:
        out: list[LighthouseEffect] = []
        for _ in range(ms // 100):
            self.now_ms += 100
            if self.now_ms % 1_000 == 0:
                for name in beating:
                    out += self.give(events.BeatReceived(ord(name) - 96))
            out += self.learn(self.core.tick(self.now_ms, WALL_MS + self.now_ms))
        return out

    def hello(self, name: str, **changes: Any) -> list[LighthouseEffect]:
        said = {"session": 1, "address": f"{name}:1", "held": self.held.get(name), "ready": True, **changes}
        if self.lease_ms:
            said.setdefault("lease_ms", self.lease_ms)
        return self.give(events.HelloReceived(ord(name) - 96, Hello("job", name, **said)))

    def ask(self, name: str, step: int = 5, **changes: Any) -> list[LighthouseEffect]:
        said = {"address": f"{name}:1", "step": step, "lineage": 100 + step, "live": True, "lease_ms": self.lease_ms}
        member = Member(name, init_sync=False, **{**said, **changes})
        return self.give(events.QuorumRequested(ord(name) - 96, next(self.requests), member, self.held.get(name)))

    def beat(self, name: str, phase: Phase = Phase.REDUCING, step: int = 6) -> list[LighthouseEffect]:
        progress = Progress(step, phase, 100)
        return self.give(events.BeatReceived(ord(name) - 96, 0, progress, number=next(self.beats)))

    def together(self, *names: str) -> QuorumKey:
        """All of these train together; the first grace is over."""
        self.pass_ms(400)
        for name in names:
            self.hello(name)
        for name in names:
            self.ask(name)
        quorum = self.core.quorum("job")
        assert quorum is not None
        assert quorum.replica_ids == names
        return quorum.key

    @property
    def waits(self) -> str:
        return self.core.waiting_for("job")


def told(orders: list[LighthouseEffect]) -> dict[str, QuorumNews]:
    return {chr(96 + order.stream): order.news for order in orders if isinstance(order, TellNewest)}


def broken(orders: list[LighthouseEffect]) -> dict[str, str]:
    return {chr(96 + order.stream): order.notice.reason for order in orders if isinstance(order, NotifyLoss)}


def formed(orders: list[LighthouseEffect]) -> list[tuple[str, ...]]:
    return [order.quorum.replica_ids for order in orders if isinstance(order, QuorumFormed)]


class TestRecall:
    def test_a_newcomer_that_asks_calls_all_members_back(self) -> None:
        table = Table()
        key = table.together("a", "b")
        table.pass_ms(15_000, "a", "b")
        table.hello("c")
        assert told(table.ask("c", 0)) == dict.fromkeys("ab", QuorumNews(key, recalled=True))
        assert told(table.pass_ms(1_000, "a", "b")) == {}, "it is said once, and then with each answer to a beat"

    def test_so_does_one_that_asks_soon_after_a_quorum_was_formed(self) -> None:
        table = Table()
        key = table.together("a", "b")
        table.hello("c")
        assert told(table.ask("c", 0)) == dict.fromkeys("ab", QuorumNews(key, recalled=True))

    def test_of_several_newcomers_one_alone_costs_a_look_at_all_members(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looks: list[int] = []
        table = Table()
        table.together("a", "b")
        monkeypatch.setattr("tft_coord.core.lighthouse.decide", lambda situation: looks.append(1) or decide(situation))
        for name in "cde":
            table.hello(name)
            table.ask(name, 0)
        assert len(looks) == 1

    def test_the_answer_to_each_beat_repeats_it(self) -> None:
        table = Table()
        key = table.together("a", "b")
        table.hello("c")
        table.ask("c", 0)
        table.pass_ms(100)
        assert told(table.beat("a")) == {"a": QuorumNews(key, recalled=True, beat=1)}
        assert told(table.beat("b")) == {"b": QuorumNews(key, recalled=True, beat=2)}

    def test_the_next_quorum_ends_it_and_has_the_newcomer(self) -> None:
        table = Table()
        table.together("a", "b")
        table.hello("c")
        table.ask("c", 0)
        table.ask("a", 6)
        assert formed(table.ask("b", 6)) == [("a", "b", "c")]
        assert told(table.beat("a")) == {"a": QuorumNews(table.held["a"], beat=1)}

    def test_a_replica_that_has_waited_for_long_does_not_hurry_the_members(self) -> None:
        """They train until they have asked, however long ago it did."""
        table = Table()
        table.together("a", "b")
        table.hello("c")
        table.ask("c", 0)
        table.pass_ms(30_000, "a", "b", "c")
        assert formed([*table.ask("a", 6), *table.pass_ms(500, "a", "b", "c")]) == []
        assert formed(table.ask("b", 6)) == [("a", "b", "c")]

    def test_a_quorum_that_is_given_again_ends_it(self) -> None:
        table = Table()
        key = table.together("a", "b")
        table.hello("c")
        table.ask("c", 0)
        table.give(events.StreamClosed(3))
        table.ask("a", 6)
        table.ask("b", 6)
        assert table.core.quorum("job").key == key  # type: ignore[union-attr]
        assert told(table.beat("a")) == {"a": QuorumNews(key, beat=1)}

    def test_a_drain_recalls(self) -> None:
        table = Table()
        key = table.together("a", "b")
        asked = table.core.drain(events.DrainRequested(1, "job", "a", "maintenance"))
        assert effects.AskToLeave(1, "maintenance", 0) in asked
        news = QuorumNews(key, recalled=True)
        assert {order.stream: order.news for order in asked if isinstance(order, TellNewest)} == {1: news, 2: news}

    def test_a_straggler_that_is_left_out_is(self) -> None:
        policy = StragglerPolicy(action=StragglerAction.LEAVE_OUT, patience_ms=1_000)
        table = Table(stragglers=policy)
        key = table.together("a", "b", "c")
        out: list[LighthouseEffect] = []
        for step in range(6, 40):
            for name, own_ms in (("a", 100), ("b", 100), ("c", 1_000)):
                progress = Progress(step, Phase.REDUCING, 10, own_ms=own_ms)
                out += table.give(events.BeatReceived(ord(name) - 96, 0, progress, number=step))
            out += table.pass_ms(500)
        assert any(isinstance(order, effects.PaceChanged) for order in out)
        assert QuorumNews(key, recalled=True) in [order.news for order in out if isinstance(order, TellNewest)]

    def test_one_that_others_can_not_train_with_recalls_nobody(self) -> None:
        table = Table()
        table.together("a", "b")
        table.pass_ms(15_000, "a", "b")
        table.hello("c")
        assert told(table.ask("c", 0, failed_heals=9)) == {}

    @pytest.mark.parametrize("lease_ms", [0, None])
    def test_members_that_ask_in_every_step_are_not_recalled(self, lease_ms: int | None) -> None:
        table = Table(lease_ms=lease_ms)
        table.together("a", "b")
        table.pass_ms(15_000, "a", "b")
        table.hello("c")
        assert told([*table.ask("c", 0), *table.pass_ms(500, "a", "b", "c")]) == {}
        drained = table.core.drain(events.DrainRequested(1, "job", "a", ""))
        assert drained == [effects.AskToLeave(1, "", 0)]


class TestTheNewest:
    def test_a_beat_without_a_number_is_not_answered(self) -> None:
        table = Table()
        table.together("a", "b")
        assert table.give(events.BeatReceived(1)) == []

    def test_each_answer_names_the_newest_quorum(self) -> None:
        table = Table()
        key = table.together("a", "b")
        assert told(table.beat("a")) == {"a": QuorumNews(key, beat=1)}

    def test_it_says_that_the_quorum_is_broken(self) -> None:
        """A notice may have been lost with a stream, and the next beat repairs that."""
        table = Table()
        key = table.together("a", "b")
        table.give(events.DeathReported(2, "killed"))
        assert told(table.beat("a")) == {"a": QuorumNews(key, broken=True, beat=1)}

    def test_before_the_first_quorum_there_is_none(self) -> None:
        table = Table()
        table.hello("a")
        assert told(table.beat("a")) == {"a": QuorumNews(None, beat=1)}

    def test_who_was_lost_is_told_so_and_nothing_else(self) -> None:
        table = Table()
        table.together("a", "b")
        table.pass_ms(6_000, "a")
        assert [type(order) for order in table.beat("b")] == [effects.TellLost]

    def test_the_beats_tell_how_far_a_standing_quorum_is(self) -> None:
        """Nobody goes on from before the step that its members have reached since, while one may come back."""
        table = Table(lost_state_timeout_ms=600_000)
        table.together("a", "b")
        table.beat("a", Phase.OWN, step=50)
        table.pass_ms(6_000, "b")
        table.give(events.DeathReported(2, "killed"))
        table.hello("c")
        table.ask("c", 20)
        table.pass_ms(60_000, "c")
        assert "the state of step 50, which a held" in table.waits


class TestMembersThatDoNotCome:
    def test_a_failed_round_breaks_the_quorum_for_the_others_at_once(self) -> None:
        table = Table()
        table.together("a", "b", "c")
        assert set(broken(table.ask("a", 5, commit_failures=1))) == {"b", "c"}

    def test_one_whose_word_told_it_nothing_is_told_two_beats_later(self) -> None:
        table = Table()
        table.together("a", "b", "c")
        table.ask("a", 6)
        table.beat("b", Phase.WAITING)
        table.beat("c", Phase.OWN)
        assert broken(table.pass_ms(1_900)) == {}
        told_so = broken(table.pass_ms(200))
        assert set(told_so) == {"b", "c"}
        assert told_so["b"] == "asked for the next quorum, and b still waits in this one"

    def test_members_that_are_busy_or_between_two_steps_come_by_themselves(self) -> None:
        table = Table()
        key = table.together("a", "b", "c")
        table.ask("a", 6)
        table.beat("b", Phase.OUTSIDE)
        table.beat("c", Phase.OWN)
        assert broken(table.pass_ms(4_000)) == {}
        table.ask("b", 6)
        table.ask("c", 6)
        assert table.core.quorum("job").key == key  # type: ignore[union-attr]

    def test_a_late_round_is_broken_for_whoever_is_between_two_steps(self) -> None:
        table = Table()
        key = table.together("a", "b", "c")
        table.beat("a")
        table.beat("b")
        table.beat("c", Phase.OUTSIDE)
        table.give(events.LateReported(1, key, 6))
        told_so = broken(table.pass_ms(100))
        assert set(told_so) == {"a", "b", "c"}
        assert told_so["a"] == "has waited for c for longer than join_timeout"

    def test_the_notice_of_a_late_round_is_about_the_member_that_waits(self) -> None:
        table = Table()
        key = table.together("a", "b", "c")
        for name in "bc":
            table.beat(name)
        table.beat("a", Phase.OUTSIDE)
        table.give(events.LateReported(2, key, 6))
        notices = [order.notice for order in table.pass_ms(100) if isinstance(order, effects.NotifyLoss)]
        assert {(each.replica_id, each.reason) for each in notices} == {
            ("b", "has waited for a for longer than join_timeout")
        }

    def test_the_others_go_on_without_it_a_moment_later(self) -> None:
        table = Table()
        key = table.together("a", "b", "c")
        table.beat("c", Phase.OUTSIDE)
        table.give(events.LateReported(1, key, 6))
        table.pass_ms(100)
        table.ask("a", 6, needs_configure=True)
        table.ask("b", 6, needs_configure=True)
        assert formed(table.pass_ms(2_200, "a", "b", "c")) == [("a", "b")]

    def test_a_member_inside_its_step_may_take_as_long_as_a_step_may(self) -> None:
        """It may compile; whether it hangs is judged by slowest_step."""
        table = Table()
        key = table.together("a", "b")
        table.beat("b", Phase.OWN)
        table.give(events.LateReported(1, key, 6))
        assert broken(table.pass_ms(3_000, "a")) == {}
        table.beat("b", Phase.OUTSIDE, step=6)
        assert set(broken(table.pass_ms(100))) == {"a", "b"}

    def test_a_round_that_was_committed_after_all_is_not_late(self) -> None:
        table = Table()
        key = table.together("a", "b")
        table.give(events.LateReported(1, key, 6))
        table.beat("b", Phase.OUTSIDE, step=7)
        assert broken(table.pass_ms(3_000)) == {}

    def test_late_in_an_older_quorum_or_said_by_a_stranger_is_no_news(self) -> None:
        table = Table()
        key = table.together("a", "b")
        table.beat("b", Phase.OUTSIDE)
        table.give(events.LateReported(1, QuorumKey(3, 3), 6))
        table.hello("c")
        table.give(events.LateReported(3, key, 6))
        assert broken(table.pass_ms(500)) == {}

    @pytest.mark.parametrize("lease_ms", [0, None])
    def test_without_a_lease_nothing_is_broken(self, lease_ms: int | None) -> None:
        table = Table(lease_ms=lease_ms)
        key = table.together("a", "b")
        table.ask("a", 6, commit_failures=1)
        table.beat("b", Phase.WAITING)
        table.give(events.LateReported(1, key, 6))
        assert broken(table.pass_ms(4_000)) == {}


class TestNobodyStartsOver:
    def test_a_fresh_replica_waits_for_members_that_may_still_train(self) -> None:
        table = Table()
        table.together("a", "b")
        table.hello("c")
        table.pass_ms(6_000, "c")  # a and b are silent for longer than heartbeat_timeout
        table.ask("c", 0)
        assert formed(table.pass_ms(BOUND_MS - 6_000 - 100, "c")) == []
        assert "a may still train without this lighthouse; restart it" in table.waits
        assert formed(table.pass_ms(300, "c")) == [("c",)]

    @pytest.mark.parametrize("lease_ms", [0, None])
    def test_without_a_lease_heartbeat_timeout_is_enough(self, lease_ms: int | None) -> None:
        table = Table(lease_ms=lease_ms)
        table.together("a", "b")
        table.hello("c")
        table.ask("c", 0)
        assert formed(table.pass_ms(11_000, "c")) == [("c",)]

    def test_with_one_member_nobody_else_is_waited_for(self) -> None:
        table = Table()
        table.together("a", "b")
        table.hello("c")
        table.ask("c", 0)
        table.ask("a", 6, needs_configure=True)
        assert formed(table.pass_ms(12_000, "a", "c")) == [("a", "c")]

    def test_whose_end_is_known_is_not_waited_for(self) -> None:
        table = Table()
        table.together("a", "b", "d")
        table.hello("c")
        table.ask("c", 0)
        table.give(events.DeathReported(1, "killed"))
        table.give(events.LeaveReceived(2, "drained", 0))
        assert formed(table.pass_ms(200, "c")) == []
        table.hello("e", replaces="d")
        assert formed([*table.ask("e", 0), *table.pass_ms(200, "c")]) == [("c", "e")]

    def test_the_silence_of_each_counts_from_what_was_heard_of_it_last(self) -> None:
        table = Table()
        table.together("a", "b")
        table.hello("c")
        table.pass_ms(4_000, "b", "c")
        table.ask("c", 0)
        assert formed(table.pass_ms(BOUND_MS - 600, "c")) == [], "b was heard 4 s after a"
        assert table.waits.startswith("b may still train")
        assert formed(table.pass_ms(1_000, "c")) == [("c",)]

    def test_a_member_of_an_earlier_quorum_that_was_cut_off_may_hold_the_newest_state(self) -> None:
        """Q0 = {a, b}; b is cut off in the reductions; a goes on alone in Q1 and dies; a fresh c asks."""
        table = Table()
        table.together("a", "b")
        table.pass_ms(6_000, "a")
        assert formed(table.ask("a", 6, needs_configure=True)) == [("a",)]
        table.give(events.DeathReported(1, "killed"))
        table.hello("c")
        table.ask("c", 0)
        assert formed(table.pass_ms(10_000, "c")) == []
        assert table.waits.startswith("b may still train")
        table.hello("b", session=2)
        assert formed([*table.ask("b", 6), *table.pass_ms(11_000, "b", "c")]) == [("b", "c")]

    def test_one_that_was_in_a_later_quorum_is_no_member_of_the_earlier_any_more(self) -> None:
        table = Table()
        table.together("a", "b")
        table.pass_ms(6_000, "a")
        table.ask("a", 6, needs_configure=True)
        table.hello("b", session=2)
        table.ask("b", 6)
        table.pass_ms(11_000, "a", "b")
        table.give(events.DeathReported(1, "killed"))
        table.give(events.DeathReported(2, "killed"))
        table.hello("c")
        assert formed(table.ask("c", 0)) == [("c",)]

    def test_a_lost_member_is_remembered_until_its_lease_is_over(self) -> None:
        """Longer than ten times heartbeat_timeout, where the lease is."""
        table = Table(lease_ms=120_000)
        table.together("a", "b")
        table.hello("c")
        table.ask("c", 0)
        assert formed(table.pass_ms(120_000, "c")) == []
        assert formed(table.pass_ms(12_000, "c")) == [("c",)]


class TestWithoutMemory:
    def reported(self, table: Table, name: str, key: QuorumKey, *ids: str) -> None:
        table.held[name] = key
        table.hello(name)
        members = tuple(Member(each, session=1, address=f"{each}:1", step=5, lease_ms=LEASE_MS) for each in ids)
        table.give(events.QuorumReported(ord(name) - 96, Quorum(key, members)))

    def test_members_that_are_named_are_waited_for_since_the_start(self) -> None:
        table = Table()
        table.pass_ms(400)
        self.reported(table, "a", QuorumKey(7, 7), "a", "b")
        table.give(events.DeathReported(1, "killed"))
        table.hello("c")
        table.ask("c", 0)
        assert formed(table.pass_ms(BOUND_MS - 500, "c")) == []
        assert table.waits.startswith("b may still train")
        assert formed(table.pass_ms(300, "c")) == [("c",)]

    def test_members_that_nobody_can_name_are_waited_for_as_long(self) -> None:
        table = Table()
        table.pass_ms(400)
        table.held["a"] = QuorumKey(7, 7)
        table.hello("a")
        table.give(events.QuorumReported(1, None))
        table.give(events.StreamClosed(1))
        table.hello("c")
        table.ask("c", 3)
        assert formed(table.pass_ms(BOUND_MS - 500, "c")) == []
        assert "unknown members of quorum 7.0000000000000007 may" in table.waits
        assert formed(table.pass_ms(300, "c")) == [("c",)]

    def test_a_member_of_the_quorum_that_nobody_can_name_ends_the_wait(self) -> None:
        table = Table()
        table.pass_ms(400)
        for name in "ab":
            table.held[name] = QuorumKey(7, 7)
            table.hello(name)
            table.give(events.QuorumReported(ord(name) - 96, None))
        table.give(events.StreamClosed(1))
        assert formed([*table.ask("b", 5), *table.pass_ms(1_000, "b")]) == [("b",)]

    def test_where_nobody_names_a_quorum_it_forms_at_once(self) -> None:
        table = Table()
        table.pass_ms(400)
        table.hello("c")
        assert formed(table.ask("c", 0)) == [("c",)]

    def test_a_durable_counter_tells_of_an_earlier_life(self) -> None:
        table = Table(earlier=True)
        table.pass_ms(400)
        table.hello("c")
        table.ask("c", 0)
        assert formed(table.pass_ms(BOUND_MS - 500, "c")) == []
        assert table.waits.startswith("replicas of an earlier lighthouse may still train without this lighthouse, ")
        assert formed(table.pass_ms(300, "c")) == [("c",)]

    def test_with_a_member_of_the_newest_quorum_it_goes_on_at_once(self) -> None:
        table = Table(earlier=True)
        table.pass_ms(400)
        self.reported(table, "a", QuorumKey(7, 7), "a", "b")
        table.hello("c")
        table.ask("c", 0)
        table.ask("a", 6)
        assert formed(table.pass_ms(11_000, "a", "c")) == [("a", "c")]

    def test_hellos_without_a_lease_are_waited_for_as_before(self) -> None:
        table = Table(lease_ms=None)
        table.pass_ms(400)
        table.held["a"] = QuorumKey(7, 7)
        table.hello("a")
        table.give(events.QuorumReported(1, None))
        table.give(events.StreamClosed(1))
        table.hello("c")
        table.ask("c", 0, live=False)
        assert formed(table.pass_ms(TIMES["heartbeat_timeout_ms"] - 500, "c")) == []
        assert formed(table.pass_ms(300, "c")) == [("c",)]


class TestMixedQuorums:
    def test_one_member_without_a_lease_makes_all_ask_in_every_step(self) -> None:
        table = Table()
        table.pass_ms(400)
        for name in "ab":
            table.hello(name)
        table.ask("a")
        (first, _) = [order for order in table.ask("b", lease_ms=None) if isinstance(order, AnswerQuorum)]
        assert first.quorum.lease_ms is None
        table.pass_ms(15_000, "a", "b")
        table.hello("c")
        assert told(table.ask("c", 0)) == {}

    def test_the_smallest_lease_counts(self) -> None:
        table = Table()
        table.pass_ms(400)
        for name in "ab":
            table.hello(name)
        table.ask("a")
        (first, _) = [order for order in table.ask("b", lease_ms=9_000) if isinstance(order, AnswerQuorum)]
        assert first.quorum.lease_ms == 9_000

    def test_a_lease_that_changes_is_told_to_all(self) -> None:
        table = Table()
        key = table.together("a", "b")
        table.ask("a", 6)
        answers = [order for order in table.ask("b", 6, lease_ms=0) if isinstance(order, AnswerQuorum)]
        assert {order.quorum.lease_ms for order in answers} == {0}
        assert {order.quorum.key for order in answers} == {key}


def test_a_newcomer_among_a_thousand_standing_members_costs_each_one_message_and_one_request() -> None:
    names = [f"r{number:04}" for number in range(1_000)]
    core = LighthouseCore(
        LighthouseConfig(timeouts=Timeouts(**TIMES)),
        started_ms=WALL_MS,
        cluster_id="cluster",
        nonces=itertools.count(1).__next__,
        now_ms=0,
    )
    held: QuorumKey | None = None
    now_ms = 1_000

    def give(event: events.LighthouseEvent) -> list[LighthouseEffect]:
        return core.handle(event, now_ms, WALL_MS + now_ms)

    def ask(number: int, step: int) -> list[LighthouseEffect]:
        member = Member(names[number], step=step, lineage=step, live=True, init_sync=False, lease_ms=LEASE_MS)
        return give(events.QuorumRequested(number, step + 1, member, held))

    core.tick(now_ms, WALL_MS + now_ms)
    for number, name in enumerate(names):
        give(events.HelloReceived(number, Hello("job", name, 1, f"{name}:1", ready=number < 999)))
    for number in range(999):
        ask(number, 5)
    quorum = core.quorum("job")
    assert quorum is not None
    assert len(quorum.members) == 999
    held = quorum.key
    now_ms += 900
    core.tick(now_ms, WALL_MS + now_ms)
    held, out = None, [*ask(999, 0), *core.tick(now_ms, WALL_MS + now_ms)]
    recalls = [order for order in out if isinstance(order, TellNewest)]
    assert len(recalls) == 999
    assert all(order.news is recalls[0].news for order in recalls), "it is encoded once"
    held, answers = quorum.key, []
    for number in range(999):
        answers += ask(number, 6)
    assert sum(isinstance(order, AnswerQuorum) for order in answers) == 1_000
