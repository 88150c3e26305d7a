"""A newcomer's trial: when it is asked for, what its answers do, and the dials of its manager server."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from tft_coord.core import effects, events
from tft_coord.core.liveness import Replica
from tft_coord.core.trial import ANSWERED_WITHIN_MS, Trials
from tft_coord.core.types import TRIED_MOST, Hello, Member, PeerAddresses, Unreached, Via
from tft_coord.errors import ProtocolError
from tft_coord.manager_server import trial
from tft_coord.manager_server.trial import try_peers
from tft_coord.wire import codec


def replica(name: str, stream: int = 1, *, tries_peers: bool = True) -> Replica:
    return Replica(name, 1, f"{name}:1", 0, stream=stream, tries_peers=tries_peers)


def member(name: str) -> Member:
    return Member(name, address=f"{name}:1", store_address=f"{name}:2")


MEMBERS = {name: member(name) for name in "ab"}
LIVING = {name: replica(name) for name in "ab"}


def missed(name: str) -> Unreached:
    return Unreached(name, Via.GROUP, "no answer")


# --- the core ---------------------------------------------------------------------------------------------------------


def test_a_newcomer_is_asked_once_and_is_out_until_it_has_answered() -> None:
    trials = Trials()
    asked = trials.look([replica("n")], MEMBERS, LIVING, 0)
    peers = (PeerAddresses("a", ("a:1", "a:2")), PeerAddresses("b", ("b:1", "b:2")))
    assert asked == [effects.TryPeers(1, 1, peers)]
    assert trials.look([replica("n")], MEMBERS, LIVING, 100) == []
    assert list(trials.running()) == ["n"]
    assert trials.answered("n", 1, [], 200)
    assert not trials.keep_out
    assert trials.look([replica("n")], MEMBERS, LIVING, 60_000) == []


def test_one_that_failed_tries_again_after_1_2_4_and_5_s() -> None:
    trials = Trials()
    now_ms = 0
    trials.look([replica("n")], MEMBERS, LIVING, now_ms)
    for number, pause_ms in enumerate((1_000, 2_000, 4_000, 5_000, 5_000), start=1):
        assert trials.answered("n", number, [missed("b")], now_ms)
        assert trials.failed() == {"n": {"b": "no answer"}}
        assert trials.look([replica("n")], MEMBERS, LIVING, now_ms + pause_ms - 1) == []
        now_ms += pause_ms
        assert [each.number for each in trials.look([replica("n")], MEMBERS, LIVING, now_ms)] == [number + 1]
        assert trials.failed() == {"n": {"b": "no answer"}}  # until it knows better
    trials.answered("n", 6, [], now_ms)
    assert trials.failed() == {}


def test_an_answer_to_another_trial_counts_for_nothing() -> None:
    trials = Trials()
    trials.look([replica("n")], MEMBERS, LIVING, 0)
    assert not trials.answered("n", 7, [], 100)
    assert not trials.answered("a", 1, [], 100)
    trials.look([replica("n", stream=2)], MEMBERS, LIVING, 200)
    assert not trials.answered("n", 1, [], 300)
    assert trials.answered("n", 2, [], 300)


def test_who_was_lost_in_its_trial_begins_another_one() -> None:
    """What it answered came for the session that was lost, and nobody would answer that trial again."""
    trials = Trials()
    trials.look([replica("n")], MEMBERS, LIVING, 0)
    again = replica("n")
    again.session += 1
    assert [each.number for each in trials.look([again], MEMBERS, LIVING, 3_000)] == [2]
    assert trials.answered("n", 2, [], 3_100)
    assert not trials.keep_out


def test_no_answer_is_a_failure() -> None:
    trials = Trials()
    trials.look([replica("n")], MEMBERS, LIVING, 0)
    trials.look([replica("n")], MEMBERS, LIVING, ANSWERED_WITHIN_MS)
    assert set(trials.failed()["n"]) == {"a", "b"}


def test_an_answer_that_comes_after_all_counts() -> None:
    trials = Trials()
    trials.look([replica("n")], MEMBERS, LIVING, 0)
    trials.look([replica("n")], MEMBERS, LIVING, ANSWERED_WITHIN_MS)
    assert trials.answered("n", 1, [], ANSWERED_WITHIN_MS + 100)
    assert not trials.keep_out


def test_who_needs_none() -> None:
    trials = Trials()
    assert trials.look([replica("n", tries_peers=False)], MEMBERS, LIVING, 0) == []  # an older peer
    assert trials.look([replica("n")], {}, LIVING, 0) == []  # the very first quorum
    assert trials.look([replica("a")], MEMBERS, LIVING, 0) == []  # a member
    assert trials.look([replica("n")], MEMBERS, {}, 0) == []  # nobody is left to be tried
    assert not trials.keep_out


def test_who_is_known_not_to_reach_a_member_begins_none_and_what_its_last_one_found_counts() -> None:
    trials = Trials()
    trials.look([replica("n")], MEMBERS, LIVING, 0)
    trials.answered("n", 1, [missed("a")], 100)
    assert trials.look([replica("n")], MEMBERS, LIVING, 10_000, {"n": {"b"}, "b": {"n"}}) == []
    assert list(trials.failed()) == ["n"]
    assert trials.look([replica("n")], MEMBERS, LIVING, 10_000, {"n": {"another newcomer"}}) != []


def test_one_that_passes_ends_what_was_overruled() -> None:
    """A quorum fits with it, perhaps, and those that failed need not be let in."""
    trials = Trials()
    trials.look([replica("n"), replica("o", 2)], MEMBERS, LIVING, 0)
    trials.answered("n", 1, [missed("a")], 100)
    trials.overrule()
    assert trials.failed() == {}
    assert not trials.keep_out
    assert trials.look([replica("n"), replica("o", 2)], MEMBERS, LIVING, 60_000) == []
    trials.answered("o", 2, [], 60_100)
    assert list(trials.failed()) == ["n"]


def test_an_open_trial_of_an_earlier_session_keeps_no_replica_out_that_begins_none() -> None:
    trials = Trials()
    trials.look([replica("n")], MEMBERS, LIVING, 0)
    assert list(trials.running()) == ["n"]
    assert trials.look([replica("n", 9)], MEMBERS, LIVING, 100, {"n": {"b"}, "b": {"n"}}) == []
    assert list(trials.running()) == []


def test_an_overrule_is_ended_for_those_named_and_can_be_made_again() -> None:
    """Where a quorum fits without a newcomer by now, it stays out; where none does, it is in as before."""
    trials = Trials()
    trials.look([replica("n"), replica("o", 2)], MEMBERS, LIVING, 0)
    trials.answered("n", 1, [missed("a")], 100)
    trials.answered("o", 2, [missed("a")], 100)
    trials.overrule()
    assert trials.is_any_overruled
    assert trials.heed(["n", "another"]) == ["n"]
    assert list(trials.failed()) == ["n"]
    trials.overrule_again(["n"])
    assert trials.failed() == {}


def test_of_many_members_a_few_are_tried() -> None:
    many = {f"m{number:02}": member(f"m{number:02}") for number in range(40)}
    living = {name: replica(name) for name in many}
    newcomers = [replica(name, stream) for stream, name in enumerate("xyz", start=1)]
    asked = Trials().look(newcomers, many, living, 0)
    assert [len(each.peers) for each in asked] == [TRIED_MOST] * 3
    assert asked[0].peers != asked[1].peers


def test_a_failure_against_one_that_was_not_asked_for_counts_for_nothing() -> None:
    trials = Trials()
    trials.look([replica("n")], MEMBERS, LIVING, 0)
    trials.answered("n", 1, [missed("z")], 100)
    assert trials.failed() == {}


# --- the wire ---------------------------------------------------------------------------------------------------------


def test_both_messages_come_out_as_they_went_in() -> None:
    asked = effects.TryPeers(0, 3, (PeerAddresses("a", ("h:1", "h:2")), PeerAddresses("b", ())))
    assert codec.decode_from_lighthouse(codec.encode_from_lighthouse(asked)) == asked
    tried = events.PeersTried(4, 3, (missed("a"),))
    assert codec.decode_to_lighthouse(4, codec.encode_to_lighthouse(tried)) == tried
    hello = events.HelloReceived(1, Hello("j", "a", 1, "h:1", tries_peers=True))
    assert codec.decode_to_lighthouse(1, codec.encode_to_lighthouse(hello)) == hello


def test_too_many_peers_or_addresses_are_refused() -> None:
    peers = tuple(PeerAddresses(f"r{number}", ("h:1",)) for number in range(TRIED_MOST + 1))
    with pytest.raises(ProtocolError, match="a trial names 17 peers; at most 16 are allowed"):
        codec.decode_from_lighthouse(codec.encode_from_lighthouse(effects.TryPeers(0, 1, peers)))
    crowded = (PeerAddresses("r", ("h:1",) * 5),)
    with pytest.raises(ProtocolError, match="more than 4 addresses"):
        codec.decode_from_lighthouse(codec.encode_from_lighthouse(effects.TryPeers(0, 1, crowded)))


# --- the dials --------------------------------------------------------------------------------------------------------


def test_who_listens_or_refuses_is_reached_and_who_is_unknown_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listens, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # it does not listen, so its port refuses
        peers = [
            PeerAddresses("a", (f"127.0.0.1:{listens.getsockname()[1]}",)),
            PeerAddresses("b", (f"127.0.0.1:{silent.getsockname()[1]}",)),
            PeerAddresses("c", (f"127.0.0.1:{listens.getsockname()[1]}", "no-such-host.invalid:1")),
            PeerAddresses("d", ("no address",)),
        ]
        found = asyncio.run(try_peers(peers))
    assert [each.replica_id for each in found] == ["c"]
    assert found[0].why.startswith("no-such-host.invalid:1: ")


def test_who_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "DIAL_WITHIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        crowd = []
        for _ in range(8):  # its queue is full then, and more connections get no answer
            other = socket.socket()
            other.setblocking(False)
            other.connect_ex(address)
            crowd.append(other)
        since = time.monotonic()
        found = asyncio.run(try_peers([PeerAddresses("a", (f"127.0.0.1:{address[1]}",))]))
        for other in crowd:
            other.close()
    assert [(each.replica_id, each.via) for each in found] == [("a", Via.GROUP)]
    assert "no answer" in found[0].why
    assert time.monotonic() - since < 10


def slow_names(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> list[str]:
    """Names are looked up so slowly. Returns: which."""
    right = socket.getaddrinfo
    asked: list[str] = []

    def slow(host: str, *rest: Any, **more: Any) -> Any:
        asked.append(host)
        time.sleep(delay_s)
        return right("127.0.0.1", *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    return asked


def test_each_name_is_looked_up_once_and_its_time_is_not_the_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = slow_names(monkeypatch, 0.3)
    monkeypatch.setattr(trial, "DIAL_WITHIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listens:
        port = listens.getsockname()[1]
        peers = [PeerAddresses(f"r{number}", (f"node-1:{port}", f"node-1:{port}")) for number in range(16)]
        assert asyncio.run(try_peers(peers)) == ()
    assert asked == ["node-1"]


def test_a_name_that_takes_long_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_names(monkeypatch, 0.5)
    monkeypatch.setattr(trial, "LOOK_UP_WITHIN_S", 0.1)
    assert asyncio.run(try_peers([PeerAddresses("a", ("node-1:1",))])) == ()


def test_of_several_places_of_a_name_one_that_listens_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, 0)) for place in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    with socket.create_server(("127.0.0.1", 0)) as listens:
        assert asyncio.run(try_peers([PeerAddresses("a", (f"node-1:{listens.getsockname()[1]}",))])) == ()


def test_nobody_to_try_takes_no_time() -> None:
    assert asyncio.run(try_peers([])) == ()
