"""A manager server and its ranks, without a lighthouse: votes, deadlines, sessions, and the life of its process."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil
import pytest

from tft_coord import (
    TLS,
    ConfigError,
    CoordinationClosedError,
    CoordinationError,
    ManagerClient,
    ManagerServer,
    ProtocolError,
    Purpose,
    QuorumKey,
    RankRequest,
    RefusedError,
    ReplicaGroupLostError,
    RequestTimeoutError,
    StaleQuorumError,
    Timeouts,
    UnreachableError,
    errors,
)
from tft_coord.client import rank_session
from tft_coord.core.types import KillOrder, Verdict, WaitsFor
from tft_coord.notifications import Notification
from tft_coord.wire import rank_codec, services

NOBODY = "127.0.0.1:9"  # the discard port: no lighthouse answers there
SOON = timedelta(milliseconds=300)
LATE = timedelta(seconds=20)
QUICK = Timeouts(heartbeat_timeout_ms=1_000, beat_interval_ms=100, reconnect_grace_ms=100)
KEY = QuorumKey(7, 1)

T = TypeVar("T")


def serve(
    world_size: int = 1,
    *,
    in_process: bool = True,
    token: str | None = None,
    timeouts: Timeouts = QUICK,
    wait: bool = True,
) -> ManagerServer:
    return ManagerServer(
        "group:1",
        NOBODY,
        "127.0.0.1",
        "127.0.0.1:0",
        "127.0.0.1:1",
        world_size,
        timeouts=timeouts,
        token=token,
        in_process=in_process,
        wait=wait,
    )


@pytest.fixture(params=[True, False], ids=["in_process", "child"])
def server(request: pytest.FixtureRequest) -> Iterator[ManagerServer]:
    with serve(world_size=2, in_process=request.param) as server:
        yield server


def together(*calls: Callable[[], T]) -> list[T | Exception]:
    """Run the calls at once, each on a thread; their results or errors in order."""
    results: list[T | Exception] = [RuntimeError("it did not end")] * len(calls)

    def run(index: int, call: Callable[[], T]) -> None:
        try:
            results[index] = call()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def client_of(
    server: ManagerServer, rank: int | None = None, token: str | None = None, **settings: Any
) -> ManagerClient:
    return ManagerClient(server.address(), LATE, group_rank=rank, token=token, timeouts=QUICK, **settings)


def kill_child_of(server: ManagerServer) -> None:
    process = server._server._process  # type: ignore[union-attr]
    process.kill()
    process.wait(10)


@pytest.mark.parametrize("with_session", [True, False], ids=["on the stream", "unary"])
def test_a_vote_is_yes_when_both_ranks_say_so_and_its_verdict_is_final(
    server: ManagerServer, with_session: bool
) -> None:
    ranks = (0, 1) if with_session else (None, None)
    with client_of(server, ranks[0]) as zero, client_of(server, ranks[1]) as one:
        votes = [
            lambda: zero.should_commit(0, 3, True, LATE, key=KEY),
            lambda: one.should_commit(1, 3, True, LATE, key=KEY),
        ]
        assert together(*votes) == [True, True]
        # An answer that was lost is asked for again, and a change of mind comes too late.
        assert zero.should_commit(0, 3, True, LATE, key=KEY) is True
        assert one.should_commit(1, 3, False, LATE, key=KEY) is True
        # The next round is another; one no decides it.
        assert one.should_commit(1, 4, False, LATE, key=KEY) is False
        assert zero.should_commit(0, 4, True, LATE, key=KEY) is False
        # What a healing agrees on are rounds of their own.
        for purpose in (Purpose.STAGED, Purpose.WITHOUT_OWN, Purpose.MATCHED):
            ask = partial(zero.should_commit, 0, 4, True, LATE, key=KEY, purpose=purpose)
            ask_too = partial(one.should_commit, 1, 4, True, LATE, key=KEY, purpose=purpose)
            assert together(ask, ask_too) == [True, True]


def test_a_vote_that_nobody_joins_is_sealed_as_no_before_its_deadline(server: ManagerServer) -> None:
    with client_of(server, 0) as zero, client_of(server, 1) as one:
        assert zero.should_commit(0, 3, True, SOON, key=KEY) is False
        # The one who comes late gets the same verdict, and the next round is not poisoned.
        assert one.should_commit(1, 3, True, LATE, key=KEY) is False
        votes = [
            lambda: zero.should_commit(0, 4, True, LATE, key=KEY),
            lambda: one.should_commit(1, 4, True, LATE, key=KEY),
        ]
        assert together(*votes) == [True, True]


def test_torchfts_votes_without_a_key(server: ManagerServer) -> None:
    with client_of(server) as zero, client_of(server) as one:
        for verdict in (True, False, True):
            votes = [partial(zero.should_commit, 0, 1, True, LATE), partial(one.should_commit, 1, 1, verdict, LATE)]
            assert together(*votes) == [verdict, verdict]


@pytest.mark.parametrize("with_session", [True, False], ids=["on the stream", "unary"])
def test_a_quorum_that_does_not_come_says_who_was_waited_for(with_session: bool) -> None:
    with serve(world_size=2) as server, client_of(server, 0 if with_session else None) as zero:
        with pytest.raises(RequestTimeoutError, match="rank 1 of the group has not asked") as caught:
            zero.quorum(0, RankRequest(step=5), SOON)
        assert "rank 0's quorum for step 5" in str(caught.value)
        assert isinstance(caught.value, TimeoutError)
    with serve(world_size=1) as server, client_of(server, 0 if with_session else None) as zero:
        with pytest.raises(RequestTimeoutError, match=r"the lighthouse at 127\.0\.0\.1:9") as caught:
            zero.quorum(0, RankRequest(step=5), SOON)
        assert "has not answered" in str(caught.value)


def test_a_lighthouse_that_is_not_there_is_said_within_seconds(caplog: pytest.LogCaptureFixture) -> None:
    said = threading.Event()

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.WARNING:
                said.set()

    listener = Said()
    logging.getLogger("tft_coord").addHandler(listener)
    try:
        with serve(in_process=True):
            assert said.wait(10)
    finally:
        logging.getLogger("tft_coord").removeHandler(listener)
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "the lighthouse at 127.0.0.1:9 can't be reached" in record.getMessage()
    assert "retrying" in record.getMessage()


def test_each_wait_of_a_rank_is_told_why_the_lighthouse_is_not_reached() -> None:
    """It was told once, at the first wait; of a later one its log said that nobody had said for whom it waits."""
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen(news: Notification) -> None:
        if isinstance(news, WaitsFor):
            told.put(news.sentence)

    with serve(world_size=1) as server, client_of(server, 0, listener=listen):
        for _ in range(2):
            assert "the lighthouse at 127.0.0.1:9 can't be reached: no server listens there" in told.get(timeout=20)


def test_a_rank_that_asks_again_makes_its_older_request_void() -> None:
    asked = threading.Event()
    with serve(world_size=2) as server, client_of(server, 0) as first, client_of(server) as second:

        def older() -> object:
            asked.set()
            return first.quorum(0, RankRequest(step=1, checkpoint_metadata="older"), LATE)

        def newer() -> object:
            asked.wait(10)
            while second_sees() != "older":
                pass
            return first.quorum(0, RankRequest(step=2), SOON)

        def second_sees() -> str:
            try:
                return second.checkpoint_metadata(0, LATE)
            except ProtocolError:
                return ""

        results = together(older, newer)
    assert isinstance(results[0], StaleQuorumError)
    assert isinstance(results[1], RequestTimeoutError)


def test_a_rank_with_a_session_is_asked_for_by_nobody_else() -> None:
    with serve(world_size=1) as server, client_of(server, 0), client_of(server) as other:
        with pytest.raises(RefusedError, match=r"rank 0 of replica \S+ has a session, and only that session may ask"):
            other.quorum(0, RankRequest(step=0, checkpoint_metadata="http://elsewhere:1"), LATE)
        with pytest.raises(RefusedError, match=r"rank 0 of replica \S+ has a session"):
            other.should_commit(0, 0, True, LATE)


def test_checkpoint_metadata_is_what_the_rank_said_last(server: ManagerServer) -> None:
    with client_of(server, 0) as zero:
        with pytest.raises(ProtocolError, match="rank not found: rank 0"):
            zero.checkpoint_metadata(0, LATE)
        with pytest.raises(RequestTimeoutError):
            zero.quorum(0, RankRequest(step=1, checkpoint_metadata="http://here:1"), SOON)
        assert zero.checkpoint_metadata(0, LATE) == "http://here:1"
        assert zero._checkpoint_metadata(0, LATE) == "http://here:1"


def test_the_loss_of_a_rank_ends_the_group_at_once(server: ManagerServer) -> None:
    waits = threading.Event()
    with client_of(server, 0) as zero:
        one = client_of(server, 1)

        def vote() -> bool:
            waits.set()
            return zero.should_commit(0, 1, True, LATE, key=KEY)

        def leave() -> bool:
            waits.wait(10)
            one.close()
            return True

        assert together(vote, leave) == [False, True]
        with pytest.raises(ReplicaGroupLostError, match=r"lost a rank .*end this process and start the group again"):
            zero.quorum(0, RankRequest(step=1), LATE)


def test_a_rank_that_the_group_does_not_have_is_told_so(server: ManagerServer) -> None:
    with pytest.raises(ProtocolError, match="world size 2 and no rank 2"):
        client_of(server, 2)
    with client_of(server) as client:
        with pytest.raises(ProtocolError, match="which has world size 2"):
            client.quorum(2, RankRequest(step=1), LATE)
        with pytest.raises(ProtocolError, match="which has world size 2"):
            client.should_commit(2, 1, True, LATE, key=KEY)


def test_a_listener_that_raises_does_not_end_its_ranks_stream(caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()

    def listener(_: object) -> None:
        told.set()
        raise RuntimeError("the listener's own fault")

    with (
        serve(world_size=2) as server,
        ManagerClient(server.address(), LATE, group_rank=0, timeouts=QUICK, listener=listener) as zero,
    ):
        with grpc.insecure_channel(server.address().removeprefix("http://")) as channel:
            # Rank 1 comes, and goes without a goodbye.
            hello = rank_codec.encode_from_rank(rank_codec.RankHello(1, 1))
            assert len(list(services.stream_stub(channel, services.MANAGER_SESSION)(iter([hello])))) == 1
        assert told.wait(10)
        with pytest.raises(ReplicaGroupLostError, match="lost a rank"):
            zero.quorum(0, RankRequest(step=1), LATE)
    assert "the listener raised an error for: replica group:1 lost a rank" in caplog.text


def test_a_stream_that_broke_leaves_nothing_to_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """grpc's thread and its descriptors live for as long as a channel does."""
    channels: list[weakref.ref[grpc.aio.Channel]] = []
    dials, again = itertools.count(), threading.Event()

    async def dial(address: str, timeouts: Timeouts, tls: TLS | None) -> grpc.aio.Channel:
        if next(dials) > 0:
            again.set()
        channel = await right_dial(address, timeouts, tls)
        channels.append(weakref.ref(channel))
        return channel

    right_dial = rank_session.dial
    monkeypatch.setattr(rank_session, "dial", dial)
    with serve(in_process=False) as server, client_of(server, 0):
        gc.collect()
        gc.disable()
        try:
            kill_child_of(server)
            assert again.wait(10)
            assert [channel() for channel in channels] == [None]
        finally:
            gc.enable()


def test_two_processes_with_one_rank_are_refused_by_name(server: ManagerServer) -> None:
    with client_of(server, 1) as one:
        with pytest.raises(
            RefusedError, match=r"rank 1 of replica group:1 is already running \(session \d+\); .* its own RANK"
        ):
            client_of(server, 1)
        # The one that was there first goes on.
        assert one.should_commit(1, 1, False, LATE, key=KEY) is False


def test_a_second_hello_on_one_stream_ends_it() -> None:
    with serve() as server, grpc.insecure_channel(server.address().removeprefix("http://")) as channel:
        hello = rank_codec.encode_from_rank(rank_codec.RankHello(0, 1))
        answers = [
            rank_codec.decode_to_rank(each)
            for each in services.stream_stub(channel, services.MANAGER_SESSION)(iter([hello, hello]))
        ]
        assert answers[0] == rank_codec.RankWelcome(1)
        refusal = answers[1]
        assert isinstance(refusal, rank_codec.RankRefused)
        assert "a second hello arrived on a rank's stream" in refusal.message


def test_calls_under_way_end_when_their_client_is_closed() -> None:
    with serve(world_size=2) as server:
        for rank in (None, 0):
            client = client_of(server, rank)
            waits = threading.Event()

            def ask(client: ManagerClient = client, waits: threading.Event = waits) -> object:
                waits.set()
                return client.quorum(0, RankRequest(step=1), LATE)

            def close(client: ManagerClient = client, waits: threading.Event = waits) -> object:
                waits.wait(10)
                client.close()
                return None

            result = together(ask, close)[0]
            assert isinstance(result, CoordinationClosedError)
            with pytest.raises(CoordinationClosedError, match="make a new one"):
                client.quorum(0, RankRequest(step=1), LATE)
            client.close()


def test_a_server_with_a_secret_answers_nobody_without_it() -> None:
    with serve(token="s3cret") as server:
        with client_of(server) as stranger, pytest.raises(RefusedError, match="shared secret"):
            stranger.should_commit(0, 1, True, LATE, key=KEY)
        with pytest.raises(RefusedError, match="shared secret"):
            client_of(server, 0, token="other")
        with client_of(server, 0, token="s3cret") as client:
            assert client.should_commit(0, 1, True, LATE, key=KEY) is True


def test_a_call_without_a_deadline_and_nonsense_are_refused_with_a_sentence() -> None:
    with serve() as server:
        channel = grpc.insecure_channel(server.address().removeprefix("http://"))
        vote = rank_codec.encode_vote(rank_codec.Vote(0, 1, True, None, Purpose.COMMIT))
        with pytest.raises(grpc.RpcError) as caught:
            services.unary_stub(channel, services.MANAGER_SHOULD_COMMIT)(vote)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "missing timeout" in (caught.value.details() or "")
        with pytest.raises(grpc.RpcError) as caught:
            services.unary_stub(channel, services.MANAGER_QUORUM)(b"\xff\xff", timeout=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            services.unary_stub(channel, services.MANAGER_KILL)(b"\xff\xff", timeout=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        channel.close()


def test_a_kill_reaches_every_rank_and_says_who_asked(server: ManagerServer) -> None:
    told: queue.Queue[tuple[int, object]] = queue.Queue()
    with (
        ManagerClient(server.address(), LATE, group_rank=0, timeouts=QUICK, listener=lambda news: told.put((0, news))),
        ManagerClient(server.address(), LATE, group_rank=1, timeouts=QUICK, listener=lambda news: told.put((1, news))),
        client_of(server) as operator,
    ):
        operator.kill("it is wedged", LATE)
        heard = dict(told.get(timeout=20) for _ in range(2))
    for rank in (0, 1):
        order = heard[rank]
        assert isinstance(order, KillOrder)
        assert order.message.startswith("it is wedged (requested by 127.0.0.1:")


def test_each_line_of_the_child_names_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        ManagerServer(
            "group:1", NOBODY, "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 1, timeouts=QUICK, job="50 %s"
        ) as server,
        client_of(server) as operator,
    ):
        operator.kill("it is wedged", LATE)
    lines = [line for line in capfd.readouterr().err.splitlines() if "kill request" in line]
    assert len(lines) == 1
    assert ": job 50 %s: replica group:1 received a kill request: it is wedged" in lines[0]


def test_a_rank_that_wishes_to_leave_takes_the_group_with_it(server: ManagerServer) -> None:
    with client_of(server, 0) as zero, client_of(server, 1) as one:
        votes = [
            partial(zero.vote, 0, 3, True, LATE, key=KEY, leaving=True),
            partial(one.vote, 1, 3, True, LATE, key=KEY),
        ]
        assert together(*votes) == [Verdict(yes=True, leaves=True)] * 2
        zero.leave(0, "it is preempted", 1_000, LATE)
        one.leave(1, "it is preempted", 1_000, LATE)
        with pytest.raises(RefusedError, match=r"has left the job \(it is preempted\)") as refused:
            one.quorum(1, RankRequest(4), LATE)
        assert refused.value.code == "left"
        with client_of(server) as stranger, pytest.raises(errors.CoordinationError, match="has no session"):
            stranger.leave(0, "", 0, SOON)


def test_a_manager_server_that_died_is_unreachable_within_the_heartbeat_timeout() -> None:
    with serve(in_process=False) as server, client_of(server, 0) as zero:
        kill_child_of(server)
        with pytest.raises(UnreachableError, match="the manager server has ended"):
            zero.quorum(0, RankRequest(step=1), LATE)


def test_a_manager_server_that_ended_is_known_to_have_ended(server: ManagerServer) -> None:
    alarms: list[object] = []
    with (
        client_of(server, 0) as zero,
        client_of(server) as unary,
        ManagerClient(server.address(), LATE, group_rank=1, timeouts=QUICK, listener=alarms.append) as one,
    ):
        waits = threading.Event()

        def ask(client: ManagerClient) -> object:
            waits.set()
            return client.quorum(0, RankRequest(step=1), LATE)

        def end() -> object:
            waits.wait(10)
            server.shutdown()
            return None

        results = together(lambda: ask(zero), end)
        # It said goodbye where it could; a call that found it gone says so.
        assert isinstance(results[0], (ReplicaGroupLostError, UnreachableError))
        with pytest.raises(UnreachableError, match=r"127\.0\.0\.1"):
            unary.quorum(0, RankRequest(step=1), LATE)
        # Another rank that asks after that learns it at once: there is nobody left to wait for.
        with pytest.raises(ReplicaGroupLostError, match=r"lost a rank \(.*shut down\); end this process"):
            one.should_commit(1, 1, True, LATE, key=KEY)
    assert alarms == []


def test_nobody_answers_within_connect_timeout() -> None:
    with pytest.raises(
        UnreachableError, match=r"can't be reached within 0\.2 s \(connect_timeout\): no server listens there"
    ):
        ManagerClient(NOBODY, timedelta(seconds=0.2))


def test_a_rank_that_does_not_reach_its_server_says_what_it_saw_last() -> None:
    says = r"was not accepted within 0\.5 s \(the name no\.such\.host\.invalid is unknown \(.*\)\); check the address"
    with pytest.raises(UnreachableError, match=says):
        ManagerClient("no.such.host.invalid:1", timedelta(seconds=0.5), group_rank=0, connect_now=False)


def test_a_start_ends_in_time_even_where_a_dial_loses_its_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dial(*_: object) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3_600)
        await asyncio.sleep(3_600)

    monkeypatch.setattr("tft_coord.client.rank_session.dial", dial)
    with pytest.raises(UnreachableError, match=r"was not accepted within 0\.5 s"):
        ManagerClient(NOBODY, timedelta(seconds=0.5), group_rank=0, connect_now=False)


@pytest.mark.parametrize("group_rank", [None, 0])
def test_what_a_server_refuses_is_said_once_without_grpcs_own_text(group_rank: int | None) -> None:
    with serve(token="the-right-one") as server, pytest.raises(RefusedError, match="shared secret") as raised:
        ManagerClient(server.address(), LATE, group_rank=group_rank, token="a-wrong-one").checkpoint_metadata(0, LATE)
    text = "".join(traceback.format_exception(raised.value))
    assert text.count("shared secret") == 1
    assert "RpcError" not in text


# --- settings and the process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_process", [True, False])
def test_an_address_that_cannot_be_bound_is_said_in_one_sentence(in_process: bool) -> None:
    with serve() as other:
        taken = other.address().removeprefix("http://")
        with pytest.raises(ConfigError, match=f"replica a can't listen at {taken}"):
            ManagerServer("a", NOBODY, "127.0.0.1", taken, "", 1, in_process=in_process)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"replica_id": ""}, "replica_id is ''"),
        ({"replica_id": "x" * 257}, "replica_id is"),
        ({"lighthouse_addr": "nowhere"}, "'nowhere' is not an address"),
        ({"hostname": "x y"}, "hostname is 'x y'; give a host's name or address without a port"),
        ({"hostname": "node-1:29510"}, "hostname is 'node-1:29510'"),
        ({"world_size": 0}, "world_size is 0"),
        ({"job": ""}, "job is ''"),
        ({"quorum_retries": -1}, "quorum_retries is -1"),
        ({"connect_timeout": timedelta(0)}, "above zero"),
        ({"token": "two words"}, "shared secret"),
        (
            {"hostname": "node-1"},
            "hostname is 'node-1' and no shared secret is set, so the server accepts only",
        ),
        ({"bind": "192.0.2.1:0"}, "bind is '192.0.2.1:0' and no shared secret is set; to serve other machines set TFT"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(change: dict[str, object], says: str) -> None:
    settings: dict[str, object] = {
        "replica_id": "a",
        "lighthouse_addr": NOBODY,
        "hostname": "127.0.0.1",
        "bind": "127.0.0.1:0",
        "store_addr": "",
        "world_size": 1,
        "in_process": True,
    }
    with pytest.raises(ConfigError, match=says):
        ManagerServer(**{**settings, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "listens"),
    [
        ({}, {"127.0.0.1", "::1", "::ffff:127.0.0.1"}),
        ({"token": "secret"}, {"::", "0.0.0.0"}),
        ({"insecure": True}, {"::", "0.0.0.0"}),
    ],
)
def test_without_a_secret_a_server_listens_at_loopback(settings: dict[str, Any], listens: set[str]) -> None:
    with ManagerServer("a", NOBODY, "localhost", "[::]:0", "", 1, in_process=True, **settings) as server:
        port = int(server.address().rpartition(":")[2])
        found = psutil.Process().net_connections(kind="tcp")
        at = {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == port}
        assert at
        assert at <= listens


def test_a_config_does_not_show_the_secret() -> None:
    with ManagerServer("a", NOBODY, "localhost", "[::]:0", "", 1, in_process=True, token="s3cret") as server:
        assert "s3cret" not in repr(server._server._shell._config)  # type: ignore[union-attr]


def test_a_server_that_is_not_waited_for_tells_its_address_when_it_serves() -> None:
    with serve(in_process=False, wait=False) as server:
        assert server.alive()
        address = server.address()
        assert server.address() == address
        with ManagerClient(address, group_rank=0, connect_now=False):
            pass


def test_a_server_that_is_not_waited_for_says_at_once_that_its_port_is_taken() -> None:
    with serve() as other:
        port = other.address().rpartition(":")[2]
        for host in ("127.0.0.1", "[::]"):
            with pytest.raises(ConfigError, match=rf"can't listen at {re.escape(host)}:{port}: the address is in use"):
                ManagerServer("a", NOBODY, "127.0.0.1", f"{host}:{port}", "", 1, wait=False)


def test_a_server_that_can_not_start_says_so_whenever_its_address_is_asked_for() -> None:
    with ManagerServer("a", NOBODY, "127.0.0.1", "192.0.2.1:0", "", 1, wait=False, insecure=True) as server:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"replica a can't listen at 192\.0\.2\.1:0"):
                server.address()


def test_a_server_that_ends_while_it_starts_leaves_nothing_and_nobody_waiting() -> None:
    before = len(os.listdir("/proc/self/fd"))
    server = serve(in_process=False, wait=False)
    pid = server._server._process.pid  # type: ignore[union-attr]
    os.kill(pid, signal.SIGSTOP)  # so that it is surely starting still

    def ask() -> None:
        with suppress(CoordinationError):  # the child may have told its address before it heard the goodbye
            server.address()

    asks = threading.Thread(target=ask)
    asks.start()
    threading.Timer(0.1, os.kill, [pid, signal.SIGCONT]).start()
    server.shutdown()
    asks.join(10)
    assert not asks.is_alive()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    assert len(os.listdir("/proc/self/fd")) == before


def test_shutdown_leaves_no_process_and_can_be_said_twice() -> None:
    server = serve(in_process=False)
    assert server.alive()
    pid = server._server._process.pid  # type: ignore[union-attr]
    server.shutdown()
    server.shutdown()
    assert not server.alive()
    with pytest.raises(CoordinationClosedError, match="group:1 was shut down"):
        server.address()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


HOLD_AND_DIE = """
import ctypes, os, sys
from tft_coord import ManagerServer
server = ManagerServer("a", "127.0.0.1:9", "127.0.0.1", "127.0.0.1:0", "", 1)
if sys.argv[1] == "fork" and os.fork() == 0:
    os.close(1)
    sys.stdin.read()  # a forked worker that outlives its parent, until the test has seen what it wanted
    os._exit(0)
libc = ctypes.CDLL(None)
if sys.argv[1] == "fork of C's" and libc.fork() == 0:
    libc.close(1)
    libc.read(0, ctypes.create_string_buffer(1), 1)  # and it holds the pipe, for Python knows nothing of this fork
    libc._exit(0)
print(server._server._process.pid, flush=True)
if sys.argv[1] == "return":
    sys.exit()
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["kill", "fork", "fork of C's", "return"])
def test_the_child_ends_when_its_parent_does(how: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", HOLD_AND_DIE, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    watch = os.pidfd_open(child) if Path(f"/proc/{child}").exists() else -1
    parent.wait(10)
    if watch >= 0:
        readable, _, _ = select.select([watch], [], [], 10)
        os.close(watch)
        assert readable, "the manager server outlived its parent"
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split(")")[1]
    parent.communicate()


def test_signals_to_all_processes_leave_the_child_to_its_parent() -> None:
    with serve(in_process=False) as server, client_of(server, 0) as client:
        process = server._server._process  # type: ignore[union-attr]
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(process.pid, number)
        assert client.should_commit(0, 1, True, LATE, key=KEY) is True
        assert os.getsid(process.pid) != os.getsid(0)
        assert server.alive()


def test_the_child_imports_no_torch_and_no_main_module() -> None:
    with serve(in_process=False) as server:
        maps = Path(f"/proc/{server._server._process.pid}/maps")  # type: ignore[union-attr]
        if maps.exists():
            assert "torch" not in maps.read_text()


def test_a_child_that_is_killed_is_not_alive() -> None:
    with serve(in_process=False) as server:
        kill_child_of(server)
        assert not server.alive()


def test_who_does_not_connect_at_once_is_told_by_the_first_call() -> None:
    with (
        ManagerClient("127.0.0.1:1", connect_now=False) as client,
        pytest.raises((RequestTimeoutError, UnreachableError)),
    ):
        client.checkpoint_metadata(0, timedelta(milliseconds=200))
