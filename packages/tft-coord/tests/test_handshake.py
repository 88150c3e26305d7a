"""What the replicas of a job must have in common: fingerprints, who is refused for them, and on what way they come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tft_coord.core import effects, events
from tft_coord.core.fingerprint import (
    FURTHER,
    MAX_FINGERPRINT_BYTES,
    MAX_PARTS,
    Fingerprint,
    FingerprintPart,
    check,
    differences,
    differences_of_ranks,
    fingerprint_of,
    list_differences,
    merged,
)
from tft_coord.core.handshake import PART_BYTES, SMALL_BYTES, Differs, Handshake, MemoryBudget, Precedence
from tft_coord.core.lighthouse import LighthouseConfig, LighthouseCore
from tft_coord.core.replica_group import ReplicaGroupCore
from tft_coord.core.session import SendRequest, SessionCore
from tft_coord.core.types import Hello, Member, Quorum, QuorumKey, RankRequest, Refusal
from tft_coord.errors import ProtocolError
from tft_coord.timeouts import Timeouts
from tft_coord.wire import codec, rank_codec

TIMES = Timeouts()
KEY = QuorumKey(7, 70)


def of(**parts: str) -> Fingerprint:
    return fingerprint_of(parts)


TWO, FOUR = of(size="2"), of(size="4")


class TestFingerprint:
    def test_it_is_sorted_with_parameters_last(self) -> None:
        parts = {"user/b": "1", "parameter/0/w": "float32 [2]", "group world size": "1"}
        assert [part.name for part in fingerprint_of(parts)] == ["group world size", "user/b", "parameter/0/w"]

    def test_what_one_side_lacks_is_not_compared(self) -> None:
        assert differences({"size": "2", "theirs": "x"}, of(size="2", ours="y")) == []
        assert differences({"size": "2"}, of(size="4")) == ["size is '2' there and '4' here"]

    def test_three_differences_are_said(self) -> None:
        assert list_differences(list("abc")) == "a; b; c"
        assert list_differences(list("abcde")) == "a; b; c; and 2 more"

    def test_too_many_parts_are_put_together_and_still_told_apart(self) -> None:
        parts = {f"parameter/{number:06d}": "float32 [1]" for number in range(MAX_PARTS + 10)}
        one, other = fingerprint_of(parts), fingerprint_of({**parts, f"parameter/{MAX_PARTS + 5:06d}": "float32 [2]"})
        assert len(one) == MAX_PARTS
        assert one[-1].name == FURTHER
        assert one[-1].value.startswith("11 parts, sha256 ")
        (found,) = differences(dict(one), other)
        assert found.startswith("further parts is '11 parts")

    def test_a_long_value_ends_with_its_digest(self) -> None:
        one, other = of(text="x" * 5_000), of(text="x" * 4_999 + "y")
        assert len(one[0].value.encode()) <= 1024
        assert one[0].value != other[0].value

    @given(st.dictionaries(st.text(min_size=1, max_size=400), st.text(max_size=3_000), max_size=20))
    def test_whatever_is_given_fits_the_wire(self, parts: dict[str, str]) -> None:
        fingerprint = check(fingerprint_of(parts))
        asked = events.QuorumRequested(1, 1, Member("a"), None, fingerprint)
        assert codec.decode_to_lighthouse(1, codec.encode_to_lighthouse(asked)) == asked

    def test_all_in_all_it_is_bounded(self) -> None:
        fingerprint = check(fingerprint_of({f"user/{number}": "v" * 1024 for number in range(3_000)}))
        assert sum(len(part.name) + len(part.value) for part in fingerprint) <= MAX_FINGERPRINT_BYTES
        assert fingerprint[-1].name == FURTHER

    @pytest.mark.parametrize(
        ("fingerprint", "words"),
        [
            ((FingerprintPart("", "x"),), "printable names"),
            ((FingerprintPart("a\nb", "x"),), "printable names"),
            ((FingerprintPart("a", "x\n"),), "printable names"),
            ((FingerprintPart("a" * 257, "x"),), "is too long"),
            ((FingerprintPart("a", "x" * 1025),), "is too long"),
            ((FingerprintPart("a", "x"),) * (MAX_PARTS + 1), "16385 parts"),
            ((FingerprintPart("a", "x" * 1024),) * 1_100, "at most 1048576"),
        ],
    )
    def test_a_peers_is_looked_at_before_it_is_used(self, fingerprint: Fingerprint, words: str) -> None:
        with pytest.raises(ProtocolError, match=words):
            rank_codec.decode_rank_request(
                rank_codec.encode_rank_request(rank_codec.Ask(0, RankRequest(0, fingerprint=fingerprint)))
            )


class TestOfAGroup:
    def test_what_all_ranks_say_is_said_once(self) -> None:
        assert merged({0: TWO, 1: TWO}) == TWO

    def test_stages_have_parameters_of_their_own(self) -> None:
        first = of(**{"size": "2", "parameter/0/w": "float32 [4]"})
        second = of(**{"size": "2", "parameter/0/w": "float32 [8]", "parameter/0/head": "float32 [1]"})
        assert differences_of_ranks({0: first, 1: second}) == []
        assert dict(merged({0: first, 1: second})) == {
            "size": "2",
            "parameter/0/w of rank 0": "float32 [4]",
            "parameter/0/w of rank 1": "float32 [8]",
            "parameter/0/head of rank 1": "float32 [1]",
        }

    def group(self) -> ReplicaGroupCore:
        return ReplicaGroupCore(replica_id="a", address="a:1", store_address="a:2", world_size=2, timeouts=TIMES)

    def ask(self, core: ReplicaGroupCore, rank: int, call: int, fingerprint: Fingerprint) -> list[effects.GroupEffect]:
        return core.handle(events.RankAsked(rank, call, RankRequest(0, fingerprint=fingerprint), 9_000), 0)

    def test_it_travels_with_the_first_request_and_with_news(self) -> None:
        core = self.group()
        self.ask(core, 0, 1, TWO)
        (order,) = self.ask(core, 1, 2, TWO)
        assert isinstance(order, effects.AskLighthouse)
        assert order.fingerprint == TWO
        core.handle(events.QuorumArrived(1, Quorum(KEY, (Member("a", address="a:1", lineage=1, world_size=2),))), 0)
        self.ask(core, 0, 3, ())
        (order,) = self.ask(core, 1, 4, ())
        assert isinstance(order, effects.AskLighthouse)
        assert order.fingerprint == ()
        core.handle(events.RequestRefused(2, "ahead", "no"), 0)
        self.ask(core, 0, 5, of(size="2", seed="1"))
        (order,) = self.ask(core, 1, 6, ())
        assert isinstance(order, effects.AskLighthouse)
        assert order.fingerprint == of(size="2", seed="1")

    def test_ranks_that_differ_are_refused_by_name(self) -> None:
        core = self.group()
        self.ask(core, 0, 1, TWO)
        orders = self.ask(core, 1, 2, FOUR)
        assert [(order.rank, order.code) for order in orders if isinstance(order, effects.FailRank)] == [
            (0, "differs"),
            (1, "differs"),
        ]
        assert isinstance(orders[0], effects.FailRank)
        assert "the ranks of replica a differ: size is '2' on rank 0 and '4' on rank 1" in orders[0].message
        self.ask(core, 0, 3, ())
        assert all(isinstance(order, effects.FailRank) for order in self.ask(core, 1, 4, ()))


class TestOfASession:
    def test_it_is_said_with_the_first_request_on_each_stream(self) -> None:
        core = SessionCore(job="j", replica_id="a", address="a:1", session=1, timeouts=TIMES, jitter=lambda: 0.5)
        member = Member("a")
        core.start(0)
        core.stream_opened(0)
        core.welcomed(1, 50, 0, "c")
        assert core.ask(1, member, None, 0, TWO) == [SendRequest(1, member, None, TWO)]
        core.answered(1, KEY)
        assert core.ask(2, member, KEY, 0) == [SendRequest(2, member, KEY)]
        core.stream_broke(10)
        core.stream_opened(20)
        assert core.welcomed(1, 60, 20, "d") == [SendRequest(2, member, KEY, TWO)]
        core.answered(2, KEY)
        assert core.ask(3, member, KEY, 30, FOUR) == [SendRequest(3, member, KEY, FOUR)]

    @pytest.mark.parametrize("hung", [False, True])
    def test_and_with_that_of_a_newer_session_on_the_same_stream(self, hung: bool) -> None:
        core = SessionCore(job="j", replica_id="a", address="a:1", session=1, timeouts=TIMES, jitter=lambda: 0.5)
        member = Member("a")
        core.start(0)
        core.stream_opened(0)
        core.welcomed(1, 50, 0, "c")
        assert core.ask(1, member, None, 0, TWO) == [SendRequest(1, member, None, TWO)]
        core.told_lost(1, 10, hung=hung)  # it was lost before that request, which then was not heard
        if hung:
            core.went_on(20)
        assert core.welcomed(2, 50, 20, "c") == [SendRequest(1, member, None, TWO)]
        core.answered(1, KEY)
        assert core.ask(2, member, KEY, 30) == [SendRequest(2, member, KEY)]


def much(name: str) -> Fingerprint:
    return of(**{f"{name}{number}": "x" * 1000 for number in range(100)})


ROOM_FOR_TWO = 2 * sum(len(name) + len(value) + PART_BYTES for name, value in much("a")) + SMALL_BYTES


class Weights(dict[str, Precedence]):
    """How much whose word weighs."""

    def __missing__(self, replica_id: str) -> Precedence:
        return Precedence.GONE


class TestHandshake:
    def test_the_first_to_come_says_what_the_job_is(self) -> None:
        shake = Handshake("j", Weights(a=Precedence.NEW, b=Precedence.NEW, c=Precedence.NEW).__getitem__)
        assert shake.asks("a", TWO) == []
        assert shake.asks("b", TWO) == []
        (differs,) = shake.asks("c", FOUR)
        assert differs.replica_id == "c"
        assert differs.message.startswith("replica c differs from a of job 'j': size is '2' there and '4' here; give")

    def test_who_was_refused_is_looked_at_again_when_it_asks_again(self) -> None:
        weights = Weights(a=Precedence.NEW, c=Precedence.NEW)
        shake = Handshake("j", weights.__getitem__)
        shake.asks("a", TWO)
        assert len(shake.asks("c", FOUR)) == 1
        assert len(shake.asks("c", ())) == 1
        weights["a"] = Precedence.GONE
        assert shake.asks("c", ()) == []
        assert len(shake) == 1

    def test_who_holds_a_quorum_stands_over_who_holds_none(self) -> None:
        shake = Handshake("j", Weights(x=Precedence.NEW, y=Precedence.NEW, a=Precedence.HOLDS).__getitem__)
        shake.asks("x", FOUR)
        shake.asks("y", FOUR)
        gone = shake.asks("a", TWO)
        assert [each.replica_id for each in gone] == ["x", "y"]
        assert "replica x differs from a of job 'j': size is '2' there and '4' here" in gone[0].message
        assert len(shake.asks("x", ())) == 1

    def test_against_two_it_must_weigh_more_than_each(self) -> None:
        shake = Handshake("j", Weights(x=Precedence.NEW, m=Precedence.MEMBER, a=Precedence.HOLDS).__getitem__)
        shake.asks("x", of(size="4"))
        shake.asks("m", of(seed="1"))
        assert [each.replica_id for each in shake.asks("a", of(size="2", seed="2"))] == ["a"]
        assert [each.replica_id for each in shake.asks("a", of(size="4", seed="1"))] == []

    def test_what_the_dead_said_is_forgotten(self) -> None:
        weights = Weights({f"r{number}": Precedence.NEW for number in range(50)})
        shake = Handshake("j", weights.__getitem__)
        for number in range(50):
            shake.asks(f"r{number}", TWO)
        weights.clear()
        shake.forget_gone()
        assert len(shake) == 0

    def test_a_new_word_replaces_the_old_one(self) -> None:
        shake = Handshake("j", Weights(a=Precedence.NEW, b=Precedence.NEW).__getitem__)
        shake.asks("a", TWO)
        assert shake.asks("a", FOUR) == []
        assert shake.asks("b", FOUR) == []

    def test_strangers_who_say_much_and_each_something_else_find_no_room(self) -> None:
        weights = Weights(dict.fromkeys("abcd", Precedence.NEW))
        room = MemoryBudget(ROOM_FOR_TWO)
        shake, other = Handshake("j", weights.__getitem__, room), Handshake("k", weights.__getitem__, room)
        assert shake.asks("a", much("a")) == []
        assert shake.asks("b", much("a")) == []  # the same is kept once
        assert other.asks("c", much("c")) == []
        (differs,) = shake.asks("d", much("d"))
        assert differs.replica_id == "d"
        assert "replica d of job 'j' sent a fingerprint that no other replica has" in differs.message
        assert shake.asks("d", ()) == [differs]  # it is not let in because nothing is known of it
        assert shake.asks("d", TWO) == []  # what is small finds room
        assert len(shake.asks("d", much("d"))) == 1
        other.forget_all()
        assert shake.asks("d", much("d")) == []
        for name in "abd":
            shake.forget(name)
        assert room.left_bytes == ROOM_FOR_TWO

    def test_nor_do_those_who_are_refused(self) -> None:
        weights = Weights(dict.fromkeys("abcd", Precedence.NEW))
        room = MemoryBudget(ROOM_FOR_TWO)
        shake = Handshake("j", weights.__getitem__, room)
        shake.asks("a", TWO)
        for name in ("b", "c", "d"):
            assert [each.replica_id for each in shake.asks(name, (*FOUR, *much(name)))] == [name]
        assert 0 <= room.left_bytes < SMALL_BYTES * 4
        assert [len(shake.asks(name, ())) for name in ("b", "c", "d")] == [1, 1, 1]
        shake.forget_all()
        assert len(shake) == 0
        assert room.left_bytes == ROOM_FOR_TWO

    def test_that_it_differs_is_a_value(self) -> None:
        assert Differs("a", "m") == Differs("a", "m")


class Table:
    """A lighthouse that has been there for long, and replicas with a stream each."""

    def __init__(self, *names: str, late_ms: int = 60_000) -> None:
        self.core = LighthouseCore(
            LighthouseConfig(timeouts=TIMES), started_ms=0, cluster_id="c", nonces=lambda: 5, now_ms=0
        )
        self.now_ms = 0
        self.requests: dict[str, int] = {}
        self.pass_ms(late_ms)
        for name in names:
            self.hello(name)

    @property
    def newest(self) -> QuorumKey | None:
        quorum = self.core.quorum("j")
        return quorum.key if quorum is not None else None

    def pass_ms(self, pass_ms: int) -> list[effects.LighthouseEffect]:
        out = []
        for _ in range(0, pass_ms, 100):
            self.now_ms += 100
            out += self.core.tick(self.now_ms, self.now_ms)
        return out

    def hello(self, name: str, held: QuorumKey | None = None) -> list[effects.LighthouseEffect]:
        hello = Hello(job="j", replica_id=name, session=1, address=f"{name}:1", held=held, ready=held is not None)
        return self.core.handle(events.HelloReceived(ord(name), hello), self.now_ms, self.now_ms)

    def ask(
        self, name: str, fingerprint: Fingerprint = (), held: QuorumKey | None = None, **member: object
    ) -> list[effects.LighthouseEffect]:
        number = self.requests[name] = self.requests.get(name, 0) + 1
        asks = Member(name, address=f"{name}:1", lineage=1, **member)  # type: ignore[arg-type]
        return self.core.handle(
            events.QuorumRequested(ord(name), number, asks, held, fingerprint), self.now_ms, self.now_ms
        )

    def close(self, name: str) -> None:
        self.core.handle(events.StreamClosed(ord(name)), self.now_ms, self.now_ms)


def refusals(orders: list[effects.LighthouseEffect]) -> list[tuple[str, Refusal]]:
    return [(chr(order.stream), order.refusal) for order in orders if isinstance(order, effects.RefuseRequest)]


class TestOfTheLighthouse:
    def test_one_that_differs_is_refused_and_not_waited_for(self) -> None:
        table = Table("a", "b", "c")
        table.ask("a", TWO)
        table.ask("c", TWO)
        table.ask("a", held=table.newest)
        assert table.core.quorum("j") is not None
        assert refusals(table.ask("b", FOUR)) == [("b", Refusal.DIFFERS)]
        table.core.handle(events.DeathReported(ord("c"), "killed"), table.now_ms, table.now_ms)
        orders = table.ask("a", held=table.newest)
        formed = [order.quorum.replica_ids for order in orders if isinstance(order, effects.QuorumFormed)]
        assert formed == [("a",)]  # at once: who was refused never became ready

    def test_after_the_others_are_gone_it_is_the_job(self) -> None:
        table = Table("a", "b")
        table.ask("a", TWO)
        table.close("a")
        table.pass_ms(1_000)
        assert refusals(table.ask("b", FOUR)) == [("b", Refusal.DIFFERS)]  # a may come back
        for _ in range(6):
            table.pass_ms(1_000)
            table.core.handle(events.BeatReceived(ord("b")), table.now_ms, table.now_ms)
        assert refusals(table.ask("b")) == []

    def test_a_reported_death_frees_the_name_at_once(self) -> None:
        table = Table("a", "b")
        table.ask("a", TWO)
        table.core.handle(events.DeathReported(ord("a"), "killed"), table.now_ms, table.now_ms)
        assert refusals(table.ask("b", FOUR)) == []

    def test_a_lighthouse_without_memory_believes_those_who_train(self) -> None:
        table = Table("x", late_ms=0)
        table.ask("x", FOUR)
        table.hello("a", held=KEY)
        assert refusals(table.ask("a", TWO, held=KEY)) == [("x", Refusal.DIFFERS)]
        assert refusals(table.ask("x")) == [("x", Refusal.DIFFERS)]

    @pytest.mark.parametrize("says", [{"held": KEY}, {"live": True, "step": 7}], ids=str)
    def test_nor_does_one_whose_manager_server_was_started_anew_yield_to_a_stranger(self, says: dict[str, Any]) -> None:
        """Its hello holds nothing; its first request says that it has trained, by either word."""
        table = Table("x", "a", late_ms=0)
        table.ask("x", FOUR)
        assert refusals(table.ask("a", TWO, **says)) == [("x", Refusal.DIFFERS)]

    def test_members_outweigh_those_who_hold_an_older_quorum(self) -> None:
        table = Table("a", "b")
        table.ask("a", TWO)
        table.ask("b", TWO)
        table.pass_ms(100)
        table.hello("x", held=KEY)
        assert refusals(table.ask("x", FOUR, held=KEY)) == [("x", Refusal.DIFFERS)]

    def test_two_thousand_that_come_and_go_leave_nothing(self) -> None:
        table = Table()
        for number in range(2_000):
            stream, name = number + 1_000, f"r{number}"
            hello = Hello(job="j", replica_id=name, session=1, address="a:1")
            asks = events.QuorumRequested(stream, 1, Member(name), None, of(size=str(number)))
            for event in (events.HelloReceived(stream, hello), asks, events.DeathReported(stream, "over")):
                table.core.handle(event, table.now_ms, table.now_ms)
            table.core.handle(events.StreamClosed(stream), table.now_ms, table.now_ms)
            job = table.core._jobs["j"]
            table.now_ms += 100
            if number % 100 == 0:
                table.core.tick(table.now_ms, table.now_ms)
                assert len(job._handshake) <= 2 * len(job.liveness.replicas) + 17
