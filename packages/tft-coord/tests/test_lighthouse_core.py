"""The lighthouse's core: when quorums form, what each is answered, and what a restart, a loss or a lost answer does."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tft_coord.core import effects, events
from tft_coord.core.effects import AnswerQuorum, AnswerUnchanged, AskForQuorum, LighthouseEffect, QuorumFormed
from tft_coord.core.lighthouse import CLOCKS_DIFFER_MOST_MS, LighthouseConfig, LighthouseCore
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.types import MAX_INT64, Hello, LossNotice, Member, Quorum, QuorumKey, Refusal
from tft_coord.errors import ConfigError, ProtocolError
from tft_coord.timeouts import Timeouts

STARTED_MS = 1_000_000
GRACE_MS = 300


class Table:
    """A lighthouse, and replicas whose stream number is their place in the alphabet."""

    def __init__(
        self, *, min_replicas: int = 1, now_ms: int = 0, started_ms: int = STARTED_MS, **timeouts: int
    ) -> None:
        self.core = LighthouseCore(
            LighthouseConfig(min_replicas=min_replicas, timeouts=Timeouts(**timeouts)),
            started_ms=started_ms,
            cluster_id="cluster",
            nonces=itertools.count(1).__next__,
            now_ms=now_ms,
        )
        self.now_ms = now_ms
        self.streams: dict[str, int] = {}
        self.sessions: dict[str, int] = {}
        self.requests: dict[str, int] = {}
        self.held: dict[str, QuorumKey | None] = {}
        self.members: dict[str, Member] = {}

    def give(self, event: events.LighthouseEvent) -> list[LighthouseEffect]:
        return self.learn(self.core.handle(event, self.now_ms, STARTED_MS + self.now_ms))

    def tick(self) -> list[LighthouseEffect]:
        return self.learn(self.core.tick(self.now_ms, STARTED_MS + self.now_ms))

    def learn(self, orders: list[LighthouseEffect]) -> list[LighthouseEffect]:
        by_stream = {stream: name for name, stream in self.streams.items()}
        for order in orders:
            if isinstance(order, AnswerQuorum):
                self.held[by_stream[order.stream]] = order.quorum.key
        return orders

    def pass_ms(self, ms: int, *beating: str) -> list[LighthouseEffect]:
        """Let time pass in ticks; these replicas beat."""
        out: list[LighthouseEffect] = []
        for _ in range(ms // 100):
            self.now_ms += 100
            for name in beating:
                out += self.give(events.BeatReceived(self.streams[name]))
            out += self.tick()
        self.now_ms += ms % 100
        return out

    def hello(self, name: str, stream: int | None = None, **changes: object) -> list[LighthouseEffect]:
        self.streams[name] = stream or self.streams.get(name) or ord(name[0]) - 96
        said = {"session": self.sessions.get(name, 1), "address": f"{name}:1", "held": self.held.get(name), **changes}
        self.sessions[name] = said["session"]  # type: ignore[assignment]
        return self.give(events.HelloReceived(self.streams[name], Hello("job", name, **said)))  # type: ignore[arg-type]

    def ask(self, name: str, step: int = 0, *, again: bool = False, **changes: object) -> list[LighthouseEffect]:
        """A new request, or (again) the same one once more."""
        if not again:
            self.requests[name] = self.requests.get(name, 0) + 1
            said = {"address": f"{name}:1", "step": step, "lineage": 100 + step, "init_sync": False, **changes}
            self.members[name] = Member(name, **said)  # type: ignore[arg-type]
        request = self.requests[name]
        return self.give(events.QuorumRequested(self.streams[name], request, self.members[name], self.held.get(name)))

    def close(self, name: str) -> list[LighthouseEffect]:
        return self.give(events.StreamClosed(self.streams[name]))

    def first_quorum(self, *names: str, step: int = 5) -> Quorum:
        """All of these train together; the first grace is over."""
        self.pass_ms(400)
        for name in names:
            self.hello(name, ready=True)
        for name in names:
            self.ask(name, step, live=True)
        quorum = self.core.quorum("job")
        assert quorum is not None
        assert quorum.replica_ids == names
        return quorum


def whole(orders: list[LighthouseEffect]) -> dict[int, Quorum]:
    return {order.stream: order.quorum for order in orders if isinstance(order, AnswerQuorum)}


def unchanged(orders: list[LighthouseEffect]) -> set[int]:
    return {order.stream for order in orders if isinstance(order, AnswerUnchanged)}


def formed(orders: list[LighthouseEffect]) -> list[tuple[tuple[str, ...], str]]:
    return [(order.quorum.replica_ids, order.reason) for order in orders if isinstance(order, QuorumFormed)]


def refused(orders: list[LighthouseEffect]) -> list[Refusal]:
    kinds = (effects.RefuseRequest, effects.RefuseSession)
    return [order.refusal for order in orders if isinstance(order, kinds)]


def told(orders: list[LighthouseEffect]) -> dict[int, list[LossNotice]]:
    """Losses that each stream is told of."""
    out: dict[int, list[LossNotice]] = {}
    for order in orders:
        if isinstance(order, effects.NotifyLoss):
            out.setdefault(order.stream, []).append(order.notice)
    return out


class TestForming:
    def test_all_get_the_same_quorum_when_the_last_has_asked(self) -> None:
        table = Table()
        table.pass_ms(400)
        for name in ("b", "a"):
            table.hello(name, ready=True)
        assert table.ask("b") == []
        orders = table.ask("a")
        assert formed(orders) == [(("a", "b"), "it is the first quorum")]
        assert whole(orders).keys() == {1, 2}
        assert len({quorum.key for quorum in whole(orders).values()}) == 1

    def test_ids_begin_above_the_start_time(self) -> None:
        assert Table().first_quorum("a").key == QuorumKey(STARTED_MS + 1, 1)

    def test_who_has_never_asked_is_waited_for_by_nobody(self) -> None:
        table = Table()
        table.pass_ms(400)
        for name in ("a", "b", "c"):
            table.hello(name)
        assert formed(table.ask("a")) == [(("a",), "it is the first quorum")]

    def test_the_late_are_waited_for_and_then_not(self) -> None:
        table = Table(join_timeout_ms=1_000)
        table.first_quorum("a", "b", "c")
        table.ask("a", 6, live=True)
        table.ask("b", 6, live=True)
        assert formed(table.pass_ms(900, "a", "b", "c")) == []
        assert "c is healthy and has not asked" in table.core.waiting_for("job")
        assert formed(table.pass_ms(200, "a", "b", "c")) == [(("a", "b"), "c is gone")]

    def test_min_replicas_holds_on_the_fast_path_too(self) -> None:
        table = Table(min_replicas=2)
        table.pass_ms(400)
        table.hello("a")
        assert table.ask("a") == []
        assert table.core.waiting_for("job") == "1 of min_replicas 2 have asked"

    def test_giving_up_and_asking_again_does_not_start_join_timeout_anew(self) -> None:
        """quorum_timeout and join_timeout are equal by default: the first to ask gives up just when the wait ends."""
        table = Table(join_timeout_ms=1_000)
        table.first_quorum("a", "b", "c")
        table.ask("a", 6, live=True)
        table.pass_ms(500, "a", "b", "c")
        table.ask("b", 6, live=True)
        table.pass_ms(400, "a", "b", "c")
        table.give(events.RequestWithdrawn(table.streams["a"], table.requests["a"]))
        table.ask("a", 6, live=True)
        assert formed(table.pass_ms(200, "a", "b", "c")) == [(("a", "b"), "c is gone")]

    def test_the_age_of_the_last_quorum_counts_from_its_first_answer(self) -> None:
        table = Table()
        table.first_quorum("a")
        table.pass_ms(500, "a")
        assert unchanged(table.ask("a", 5, live=True)) == {1}
        table.pass_ms(500, "a")
        table.hello("b")
        table.ask("b")
        orders = table.ask("a", 5, live=True)
        assert [order.age_ms for order in orders if isinstance(order, QuorumFormed)] == [1_000]

    def test_jobs_do_not_meet(self) -> None:
        table = Table()
        table.first_quorum("a")
        table.core.handle(events.HelloReceived(50, Hello("other", "a", 1, "z:1")), table.now_ms, 0)
        orders = table.core.handle(events.QuorumRequested(50, 1, Member("a"), None), table.now_ms, 0)
        assert formed(orders) == [(("a",), "it is the first quorum")]
        assert table.core.jobs == ("job", "other")

    def test_a_stream_asks_for_itself_only(self) -> None:
        table = Table()
        table.pass_ms(400)
        table.hello("a")
        assert refused(table.give(events.QuorumRequested(1, 1, Member("b"), None))) == [Refusal.MALFORMED]

    def test_what_comes_before_the_hello_does_not_count(self) -> None:
        assert Table().give(events.QuorumRequested(1, 1, Member("a"), None)) == []

    def test_shrink_only_keeps_newcomers_out(self) -> None:
        table = Table()
        table.first_quorum("a", "b")
        table.hello("c")
        table.ask("c")
        table.ask("a", 6, live=True, shrink_only=True)
        orders = table.ask("b", 6, live=True)
        assert formed(orders) == []
        assert unchanged(orders) == {1, 2}
        assert table.core.waiting_for("job") == "a replica to ask for a quorum"

    def test_no_quorum_without_a_survivor_of_the_last_one(self) -> None:
        table = Table(join_timeout_ms=0)
        table.first_quorum("a")
        for name in ("x", "y"):
            table.hello(name)
            assert formed(table.ask(name)) == []
        assert formed(table.pass_ms(3_000, "a", "x", "y")) == []
        assert "a survivor of the last quorum" in table.core.waiting_for("job")
        # Once it is lost, and has not come back with its state for as long again, they may.
        assert formed(table.pass_ms(10_000, "x", "y")) == [(("x", "y"), "x joined, y joined, a is gone")]

    def test_who_fails_to_heal_again_and_again_is_left_out_for_a_while(self) -> None:
        table = Table()
        table.first_quorum("a")
        table.hello("b")
        assert table.ask("b", failed_heals=2) == []
        assert unchanged(table.ask("a", 6, live=True)) == {1}
        table.pass_ms(1_000, "a", "b")
        assert formed(table.ask("a", 7, live=True)) == [(("a", "b"), "b joined")]

    def test_the_news_of_a_quorum_say_who_recovers(self) -> None:
        table = Table()
        table.first_quorum("a")
        table.hello("b")
        table.ask("b")
        orders = table.ask("a", 6, live=True)
        assert [order.recovering for order in orders if isinstance(order, QuorumFormed)] == [("b",)]

    def test_min_replicas_must_be_positive(self) -> None:
        with pytest.raises(ConfigError, match="min_replicas is 0; give at least 1"):
            LighthouseConfig(min_replicas=0)


class TestUnchanged:
    def next_step(self, table: Table, step: int = 6, **of_b: object) -> list[LighthouseEffect]:
        table.ask("a", step, live=True)
        return table.ask("b", step, **{"live": True, **of_b})

    def test_a_steady_quorum_costs_no_bytes(self) -> None:
        table = Table()
        quorum = table.first_quorum("a", "b")
        for step in (6, 7, 8):
            orders = self.next_step(table, step)
            assert orders == [
                AnswerUnchanged(1, table.requests["a"], quorum.key),
                AnswerUnchanged(2, table.requests["b"], quorum.key),
            ]

    @pytest.mark.parametrize("differs", [{"min_replica_size": 2}, {"fixed_with_spares": True}], ids=str)
    def test_members_that_would_take_the_plan_from_different_settings_get_it_whole(
        self, differs: dict[str, object]
    ) -> None:
        table = Table()
        quorum = table.first_quorum("a", "b")
        for step in (6, 7, 8):
            orders = self.next_step(table, step, **differs)
            assert unchanged(orders) == set()
            assert {given.key for given in whole(orders).values()} == {quorum.key}

    @pytest.mark.parametrize(
        "change",
        [
            {"step": 5, "lineage": 105},
            {"lineage": 7},
            {"lineage": None},
            {"torn": True, "lineage": None},
            {"data": '{"lr": 1}'},
            {"allow_heal": False},
            {"min_replica_size": 2},
            {"fixed_with_spares": True},
        ],
        ids=str,
    )
    def test_whatever_the_plan_depends_on_is_told_whole_under_the_same_key(self, change: dict[str, object]) -> None:
        table = Table()
        quorum = table.first_quorum("a", "b")
        table.ask("a", 6, live=True)
        said = {"live": True, "lineage": 106, **change}
        step = said.pop("step", 6)
        orders = table.ask("b", step, **said)  # type: ignore[arg-type]
        assert unchanged(orders) == set()
        assert {given.key for given in whole(orders).values()} == {quorum.key}

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"commit_failures": 1}, "b failed to commit (1 in a row)"),
            ({"needs_configure": True}, "b asks for a new process group"),
            ({"address": "b:2"}, "b has other addresses or another world size"),
            ({"world_size": 3}, "b has other addresses or another world size"),
        ],
    )
    def test_whatever_spoils_the_process_group_raises_the_id(self, change: dict[str, object], reason: str) -> None:
        table = Table()
        before = table.first_quorum("a", "b")
        orders = self.next_step(table, **change)
        assert formed(orders) == [(("a", "b"), reason)]
        after = table.core.quorum("job")
        assert after is not None
        assert after.key.quorum_id == before.key.quorum_id + 1
        assert after.key.nonce != before.key.nonce

    def test_who_does_not_hold_the_key_gets_the_whole_answer(self) -> None:
        table = Table()
        table.first_quorum("a", "b")
        table.ask("a", 6, live=True)
        table.held["b"] = QuorumKey(3, 3)
        orders = table.ask("b", 6, live=True)
        # It lost its answer, and another has gone on: broken for all.
        assert formed(orders) == [(("a", "b"), "b did not receive it")]

    def test_at_step_0_somebody_heals(self) -> None:
        table = Table()
        table.pass_ms(400)
        for name in ("a", "b"):
            table.hello(name, ready=True)
        for name in ("a", "b"):
            table.ask(name, 0, init_sync=True)
        table.ask("a", 0, init_sync=True)
        orders = table.ask("b", 0, init_sync=True)
        assert unchanged(orders) == set()
        assert whole(orders).keys() == {1, 2}


class TestLostAnswer:
    """An answer that went with its stream, in all the ways in which that shows."""

    def test_a_first_answer_is_given_again(self) -> None:
        table = Table()
        quorum = table.first_quorum("a", "b")
        table.close("b")
        table.held["b"] = None
        table.hello("b", stream=22)
        assert whole(table.ask("b", again=True)) == {22: quorum}
        assert table.core.quorum("job") == quorum

    def test_so_is_an_unchanged_one_though_the_key_is_held(self) -> None:
        """a has its answer and waits for b in the reduction: b must not wait for a's next request."""
        table = Table()
        quorum = table.first_quorum("a", "b")
        table.ask("a", 6, live=True)
        assert unchanged(table.ask("b", 6, live=True)) == {1, 2}
        table.close("b")
        table.hello("b", stream=22)
        (given,) = whole(table.ask("b", again=True)).values()
        assert given.key == quorum.key
        assert [member.step for member in given.members] == [6, 6]

    def test_it_is_given_again_as_often_as_it_is_lost(self) -> None:
        table = Table()
        table.first_quorum("a", "b")
        for stream in (22, 23, 24):
            table.close("b")
            table.held["b"] = None
            table.hello("b", stream=stream)
            assert set(whole(table.ask("b", again=True))) == {stream}

    def test_once_another_has_gone_on_it_is_broken_for_all(self) -> None:
        table = Table()
        before = table.first_quorum("a", "b")
        table.close("b")
        table.held["b"] = None
        table.ask("a", 5, live=True, commit_failures=1)
        table.hello("b", stream=22)
        orders = table.ask("b", again=True)
        assert len(formed(orders)) == 1
        assert all(quorum.key > before.key for quorum in whole(orders).values())

    def test_a_newcomer_that_asks_has_not_gone_on(self) -> None:
        table = Table()
        quorum = table.first_quorum("a", "b")
        table.hello("c")
        table.ask("c")
        table.close("b")
        table.held["b"] = None
        table.hello("b", stream=22)
        assert whole(table.ask("b", again=True)) == {22: quorum}

    def test_after_a_loss_in_it_it_is_not_given_again(self) -> None:
        """It would send b into a meeting with a, which is dead."""
        table = Table()
        table.first_quorum("a", "b", "c")
        table.close("b")
        table.held["b"] = None
        table.give(events.DeathReported(1, "rank 0 ended"))
        table.hello("b", stream=22)
        assert whole(table.ask("b", again=True)) == {}

    def test_a_state_that_changed_since_is_news_to_the_others(self) -> None:
        table = Table()
        table.first_quorum("a", "b")
        table.held["b"] = None
        assert whole(table.ask("b", 3, lineage=None)) == {}
        orders = table.ask("a", 5, live=True)
        assert formed(orders) == [(("a", "b"), "b did not receive it")]

    def test_an_answer_that_came_after_giving_up_is_given_again_to_the_next_request(self) -> None:
        table = Table()
        quorum = table.first_quorum("a", "b")
        table.give(events.RequestWithdrawn(2, table.requests["b"]))  # it crossed the answer
        assert whole(table.ask("b", 5, live=True)) == {2: quorum}

    def test_who_heals_in_it_is_waited_for_as_before(self) -> None:
        table = Table(join_timeout_ms=500)
        table.first_quorum("a", "c")
        table.hello("b")
        table.ask("b", 0)
        table.ask("c", 6, live=True)
        assert formed(table.ask("a", 6, live=True)) == [(("a", "b", "c"), "b joined")]
        table.close("b")
        table.held["b"] = None
        table.hello("b", stream=22)
        assert len(whole(table.ask("b", again=True))) == 1
        table.ask("a", 7, live=True)
        table.ask("c", 7, live=True)
        assert formed(table.pass_ms(1_000, "a", "b", "c")) == []
        assert table.core.waiting_for("job") == "b is healing and receives data"


class TestRequestsAndStreams:
    def test_a_caller_that_gave_up_is_no_member(self) -> None:
        """needs.md section 4, fault 5."""
        table = Table(join_timeout_ms=0)
        table.first_quorum("a", "b")
        table.ask("b", 6, live=True)
        table.give(events.RequestWithdrawn(2, table.requests["b"]))
        table.close("b")
        assert formed(table.pass_ms(300, "a")) == []
        assert formed(table.ask("a", 6, live=True)) == [(("a",), "b is gone")]

    def test_not_even_while_it_lives(self) -> None:
        table = Table(join_timeout_ms=1_000)
        table.first_quorum("a", "b", "c")
        table.ask("b", 6, live=True)
        table.give(events.RequestWithdrawn(2, table.requests["b"]))
        table.ask("a", 6, live=True)
        assert formed(table.ask("c", 6, live=True)) == []
        assert formed(table.pass_ms(1_000, "a", "b", "c")) == [(("a", "c"), "b is gone")]

    def test_nor_is_one_that_gave_up_while_its_stream_was_broken(self) -> None:
        table = Table(join_timeout_ms=1_000)
        table.first_quorum("a", "b")
        table.ask("b", 6, live=True)
        table.close("b")
        table.hello("b", stream=22)  # it says no request again
        assert formed(table.ask("a", 6, live=True)) == []
        assert formed(table.pass_ms(1_200, "a", "b")) == []  # one of two is no majority
        assert "a majority is needed" in table.core.waiting_for("job")

    def test_nobody_is_sent_into_a_quorum_with_a_member_whose_stream_is_gone(self) -> None:
        """The waiting member that died: within the grace nobody knows, and after it the others go on without it."""
        table = Table()
        table.first_quorum("a", "b", "c")
        table.ask("c", 6, live=True)
        table.close("c")
        table.ask("a", 6, live=True)
        assert formed(table.ask("b", 6, live=True)) == []
        assert formed(table.pass_ms(400, "a", "b")) == [(("a", "b"), "c is gone")]

    def test_a_redial_asks_on_and_keeps_its_place(self) -> None:
        table = Table(join_timeout_ms=1_000)
        table.first_quorum("a", "b", "c")
        table.ask("a", 6, live=True)
        table.ask("b", 6, live=True)
        table.pass_ms(800, "a", "b", "c")
        table.close("a")
        table.hello("a", stream=21)
        table.ask("a", again=True)
        assert formed(table.pass_ms(300, "a", "b", "c")) == [(("a", "b"), "c is gone")]

    def test_a_loss_withdraws_the_request_with_an_error(self) -> None:
        table = Table()
        table.first_quorum("a", "b")
        table.ask("b", 6, live=True)
        orders = table.pass_ms(5_100, "a")
        assert [type(order) for order in orders] == [
            effects.ReplicaLost,
            effects.NotifyLoss,
            effects.RefuseRequest,
            effects.TellLost,
        ]
        assert refused(orders) == [Refusal.LOST]

    def test_the_lost_learn_it_when_they_speak(self) -> None:
        table = Table()
        table.first_quorum("a", "b")
        table.pass_ms(5_100, "a")
        (told,) = table.give(events.BeatReceived(2))
        assert isinstance(told, effects.TellLost)
        assert isinstance(table.hello("b", session=2)[0], effects.Welcome)

    def test_a_late_beat_after_a_reported_death_revives_nobody(self) -> None:
        table = Table()
        table.first_quorum("a", "b")
        table.give(events.DeathReported(2, "rank 0 ended"))
        assert refused(table.give(events.BeatReceived(2))) == [Refusal.DEAD]
        assert formed(table.ask("a", 6, live=True)) == [(("a",), "b is gone")]

    def test_a_death_lets_the_others_go_on_at_once(self) -> None:
        table = Table()
        table.first_quorum("a", "b", "c")
        table.ask("a", 6, live=True)
        table.ask("b", 6, live=True)
        assert formed(table.give(events.DeathReported(3, "rank 0 ended"))) == [(("a", "b"), "c is gone")]

    def test_a_pause_of_the_lighthouse_kills_nobody(self) -> None:
        table = Table()
        table.first_quorum("a", "b")
        table.now_ms += 60_000
        assert table.tick() == []
        assert table.pass_ms(4_000, "a", "b") == []


class TestLossNotices:
    """docs/protocol, "Broken quorums": who is told of a loss, of which quorum, and how often."""

    def of_three(self, **timeouts: int) -> tuple[Table, QuorumKey]:
        table = Table(**timeouts)
        return table, table.first_quorum("a", "b", "c").key

    def test_each_other_member_is_told_and_nobody_else(self) -> None:
        table, key = self.of_three()
        table.hello("d", ready=True)
        table.ask("d")  # it waits to join, and is in no quorum
        table.hello("e")
        notice = LossNotice(key, "b", 1, "its manager server reports: rank 0 ended")
        assert told(table.give(events.DeathReported(2, "rank 0 ended"))) == {1: [notice], 3: [notice]}

    def test_who_only_waits_to_join_breaks_nothing(self) -> None:
        table, key = self.of_three()
        table.hello("d")
        table.ask("d")
        assert told(table.give(events.DeathReported(4, "rank 0 ended"))) == {}
        for name in ("a", "b", "c"):
            orders = table.ask(name, 6, live=True)
        assert unchanged(orders) == {1, 2, 3}
        assert table.core.quorum("job") is not None
        assert table.core.quorum("job").key == key  # type: ignore[union-attr]

    def test_who_was_in_an_older_quorum_only_breaks_nothing(self) -> None:
        table, _ = self.of_three(join_timeout_ms=500)
        table.ask("a", 6, live=True)
        table.ask("b", 6, live=True)
        assert formed(table.pass_ms(600, "a", "b", "c")) == [(("a", "b"), "c is gone")]
        assert told(table.give(events.DeathReported(3, "rank 0 ended"))) == {}

    def test_a_death_after_a_loss_of_the_same_one_is_told_once(self) -> None:
        table, key = self.of_three()
        silent = told(table.pass_ms(5_100, "a", "c"))
        assert silent == {1: [LossNotice(key, "b", 1, "silent for 5000 ms")], 3: silent[1]}
        assert told(table.give(events.DeathReported(2, "rank 0 ended"))) == {}
        assert told(table.pass_ms(10_000, "a", "c")) == {}

    def test_two_losses_in_one_quorum_are_two_notices(self) -> None:
        table, key = self.of_three()
        table.give(events.DeathReported(2, "rank 0 ended"))
        second = LossNotice(key, "c", 1, "its manager server reports: rank 0 ended")
        # Who is lost itself is told too, as long as its stream stands.
        assert told(table.give(events.DeathReported(3, "rank 0 ended"))) == {1: [second], 2: [second]}

    def test_who_says_that_it_cant_go_on_is_told_of_to_the_others_once(self) -> None:
        table, key = self.of_three()
        left = LossNotice(key, "b", 1, "asks for a new process group", lives=True)
        assert told(table.ask("b", 5, live=True, commit_failures=1, needs_configure=True)) == {1: [left], 3: [left]}
        # With a thousand members everyone would say so a moment later; one notice is enough.
        assert told(table.ask("a", 5, live=True, commit_failures=1, needs_configure=True)) == {}
        # A loss is told all the same: transfers from the lost one end with it.
        lost = LossNotice(key, "b", 1, "its manager server reports: rank 0 ended")
        assert told(table.give(events.DeathReported(2, "rank 0 ended"))) == {1: [lost], 3: [lost]}
        assert told(table.hello("c", stream=21)) == {21: [lost]}

    def test_who_never_got_the_quorum_that_others_have_left_is_told_of(self) -> None:
        table, key = self.of_three()
        table.held["b"] = None  # its answer was lost
        table.ask("a", 5, live=True, commit_failures=1)
        left = LossNotice(key, "b", 1, "did not receive it", lives=True)
        assert told(table.ask("b", 5, live=True)) == {1: [left], 3: [left]}

    def test_a_step_that_goes_well_is_nobodys_business(self) -> None:
        table, _ = self.of_three()
        for step in range(6, 9):
            for name in ("a", "b", "c"):
                assert told(table.ask(name, step, live=True)) == {}

    def test_a_stream_that_comes_back_hears_what_it_missed_in_the_quorum_that_it_names(self) -> None:
        table, key = self.of_three()
        table.close("a")
        assert told(table.give(events.DeathReported(2, "rank 0 ended"))).keys() == {3}
        orders = table.hello("a", stream=21)
        assert [type(order) for order in orders] == [effects.Welcome, effects.NotifyLoss]
        assert told(orders)[21][0].replica_id == "b"
        assert told(table.hello("c", stream=23, held=QuorumKey(key.quorum_id, key.nonce + 1))) == {}
        assert told(table.hello("c", stream=24, held=None)) == {}

    def test_even_when_the_others_have_gone_on(self) -> None:
        """It is still in the old quorum, and waits there for who is lost: no answer has told it of the next."""
        table, key = self.of_three(join_timeout_ms=100)
        table.close("c")
        table.give(events.DeathReported(2, "rank 0 ended"))
        table.hello("d")
        table.ask("d")
        table.ask("a", 6, live=True)
        assert formed(table.pass_ms(200, "a", "d")) == [(("a", "d"), "d joined, b is gone, c is gone")]
        notices = told(table.hello("c", stream=23))[23]
        assert [(notice.key, notice.replica_id) for notice in notices] == [(key, "b")]
        assert told(table.hello("a", stream=21, held=table.held["a"])) == {}

    def test_losses_of_old_quorums_do_not_pile_up(self) -> None:
        table = Table()
        table.first_quorum("a")
        for number in range(2, 60):
            name = f"b{number}"
            table.hello(name, stream=1_000 + number, ready=True)
            table.ask(name, 5, live=True)
            table.ask("a", 5, live=True)
            assert told(table.give(events.DeathReported(1_000 + number, "rank 0 ended"))).keys() == {1}
        assert len(table.core._jobs["job"]._losses_before) == 16

    def test_the_next_key_ends_them(self) -> None:
        table, _ = self.of_three()
        table.give(events.DeathReported(2, "rank 0 ended"))
        table.ask("a", 6, live=True)
        assert formed(table.ask("c", 6, live=True)) == [(("a", "c"), "b is gone")]
        assert told(table.hello("a", stream=21)) == {}

    def test_a_newer_session_of_the_living_breaks_the_quorum_of_the_older(self) -> None:
        """Its manager server was started anew within the grace: nobody was lost, and nobody can meet the old one."""
        table, key = self.of_three()
        table.close("b")
        orders = table.hello("b", stream=22, session=2, address="b:9", held=None)
        assert not any(isinstance(order, effects.ReplicaLost) for order in orders)
        notice = LossNotice(key, "b", 1, "replaced by session 2")
        assert told(orders) == {1: [notice], 3: [notice]}
        assert told(table.pass_ms(1_000, "a", "b", "c")) == {}

    def test_a_replacement_breaks_the_quorum_of_whom_it_replaces(self) -> None:
        table, key = self.of_three()
        notice = LossNotice(key, "b", 1, "replaced by d")
        orders = table.hello("d", replaces="b")
        # b's own stream is told that its session is lost; that breaks its quorum there.
        assert told(orders) == {1: [notice], 3: [notice]}

    def test_of_a_stream_that_breaks_they_are_told_after_the_grace_and_not_if_it_is_back(self) -> None:
        table, key = self.of_three()
        table.close("b")
        assert told(table.pass_ms(200, "a", "c")) == {}
        table.hello("b", stream=22)
        assert told(table.pass_ms(1_000, "a", "b", "c")) == {}
        table.close("b")
        assert told(table.pass_ms(300, "a", "c"))[1][0].key == key

    def test_a_sick_network_tells_nobody(self) -> None:
        table = Table()
        table.first_quorum("a", "b", "c", "d")
        for name in ("b", "c", "d"):
            table.close(name)
        assert told(table.pass_ms(1_000, "a")) == {}

    def test_nor_does_a_sick_lighthouse(self) -> None:
        table, _ = self.of_three()
        table.close("b")
        table.now_ms += 6_000
        assert told(table.tick()) == {}
        # A death that was reported meanwhile counts all the same.
        assert told(table.give(events.DeathReported(3, "rank 0 ended"))).keys() == {1}

    def test_in_a_job_of_its_own(self) -> None:
        table, _ = self.of_three()
        table.give(events.HelloReceived(9, Hello("other", "b", 1, "b:1", ready=True)))
        assert told(table.give(events.DeathReported(9, "rank 0 ended"))) == {}


class TestLostState:
    """A newcomer does not start the job over because the link of its only source broke."""

    def healing(self) -> Table:
        """a stands at step 35, c is new and heals from it; then a's stream breaks, and c asks alone."""
        table = Table(heartbeat_timeout_ms=2_000)
        table.first_quorum("a", step=35)
        table.hello("c")
        table.ask("c")
        table.ask("a", 35, live=True)
        quorum = table.core.quorum("job")
        assert quorum is not None
        assert quorum.replica_ids == ("a", "c")
        table.close("a")
        assert table.ask("c", needs_configure=True, failed_heals=1) == []
        return table

    def test_one_that_may_come_back_with_it_is_waited_for(self) -> None:
        table = self.healing()
        assert formed(table.pass_ms(500, "c")) == []
        waits = "the state of step 35, which a held until it was lost 0 s ago; continue or restart that replica, or the"
        assert table.core.waiting_for("job") == f"{waits} others resume from an older step in 2 s"
        assert table.core.wait_sentence("job", table.now_ms).count("or the others resume") == 1
        assert "ends when" not in table.core.wait_sentence("job", table.now_ms)
        table.core.look_at_waits(table.now_ms)
        assert table.core.warnings("job") == (
            f"the job has stopped and waits for {waits} others resume from an older step in 2 s. With --on-lost-state "
            "restart the lighthouse waits for heartbeat_timeout only",
        )
        table.sessions["a"] = 2  # another manager server, of the same trainer
        assert formed(table.hello("a")) == []
        ((ids, _),) = formed(table.ask("a", 35, live=True))
        assert ids == ("a", "c")

    def test_for_heartbeat_timeout_at_most(self) -> None:
        table = self.healing()
        assert formed(table.pass_ms(2_200, "c")) == []
        ((ids, _),) = formed(table.pass_ms(100, "c"))
        assert ids == ("c",)

    def test_a_death_that_is_reported_is_not_waited_for(self) -> None:
        table = Table()
        table.first_quorum("a", step=35)
        table.hello("c")
        table.ask("c")
        table.ask("a", 35, live=True)
        table.ask("c", failed_heals=1)
        orders = table.give(events.DeathReported(table.streams["a"], "signal 9"))
        assert [ids for ids, _ in formed(orders)] == [("c",)]

    def test_nor_is_one_that_was_replaced(self) -> None:
        table = self.healing()
        table.pass_ms(500, "c")
        table.hello("d", replaces="a", ready=True)
        assert [ids for ids, _ in formed(table.ask("d"))] == [("c", "d")]

    def test_one_other_that_holds_it_is_enough(self) -> None:
        table = Table()
        table.first_quorum("a", "b", step=35)
        table.close("a")
        table.ask("b", 35, live=True)
        assert [ids for ids, _ in formed(table.pass_ms(400, "b"))] == [("b",)]

    def test_nor_one_that_was_to_heal_and_has_a_state_of_that_step_where_the_source_is_torn(self) -> None:
        """Both had loaded step 100 and did not know whether that is one state; the first raised in its optimizer."""
        table = Table(heartbeat_timeout_ms=2_000)
        table.pass_ms(400)
        for name in ("a", "b"):
            table.hello(name, ready=True)
        table.ask("a", 100, lineage=None)
        ((ids, _),) = formed(table.ask("b", 100, lineage=None))
        assert ids == ("a", "b")
        table.close("b")
        assert formed(table.pass_ms(400, "a")) == []
        assert formed(table.ask("a", 101, live=True, torn=True)) == []
        waits = (
            "the state of step 100, which b held until it was lost 0 s ago; continue or restart that replica, or the"
        )
        assert table.core.waiting_for("job") == f"{waits} others resume from an older step in 2 s"
        assert [ids for ids, _ in formed(table.pass_ms(2_000, "a"))] == [("a",)]

    def test_at_step_0_there_is_nothing_to_wait_for(self) -> None:
        table = Table()
        table.first_quorum("a", "b", step=0)
        table.close("a")
        table.ask("b", 0)
        assert [ids for ids, _ in formed(table.pass_ms(400, "b"))] == [("b",)]


class TestHealing:
    def join(self, **timeouts: int) -> Table:
        table = Table(join_timeout_ms=500, **timeouts)
        table.first_quorum("a", "c")
        table.hello("b")
        table.ask("b", 0)
        table.ask("a", 6, live=True)
        table.ask("c", 6, live=True)
        table.pass_ms(20_000, "a", "b", "c")  # a long forward
        table.ask("a", 7, live=True)
        table.ask("c", 7, live=True)
        return table

    def test_it_is_waited_for_while_bytes_arrive(self) -> None:
        table = self.join()
        for received in range(1, 30):
            table.give(events.BeatReceived(2, healed_bytes=received))
            assert formed(table.pass_ms(1_000, "a", "b", "c")) == []
        assert formed(table.pass_ms(5_000, "a", "b", "c")) == [(("a", "c"), "b is gone")]

    def test_its_source_has_a_heartbeat_timeout_to_begin(self) -> None:
        table = self.join()
        assert formed(table.pass_ms(4_800, "a", "b", "c")) == []
        assert formed(table.pass_ms(300, "a", "b", "c")) == [(("a", "c"), "b is gone")]

    def test_heal_timeout_is_the_most(self) -> None:
        table = self.join(heal_timeout_ms=25_000)
        for received in range(1, 5):
            table.give(events.BeatReceived(2, healed_bytes=received))
            assert formed(table.pass_ms(1_000, "a", "b", "c")) == []
        assert formed(table.pass_ms(1_100, "a", "b", "c")) == [(("a", "c"), "b is gone")]

    def test_bytes_of_an_older_life_of_its_server_do_not_hide_the_new_ones(self) -> None:
        table = self.join()
        table.give(events.BeatReceived(2, healed_bytes=1_000_000))
        assert formed(table.pass_ms(2_000, "a", "b", "c")) == []
        assert table.core._jobs["job"].liveness.replicas["b"].healed_bytes == 1_000_000
        table.hello("b", session=2)
        table.give(events.BeatReceived(2, healed_bytes=10))
        assert table.core._jobs["job"].liveness.replicas["b"].progress_ms == table.now_ms


class TestNoByteComes:
    """A replica waits for a state, and its source gives nothing: field report D11."""

    def join(self, *before: str, phase: Phase = Phase.WAITING, **timeouts: int) -> Table:
        table = Table(**timeouts)
        table.first_quorum(*before)
        table.hello("z")
        table.ask("z", 0)
        for name in before:
            table.ask(name, 6, live=True)
        for name in before:
            table.ask(name, 7, live=True)
        table.give(events.BeatReceived(26, progress=Progress(0, phase, 0)))
        return table

    def beat(self, table: Table, seconds: int, phase: Phase = Phase.WAITING) -> list[tuple[tuple[str, ...], str]]:
        out = []
        for second in range(seconds):
            table.give(events.BeatReceived(26, progress=Progress(0, phase, second * 1_000)))
            out += formed(table.pass_ms(1_000, *(name for name in table.streams if name != "z")))
        return out

    def test_its_only_source_does_not_wait_for_it_without_end(self) -> None:
        table = self.join("a", join_timeout_ms=20_000)
        assert self.beat(table, 4) == []
        assert self.beat(table, 2) == [(("a",), "z is gone")]

    def test_nor_do_the_others_until_join_timeout(self) -> None:
        table = self.join("a", "b", join_timeout_ms=20_000)
        assert self.beat(table, 6) == [(("a", "b"), "z is gone")]

    def test_a_source_has_a_quarter_of_join_timeout_for_the_first_byte(self) -> None:
        table = self.join("a", join_timeout_ms=60_000)
        assert self.beat(table, 14) == []
        assert self.beat(table, 2) == [(("a",), "z is gone")]

    def test_from_the_first_byte_on_the_usual_rule_holds(self) -> None:
        table = self.join("a", "b", join_timeout_ms=20_000)
        table.give(events.BeatReceived(26, healed_bytes=1, progress=Progress(0, Phase.WAITING, 0)))
        assert self.beat(table, 18) == []
        assert self.beat(table, 3) == [(("a", "b"), "z is gone")]

    def test_a_replica_that_is_still_busy_with_its_step_is_waited_for(self) -> None:
        table = self.join("a", "b", phase=Phase.OWN, join_timeout_ms=20_000)
        assert self.beat(table, 18, Phase.OWN) == []


class TestPoorSources:
    """A member names a source that was silent when it healed: field report D3."""

    def test_it_is_logged_once_and_stands_in_the_quorum_without_a_new_id(self) -> None:
        table = Table()
        first = table.first_quorum("a", "b")
        table.ask("a", 6, live=True)
        orders = table.ask("b", 6, live=True, poor_sources=("a",))
        (warned,) = [order for order in orders if isinstance(order, effects.Warned)]
        assert "replica b could not heal well from source a" in warned.sentence
        assert "the host of a:1" in warned.sentence
        table.ask("a", 7, live=True)
        orders = table.ask("b", 7, live=True, poor_sources=("a",))
        assert [order for order in orders if isinstance(order, effects.Warned)] == []
        quorum = table.core.quorum("job")
        assert quorum is not None
        assert (quorum.key, quorum.members[1].poor_sources) == (first.key, ("a",))
        table.ask("a", 8, live=True)
        table.ask("b", 8, live=True)
        table.ask("a", 9, live=True)
        orders = table.ask("b", 9, live=True, poor_sources=("a",))
        assert [type(order) for order in orders if isinstance(order, effects.Warned)] == [effects.Warned], "again"


class TestAheadOfTheJob:
    def test_a_loaded_state_ahead_of_every_live_one_is_refused_by_name(self) -> None:
        table = Table()
        table.first_quorum("a")
        table.hello("b")
        table.ask("b", 1_000_000, lineage=None)
        orders = table.ask("a", 6, live=True)
        assert refused(orders) == [Refusal.AHEAD]
        assert unchanged(orders) == {1}
        (message,) = [order.message for order in orders if isinstance(order, effects.RefuseRequest)]
        assert "b has loaded step 1000000 from outside, ahead of the job's own step 6" in message

    def test_a_job_that_starts_from_a_checkpoint_is_not_refused(self) -> None:
        table = Table()
        table.pass_ms(400)
        for name in ("a", "b"):
            table.hello(name, ready=True)
        for name in ("a", "b"):
            table.ask(name, 5_000, lineage=None)
        quorum = table.core.quorum("job")
        assert quorum is not None
        assert quorum.replica_ids == ("a", "b")


class TestWithoutMemory:
    """The lighthouse died; another one starts at its address and knows nothing."""

    OLD = Quorum(
        QuorumKey(900_000, 77),
        tuple(
            Member(name, session=1, address=f"{name}:1", step=5, lineage=105, init_sync=False, live=True)
            for name in ("a", "b", "c")
        ),
    )

    def comes_back(
        self, table: Table, *names: str, held: QuorumKey | None = None, num_answers: int = 0
    ) -> list[LighthouseEffect]:
        out: list[LighthouseEffect] = []
        for name in names:
            table.held[name] = held or self.OLD.key
            out += table.hello(name, ready=True, num_answers=num_answers)
        return out

    def test_the_first_that_comes_back_is_asked_and_the_others_are_waited_for(self) -> None:
        table = Table()
        assert self.comes_back(table, "a")[-1] == AskForQuorum(1, self.OLD.key)
        table.ask("a", 6, live=True)
        assert table.core.waiting_for("job").startswith("the members of quorum 900000.")
        assert table.give(events.QuorumReported(1, self.OLD)) == []
        self.comes_back(table, "b", "c")
        table.ask("b", 6, live=True)
        orders = table.ask("c", 6, live=True)
        assert unchanged(orders) == {1, 2, 3}  # the very same quorum stands

    def test_it_forms_on_the_fast_path_even_in_the_first_grace(self) -> None:
        table = Table()
        table.now_ms = 100
        self.test_the_first_that_comes_back_is_asked_and_the_others_are_waited_for()

    def test_a_fresh_replica_that_asks_first_does_not_start_a_job_of_its_own(self) -> None:
        table = Table()
        table.hello("x")
        table.ask("x")
        assert formed(table.pass_ms(200, "x")) == []
        assert "has just started" in table.core.waiting_for("job")
        self.comes_back(table, "a", "b", "c")
        table.give(events.QuorumReported(1, self.OLD))
        for name in ("a", "b"):
            table.ask(name, 6, live=True)
        assert formed(table.ask("c", 6, live=True)) == [(("a", "b", "c", "x"), "x joined")]

    def test_after_the_first_grace_a_fresh_job_may_start(self) -> None:
        table = Table()
        table.hello("x")
        table.ask("x")
        assert formed(table.pass_ms(GRACE_MS, "x")) == [(("x",), "it is the first quorum")]

    def test_members_that_do_not_come_back_are_lost_by_their_silence(self) -> None:
        table = Table(join_timeout_ms=60_000)
        self.comes_back(table, "a", "b")
        table.give(events.QuorumReported(1, self.OLD))
        for name in ("a", "b"):
            table.ask(name, 6, live=True)
        assert formed(table.pass_ms(4_900, "a", "b")) == []
        assert formed(table.pass_ms(200, "a", "b")) == [(("a", "b"), "c is gone")]

    @pytest.mark.parametrize("comes_before", [True, False])
    def test_while_it_is_away_itself_no_time_passes_for_those_that_others_name_later(self, comes_before: bool) -> None:
        table = Table(join_timeout_ms=60_000)
        if comes_before:
            self.comes_back(table, "a")
        table.now_ms += 4_900
        if not comes_before:
            self.comes_back(table, "a")
        table.give(events.QuorumReported(1, self.OLD))
        table.ask("a", 6, live=True)
        assert table.pass_ms(4_900, "a") == []  # b and c may dial
        self.comes_back(table, "b", "c")
        table.ask("b", 6, live=True)
        assert unchanged(table.ask("c", 6, live=True)) == {1, 2, 3}

    def test_what_one_that_has_died_since_it_was_asked_says_of_its_quorum_counts(self) -> None:
        """It may have been the only one to know; without it a fresh replica would start over beside those that live."""
        table = Table(join_timeout_ms=60_000)
        assert self.comes_back(table, "a")[-1] == AskForQuorum(1, self.OLD.key)
        table.give(events.DeathReported(1, "rank 0 ended"))
        orders = table.give(events.QuorumReported(1, self.OLD))
        assert [type(order) for order in orders] == [effects.RefuseSession]
        table.hello("x")
        table.ask("x")
        assert formed(table.pass_ms(4_900, "x")) == []
        self.comes_back(table, "b", "c")
        table.ask("b", 6, live=True)
        assert formed(table.ask("c", 6, live=True)) == [(("b", "c", "x"), "x joined, a is gone")]

    @pytest.mark.parametrize("how", ["no longer held", "stream broke"])
    def test_where_nobody_can_say_who_trained_they_have_their_time_to_come(self, how: str) -> None:
        """a held a quorum and is gone; b, which was in it, is slow to dial. A fresh replica must not start over."""
        table = Table()
        self.comes_back(table, "a")
        if how == "no longer held":
            table.give(events.QuorumReported(1, None))
        table.close("a")
        table.hello("x")
        table.ask("x")
        assert formed(table.pass_ms(4_800, "x")) == []
        assert table.core.waiting_for("job").startswith("unknown members of quorum 900000.")
        self.comes_back(table, "b")
        assert formed(table.give(events.QuorumReported(2, self.OLD))) == []
        assert formed(table.ask("b", 6, live=True)) == []  # c has its time, too
        assert formed(table.pass_ms(5_000, "b", "x")) == [(("b", "x"), "x joined, a is gone, c is gone")]

    def fresh_beside_the_unnamed(self) -> Table:
        """a, which held a quorum, is gone before it could say who was in it; x asks, which is fresh."""
        table = Table()
        self.comes_back(table, "a")
        table.close("a")
        table.hello("x")
        table.ask("x")
        return table

    def test_but_no_longer_than_anybody_is_waited_for(self) -> None:
        table = self.fresh_beside_the_unnamed()
        assert formed(table.pass_ms(4_900, "x")) == []
        assert formed(table.pass_ms(200, "x")) == [(("x",), "it is the first quorum")]

    def test_nor_does_a_lighthouse_that_stalls_now_and_then_wait_for_ever(self) -> None:
        table = self.fresh_beside_the_unnamed()
        for _ in range(2):
            assert formed(table.pass_ms(2_000, "x")) == []
            table.now_ms += 500
            table.give(events.BeatReceived(table.streams["x"]))
        assert formed(table.pass_ms(1_100, "x")) == [(("x",), "it is the first quorum")]

    @pytest.mark.parametrize("state", [{"torn": True}, {"failed_heals": 3}], ids=["torn", "not eligible"])
    def test_a_state_that_can_not_be_gone_on_from_does_not_count(self, state: dict[str, Any]) -> None:
        table = Table()
        self.comes_back(table, "a", "b")
        table.give(events.QuorumReported(1, None))
        table.give(events.QuorumReported(2, None))
        table.ask("b", 6, live=True, **state)
        table.hello("x")
        table.ask("x")
        assert formed(table.pass_ms(4_900, "b", "x")) == []

    def test_nor_does_an_older_quorum_that_is_known(self) -> None:
        table = Table()
        older = Quorum(QuorumKey(800_000, 7), (Member("x", session=1, address="x:1", init_sync=False),))
        self.comes_back(table, "a")
        table.close("a")
        self.comes_back(table, "x", held=older.key)
        table.give(events.QuorumReported(table.streams["x"], older))
        table.ask("x")
        assert formed(table.pass_ms(4_900, "x")) == []
        assert "unknown members of quorum" in table.core.waiting_for("job")

    def test_a_quorum_that_is_named_in_a_request_alone_counts(self) -> None:
        """Its manager server is a new one."""
        table = Table()
        table.hello("a")
        table.held["a"] = self.OLD.key
        table.ask("a", 6, live=True)
        table.give(events.DeathReported(1, "rank 0 ended"))
        table.hello("x")
        table.ask("x")
        assert formed(table.pass_ms(4_900, "x")) == []

    def test_nor_where_one_that_has_trained_asks(self) -> None:
        table = Table()
        self.comes_back(table, "a")
        table.give(events.QuorumReported(1, None))
        table.ask("a", 6, live=True)
        assert formed(table.pass_ms(GRACE_MS, "a")) == [(("a",), "it is the first quorum")]

    def test_ids_go_above_every_id_reported(self) -> None:
        table = Table()
        ahead = QuorumKey(STARTED_MS + 5_000, 1)
        self.comes_back(table, "a", held=ahead)
        table.give(events.QuorumReported(1, None))
        table.pass_ms(400, "a")
        table.ask("a", 6, live=True)
        quorum = table.core.quorum("job")
        assert quorum is not None
        assert quorum.key.quorum_id == STARTED_MS + 5_001

    def test_even_those_of_a_replica_that_never_asks(self) -> None:
        table = Table()
        self.comes_back(table, "a", held=QuorumKey(STARTED_MS + 5_000, 1))
        table.close("a")
        table.pass_ms(400)
        table.hello("x")
        table.ask("x")
        table.pass_ms(4_600, "x")
        quorum = table.core.quorum("job")
        assert quorum is not None
        assert quorum.key.quorum_id == STARTED_MS + 5_001

    def test_the_newest_quorum_counts_whoever_comes_first(self) -> None:
        table = Table()
        newer = Quorum(QuorumKey(900_001, 78), self.OLD.members[:2])
        self.comes_back(table, "c")
        assert self.comes_back(table, "a", held=newer.key)[-1] == AskForQuorum(1, newer.key)
        assert table.give(events.QuorumReported(3, self.OLD)) == []  # the older answer comes too late
        table.give(events.QuorumReported(1, newer))
        assert table.core.quorum("job") == newer

    @pytest.mark.parametrize("how", ["no longer held", "another one", "stream broke", "silence"])
    def test_when_one_can_not_say_the_next_best_is_asked(self, how: str) -> None:
        table = Table()
        newer = QuorumKey(900_001, 78)
        self.comes_back(table, "a")
        table.give(events.QuorumReported(1, self.OLD))
        self.comes_back(table, "b")
        self.comes_back(table, "c", held=newer)
        assert self.comes_back(table, "d", held=newer) == [
            effects.Welcome(4, 1, STARTED_MS, "cluster", 5_000, 60_000)
        ]  # c is asked already
        match how:
            case "no longer held":
                orders = table.give(events.QuorumReported(3, None))
            case "another one":
                orders = table.give(events.QuorumReported(3, self.OLD))
            case "stream broke":
                orders = table.close("c")
            case _:
                orders = table.pass_ms(5_000, "a", "b", "c", "d")
        assert AskForQuorum(4, newer) in orders
        table.give(events.QuorumReported(4, None))
        assert table.core.quorum("job") == self.OLD  # nobody knows a newer one

    def test_an_answer_that_the_old_one_could_not_give_is_given(self) -> None:
        """It died between its answers: a has quorum and waits in it for b and c, which asked before anybody knew."""
        table = Table()
        before = QuorumKey(899_000, 1)
        for name in ("b", "c"):
            table.held[name] = before
            table.hello(name, ready=True)
        table.give(events.QuorumReported(2, None))
        table.give(events.QuorumReported(3, None))
        for name in ("b", "c"):
            table.ask(name, 5, live=True)
        self.comes_back(table, "a")
        assert whole(table.give(events.QuorumReported(1, self.OLD))) == {2: self.OLD, 3: self.OLD}

    AT_6 = Quorum(OLD.key, tuple(replace(member, step=6, lineage=106) for member in OLD.members))

    @pytest.mark.parametrize("first", ["b", "a"])
    def test_nor_is_the_word_lost_that_the_quorum_stands(self, first: str) -> None:
        """a was told so and waits in its reduction for b and c. Their word went with the lighthouse that gave it, and
        they hold the very quorum that a does."""
        table = Table()
        if first == "b":
            self.comes_back(table, "b")
            table.give(events.QuorumReported(2, self.OLD))
            assert unchanged(table.ask("b", 6, live=True)) == set()
        table.held["a"] = self.OLD.key
        assert table.hello("a", ready=True, num_answers=1)[-1] == AskForQuorum(1, self.OLD.key)
        answered = whole(table.give(events.QuorumReported(1, self.AT_6)))
        self.comes_back(table, *{"b": "c", "a": "bc"}[first])
        if first == "a":
            answered = whole(table.ask("b", 6, live=True))
        assert answered == {2: self.AT_6}
        assert whole(table.ask("c", 6, live=True)) == {3: self.AT_6}
        # With the next step the round goes on as ever.
        for name in ("a", "b"):
            assert table.ask(name, 7, live=True) == []
        assert unchanged(table.ask("c", 7, live=True)) == {1, 2, 3}

    def test_who_lost_that_word_and_can_not_go_on_breaks_the_quorum_for_who_heard_it(self) -> None:
        table = Table()
        self.comes_back(table, "b", "c")
        table.give(events.QuorumReported(2, self.OLD))
        table.held["a"] = self.OLD.key
        table.hello("a", ready=True, num_answers=1)
        table.give(events.QuorumReported(1, self.AT_6))
        assert whole(table.ask("c", 6, live=True)) == {3: self.AT_6}
        (notice,) = told(table.ask("b", 6, live=True, needs_configure=True))[1]
        assert (notice.key, notice.replica_id, notice.lives) == (self.OLD.key, "b", True)

    def test_who_has_had_that_answer_may_ask_again_from_the_same_step(self) -> None:
        """With syncs in flight it does: given the answer again it would be one start ahead of the others."""
        table = Table()
        self.comes_back(table, "a", "b", num_answers=2)
        table.give(events.QuorumReported(1, self.OLD))
        assert table.ask("a", 5, live=True) == []
        self.comes_back(table, "c", num_answers=2)
        assert table.ask("b", 5, live=True) == []
        assert unchanged(table.ask("c", 5, live=True)) == {1, 2, 3}

    def test_who_is_given_the_answer_again_has_had_it(self) -> None:
        table = Table()
        self.comes_back(table, "a", num_answers=2)
        table.give(events.QuorumReported(1, self.OLD))
        self.comes_back(table, "b", "c", num_answers=1)
        for name, stream in (("b", 2), ("c", 3)):
            assert whole(table.ask(name, 5, live=True)) == {stream: self.OLD}
        for name in ("a", "b"):
            assert table.ask(name, 5, live=True) == []
        assert unchanged(table.ask("c", 5, live=True)) == {1, 2, 3}

    def test_who_holds_a_newer_quorum_is_not_given_an_older_one(self) -> None:
        """Another lighthouse gave it that one. What is known here ends for the others, for it won't come back to it."""
        table = Table()
        newer = Quorum(QuorumKey(900_001, 78), self.OLD.members[:2])
        self.comes_back(table, "a", "c")
        table.give(events.QuorumReported(1, self.OLD))
        assert self.comes_back(table, "b", held=newer.key)[-1] == AskForQuorum(2, newer.key)
        table.held["b"] = newer.key
        orders = table.ask("b", 5, live=True)
        assert whole(orders) == {}
        assert [(notice.key, notice.replica_id) for notice in told(orders)[3]] == [(self.OLD.key, "b")]
        table.give(events.QuorumReported(2, newer))
        assert table.core.quorum("job") == newer

    def test_who_heard_nothing_later_is_not_asked_again(self) -> None:
        table = Table()
        self.comes_back(table, "a")
        table.give(events.QuorumReported(1, self.OLD))
        assert AskForQuorum(2, self.OLD.key) not in self.comes_back(table, "b")
        assert table.core.quorum("job") == self.OLD

    def test_but_not_when_another_member_has_gone_on_from_it(self) -> None:
        table = Table()
        self.comes_back(table, "a")
        table.ask("a", 5, live=True, commit_failures=1)
        table.held["b"] = QuorumKey(899_000, 1)
        table.hello("b", ready=True)
        table.ask("b", 5, live=True)
        assert whole(table.give(events.QuorumReported(1, self.OLD))) == {}
        self.comes_back(table, "c")
        orders = table.ask("c", 5, live=True)
        assert len(formed(orders)) == 1
        assert all(quorum.key > self.OLD.key for quorum in whole(orders).values())

    def test_a_quorum_formed_here_is_newer_than_any_reported(self) -> None:
        table = Table()
        table.first_quorum("x")
        assert self.comes_back(table, "a") == [effects.Welcome(1, 1, STARTED_MS, "cluster", 5_000, 60_000)]

    def test_a_job_that_was_forgotten_comes_back_as_after_a_restart(self) -> None:
        """The lighthouse was cut off for a minute: nobody is left, and whoever comes first must not start alone."""
        table = Table()
        quorum = table.first_quorum("a", "b")
        for name in ("a", "b"):
            table.close(name)
        table.pass_ms(60_000)
        assert table.core.jobs == ()
        assert table.hello("a", ready=True)[-1] == AskForQuorum(1, quorum.key)
        table.give(events.QuorumReported(1, quorum))
        assert formed(table.ask("a", 6, live=True)) == []
        assert formed(table.pass_ms(1_000, "a")) == []
        table.hello("b", ready=True)
        assert unchanged(table.ask("b", 6, live=True)) == {1, 2}

    def test_a_loss_that_it_saw_before_it_learned_of_the_quorum_is_told_then(self) -> None:
        table = Table()
        self.comes_back(table, "a", "b")
        assert told(table.give(events.DeathReported(2, "rank 0 ended"))) == {}
        notice = LossNotice(self.OLD.key, "b", 1, "its manager server reports: rank 0 ended")
        assert told(table.give(events.QuorumReported(1, self.OLD))) == {1: [notice]}
        assert told(self.comes_back(table, "c")) == {3: [notice]}

    def test_so_is_a_newer_session(self) -> None:
        table = Table()
        self.comes_back(table, "a")
        table.hello("b", session=2, held=None)
        notice = LossNotice(self.OLD.key, "b", 1, "replaced by session 2")
        assert told(table.give(events.QuorumReported(1, self.OLD))) == {1: [notice]}

    def test_and_a_successor_under_another_name(self) -> None:
        """The replaced one never came back here, so that nobody could be lost; the quorum is broken all the same."""
        table = Table()
        self.comes_back(table, "a")
        table.hello("d", replaces="b")
        notice = LossNotice(self.OLD.key, "b", 1, "replaced by d")
        assert told(table.give(events.QuorumReported(1, self.OLD))) == {1: [notice]}

    @pytest.mark.parametrize("is_known", [False, True], ids=["learned of it later", "knew it before"])
    @pytest.mark.parametrize("is_lost", [False, True], ids=["", "was lost before"])
    def test_the_successor_of_an_older_session_ends_the_newer_one_too(self, is_known: bool, is_lost: bool) -> None:
        """A twin of a lost member, with an older session, came to this lighthouse first, and was replaced."""
        table = Table()
        a, b, c = self.OLD.members
        quorum = replace(self.OLD, members=(a, replace(b, session=2), c))
        self.comes_back(table, "a", "c")
        table.hello("b", session=1, held=None)
        if is_lost:
            table.close("b")
            table.pass_ms(2_000, "a", "c")
        if is_known:
            assert told(table.give(events.QuorumReported(1, quorum))) == {}
        told_then = table.hello("d", replaces="b")
        if not is_known:
            told_then = table.give(events.QuorumReported(1, quorum))
        (notice,) = told(told_then)[1]
        assert (notice.key, notice.replica_id, notice.session, notice.lives) == (quorum.key, "b", 2, False)

    def test_one_that_asked_before_and_can_not_go_on_breaks_it_too(self) -> None:
        """It has left its process group, and asked before this lighthouse knew that the others may wait there."""
        table = Table()
        self.comes_back(table, "a", "b")
        assert told(table.ask("b", 5, live=True, needs_configure=True)) == {}
        (notice,) = told(table.give(events.QuorumReported(1, self.OLD)))[1]
        assert (notice.key, notice.replica_id, notice.lives) == (self.OLD.key, "b", True)

    def test_members_that_are_presumed_and_stay_away_break_it_by_their_silence(self) -> None:
        table = Table()
        self.comes_back(table, "a", "b")
        table.give(events.QuorumReported(1, self.OLD))
        assert told(table.pass_ms(4_900, "a", "b")) == {}
        assert told(table.pass_ms(100, "a", "b")).keys() == {1, 2}

    def test_a_member_that_is_only_presumed_is_waited_for_once(self) -> None:
        """The next quorum formed without it, so its silence delays no quorum after that."""
        table = Table(join_timeout_ms=1_000)
        self.comes_back(table, "a", "b")
        table.give(events.QuorumReported(1, self.OLD))
        table.hello("d", ready=True)
        for name in ("a", "b", "d"):
            assert whole(table.ask(name, 6, live=True)) == {}
        told_then = whole(table.pass_ms(1_000, "a", "b", "d"))
        assert {quorum.replica_ids for quorum in told_then.values()} == {("a", "b", "d")}
        table.held |= dict.fromkeys(("a", "b"), told_then[1].key)
        for name in ("a", "b"):
            table.ask(name, 7, live=True, needs_configure=True)
        table.close("d")
        assert whole(table.pass_ms(300, "a", "b")).keys() == {1, 2}


class TestSeveralLighthouses:
    def test_an_old_one_that_hears_of_a_newer_sends_everyone_away(self) -> None:
        table = Table()
        table.first_quorum("a", "b")
        orders = table.hello("c", lighthouse_started_ms=STARTED_MS + 1, cluster_id="cluster")
        assert {order.stream for order in orders if isinstance(order, effects.RefuseSession)} == {1, 2, 3}
        assert set(refused(orders)) == {Refusal.OLD_LIGHTHOUSE}
        assert table.ask("a", 6, live=True) == []
        assert table.pass_ms(10_000) == []
        assert table.core.jobs == ()

    @pytest.mark.parametrize("pause_ms", [100, 2_000, 5_000])
    def test_it_stands_in_when_replicas_keep_coming(self, pause_ms: int) -> None:
        """It would else refuse the job for good when the newer one has died."""
        table = Table()
        last = table.first_quorum("a", "b")
        newer_ms = STARTED_MS + 60_000
        told: list[Refusal] = []
        for _ in range(0, 5_000, pause_ms):
            told += refused(table.hello("a", lighthouse_started_ms=newer_ms, cluster_id="cluster"))
            table.pass_ms(pause_ms)
        assert told == [Refusal.OLD_LIGHTHOUSE] * (len(told)) != []
        for name in "ab":
            welcome = table.hello(name, lighthouse_started_ms=newer_ms, cluster_id="cluster")[0]
            assert isinstance(welcome, effects.Welcome)
            assert welcome.lighthouse_started_ms == table.core.started_ms > newer_ms
        table.give(events.QuorumReported(1, last))
        assert unchanged(table.ask("a", 6, live=True) + table.ask("b", 6, live=True)) == {1, 2}
        table.ask("a", 7, live=True, commit_failures=1)
        table.ask("b", 7, live=True)
        found = table.core.quorum("job")
        assert found is not None
        assert found.key.quorum_id > max(last.key.quorum_id, newer_ms)

    def test_it_stands_in_for_nobody_who_comes_now_and_then(self) -> None:
        table = Table()
        table.first_quorum("a", "b")
        for _ in range(5):
            for _ in range(20):
                orders = table.hello("a", lighthouse_started_ms=STARTED_MS + 60_000, cluster_id="cluster")
                assert set(refused(orders)) == {Refusal.OLD_LIGHTHOUSE}
                table.pass_ms(100)
            table.pass_ms(6_000)
        assert set(refused(table.hello("d"))) == {Refusal.OLD_LIGHTHOUSE}

    @pytest.mark.parametrize("pause_ms", [100, 4_900, 5_000, 6_000])
    def test_it_stands_in_for_each_newer_one_anew(self, pause_ms: int) -> None:
        """That it has stood in once does not make the next newer one gone."""
        table = Table()
        for _ in range(2):
            newer_ms = table.core.started_ms + 60_000
            for _ in range(50):
                told = table.hello("a", lighthouse_started_ms=newer_ms, cluster_id="cluster")
                assert set(refused(told)) == {Refusal.OLD_LIGHTHOUSE}
                table.pass_ms(100)
            welcome = table.hello("a", lighthouse_started_ms=newer_ms, cluster_id="cluster")[0]
            assert isinstance(welcome, effects.Welcome)
            table.pass_ms(pause_ms, "a")

    def test_its_age_does_not_make_the_newer_one_gone(self) -> None:
        table = Table()
        table.pass_ms(5_000)
        told = table.hello("a", lighthouse_started_ms=STARTED_MS + 60_000, cluster_id="cluster")
        assert set(refused(told)) == {Refusal.OLD_LIGHTHOUSE}

    def test_its_own_start_time_is_no_news(self) -> None:
        table = Table()
        orders = table.hello("a", lighthouse_started_ms=STARTED_MS, cluster_id="cluster")
        assert isinstance(orders[0], effects.Welcome)

    def test_one_that_restarts_with_its_clock_set_back_serves(self) -> None:
        table = Table()
        orders = table.hello("a", lighthouse_started_ms=STARTED_MS + 3_600_000, cluster_id="the one before")
        assert isinstance(orders[0], effects.Welcome)
        held = QuorumKey(STARTED_MS + 3_600_000, 7)
        table.pass_ms(400, "a")
        table.hello("b", held=held)
        table.give(events.QuorumReported(2, None))
        table.ask("b", 1, live=True)
        table.ask("a")
        quorum = table.core.quorum("job")
        assert quorum is not None
        assert quorum.key.quorum_id > held.quorum_id


class TestBadInput:
    def test_a_lighthouse_whose_clock_was_years_ahead_refuses_nobody_to_its_successor(self) -> None:
        """That one is of another cluster, unless it was told one, and start times are compared within one only."""
        table = Table()
        orders = table.hello("a", lighthouse_started_ms=STARTED_MS + 2 * CLOCKS_DIFFER_MOST_MS, cluster_id="before")
        assert isinstance(orders[0], effects.Welcome)

    @pytest.mark.parametrize("what", ["session", "lighthouse_started_ms"])
    def test_a_number_years_ahead_of_the_clock_locks_nobody_out(self, what: str) -> None:
        table = Table()
        assert refused(table.hello("a", **{what: 2**63 - 1, "cluster_id": "cluster"})) == [Refusal.CLOCK]
        table.sessions.clear()
        table.first_quorum("a")

    @pytest.mark.parametrize("replica_id", ["a\nINFO all is well", "\x1b[2J"])
    def test_a_name_that_would_break_a_log_line_is_refused(self, replica_id: str) -> None:
        with pytest.raises(ProtocolError, match="printable"):
            Hello("job", replica_id, 1, "a:1")
        with pytest.raises(ProtocolError, match="printable"):
            Member(replica_id)

    def test_an_id_that_no_lighthouse_gives_does_not_use_up_the_ids(self) -> None:
        """One far ahead of the clock would: the ids after it were refused as impossible, and each member ended."""
        table = Table()
        far = STARTED_MS + CLOCKS_DIFFER_MOST_MS + 2**33
        for held in (MAX_INT64, MAX_INT64 - 2**32, far):
            assert refused(table.hello("a", held=QuorumKey(held, 1))) == [Refusal.CLOCK]
        table.first_quorum("a")
        for held in (MAX_INT64 - 1, far):
            table.held["a"] = QuorumKey(held, 1)
            assert refused(table.ask("a", 6)) == [Refusal.MALFORMED]
        assert table.core.quorum("job") is not None
        assert table.core.quorum("job").key.quorum_id < far  # type: ignore[union-attr]

    def test_a_stream_does_not_change_its_job(self) -> None:
        table = Table()
        table.first_quorum("a")
        orders = table.give(events.HelloReceived(1, Hello("other", "a", 1, "a:1")))
        assert refused(orders) == [Refusal.MALFORMED]
        assert table.core.jobs == ("job",)

    def test_what_streams_that_nobody_knows_say_is_ignored(self) -> None:
        table = Table()
        for event in (
            events.BeatReceived(9),
            events.StreamClosed(9),
            events.DeathReported(9, "x"),
            events.QuorumReported(9, None),
            events.RequestWithdrawn(9, 1),
        ):
            assert table.give(event) == []


def test_nothing_grows_with_time() -> None:
    """needs.md section 4, fault 10: ids of the dead are forgotten, and so are jobs."""
    table = Table()
    table.pass_ms(400)
    for number in range(200):
        name = f"a{number}"
        table.hello(name, stream=1_000 + number)
        table.ask(name)
        table.close(name)
        table.pass_ms(1_000)
    job = table.core._jobs["job"]
    assert len(job.liveness.replicas) <= 60
    assert len(job._asked_since) <= 1
    table.pass_ms(60_000)
    assert table.core.jobs == ()
    assert table.core._job_of_stream == {}
