"""A job is of one kind: the second to come is refused while one of the first is healthy."""

from __future__ import annotations

import pytest

from tft_coord.core import effects, events
from tft_coord.core.kinds import Effects, Kinds
from tft_coord.core.lighthouse import LighthouseConfig, LighthouseCore
from tft_coord.core.torchft_rule import TorchftCore
from tft_coord.core.types import Hello, Member, QuorumKey, Refusal
from tft_coord.timeouts import Timeouts

TIMES = Timeouts()
KEY = QuorumKey(7, 70)
LATE_MS = 60_000


class Table:
    """A lighthouse that has been there for so long."""

    def __init__(self, age_ms: int = LATE_MS) -> None:
        config = LighthouseConfig(timeouts=TIMES)
        ours = LighthouseCore(config, started_ms=0, cluster_id="c", nonces=lambda: 5, now_ms=0)
        theirs = TorchftCore(config, started_ms=0)
        self.kinds = Kinds(ours, theirs, undecided_ms=TIMES.heartbeat_timeout_ms, now_ms=0)
        self.now_ms = 0
        self.pass_ms(age_ms)

    def pass_ms(self, pass_ms: int) -> Effects:
        out: Effects = []
        for _ in range(0, pass_ms, 100):
            self.now_ms += 100
            out += self.kinds.tick(self.now_ms, self.now_ms)
        return out

    def hello(self, name: str, held: QuorumKey | None = None, job: str = "default", session: int = 1) -> Effects:
        hello = Hello(job=job, replica_id=name, session=session, address=f"{name}:1", held=held)
        return self.kinds.handle(events.HelloReceived(ord(name), hello), self.now_ms, self.now_ms)

    def beat(self, name: str) -> Effects:
        return self.kinds.handle_unary(events.HeartbeatReceived(name), self.now_ms, self.now_ms)

    def ask(self, name: str, step: int = 0) -> Effects:
        event = events.UnaryQuorumRequested(ord(name), Member(name, step=step))
        return self.kinds.handle_unary(event, self.now_ms, self.now_ms)


def refused(orders: Effects) -> list[tuple[str, str]]:
    found = []
    for order in orders:
        if isinstance(order, effects.RefuseSession):
            assert order.refusal is Refusal.OTHER_KIND
            found.append(("session", chr(order.stream)))
        if isinstance(order, effects.RefuseUnary):
            assert order.refusal is Refusal.OTHER_KIND
            found.append(("call", chr(order.call)))
    return found


def formed(orders: Effects) -> list[tuple[str, ...]]:
    return [order.quorum.replica_ids for order in orders if isinstance(order, effects.QuorumFormed)]


def test_theirs_is_refused_by_name_while_one_of_ours_lives() -> None:
    table = Table()
    table.hello("a")
    assert table.beat("t") == []
    (order,) = table.ask("t", step=5)
    assert isinstance(order, effects.RefuseUnary)
    assert order.message.startswith("replica t of torchft's can't join job 'default', in which replica a of ours lives")
    table.kinds.handle(events.DeathReported(ord("a"), "over"), table.now_ms, table.now_ms)
    assert formed(table.ask("t", step=5)) == [("t",)]


def test_ours_is_refused_by_name_while_one_of_theirs_beats() -> None:
    table = Table()
    table.beat("t")
    (order,) = table.hello("a", held=KEY)
    assert isinstance(order, effects.RefuseSession)
    assert order.message.startswith("replica a of ours can't join job 'default', in which replica t of torchft's lives")
    assert refused(table.hello("b", job="another")) == []
    table.pass_ms(TIMES.heartbeat_timeout_ms)
    assert refused(table.hello("c")) == []


def train(table: Table, name: str) -> QuorumKey:
    """One of ours has a quorum; returns its key."""
    table.hello(name)
    asked = events.QuorumRequested(ord(name), 1, Member(name), None)
    orders = table.kinds.handle(asked, table.now_ms, table.now_ms)
    orders += table.pass_ms(1_000)
    return next(order.quorum.key for order in orders if isinstance(order, effects.QuorumFormed))


@pytest.mark.parametrize("away_ms", [400, 10_000])
def test_a_stranger_that_beats_on_does_not_take_a_job_whose_streams_broke(away_ms: int) -> None:
    """One of theirs that was refused tells its trainer nothing and goes on beating."""
    table = Table()
    held = train(table, "a")
    assert table.beat("t") == []
    table.kinds.handle(events.StreamClosed(ord("a")), table.now_ms, table.now_ms)
    for _ in range(0, away_ms, 100):
        table.pass_ms(100)
        table.beat("t")
    assert refused(table.hello("a", held=held, session=2)) == []
    assert refused(table.ask("t")) == [("call", "t")]


def test_a_job_that_has_passed_to_theirs_stays_theirs() -> None:
    table = Table()
    held = train(table, "a")
    table.kinds.handle(events.StreamClosed(ord("a")), table.now_ms, table.now_ms)
    table.pass_ms(TIMES.heartbeat_timeout_ms)
    assert formed(table.ask("t")) == [("t",)]
    assert refused(table.hello("a", held=held, session=2)) == [("session", "a")]


def test_one_that_has_fallen_silent_is_told() -> None:
    table = Table()
    table.beat("u")
    table.ask("t")
    assert formed(table.pass_ms(1_000)) == []  # it waits for u
    table.pass_ms(TIMES.heartbeat_timeout_ms)
    assert refused(table.hello("a")) == [("call", "t")]


def test_after_a_start_those_who_hold_a_quorum_stand_over_strangers() -> None:
    table = Table(age_ms=100)
    table.beat("u")
    table.ask("t")
    assert refused(table.hello("a")) == [("session", "a")]
    assert refused(table.hello("b", held=KEY)) == [("call", "t")]
    assert refused(table.ask("t")) == [("call", "t")]


def test_after_a_start_those_who_come_with_steps_stand_over_strangers() -> None:
    table = Table(age_ms=100)
    table.hello("a")
    assert refused(table.ask("s")) == [("call", "s")]
    orders = table.ask("t", step=5)
    assert refused(orders) == [("session", "a")]
    assert formed(orders) == [("t",)]
    assert refused(table.hello("b", held=KEY)) == [("session", "b")]
