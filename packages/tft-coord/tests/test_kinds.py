"""A job is of one kind: the second to come is refused while one of the first is healthy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tft_coord.compat.router import Effects, ProtocolRouter
from tft_coord.compat.rule import TorchftCore
from tft_coord.core import effects, events
from tft_coord.core.lighthouse import LighthouseConfig, LighthouseCore
from tft_coord.core.types import Hello, Member, Quorum, QuorumKey, Refusal
from tft_coord.testing import frozen
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
        self.kinds = ProtocolRouter(ours, theirs, undecided_ms=TIMES.heartbeat_timeout_ms, now_ms=0)
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
    assert order.message.startswith("replica t (torchft) can't join job 'default', because replica a (tft) is in it")
    table.kinds.handle(events.DeathReported(ord("a"), "over"), table.now_ms, table.now_ms)
    assert formed(table.ask("t", step=5)) == [("t",)]


def test_ours_is_refused_by_name_while_one_of_theirs_beats() -> None:
    table = Table()
    table.beat("t")
    (order,) = table.hello("a", held=KEY)
    assert isinstance(order, effects.RefuseSession)
    assert order.message.startswith("replica a (tft) can't join job 'default', because replica t (torchft) is in it")
    assert refused(table.hello("b", job="another")) == []
    table.pass_ms(TIMES.heartbeat_timeout_ms)
    assert refused(table.hello("c")) == []


def test_while_the_lighthouse_is_away_nobody_takes_theirs_for_gone() -> None:
    """What they have sent meanwhile may be heard after one of ours says hello."""
    table = Table()
    table.beat("s")
    table.pass_ms(TIMES.heartbeat_timeout_ms)
    table.beat("t")
    table.now_ms += 20_000  # it is stopped, say
    assert refused(table.hello("a", held=KEY)) == [("session", "a")]
    table.pass_ms(TIMES.heartbeat_timeout_ms - 100)
    (order,) = table.hello("a", held=KEY)
    assert isinstance(order, effects.RefuseSession)
    assert "replica t (torchft)" in order.message  # and not s, which was gone before
    table.pass_ms(100)
    assert refused(table.hello("a", held=KEY)) == []


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


def test_one_that_does_not_come_in_itself_turns_nobody_out() -> None:
    table = Table(age_ms=100)
    table.hello("a")
    table.kinds.handle(events.DeathReported(ord("a"), "over"), table.now_ms, table.now_ms)
    table.beat("u")
    table.ask("t")
    orders = table.hello("a", held=KEY, session=2)
    assert [order.refusal for order in orders if isinstance(order, effects.RefuseSession)] == [Refusal.DEAD]
    assert refused(table.hello("b")) == [("session", "b")]  # t and u are there still


def test_what_theirs_had_before_ours_took_the_job_counts_no_more() -> None:
    table = Table()
    assert formed(table.ask("t")) == [("t",)]
    table.pass_ms(TIMES.heartbeat_timeout_ms)
    held = train(table, "a")
    table.kinds.handle(events.StreamClosed(ord("a")), table.now_ms, table.now_ms)
    table.pass_ms(TIMES.heartbeat_timeout_ms)
    table.beat("u")
    assert refused(table.hello("a", held=held, session=2)) == []


def test_a_member_that_a_dead_one_names_does_not_live_beside_theirs() -> None:
    table = Table(age_ms=100)
    assert effects.AskForQuorum(ord("a"), KEY) in table.hello("a", held=KEY)
    table.kinds.handle(events.DeathReported(ord("a"), "over"), table.now_ms, table.now_ms)
    assert formed(table.ask("t")) == [("t",)]
    report = events.QuorumReported(ord("a"), Quorum(KEY, (Member("a"), Member("b"))))
    table.kinds.handle(report, table.now_ms, table.now_ms)
    assert refused(table.ask("t", step=1)) == []


# --- anything, in any order ------------------------------------------------------------------------------------------

OURS, THEIRS = "ab", "tu"
TIMEOUTS = Timeouts(
    heartbeat_timeout_ms=900,
    join_timeout_ms=1_200,
    reconnect_grace_ms=300,
    quorum_tick_ms=300,
    beat_interval_ms=300,
)
SILENCE_MS, TICK_MS = TIMEOUTS.heartbeat_timeout_ms, TIMEOUTS.quorum_tick_ms
WALL_MS = 1_000_000
PASTS = (
    (),
    ("ours",),
    ("one of ours names others and dies", "theirs wait"),
    ("theirs wait",),
    ("long ago",),
    ("ours", "long ago"),
    ("long ago", "one of ours comes"),
    ("theirs wait", "long ago"),
    ("theirs", "long ago", "ours", "long ago"),
)
SHALLOW = settings(max_examples=50, stateful_step_count=12, deadline=None, derandomize=True, database=None)
# Nobody is forgotten within it, so that what is known of the past is plain.
LONGEST_MS = TIMEOUTS.forget_after_ms - SILENCE_MS


@dataclass
class Ours:
    """One of ours that was welcomed, or is named as a member by another and has not come yet (`stream` is None)."""

    stream: int | None
    last_sign_ms: int
    held: QuorumKey | None = None
    gone: bool = False  # its death was reported, or it has left
    named: bool = False


class BothKinds(RuleBasedStateMachine):
    """Members of both kinds on one lighthouse, beside a plain telling of who is there and who may come.

    What each core makes of the events that it hears is its own business: whether a hello of ours is welcomed, and when
    a quorum forms, is believed here.

    Args:
        past: what has been already: what is rarely come to by chance.
    """

    def __init__(self, past: Sequence[str] = ()) -> None:
        super().__init__()
        self.past = past
        config = LighthouseConfig(timeouts=TIMEOUTS)
        numbers = itertools.count(1)
        self.core = LighthouseCore(config, started_ms=WALL_MS, cluster_id="c", nonces=lambda: next(numbers), now_ms=0)
        self.torchft = TorchftCore(config, started_ms=WALL_MS)
        self.kinds = ProtocolRouter(self.core, self.torchft, undecided_ms=SILENCE_MS, now_ms=0)
        self.now_ms = 0
        self.numbers = itertools.count(1)
        self.sessions = dict.fromkeys(OURS, WALL_MS)
        self.keys: dict[str, QuorumKey] = {}  # what each of ours was given last, for life
        self.have_come: set[str] = set()  # of theirs
        self.forget_ours()
        self.forget_theirs()

    def forget_ours(self) -> None:
        self.ours: dict[str, Ours] = {}
        self.ours_formed = False
        self.ours_since_ms: int | None = None

    def forget_theirs(self) -> None:
        self.beats: dict[str, int] = {}
        self.calls: dict[int, tuple[str, int]] = {}  # name and step
        self.theirs_formed = False

    # --- the plain telling ----------------------------------------------------------------------------------------

    def living_ours(self) -> list[str]:
        return [
            name for name, each in self.ours.items() if not each.gone and self.now_ms - each.last_sign_ms < SILENCE_MS
        ]

    def living_theirs(self) -> list[str]:
        return [name for name, at_ms in self.beats.items() if self.now_ms - at_ms < SILENCE_MS]

    def ours_have_trained(self) -> bool:
        return self.ours_formed or any(each.held is not None for each in self.ours.values())

    def theirs_have_trained(self) -> bool:
        return self.theirs_formed or any(step > 0 for _, step in self.calls.values())

    def undecided(self) -> bool:
        return self.now_ms < SILENCE_MS

    # --- what is told ---------------------------------------------------------------------------------------------

    def give(self, orders: Effects) -> Effects:
        """Everything that is decided passes here; returns it."""
        for order in orders:
            match order:
                case effects.QuorumFormed("default", quorum):
                    assert set(quorum.replica_ids) <= set(self.living_ours()), "a quorum of others than ours that live"
                    assert not self.living_theirs(), "a quorum of ours while one of theirs is healthy"
                    self.ours_formed = True
                case effects.QuorumFormed("", quorum):
                    assert set(quorum.replica_ids) <= set(self.living_theirs())
                    assert not self.living_ours(), "a quorum of theirs while one of ours is healthy"
                    self.theirs_formed = True
                case effects.AnswerQuorum(stream, _, quorum):
                    for name, each in self.ours.items():
                        if each.stream == stream:
                            each.held = self.keys[name] = quorum.key
                case effects.AnswerUnaryQuorum(call, quorum):
                    assert self.calls.pop(call)[0] in quorum.replica_ids
                    assert not self.living_ours(), "one of theirs is answered while one of ours is healthy"
        for order in orders:
            if isinstance(order, (effects.RefuseSession, effects.CloseStream)):
                self.close(order.stream)
        return orders

    def close(self, stream: int) -> None:
        for each in self.ours.values():
            if each.stream == stream:
                each.stream = None
        self.give(self.kinds.handle(events.StreamClosed(stream), self.now_ms, WALL_MS + self.now_ms))

    def say(self, event: events.LighthouseEvent) -> Effects:
        """One of ours speaks on its stream; a sign of life if it was not given up before."""
        orders = self.kinds.handle(event, self.now_ms, WALL_MS + self.now_ms)
        for name in self.living_ours():
            if self.ours[name].stream == event.stream:
                self.ours[name].last_sign_ms = self.now_ms
        return orders

    def call(self, event: events.UnaryEvent) -> Effects:
        return self.kinds.handle_unary(event, self.now_ms, WALL_MS + self.now_ms)

    def what_is(self) -> object:
        return frozen((self.core, self.torchft))

    def turned_out(self, orders: Effects, kind: type[effects.RefuseSession] | type[effects.RefuseUnary]) -> set[int]:
        """Who is refused because of the other kind, each once."""
        found = [
            order.stream if isinstance(order, effects.RefuseSession) else order.call
            for order in orders
            if isinstance(order, kind) and order.refusal is Refusal.OTHER_KIND
        ]
        assert len(set(found)) == len(found)
        return set(found)

    def named(self, orders: Effects, number: int, *names: str) -> None:
        """That one is refused by name, and told who is there."""
        for order in orders:
            if isinstance(order, (effects.RefuseSession, effects.RefuseUnary)):
                own = order.stream if isinstance(order, effects.RefuseSession) else order.call
                if own == number:
                    assert all(name in order.message for name in names), order.message
                    return
        raise AssertionError(f"{number} is not told")

    # --- ours -----------------------------------------------------------------------------------------------------

    @initialize()
    def starts(self) -> None:
        for what in self.past:
            match what:
                case "long ago":
                    self.time_passes(SILENCE_MS // TICK_MS, silent=OURS + THEIRS)
                case "ours":
                    self.hello("a", holds=False, how="plain")
                    self.asks("a")
                    self.time_passes(1, silent="")
                case "one of ours names others and dies":
                    self.hello("a", holds=True, how="plain")
                    self.ends("a", how="dies")
                case "one of ours comes":
                    self.hello("a", holds=False, how="plain")
                case "theirs":
                    self.theirs_asks("t", 0)
                    self.time_passes(1, silent="")
                case "theirs wait":
                    self.beat("u")
                    self.theirs_asks("t", 0)

    @rule(
        name=st.sampled_from(OURS),
        holds=st.booleans(),
        how=st.sampled_from([*["plain"] * 3, "same session", "older", "elsewhere", "nonsense", "another job"]),
    )
    def hello(self, name: str, holds: bool, how: str) -> None:
        before = self.what_is()
        self.sessions[name] += how not in ("same session", "older")
        hello = Hello(
            job="another" if how == "another job" else "default",
            replica_id=name,
            session=self.sessions[name] - (how == "older") + (2**50 if how == "nonsense" else 0),
            address=f"{name}:{2 if how == 'elsewhere' else 1}",
            held=self.keys.get(name, KEY) if holds else None,
        )
        stream = next(self.numbers)
        there = self.living_theirs() if hello.job == "default" else []
        stands = holds and not self.theirs_have_trained() and (self.undecided() or self.ours_have_trained())
        orders = self.kinds.handle(events.HelloReceived(stream, hello), self.now_ms, WALL_MS + self.now_ms)
        if there and not stands:
            assert self.turned_out(orders, effects.RefuseSession) == {stream}
            assert len(orders) == 1, "somebody else is told something"
            self.named(orders, stream, f"replica {name} (tft)", " (torchft)")
            assert any(f"replica {other} (torchft)" in order.message for other in there for order in orders)  # type: ignore[union-attr]
            assert self.what_is() == before, "a refused stranger changes something"
        else:
            assert not self.turned_out(orders, effects.RefuseSession), "it is refused, and nobody else is there"
        welcomed = any(isinstance(order, effects.Welcome) and order.stream == stream for order in orders)
        told = self.turned_out(orders, effects.RefuseUnary)
        if hello.job == "default" and welcomed:
            assert told == set(self.calls), "one of theirs that is turned out is not told"
            for call in told:
                self.named(orders, call, f"replica {self.calls[call][0]} (torchft)", f"replica {name} (tft)")
            self.forget_theirs()
            if self.ours_since_ms is None:
                self.ours_since_ms = self.now_ms
            known = self.ours.get(name)
            self.ours[name] = Ours(stream, self.now_ms, hello.held, gone=known is not None and known.gone)
        else:
            assert not told, "one of theirs is turned out by who does not come in"
        self.give(orders)
        for order in orders:
            if isinstance(order, effects.AskForQuorum) and hello.job == "default":
                self.asked_for = (order.stream, order.key)

    @rule(name=st.sampled_from(OURS))
    def asks(self, name: str) -> None:
        known = self.ours.get(name)
        if known is not None and known.stream is not None:
            held = known.held
            self.give(self.say(events.QuorumRequested(known.stream, next(self.numbers), Member(name), held)))

    asked_for: tuple[int, QuorumKey] | None = None

    @precondition(lambda self: self.asked_for is not None)
    @rule(others=st.sampled_from([set(), set(OURS)]))
    def reports(self, others: set[str]) -> None:
        """Who was in the quorum that one of ours holds; maybe long after it was asked."""
        assert self.asked_for is not None
        (stream, key), self.asked_for = self.asked_for, None
        of_stream = {name for name, each in self.ours.items() if each.stream == stream}
        members = tuple(Member(name, session=WALL_MS) for name in sorted(others | of_stream))
        if not of_stream:
            return
        previous = self.core.quorum("default")
        orders = self.say(events.QuorumReported(stream, Quorum(key, members)))
        newest = self.core.quorum("default")
        if newest is not None and newest != previous and newest.key == key:
            assert self.ours_since_ms is not None
            since_ms = 0 if self.ours_since_ms < SILENCE_MS else self.ours_since_ms
            since_ms = max(since_ms, self.now_ms - SILENCE_MS + 1)  # it is judged when time passes
            self.ours = {name: each for name, each in self.ours.items() if not each.named}
            for member in newest.members:
                self.ours.setdefault(member.replica_id, Ours(None, since_ms, named=True))
            self.ours_formed = True
        self.give(orders)

    @rule(name=st.sampled_from(OURS), how=st.sampled_from(["breaks", "breaks", "dies", "leaves"]))
    def ends(self, name: str, how: str) -> None:
        known = self.ours.get(name)
        if known is None or known.stream is None:
            return
        if how == "breaks":
            self.close(known.stream)
            return
        event: events.LighthouseEvent = events.DeathReported(known.stream, "over")
        if how == "leaves":
            if name not in self.living_ours():
                return  # it is told that it is lost, and can't say so
            event = events.LeaveReceived(known.stream, "enough", 1_000)
        orders = self.say(event)
        known.gone = True
        self.give(orders)

    # --- theirs ---------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(THEIRS))
    def beat(self, name: str) -> None:
        self.have_come.add(name)
        before = self.what_is()
        there = self.living_ours()
        assert self.call(events.HeartbeatReceived(name)) == []
        if there:
            assert self.what_is() == before, "a beat of a stranger changes something"
        else:
            self.beats[name] = self.now_ms

    @rule(name=st.sampled_from(THEIRS), step=st.sampled_from([0, 5]))
    def theirs_asks(self, name: str, step: int) -> None:
        before, another = self.what_is(), frozen(self.core._jobs.get("another"))
        self.have_come.add(name)
        call = next(self.numbers)
        there = self.living_ours()
        stands = step > 0 and not self.ours_have_trained() and self.undecided()
        orders = self.call(events.UnaryQuorumRequested(call, Member(name, step=step)))
        assert frozen(self.core._jobs.get("another")) == another, "another job is touched"
        told = self.turned_out(orders, effects.RefuseSession)
        if there and not stands:
            assert self.turned_out(orders, effects.RefuseUnary) == {call}
            assert len(orders) == 1, "somebody else is told something"
            self.named(orders, call, f"replica {name} (torchft)")
            assert any(f"replica {other} (tft)" in order.message for other in there for order in orders)  # type: ignore[union-attr]
            assert self.what_is() == before, "a refused stranger changes something"
            return
        assert not self.turned_out(orders, effects.RefuseUnary), "it is refused, and nobody else is there"
        if there:
            streams = {each.stream: own for own, each in self.ours.items() if each.stream is not None}
            assert told == set(streams), "one of ours that is turned out is not told"
            for stream, own in streams.items():
                self.named(orders, stream, f"replica {own} (tft)", f"replica {name} (torchft)")
            self.forget_ours()
        else:
            assert not told
        self.beats[name] = self.now_ms
        self.calls[call] = (name, step)
        self.give(orders)

    @rule(data=st.data())
    def theirs_withdraws(self, data: st.DataObject) -> None:
        if self.calls:
            call = data.draw(st.sampled_from(sorted(self.calls)))
            del self.calls[call]
            assert self.call(events.UnaryRequestWithdrawn(call)) == []

    # --- time -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.now_ms < LONGEST_MS)
    @rule(ticks=st.sampled_from([1, 1, 2, 3]), silent=st.sampled_from(["", "", "a", "t", OURS, THEIRS, OURS + THEIRS]))
    def time_passes(self, ticks: int, silent: str) -> None:
        """Whoever has come beats, refused or not, but for those who are silent."""
        for _ in range(ticks):
            self.now_ms += TICK_MS
            self.give(self.kinds.tick(self.now_ms, WALL_MS + self.now_ms))
            for name, each in list(self.ours.items()):
                if each.stream is not None and name not in silent:
                    self.give(self.say(events.BeatReceived(each.stream)))
            for name in sorted(self.have_come - set(silent)):
                self.beat(name)

    @invariant()
    def only_one_kind_lives(self) -> None:
        assert not (self.living_ours() and self.living_theirs())
        assert (self.core.any_alive("default", self.now_ms) is None) is (not self.living_ours())
        assert (self.torchft.any_alive(self.now_ms) is None) is (not self.living_theirs())

    def teardown(self) -> None:
        """Whoever comes when all others are silent is welcome, of whatever kind."""
        everybody = "".join([*self.ours, *self.have_come, "w"])
        self.time_passes(SILENCE_MS // TICK_MS, silent=everybody)
        self.theirs_asks("w", 0)
        self.time_passes(1, silent=everybody)
        assert self.theirs_formed
        self.time_passes(SILENCE_MS // TICK_MS, silent=everybody)
        self.sessions["d"] = WALL_MS
        self.hello("d", holds=False, how="plain")
        self.asks("d")
        self.time_passes(1, silent=everybody)
        assert self.ours_formed


@pytest.mark.parametrize("past", PASTS, ids=", ".join)
def test_the_kinds_never_meet_whatever_happens(past: Sequence[str]) -> None:
    run_state_machine_as_test(lambda: BothKinds(past), settings=SHALLOW)  # type: ignore[no-untyped-call]
