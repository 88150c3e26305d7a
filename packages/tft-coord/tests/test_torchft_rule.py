"""Clients without a stream: torchft's rules (wire.md section 12), and where they do no harm."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tft_coord.compat.rule import TorchftCore
from tft_coord.core import effects, events
from tft_coord.core.lighthouse import LighthouseConfig
from tft_coord.core.types import Member, Quorum
from tft_coord.testing import TorchftLike
from tft_coord.timeouts import Timeouts


class Table:
    def __init__(self, min_replicas: int = 1) -> None:
        config = LighthouseConfig(min_replicas=min_replicas, timeouts=Timeouts(join_timeout_ms=1_000))
        self.core = TorchftCore(config, started_ms=1_000_000)
        self.now_ms = 0
        self.call = 0

    def beat(self, *names: str) -> None:
        for name in names:
            assert self.core.handle(events.HeartbeatReceived(name), self.now_ms, 0) == []

    def ask(self, name: str, **changes: object) -> list[effects.UnaryEffect]:
        self.call += 1
        member = Member(name, **changes)  # type: ignore[arg-type]
        return self.core.handle(events.UnaryQuorumRequested(self.call, member), self.now_ms, 0)

    def tick(self) -> list[effects.UnaryEffect]:
        return self.core.tick(self.now_ms, 0)


def quorum(orders: list[effects.UnaryEffect]) -> Quorum | None:
    return next((order.quorum for order in orders if isinstance(order, effects.AnswerUnaryQuorum)), None)


def ids(orders: list[effects.UnaryEffect]) -> tuple[str, ...]:
    found = quorum(orders)
    return found.replica_ids if found is not None else ()


def test_all_healthy_form_at_once_sorted() -> None:
    table = Table()
    table.beat("a", "b")
    assert table.ask("b") == []
    assert ids(table.ask("a")) == ("a", "b")


def test_the_id_rises_over_restarts_and_only_with_the_list_or_a_failed_commit() -> None:
    table = Table()
    first = quorum(table.ask("a", step=1))
    second = quorum(table.ask("a", step=2, address="elsewhere:1"))
    third = quorum(table.ask("a", step=3, commit_failures=1))
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.key.quorum_id == 1_000_001
    assert second.key == first.key
    assert third.key.quorum_id == 1_000_002


def test_a_straggler_is_waited_for_until_join_timeout() -> None:
    table = Table()
    table.beat("a", "b", "c")
    table.ask("a")
    table.ask("b")
    table.now_ms = 999
    assert table.tick() == []
    assert table.core.waiting_for == "healthy replicas have not asked, and join_timeout has not passed"
    table.now_ms = 1_000
    assert ids(table.tick()) == ("a", "b")


def test_half_of_the_healthy_is_too_few() -> None:
    table = Table()
    table.beat("a", "b")
    table.ask("a")
    table.now_ms = 4_000
    assert table.tick() == []
    assert table.core.waiting_for == "1 of 2 healthy replicas have asked"


def test_a_member_with_handles_and_one_without_never_share_a_quorum() -> None:
    for first, second in (((), ("handle",)), (("handle",), ())):
        table = Table()
        table.beat("a", "b")
        assert table.ask("a", reconfigure_handles=first) == []
        (refused,) = table.ask("b", reconfigure_handles=second)
        assert isinstance(refused, effects.RefuseUnary)
        assert "replica b builds its process groups as torchft 0." in refused.message
        assert "and replica a of the same job" in refused.message
        assert "install one release of torchft" in refused.message
        table.now_ms = 1_000
        assert ids(table.tick()) == ("a",)
        table.beat("a", "b")
        assert len(table.ask("b", reconfigure_handles=second)) == 1  # a is in the last quorum, and lives
        table.now_ms = 7_000
        assert ids(table.ask("b", reconfigure_handles=second)) == ("b",)  # a is silent


def test_the_fast_path_asks_for_no_min_replicas() -> None:
    table = Table(min_replicas=2)
    assert table.ask("a") == []
    assert ids(table.ask("b")) == ("a", "b")
    table.now_ms = 6_000  # b is silent
    assert table.ask("a") == []
    table.core.previous = Quorum(table.core.previous.key, (Member("a"),)) if table.core.previous else None
    assert ids(table.tick()) == ("a",)


def test_silence_is_death_and_any_beat_revives() -> None:
    table = Table()
    table.beat("a", "b")
    table.now_ms = 5_000
    assert ids(table.ask("a")) == ("a",)
    table.beat("b")
    assert table.ask("a") != []  # the fast path: all of the last quorum are back


def test_a_waiting_member_whose_beats_stop_is_no_member() -> None:
    table = Table(min_replicas=2)
    table.ask("a")
    table.now_ms = 6_000
    assert table.ask("b") == []
    table.beat("a")
    assert ids(table.tick()) == ("a", "b")


def test_shrink_only_means_the_last_quorums_members() -> None:
    table = Table()
    table.ask("a")
    table.beat("a", "b")
    table.ask("b")
    assert ids(table.ask("a", shrink_only=True)) == ("a",)


def test_a_newcomer_counts_where_it_may_not_be_a_member() -> None:
    """As in torchft's own test of shrink_only: the healthy have all asked, so nobody is waited for."""
    table = Table()
    table.beat("a", "b")
    table.ask("a")
    assert ids(table.ask("b")) == ("a", "b")
    table.now_ms = 6_000  # b is silent
    table.beat("a")
    assert table.ask("c", shrink_only=True) == []
    assert ids(table.ask("a", shrink_only=True)) == ("a",)


def test_who_was_left_out_has_not_waited() -> None:
    table = Table()
    table.beat("a", "b", "d")
    table.ask("d")
    table.ask("a")
    table.now_ms = 1_000
    table.beat("a", "b", "d")
    assert ids(table.tick()) == ("a", "d")
    assert table.ask("b", shrink_only=True) == []
    table.now_ms = 1_900
    assert ids([*table.ask("a", shrink_only=True), *table.ask("d", shrink_only=True)]) == ("a", "d")
    table.now_ms = 2_100  # b has waited since 1.0 s, and for the quorum after that of 1.9 s only since then
    table.beat("a", "d")
    assert table.ask("a") == []
    assert table.tick() == []
    assert table.core.waiting_for == "healthy replicas have not asked, and join_timeout has not passed"


NAMES = st.sampled_from("abcd")
HAPPENINGS = st.one_of(
    st.tuples(st.just("beat"), NAMES),
    st.tuples(st.just("ask"), NAMES, st.booleans(), st.sampled_from([0, 0, 1])),
    st.tuples(st.just("pass"), st.sampled_from([100, 400, 1_000, 3_000])),
)


@given(st.integers(1, 3), st.lists(HAPPENINGS, max_size=40))
def test_the_rule_is_torchfts(min_replicas: int, happenings: list[tuple[Any, ...]]) -> None:
    """Beside a plain telling of it, until that one forms a quorum of nobody."""
    table = Table(min_replicas=min_replicas)
    timeouts = Timeouts(join_timeout_ms=1_000)
    plain = TorchftLike(min_replicas, timeouts)
    asking: set[str] = set()
    for happening in happenings:
        orders: list[effects.UnaryEffect] = []
        match happening:
            case ("beat", name):
                table.beat(name)
                plain.beat(name, table.now_ms)
            case ("ask", name, shrink_only, failures):
                asking.add(name)
                orders = table.ask(name, shrink_only=shrink_only, commit_failures=failures)
                plain.ask(Member(name, shrink_only=shrink_only, commit_failures=failures), table.now_ms)
            case ("pass", time_ms):
                table.now_ms += time_ms
        found = quorum(orders) or quorum(table.tick())
        expected = plain.tick(table.now_ms, 0, callers=asking)
        if plain._previous == ():
            return
        assert (found is None) is (expected is None)
        if found is not None and expected is not None:
            assert found.replica_ids == expected.replica_ids
            assert found.key.quorum_id - 1_000_000 == expected.key.quorum_id
            asking -= set(found.replica_ids)


def test_shrink_only_without_a_last_quorum_means_nothing() -> None:
    assert ids(Table().ask("a", shrink_only=True)) == ("a",)


def test_a_caller_that_went_away_is_no_member() -> None:
    """needs.md section 4, fault 5."""
    table = Table(min_replicas=2)
    table.ask("a")
    table.core.handle(events.UnaryRequestWithdrawn(1), 0, 0)
    assert table.ask("b") == []
    assert table.core.waiting_for == "1 of min_replicas 2 have asked"


def test_the_newest_call_of_a_replica_stands_for_it_and_all_are_answered() -> None:
    table = Table(min_replicas=2)
    table.ask("a", step=1)
    table.ask("a", step=2)
    orders = table.ask("b")
    found = quorum(orders)
    assert found is not None
    assert found.members[0].step == 2
    assert {order.call for order in orders if isinstance(order, effects.AnswerUnaryQuorum)} == {1, 2, 3}


def test_the_dead_are_forgotten() -> None:
    """needs.md section 4, fault 10."""
    table = Table()
    for number in range(500):
        table.now_ms = number * 1_000
        table.beat(f"a{number}")
        table.tick()
    assert len(table.core._beats) <= 51
