"""The socket beside the stream to the lighthouse: steady quorums go over it, and it may fail like all else."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import grpc
import psutil
import pytest

from integration_tests.hostile import Beside, damaged, until_heard
from integration_tests.strangers import lighthouse_session
from integration_tests.test_coordination import LATE, PATIENT, Rank
from tft_coord import ManagerServer
from tft_coord.errors import Unreachable
from tft_coord.manager_server import link
from tft_coord.transport import dial, direct
from tft_coord.transport.direct import DirectPort, DirectSocket
from tft_coord.transport.frames import framed
from tft_coord.transport.loop import LoopShare
from tft_coord.wire import codec
from tft_lighthouse import LighthouseServer

Heard: TypeAlias = list[tuple[DirectSocket, list[bytes]]]

STEPS: Final = 20
ATTACKS: Final = 60


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer(bind="127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=20_000) as server:
        yield server


def manager_server(lighthouse: LighthouseServer, name: str) -> ManagerServer:
    """In this process."""
    return ManagerServer(name, lighthouse.address, "127.0.0.1", "127.0.0.1:0", "", 1, timeouts=PATIENT, in_process=True)


@pytest.fixture
def group(lighthouse: LighthouseServer) -> Iterator[Rank]:
    """A rank, and its manager server in this process."""
    server = manager_server(lighthouse, "group")
    rank = Rank(server.address(), 0, PATIENT)
    try:
        yield rank
    finally:
        rank.client.close()
        server.shutdown()


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """Those that somebody hears, and what has come over them: both ends of each."""
    found: Heard = []
    hear = DirectSocket.hear

    def heard(end: DirectSocket, take: Callable[[bytes], None]) -> None:
        came: list[bytes] = []
        found.append((end, came))

        def takes(message: bytes) -> None:
            came.append(message)
            take(message)

        hear(end, takes)

    monkeypatch.setattr(DirectSocket, "hear", heard)
    return found


def trains_until(rank: Rank, holds: Callable[[], bool]) -> None:
    """Steps, until it holds; each of them commits in the quorum of the first."""
    first = rank.ask().key
    rank.vote()
    for _ in range(10_000):
        assert rank.ask().key == first
        rank.vote()
        if holds():
            return
    raise AssertionError("it never held")


def test_steady_quorums_go_over_the_socket(sockets: Heard, group: Rank) -> None:
    trains_until(group, lambda: len(sockets) == 2 and all(came for _, came in sockets))
    before = [len(came) for _, came in sockets]
    for _ in range(STEPS):
        group.ask()
        group.vote()
    assert [len(came) >= count + STEPS for (_, came), count in zip(sockets, before, strict=True)] == [True, True]


@pytest.mark.parametrize("end", [0, 1])
def test_a_socket_that_breaks_takes_its_stream_with_it_and_costs_no_quorum(
    sockets: Heard, group: Rank, end: int
) -> None:
    """The redial comes within the grace, so that nobody is lost; and it has a socket of its own."""
    trains_until(group, lambda: len(sockets) == 2)
    share = LoopShare("this test", at_exit=lambda: None)
    try:

        async def abort() -> None:
            sockets[end][0].abort()

        share.run(abort())
    finally:
        share.give_back()
    trains_until(group, lambda: len(sockets) == 4 and all(came for _, came in sockets))
    assert group.losses.empty()


@pytest.fixture
def dials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What manager servers have dialed."""
    found: list[str] = []

    async def dialed(address: str, *more: Any, **named: Any) -> Any:
        found.append(address)
        return await dial.dial(address, *more, **named)

    monkeypatch.setattr("tft_coord.manager_server.link.dial", dialed)
    return found


def test_the_lighthouse_may_speak_on_the_socket_before_the_manager_server_knows_that_it_has_it(
    sockets: Heard, dials: list[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    connect, heard_late = direct.connect, asyncio.Event()

    async def slowly(*given: Any, **more: Any) -> DirectSocket:
        end = await connect(*given, **more)
        await heard_late.wait()
        return end

    last_came = link._Way.last_came

    def came(way: Any) -> None:
        last_came(way)
        heard_late.set()

    monkeypatch.setattr(direct, "connect", slowly)
    monkeypatch.setattr(link._Way, "last_came", came)
    trains_until(request.getfixturevalue("group"), lambda: len(sockets) == 2 and all(came for _, came in sockets))
    assert len(dials) == 1


def test_a_socket_that_only_the_lighthouse_believes_in_ends_the_stream_and_the_next_has_none(
    sockets: Heard, dials: list[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    connect = direct.connect

    async def in_vain(*given: Any, **more: Any) -> DirectSocket:
        end = await connect(*given, **more)
        end.abort()
        raise Unreachable("too late")

    monkeypatch.setattr(direct, "connect", in_vain)
    rank: Rank = request.getfixturevalue("group")
    trains_until(rank, lambda: len(dials) == 2)
    trains_until(rank, lambda: True)
    assert (len(dials), sockets) == (2, [])
    assert rank.losses.empty()


def test_where_the_port_can_not_be_reached_the_stream_carries_everything(
    sockets: Heard,
    lighthouse: LighthouseServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    caplog.set_level(logging.INFO, logger="tft_coord")
    offer = DirectPort.offer
    # The discard port: nobody answers there.
    monkeypatch.setattr(
        DirectPort,
        "offer",
        lambda *given: (offer(*given)[0], (("tft-direct-port", "9"), ("tft-direct-ticket", "00" * 16))),
    )
    rank: Rank = request.getfixturevalue("group")
    trains_until(rank, lambda: "the stream carries everything" in caplog.text)
    trains_until(rank, lambda: True)
    assert sockets == []
    assert "127.0.0.1:9 can't be reached" in caplog.text


def test_whatever_comes_to_the_port_hurts_nobody(sockets: Heard, lighthouse: LighthouseServer, group: Rank) -> None:
    """Greetings and messages of strangers, damaged in any way, while an honest group trains over its own socket."""
    trains_until(group, lambda: len(sockets) == 2)
    honest = list(sockets)
    rng, told = random.Random(1), Counter[str]()
    numbers = itertools.count()

    def attack() -> None:
        hello, *messages = lighthouse_session(next(numbers))
        with (
            grpc.insecure_channel(lighthouse.address.removeprefix("http://")) as channel,
            Beside(channel, hello) as beside,
        ):
            good = [beside.greeting, *map(framed, messages)]
            greeting, *frames = [damaged(rng, words) if rng.random() < 0.4 else words for words in good]
            heard = beside.talk(greeting, frames)
        told["a greeting"] += bool(heard)
        told.update(type(codec.decode_from_lighthouse(message)).__name__ for message in heard[1:])
        group.ask()
        assert group.vote()

    for _ in range(ATTACKS):
        attack()
    until_heard(attack, {"a greeting": 3, "AnswerQuorum": 20}, told, ATTACKS)
    assert not any(end.ended.done() for end, _ in honest), "the honest group's socket was broken"
    assert group.losses.empty()


def test_an_ended_stream_leaves_no_connection_to_the_garbage_collector(
    lighthouse: LighthouseServer, sockets: Heard
) -> None:
    """Which trainers switch off."""
    port = int(str(lighthouse.address).rsplit(":", 1)[1])
    gc.disable()
    try:
        for number in range(3):
            server = manager_server(lighthouse, f"group {number}")
            rank = Rank(server.address(), 0, PATIENT)
            trains_until(rank, lambda: len(sockets) == 2)
            rank.client.close()
            server.shutdown()
            sockets.clear()
            del server, rank
        deadline = time.monotonic() + LATE.total_seconds()
        while left := [
            each for each in psutil.Process().net_connections("tcp") if each.raddr and each.raddr.port == port
        ]:
            assert time.monotonic() < deadline, left
            time.sleep(0.01)
    finally:
        gc.enable()
