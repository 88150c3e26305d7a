"""What a `configure` that belongs to a quorum says of those that it can't reach, and how soon.

One rank is real. The others are addresses in the store: of a port that nobody listens at, of one that answers, and of
one whose connections are swallowed, because its backlog is full.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore, Store, TCPStore

from tft_pg import (
    ConfigureError,
    PeerDisconnectedError,
    ProcessGroup,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    StoreUnreachableError,
    sockets,
)
from tft_pg.backends import examination
from tft_pg.backends.attempt import EXAMINED_AFTER_S, Attempt
from tft_pg.backends.examination import give_up
from tft_pg.backends.gloo import _Published
from tft_pg.backends.patience import SHORTEST_S, Patience, Phase
from tft_pg.calls import ProbeAddress, call_all
from tft_pg.errors import Where
from tft_pg.sockets import Endpoint
from tft_pg.store import parse_store_addr
from tft_pg.testing import Bench, FakeAccelerator

GUARD = timedelta(seconds=20)
_HOLE = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0), backlog=0)
fillers = [socket.socket() for _ in range(4)]
for filler in fillers:
    filler.setblocking(False)
    filler.connect_ex(listener.getsockname())
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""
_STRANGERS = """
import socket, sys
connections = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:]]
for connection in connections:
    connection.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
sys.stdin.read()
"""
_STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def serving(program: str) -> Iterator[tuple[int, int]]:
    """A process that prints a port. Gives: the port, and its pid."""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process.pid
        finally:
            process.kill()


@pytest.fixture
def hole() -> Iterator[int]:
    with serving(_HOLE) as (port, _):
        yield port


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield unused.getsockname()[1]


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench(ProcessGroupGloo, timeout=GUARD) as bench:
        yield bench


def under(store_addr: str) -> Store:
    address = parse_store_addr(store_addr)
    return PrefixStore(
        address.prefix, TCPStore(address.host, address.port, is_master=False, wait_for_workers=False, timeout=GUARD)
    )


def publish(store: Store, ports: Mapping[int, int]) -> None:
    """Put addresses into the store as Gloo does: rank 0's own record, with another port."""
    record = bytes(store.get("0/0"))
    (name_bytes,) = struct.unpack_from("=Q", record, 0)
    for rank, port in ports.items():
        other = bytearray(record)
        struct.pack_into("!H", other, 16 + name_bytes + 2, port)
        store.set(f"0/{rank}", bytes(other))


def configure(
    bench: Bench, group: ProcessGroup, ports: Mapping[int, int], *, gave_up: int | None = None
) -> ConfigureError:
    """Configure rank 0 with others at these ports. Returns: the error."""
    store_addr = bench.fresh_address()
    store = under(store_addr)
    finish = bench.start(lambda: group.configure(store_addr, 0, len(ports) + 1, quorum_id=7))
    if gave_up is not None:
        give_up(store, gave_up)
    publish(store, ports)
    error = finish().error
    assert isinstance(error, ConfigureError), error
    return error


def bound_s(group: ProcessGroup, phase: Phase) -> float:
    patience: Patience = group._patience  # type: ignore[attr-defined]
    return patience.bound_s(phase, 60.0)


# --- connections ---------------------------------------------------------------------------------------------------


def test_a_peer_that_refuses_is_named_at_once(bench: Bench, closed_port: int) -> None:
    group = bench.make()
    error = configure(bench, group, {1: closed_port})
    assert error.unreached == {1: f"127.0.0.1 port {closed_port}: connection refused"}
    assert error.missing_ranks == ()
    assert f"rank 1 can't be reached (127.0.0.1 port {closed_port}: connection refused)" in str(error)
    assert bound_s(group, Phase.CONNECTIONS) == SHORTEST_S[Phase.CONNECTIONS]  # no time-out has passed


def test_a_peer_that_does_not_answer_is_named_and_one_that_does_is_not(bench: Bench, hole: int) -> None:
    group = bench.make()
    with socket.create_server(("127.0.0.1", 0)) as answers:
        error = configure(bench, group, {1: hole, 2: answers.getsockname()[1]})
    assert list(error.unreached) == [1]
    assert "no answer to a connection within" in error.unreached[1]
    assert bound_s(group, Phase.CONNECTIONS) == 2 * SHORTEST_S[Phase.CONNECTIONS]


def test_a_rank_that_gave_up_is_not_named(bench: Bench, closed_port: int) -> None:
    error = configure(bench, bench.make(), {1: closed_port}, gave_up=1)
    assert error.unreached == {}
    assert "rank 1 gave up" in str(error)


def test_a_late_rank_learns_that_the_others_gave_up(bench: Bench) -> None:
    groups = [bench.make(), bench.make()]
    store_addr = bench.fresh_address()
    with pytest.raises(ConfigureError, match="timed out waiting for rank 1 to join"):
        groups[0].configure(store_addr, 0, 2, timeout=timedelta(seconds=0.2))
    with pytest.raises(ConfigureError, match="rank 0 gave up") as late:
        groups[1].configure(store_addr, 1, 2, quorum_id=7)
    assert late.value.unreached == {}


def test_an_error_that_somebody_keeps_keeps_no_listener(bench: Bench) -> None:
    group = bench.make()
    store_addr = bench.fresh_address()
    gc.disable()
    try:
        with pytest.raises(ConfigureError, match="timed out waiting for rank 1 to join") as kept:
            group.configure(store_addr, 0, 2, timeout=timedelta(seconds=0.2))
        place = gloo_record(under(store_addr))
        refuses = call_all({0: place}, until_s=time.monotonic() + 5.0, goes_on=lambda: True)
        assert refuses == {0: "connection refused"}
        assert kept.value.missing_ranks == (1,)
    finally:
        gc.enable()


def test_a_late_success_is_none_when_a_peer_gave_up(bench: Bench) -> None:
    """Its listener may have taken the connection a moment before it let go of it."""
    groups = [bench.make(), bench.make()]
    store_addr = bench.fresh_address()
    first = bench.start(lambda: groups[0].configure(store_addr, 0, 2, quorum_id=7))
    store = under(store_addr)
    gloo_record(store)
    give_up(store, 1)
    threading.Event().wait(2 * EXAMINED_AFTER_S)
    second = bench.start(lambda: groups[1].configure(store_addr, 1, 2, quorum_id=7))
    error = first().error
    second()  # where that took long too, it has found that the first gave up
    assert isinstance(error, ConfigureError)
    assert "rank 1 gave up" in str(error)


def test_a_call_that_says_nothing_does_not_end_the_group(bench: Bench) -> None:
    """A rank is called by peers that look whether it answers, while its group is being built."""
    groups = [bench.make(), bench.make()]
    store_addr = bench.fresh_address()
    first = bench.start(lambda: groups[0].configure(store_addr, 0, 2, quorum_id=7))
    record = gloo_record(under(store_addr))
    assert call_all({0: record}, until_s=10**9, goes_on=lambda: True) == {}
    groups[1].configure(store_addr, 1, 2, quorum_id=7)
    first().get()
    over = threading.Event()
    assert not over.wait(0.5)  # the watch looks every 0.25 s
    bench.all(groups, lambda _, group: group.allreduce([torch.ones(3)]).wait())
    assert [group.errored() for group in groups] == [None, None]


@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_stranger_that_says_more_than_a_member_does_is_not_taken_for_one(bench: Bench, *, hangs_up: bool) -> None:
    """One that sends so much while a group is being built looks as a member does, until it has ended."""
    groups = [bench.make() for _ in range(3)]
    store_addr = bench.fresh_address()
    finish = [
        bench.start(partial(groups[rank].configure, store_addr, rank, 3, timeout=GUARD, quorum_id=7)) for rank in (0, 1)
    ]
    store = under(store_addr)
    places = [gloo_record(store, rank) for rank in (0, 1)]
    ports = [str(place.sockaddr[1]) for place in places]
    # In this process their own ends would be taken for connections between its groups.
    with subprocess.Popen([sys.executable, "-c", _STRANGERS, *ports], stdin=subprocess.PIPE) as strangers:
        for place in places:
            local = {Endpoint.of(place.sockaddr)}
            while not any(passed.received >= 18 for passed in sockets.traffic(sockets.connected(local=local)).values()):
                threading.Event().wait(0.005)
        groups[2].configure(store_addr, 2, 3, timeout=GUARD, quorum_id=7)
        for each in finish:
            each().get()
        if hangs_up:
            strangers.kill()
            assert not threading.Event().wait(1.0)  # the watch looks every 0.25 s, and for as long at what has ended
        bench.all(groups, lambda _, group: group.allreduce([torch.ones(3)]).wait())
        assert [group.errored() for group in groups] == [None] * 3
        works = [groups[rank].recv([torch.ones(3)], 1 - rank, 0) for rank in (0, 1)]
        groups[2].abort()
        for work in works:
            with pytest.raises(PeerDisconnectedError):
                work.wait()
        strangers.kill()


def gloo_record(store: Store, rank: int = 0) -> ProbeAddress:
    return _Published.read(bytes(store.get(f"0/{rank}"))).place


def test_without_a_quorum_or_with_a_time_out_the_bounds_do_not_count(bench: Bench) -> None:
    group = bench.make()
    for more in ({}, {"quorum_id": 7}):
        with pytest.raises(ConfigureError, match=r"within 0\.3 s .*waiting for rank 1 to join"):
            group.configure(bench.fresh_address(), 0, 2, timeout=timedelta(seconds=0.3), **more)  # type: ignore[arg-type]
    assert bound_s(group, Phase.RANKS) == SHORTEST_S[Phase.RANKS]


def test_ranks_that_do_not_come_cost_seconds_and_the_next_time_more(bench: Bench) -> None:
    group = bench.make()
    with pytest.raises(
        ConfigureError, match=r"2\.5 s \(rank 0 of 3, quorum 7\): timed out waiting for ranks 1, 2"
    ) as e:
        group.configure(bench.fresh_address(), 0, 3, quorum_id=7)
    assert e.value.missing_ranks == (1, 2)
    assert bound_s(group, Phase.RANKS) == 5.0
    group.configure(bench.fresh_address(), 0, 1, quorum_id=8)
    assert bound_s(group, Phase.RANKS) == 5.0  # the slow ranks may come back
    store_addr = bench.fresh_address()
    members = [group, bench.make(), bench.make()]
    bench.all(members, lambda rank, member: member.configure(store_addr, rank, 3, quorum_id=9))
    assert bound_s(group, Phase.RANKS) == 2.5


# --- the store -----------------------------------------------------------------------------------------------------


def store_error(group: ProcessGroup, store_addr: str) -> StoreUnreachableError:
    with pytest.raises(StoreUnreachableError) as caught:
        group.configure(store_addr, 0, 2, quorum_id=7)
    assert f"{caught.value.host}:{caught.value.port}" == store_addr.partition("/")[0]
    assert caught.value.why in str(caught.value)
    return caught.value


def test_a_store_that_refuses_is_an_error_at_once(bench: Bench, closed_port: int) -> None:
    group = bench.make()
    assert store_error(group, f"127.0.0.1:{closed_port}/a").why == "connection refused"
    assert bound_s(group, Phase.STORE) == SHORTEST_S[Phase.STORE]


def test_a_store_that_swallows_connections_costs_seconds(bench: Bench, hole: int) -> None:
    group = bench.make()
    assert store_error(group, f"127.0.0.1:{hole}/a").why == "no answer to a connection"
    assert bound_s(group, Phase.STORE) == 2 * SHORTEST_S[Phase.STORE]


@pytest.mark.in_parts
def test_a_stopped_store_costs_seconds_whether_it_is_new_or_known(bench: Bench) -> None:
    group = bench.make()
    with serving(_STORE) as (port, pid):
        group.configure(f"127.0.0.1:{port}/a", 0, 1, quorum_id=7)
        os.kill(pid, signal.SIGSTOP)
        assert (
            "does not answer any more; check whether its process is stopped"
            in store_error(group, f"127.0.0.1:{port}/b").why
        )
        assert "accepts connections but does not answer" in store_error(group, f"127.0.0.1:{port}/c").why


def test_a_store_whose_name_nobody_knows(bench: Bench) -> None:
    assert "its name store.invalid can't be resolved" in store_error(bench.make(), "store.invalid:1234/a").why


def test_a_resolver_that_does_not_answer_costs_seconds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    look_up = socket.getaddrinfo

    def hang(host: object, *args: object, **more: object) -> object:
        if host == "store.invalid" and not more.get("flags"):
            over.wait(GUARD.total_seconds())
        return look_up(host, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        assert "was not resolved in time" in store_error(bench.make(), "store.invalid:1234/a").why
    finally:
        over.set()


def test_a_stopped_store_holds_no_attempt_up_by_the_question_of_its_examiner() -> None:
    severed, harmed = threading.Event(), threading.Event()
    asked = threading.Event()
    examiners: list[threading.Thread] = []

    def ask() -> None:
        examiners.append(threading.current_thread())
        asked.set()
        severed.wait(GUARD.total_seconds())

    with Attempt(Where(0, 2), GUARD, Patience()) as attempt:
        attempt.break_with(severed.set, severs_store=True)
        attempt.break_with(harmed.set)
        attempt.enter(Phase.CONNECTIONS, examine=ask)
        assert asked.wait(GUARD.total_seconds())
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 5.0
    assert severed.is_set()
    assert not examiners[0].is_alive()
    assert not harmed.is_set()  # what was built stays


@pytest.mark.in_parts
def test_a_store_that_stops_while_a_late_group_asks_it_costs_seconds(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(_STORE) as (port, pid):
        groups = [bench.make(), bench.make()]
        first = bench.start(lambda: groups[0].configure(f"127.0.0.1:{port}/a", 0, 2, quorum_id=7))
        gloo_record(under(f"127.0.0.1:{port}/a"))
        look = examination._marked

        def stop_and_look(store: Store, ranks: Collection[int]) -> frozenset[int]:
            os.kill(pid, signal.SIGSTOP)
            while ") T " not in Path(f"/proc/{pid}/stat").read_text():  # it may answer a moment longer
                threading.Event().wait(0.001)
            return look(store, ranks)

        monkeypatch.setattr(examination, "_marked", stop_and_look)
        threading.Event().wait(2 * EXAMINED_AFTER_S)
        second = bench.start(lambda: groups[1].configure(f"127.0.0.1:{port}/a", 1, 2, quorum_id=7))
        error = first().error
        second()  # where that took long too, it has asked as well
        assert isinstance(error, StoreUnreachableError)
        assert "check whether its process is stopped" in error.why


# --- devices -------------------------------------------------------------------------------------------------------


def test_a_group_over_devices_names_who_did_not_come() -> None:
    with Bench(lambda: ProcessGroupNCCL(backend=FakeAccelerator()), timeout=GUARD) as bench:
        with pytest.raises(ConfigureError, match="timed out waiting for rank 1 to join") as caught:
            bench.make().configure(bench.fresh_address(), 0, 2, quorum_id=7)
        assert caught.value.missing_ranks == (1,)


# --- calls ---------------------------------------------------------------------------------------------------------


def test_calls_tell_who_refuses_who_is_silent_and_who_answers(hole: int, closed_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as answers:
        ports = {"refuses": closed_port, "silent": hole, "answers": answers.getsockname()[1]}
        places = {name: ProbeAddress(socket.AF_INET, ("127.0.0.1", port)) for name, port in ports.items()}
        places["nowhere"] = ProbeAddress(socket.AF_INET, ("no address", 1))
        found = call_all(places, until_s=time.monotonic() + 1.0, goes_on=lambda: True)
    assert set(found) == {"refuses", "silent", "nowhere"}
    assert found["refuses"] == "connection refused"
    assert found["silent"].startswith("no answer to a connection within")


def test_calls_end_when_nobody_wants_to_know(hole: int) -> None:
    place = ProbeAddress(socket.AF_INET, ("127.0.0.1", hole))
    assert call_all({0: place}, until_s=10**9, goes_on=iter([True, True, False, False]).__next__) == {}
