"""The lighthouse as a server: who asks gets a quorum, who gives up leaves, and after shutdown nothing is left."""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import grpc
import psutil
import pytest

from tft_coord import (
    ConfigError,
    CoordinationClosedError,
    LighthouseClient,
    ManagerClient,
    ManagerServer,
    Plan,
    ProtocolError,
    Quorum,
    QuorumKey,
    QuorumResult,
    RankRequest,
    RefusedError,
    RequestTimeoutError,
    Timeouts,
    Unchanged,
    UnreachableError,
)
from tft_coord.core import effects, events, types
from tft_coord.core.fingerprint import Fingerprint, FingerprintPart
from tft_coord.core.lineage import fold_lineage, initial_lineage
from tft_coord.core.stragglers import StragglerAction, StragglerPolicy
from tft_coord.transport.address import interface_of
from tft_coord.transport.loop import LoopShare
from tft_coord.wire import codec, packing, services, table
from tft_lighthouse import LighthouseServer, log

SOON = timedelta(milliseconds=300)
LATE = timedelta(seconds=20)
QUICK = Timeouts(heartbeat_timeout_ms=2_000, beat_interval_ms=200)

T = TypeVar("T")


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=2, quorum_tick_ms=20) as lighthouse:
        yield lighthouse


def together(*calls: Callable[[], T]) -> list[T]:
    """Run the calls at once, each on a thread; their results in order. Raises what a call raised."""
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
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [result for result in results if not isinstance(result, Exception)]


class Trainer:
    """One replica group of one rank, as far as coordination goes: it keeps its step and lineage."""

    def __init__(self, name: str, lighthouse: str, *, job: str = "default", token: str | None = None) -> None:
        self.name = name
        self.server = ManagerServer(
            name,
            lighthouse,
            "127.0.0.1",
            "127.0.0.1:0",
            f"{name}-store:1",
            1,
            job=job,
            timeouts=QUICK,
            token=token,
            in_process=True,
        )
        self.client = ManagerClient(self.server.address(), LATE, group_rank=0, token=token, timeouts=QUICK)
        self.step = 0
        self.lineage = initial_lineage(job)
        self.live = False
        self.key: QuorumKey | None = None
        self.members: tuple[str, ...] = ()
        self.made_of: Fingerprint = ()

    def ask(self, timeout: timedelta = LATE) -> Plan | Unchanged:
        request = RankRequest(
            step=self.step, lineage=self.lineage, live=self.live, held=self.key, fingerprint=self.made_of
        )
        answer = self.client.quorum(0, request, timeout)
        self.key = answer.key
        self.members = answer.replica_ids if isinstance(answer, Plan) else self.members
        if isinstance(answer, Plan) and answer.heal:
            self.step, self.lineage = answer.step, answer.lineage
        return answer

    @property
    def held(self) -> QuorumKey:
        assert self.key is not None
        return self.key

    def commit(self) -> None:
        assert self.client.should_commit(0, self.step, True, LATE, key=self.held)
        self.step += 1
        self.lineage = fold_lineage(self.lineage, self.held, self.step)
        self.live = True

    def train(self) -> Plan | Unchanged:
        answer = self.ask()
        self.commit()
        return answer

    def close(self) -> None:
        self.client.close()
        self.server.shutdown()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def joins(newcomer: Trainer, *others: Trainer) -> Plan:
    """The newcomer's first plan; the others train on until it has it."""
    plans: list[Plan | Unchanged] = []
    asking = threading.Thread(target=lambda: plans.append(newcomer.ask()))
    asking.start()
    while newcomer.name not in others[0].members:
        together(*(other.train for other in others))
    asking.join(30)
    assert isinstance(plans[0], Plan)
    return plans[0]


def train_in_one_quorum(last: Trainer, *first: Trainer) -> None:
    """All fresh ones, who are more than `min_replicas`: the last says hello when the first have a quorum, for they do
    not wait for one whose hello is late."""
    together(*(each.train for each in first))
    joins(last, *first)
    last.commit()


def test_two_groups_get_one_quorum_and_then_hear_that_nothing_changed(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tft_lighthouse")
    with Trainer("a:1", lighthouse.address) as a, Trainer("b:1", lighthouse.address) as b:
        plans = together(a.train, b.train)
        assert [plan.replica_ids for plan in plans if isinstance(plan, Plan)] == [("a:1", "b:1")] * 2
        assert [plan.replica_rank for plan in plans if isinstance(plan, Plan)] == [0, 1]
        assert plans[0].key == plans[1].key
        # The first step aligned them, so the second is told whole; from then on nothing is new.
        together(a.train, b.train)
        for _ in range(3):
            assert together(a.train, b.train) == [Unchanged(plans[0].key)] * 2
    lines = [record.getMessage() for record in caplog.records]
    quorum_id = plans[0].key.quorum_id
    formed = next(line for line in lines if line.startswith(f"new quorum {quorum_id}"))
    for word in ("replica_id=a:1", "address=127.0.0.1:", "store_address=b:1-store:1", "step=0", "world_size=1"):
        assert word in formed
    assert "shrink_only=False commit_failures=0" in formed
    assert any(re.fullmatch(rf"quorum changed, id none -> {quorum_id}, because .+", line) for line in lines)
    assert sum(line.startswith("new quorum") for line in lines) == 1


def test_a_newcomer_changes_the_quorum_and_the_log_says_why(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tft_lighthouse")
    with Trainer("a:1", lighthouse.address) as a, Trainer("b:1", lighthouse.address) as b:
        first = together(a.train, b.train)[0].key
        with Trainer("c:1", lighthouse.address) as c:
            plan = joins(c, a, b)
            assert plan.replica_ids == ("a:1", "b:1", "c:1")
            assert plan.heal
            assert plan.key == a.key == b.key
            assert plan.key.quorum_id > first.quorum_id
    changed = [record.getMessage() for record in caplog.records if record.getMessage().startswith("quorum changed")]
    assert f"id {first.quorum_id} -> {plan.key.quorum_id}, because" in changed[1]


def test_a_group_that_shuts_down_is_not_waited_for(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tft_lighthouse")
    with Trainer("a:1", lighthouse.address) as a, Trainer("b:1", lighthouse.address) as b:
        with Trainer("c:1", lighthouse.address) as c:
            train_in_one_quorum(c, a, b)
        plan = together(a.ask, b.ask)[0]
        assert isinstance(plan, Plan)
        assert plan.replica_ids == ("a:1", "b:1")
    losses = [record.getMessage() for record in caplog.records if record.getMessage().startswith("lost replica c:1")]
    assert losses == ["lost replica c:1 of job default: its manager server reports: rank 0 shut down"]


def test_who_differs_is_refused_in_the_log_too(caplog: pytest.LogCaptureFixture) -> None:
    with LighthouseServer("127.0.0.1:0", min_replicas=1) as lighthouse, Trainer("a:1", lighthouse.address) as a:
        a.made_of = (FingerprintPart("parameter/0", "float32 [1, 8]"),)
        a.train()
        with Trainer("b:1", lighthouse.address) as b:
            b.made_of = (FingerprintPart("parameter/0", "float32 [1, 9]"),)
            with pytest.raises(RefusedError, match="differs from a:1"):
                b.ask()
    (line,) = [line for line in caplog.messages if "is refused" in line]
    assert line.startswith(
        "job default: a request is refused (differs): replica b:1 differs from a:1 of job 'default': parameter/0"
    )


def test_one_without_memory_says_which_quorum_it_has_taken_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tft_lighthouse")
    with LighthouseServer("127.0.0.1:0", min_replicas=1) as first, Trainer("a:1", first.address) as a:
        a.train()
        place = first.address.removeprefix("http://")
        first.shutdown()
        with LighthouseServer(place, min_replicas=1):
            a.train()
    (line,) = [line for line in caplog.messages if "resumed quorum" in line]
    assert line.startswith(f"resumed quorum {a.held.quorum_id} of job default (1 members), as reported by replica a:1;")


def test_one_that_stands_in_says_so_once_and_the_replica_names_both(caplog: pytest.LogCaptureFixture) -> None:
    """The older of two lighthouses: it refuses for a while, each dial in the same words."""
    caplog.set_level(logging.INFO)

    def new() -> LighthouseServer:
        return LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=2_000, cluster_id="ours")

    with new() as older:
        started_ms = time.time_ns() // 1_000_000
        while time.time_ns() // 1_000_000 == started_ms:
            pass  # their starts tell them apart
        with (
            new() as newer,
            Trainer("a:1", f"{newer.address},{older.address}") as a,
        ):
            places = [each.address.removeprefix("http://") for each in (newer, older)]
            a.train()
            newer.shutdown()
            a.train()
    refused = [line for line in caplog.messages if "a stream is refused (old_lighthouse)" in line]
    assert len(refused) == 1
    assert [line for line in caplog.messages if "this one replaces it" in line] == [
        "the newer lighthouse of this cluster is gone: this one replaces it, with no memory of any job, as after a "
        "restart"
    ]
    both = f"the lighthouse at {places[0]} can't be reached: .*; the lighthouse at {places[1]} refuses this replica"
    assert any(re.search(both, line) for line in caplog.messages), caplog.text


def test_the_same_refusal_is_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    refusals = log.Refusals(lambda: now_s)
    for _ in range(3):
        refusals.log("a stream", types.Refusal.DUPLICATE, "replica a already lives")
        refusals.log("a stream", types.Refusal.DUPLICATE, "replica b already lives")
        now_s += 29.0
    assert len(caplog.messages) == 2
    refusals.log("a stream", types.Refusal.DUPLICATE, "replica a already lives")
    assert caplog.messages[2] == "a stream is refused (duplicate): replica a already lives"
    for number in range(2 * log.REFUSALS_KEPT):
        refusals.log("a call", types.Refusal.MALFORMED, str(number))
    refusals.log("a stream", types.Refusal.DUPLICATE, "replica a already lives")
    assert caplog.messages[-1] == caplog.messages[2]  # what is kept is bounded


@pytest.mark.parametrize("unpacks", [True, False])
def test_a_long_quorum_goes_packed_to_whom_unpacks_it(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch, unpacks: bool
) -> None:
    """An older manager server does not say that it does."""
    packed: list[bytes] = []
    read_hello, pack = table.HELLO._decode, lighthouse._shell._encode._packed
    monkeypatch.setattr(packing, "PACKED_FROM_BYTES", 1)
    monkeypatch.setattr(table.HELLO, "_decode", lambda *wire: replace(read_hello(*wire), unpacks=unpacks))
    monkeypatch.setattr(lighthouse._shell._encode, "_packed", lambda encoded: packed.append(encoded) or pack(encoded))
    groups = [Trainer(name, lighthouse.address) for name in ("1", "2")]
    try:
        plans = together(*(group.ask for group in groups))
        assert [plan.replica_ids for plan in plans if isinstance(plan, Plan)] == [("1", "2")] * 2
        assert len(packed) == 2 * unpacks
    finally:
        for group in groups:
            group.close()


def test_an_error_in_one_job_is_one_traceback_and_costs_the_other_nothing(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Trainer("broken1", lighthouse.address, job="broken")
    groups = [Trainer(name, lighthouse.address, job="whole") for name in ("1", "2")]
    try:
        shell = lighthouse._shell

        def raises(*_: object) -> list[effects.LighthouseEffect]:
            raise KeyError("gone")

        shell._core._jobs["broken"].tick = raises  # type: ignore[method-assign]
        plans = together(*(group.ask for group in groups))
        assert [plan.replica_ids for plan in plans if isinstance(plan, Plan)] == [("1", "2")] * 2
        time.sleep(0.1)  # some ticks
    finally:
        for group in (broken, *groups):
            group.close()
    said = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage()[:55] for record in said] == ["job broken: the lighthouse failed with KeyError('gone')"]
    assert said[0].exc_info is not None
    assert "in raises" in caplog.text


def test_two_jobs_on_one_lighthouse_never_meet(lighthouse: LighthouseServer) -> None:
    groups = [Trainer(f"{job}{name}", lighthouse.address, job=job) for job in ("x", "y") for name in ("1", "2")]
    try:
        plans = together(*(group.ask for group in groups))
        assert [plan.replica_ids for plan in plans if isinstance(plan, Plan)] == [("x1", "x2")] * 2 + [("y1", "y2")] * 2
    finally:
        for group in groups:
            group.close()


def test_two_groups_with_one_replica_id_are_told_apart_by_name(lighthouse: LighthouseServer) -> None:
    with Trainer("a:1", lighthouse.address) as first, Trainer("b:1", lighthouse.address) as b:
        together(first.train, b.train)
        with Trainer("a:1", lighthouse.address) as second:
            with pytest.raises(RefusedError, match="replica a:1 is already running at") as caught:
                second.ask()
            assert caught.value.code == "duplicate"
            # It stays refused, and harms nobody.
            with pytest.raises(RefusedError):
                second.ask()
        together(first.train, b.train)


def test_torchfts_names_on_our_manager_client(lighthouse: LighthouseServer) -> None:
    with Trainer("a:1", lighthouse.address) as a, Trainer("b:1", lighthouse.address) as b:

        def ask(trainer: Trainer, step: int) -> QuorumResult:
            return trainer.client._quorum(
                group_rank=0,
                step=step,
                checkpoint_metadata=f"http://{trainer.name}",
                shrink_only=False,
                init_sync=True,
                commit_failures=0,
                timeout=LATE,
            )

        first, second = together(lambda: ask(a, 0), lambda: ask(b, 0))
        assert (first.heal, second.heal) == (False, True)
        assert second.recover_src_replica_rank == 0
        assert second.recover_src_manager_address == a.server.address()
        assert first.recover_dst_replica_ranks == [1]
        assert (first.store_address, first.max_step) == ("a:1-store:1", 0)
        source = ManagerClient(second.recover_src_manager_address, LATE)
        assert source._checkpoint_metadata(0, LATE) == "http://a:1"
        source.close()
        first, second = together(lambda: ask(a, 1), lambda: ask(b, 1))
        assert (first.heal, second.heal, second.max_world_size) == (False, False, 2)


# --- connections that break -------------------------------------------------------------------------------------------


class Cable:
    """A TCP relay to a server, whose connections can be cut while both ends live."""

    def __init__(self, address: str) -> None:
        self._share = LoopShare("a cable", at_exit=self.close)
        host, _, port = address.removeprefix("http://").rpartition(":")
        self._target = host, int(port)
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self._server, self.address = self._share.run(self._start())

    def cut(self, *, while_cut: Callable[[], None] = lambda: None) -> None:
        """Cut every connection; new ones are refused until `while_cut` returns."""
        self._share.run(self._stop_listening())
        while_cut()
        port = int(self.address.rpartition(":")[2])
        self._server, _ = self._share.run(self._start(port))

    def close(self) -> None:
        self._share.run(self._stop_listening())
        self._share.give_back()

    async def _start(self, port: int = 0) -> tuple[asyncio.Server, str]:
        server = await asyncio.start_server(self._relay, "127.0.0.1", port)
        return server, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _stop_listening(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.close()


def test_a_stream_that_breaks_and_comes_back_costs_nobody_a_quorum(lighthouse: LighthouseServer) -> None:
    cable = Cable(lighthouse.address)
    with Trainer("a:1", cable.address) as a, Trainer("b:1", lighthouse.address) as b:
        for _ in range(3):
            together(a.train, b.train)
        assert together(a.train, b.train) == [Unchanged(a.held)] * 2
        asked: list[Plan | Unchanged] = []
        asking = threading.Thread(target=lambda: asked.append(a.ask()))
        asking.start()
        cable.cut()
        b.ask()
        asking.join(30)
        assert asked[0].key == b.key
        a.commit()
        b.commit()
        together(a.train, b.train)
    cable.close()


def test_a_living_replica_that_was_taken_for_lost_comes_back_by_itself(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tft_lighthouse")
    cable = Cable(lighthouse.address)

    def others_go_on() -> None:
        plan = together(b.ask, c.ask)[0]
        assert isinstance(plan, Plan)
        assert plan.replica_ids == ("b:1", "c:1")
        together(b.commit, c.commit)

    with (
        Trainer("a:1", cable.address) as a,
        Trainer("b:1", lighthouse.address) as b,
        Trainer("c:1", lighthouse.address) as c,
    ):
        train_in_one_quorum(a, b, c)
        cable.cut(while_cut=others_go_on)
        plan = joins(a, b, c)
        assert plan.replica_ids == ("a:1", "b:1", "c:1")
        assert plan.heal  # the others have gone on without it
    cable.close()
    assert any("lost replica a:1 of job default: its stream disconnected" in line for line in caplog.messages)


def test_a_vote_whose_connection_breaks_is_said_again(lighthouse: LighthouseServer) -> None:
    """The verdict reaches rank 0, and rank 1's connection breaks before it has voted and after."""
    patient = Timeouts(reconnect_grace_ms=4_000)
    server = ManagerServer(
        "a:1", lighthouse.address, "127.0.0.1", "127.0.0.1:0", "", 2, timeouts=patient, in_process=True
    )
    cable = Cable(server.address())
    zero = ManagerClient(server.address(), LATE, group_rank=0, timeouts=QUICK)
    one = ManagerClient(cable.address, LATE, group_rank=1, timeouts=QUICK)
    key = QuorumKey(7, 7)
    verdicts: list[bool] = []
    voting = threading.Thread(target=lambda: verdicts.append(one.should_commit(1, 1, True, LATE, key=key)))
    voting.start()
    cable.cut()
    assert zero.should_commit(0, 1, True, LATE, key=key) is True
    voting.join(30)
    assert verdicts == [True]
    cable.cut()
    assert one.should_commit(1, 1, False, LATE, key=key) is True  # the verdict is final
    one.close()
    zero.close()
    cable.close()
    server.shutdown()


# --- torchft's unary wire -----------------------------------------------------------------------------------


def test_clients_of_torchfts_wire_get_a_quorum(lighthouse: LighthouseServer) -> None:
    with LighthouseClient(lighthouse.address(), LATE) as client:
        client.heartbeat("a")
        quorums: list[Quorum] = together(
            lambda: client.quorum("b", LATE, "http://b:1", "b:2", step=5, world_size=2, data={"rate": 0.5}),
            lambda: client.quorum("a", LATE),
        )
    assert quorums[0] == quorums[1]
    a, b = quorums[0].participants
    assert (a.replica_id, a.world_size, a.data) == ("a", 0, None)
    assert (b.replica_id, b.address, b.store_address, b.step, b.world_size, b.shrink_only, b.data) == (
        "b",
        "http://b:1",
        "b:2",
        5,
        2,
        False,
        {"rate": 0.5},
    )
    assert quorums[0].created.seconds > 1_600_000_000


def test_a_request_that_was_given_up_is_in_no_quorum() -> None:
    """torchft's lighthouse goes on counting a caller that timed out."""
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=100, quorum_tick_ms=20) as lighthouse,
        LighthouseClient(lighthouse.address, LATE) as client,
    ):
        with pytest.raises(RequestTimeoutError, match="replica gone's quorum for step 0"):
            client.quorum("gone", SOON)
        with pytest.raises(RequestTimeoutError):
            client.quorum("a", SOON)  # min_replicas is 2, and there is nobody else
        # "gone" counts as healthy still, so it is waited for until join_timeout; but no quorum contains it.
        quorum = together(lambda: client.quorum("a", LATE), lambda: client.quorum("b", LATE))[0]
    assert [member.replica_id for member in quorum.participants] == ["a", "b"]


def test_a_job_is_of_one_kind() -> None:
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1, quorum_tick_ms=20) as lighthouse,
        LighthouseClient(lighthouse.address, LATE) as client,
    ):
        with Trainer("ours", lighthouse.address) as ours:
            ours.train()
            client.heartbeat("theirs")  # it is told when it asks
            with pytest.raises(
                RefusedError, match=r"replica theirs \(torchft\) can't join job 'default', because"
            ) as said:
                client.quorum("theirs", LATE)
            assert said.value.code == "other_kind"
            ours.train()
        theirs = client.quorum("theirs", LATE)  # ours have left
        assert [member.replica_id for member in theirs.participants] == ["theirs"]
        with (
            Trainer("late", lighthouse.address) as late,
            pytest.raises(RefusedError, match=r"replica late \(tft\) can't join job 'default', because replica theirs"),
        ):
            late.train()
        with Trainer("apart", lighthouse.address, job="another") as apart:
            apart.train()


def test_a_groups_request_that_was_given_up_is_in_no_quorum(lighthouse: LighthouseServer) -> None:
    with Trainer("a:1", lighthouse.address) as a, Trainer("b:1", lighthouse.address) as b:
        with pytest.raises(RequestTimeoutError, match="the lighthouse has not answered"):
            a.ask(SOON)
        with pytest.raises(RequestTimeoutError):
            b.ask(SOON)  # it would have formed a quorum with a's request
        together(a.train, b.train)


def test_nonsense_is_refused_with_a_sentence(lighthouse: LighthouseServer) -> None:
    channel = grpc.insecure_channel(lighthouse.address.removeprefix("http://"))
    with channel:
        for request in (b"\xff\xff", b"", codec.encode_heartbeat("x" * 300)):
            with pytest.raises(grpc.RpcError) as caught:
                services.unary_stub(channel, services.LIGHTHOUSE_HEARTBEAT)(request, timeout=5)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            services.unary_stub(channel, services.LIGHTHOUSE_QUORUM)(b"", timeout=5)
        assert "missing requester" in (caught.value.details() or "")
        stub: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(services.LIGHTHOUSE_SESSION)
        stream = stub(iter([b"\xff\xff"]), timeout=5)
        answers = [codec.decode_from_lighthouse(answer) for answer in stream]
        assert len(answers) == 1
        assert "are not a ToLighthouse message" in str(answers[0])
    with LighthouseClient(lighthouse.address, LATE) as client:
        client.heartbeat("still served")


def test_a_quorum_that_nobody_asked_for_is_not_looked_at(lighthouse: LighthouseServer) -> None:
    key, now_ms = types.QuorumKey(7, 7), time.time_ns() // 1_000_000
    hello = events.HelloReceived(0, types.Hello("reports", "a:1", now_ms, "h:1", held=key))
    report = events.QuorumReported(0, types.Quorum(key, (types.Member("a:1"),)))
    said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    for event in (hello, report, report):
        said.put(codec.encode_to_lighthouse(event))
    with grpc.insecure_channel(lighthouse.address.removeprefix("http://")) as channel:
        stub: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(services.LIGHTHOUSE_SESSION)
        answers = [codec.decode_from_lighthouse(answer) for answer in stub(iter(said.get, None), timeout=20)]
        said.put(None)
    assert [type(answer) for answer in answers] == [effects.Welcome, effects.AskForQuorum, effects.RefuseSession]
    assert "a quorum report arrived without a request" in str(answers[-1])


def test_bad_arguments_are_refused_before_anything_is_sent(lighthouse: LighthouseServer) -> None:
    with LighthouseClient(lighthouse.address, LATE) as client:
        with pytest.raises(TypeError, match="data must be a dict"):
            client.quorum("a", LATE, data=[1])  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="can't be written as JSON"):
            client.quorum("a", LATE, data={"x": object()})
        with pytest.raises(TypeError, match=r"must be a datetime\.timedelta"):
            client.quorum("a", 5)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="above zero"):
            client.quorum("a", timedelta(seconds=-1))
        with pytest.raises(ProtocolError, match="no replica id"):
            client.quorum("", LATE)
    with pytest.raises(CoordinationClosedError):
        client.heartbeat("a")


# --- the secret ---------------------------------------------------------------------------------------------


def test_a_lighthouse_with_a_secret_answers_nobody_without_it() -> None:
    with LighthouseServer("127.0.0.1:0", token="s3cret") as lighthouse:
        for token in (None, "other"):
            with LighthouseClient(lighthouse.address, LATE, token=token) as stranger:
                with pytest.raises(RefusedError, match="shared secret"):
                    stranger.heartbeat("a")
                with pytest.raises(RefusedError, match="shared secret"):
                    stranger.quorum("a", LATE)
        with Trainer("a:1", lighthouse.address) as stranger, pytest.raises(RefusedError, match="shared secret"):
            stranger.ask(LATE)  # at once: no waiting mends it
        with Trainer("a:1", lighthouse.address, token="s3cret") as friend:
            friend.train()


def test_without_a_secret_the_server_says_so_loudly(caplog: pytest.LogCaptureFixture) -> None:
    with LighthouseServer("127.0.0.1:0"):
        pass
    with LighthouseServer("127.0.0.1:0", insecure=True):
        pass
    first, second = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "no shared secret is set, so only this machine is served, at http://127.0.0.1:" in first
    assert "make one with `openssl rand -hex 32`" in first
    assert "insecure: any host that reaches" in second


def addresses_listened_at(address: str) -> set[str]:
    port = int(address.rpartition(":")[2])
    connections = psutil.Process().net_connections(kind="tcp")
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port == port}


def test_without_a_secret_only_this_machine_is_served() -> None:
    with LighthouseServer("[::]:0") as lighthouse:
        assert lighthouse.address.startswith("http://localhost:")
        assert addresses_listened_at(lighthouse.address) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        with LighthouseClient(lighthouse.address) as client:
            client.describe()
    for settings in ({"token": "secret"}, {"insecure": True}):
        with LighthouseServer("[::]:0", **settings) as lighthouse:  # type: ignore[arg-type]
            assert addresses_listened_at(lighthouse.address) & {"::", "0.0.0.0"}
    for bind, hostname in (("192.0.2.1:0", None), ("[::]:0", "node-1"), ("[2001:db8::1]:0", None)):
        with pytest.raises(ConfigError, match=r"no shared secret is set.*openssl rand -hex 32.*TFT_INSECURE=1"):
            LighthouseServer(bind, hostname=hostname)


# --- beginning and end --------------------------------------------------------------------------------------


def test_the_address_is_a_string_that_may_be_called(lighthouse: LighthouseServer) -> None:
    assert lighthouse.address.startswith("http://127.0.0.1:")
    assert lighthouse.address() == lighthouse.address
    assert type(lighthouse.address()) is str


def test_after_shutdown_no_open_connection_is_answered_and_nothing_is_left() -> None:
    """torchft's lighthouse goes on answering on open connections, so that two can serve at once."""
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=2)
    port = int(lighthouse.address.rpartition(":")[2])
    with LighthouseClient(lighthouse.address, LATE) as client, Trainer("a:1", lighthouse.address) as a:
        client.heartbeat("a")
        waiting = threading.Event()

        def wait_for_quorum() -> str:
            waiting.set()
            with pytest.raises(RequestTimeoutError) as caught:
                a.ask(timedelta(seconds=1))
            return str(caught.value)

        def end() -> None:
            waiting.wait(10)
            lighthouse.shutdown()
            lighthouse.shutdown()

        assert "can't be reached" in str(together(wait_for_quorum, end)[0])
        with pytest.raises(UnreachableError):
            client.heartbeat("a")
        # The port is free for the next one, which is reached on the same connections.
        with LighthouseServer(f"127.0.0.1:{port}", min_replicas=1):
            a.train()
            with LighthouseClient(f"127.0.0.1:{port}", LATE) as second:
                second.heartbeat("a")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tft-")]
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))
    with pytest.raises(CoordinationClosedError, match="was shut down"), lighthouse:
        pass


def test_an_ended_stream_leaves_no_connection_to_the_garbage_collector(lighthouse: LighthouseServer) -> None:
    """Which trainers switch off."""
    port = int(lighthouse.address.rpartition(":")[2])
    gc.disable()
    try:
        with Trainer("a:1", lighthouse.address) as a, Trainer("b:1", lighthouse.address) as b:
            together(a.train, b.train)
        del a, b
        until = time.monotonic() + LATE.total_seconds()
        while left := [
            each for each in psutil.Process().net_connections("tcp") if each.raddr and each.raddr.port == port
        ]:
            assert time.monotonic() < until, left
            time.sleep(0.01)
    finally:
        gc.enable()


def test_a_lighthouse_that_forgets_everything_changes_nothing() -> None:
    first = LighthouseServer("127.0.0.1:0", min_replicas=2)
    port = int(first.address.rpartition(":")[2])
    try:
        with Trainer("a:1", first.address) as a, Trainer("b:1", first.address) as b:
            for _ in range(3):
                answers = together(a.train, b.train)
            assert answers == [Unchanged(a.held)] * 2
            first.shutdown()
            with LighthouseServer(f"127.0.0.1:{port}", min_replicas=2):
                for _ in range(3):
                    answers = together(a.train, b.train)
                # The quorum from before stands, with its id: nobody reconfigures, nobody heals.
                assert answers == [Unchanged(a.held)] * 2
                old = a.held
                with Trainer("c:1", f"127.0.0.1:{port}") as c:
                    assert joins(c, a, b).key.quorum_id > old.quorum_id
    finally:
        first.shutdown()


FORGOTTEN = """
import atexit
import sys
import time
from datetime import timedelta
from tft_coord import ManagerClient, ManagerServer, RankRequest
from tft_coord.transport.loop import end_at_exit
from tft_lighthouse import LighthouseServer
if sys.argv[2] == "late":
    end_at_exit()
    atexit.register(time.sleep, 0.5)  # between the end of the manager server and that of the client
lighthouse = LighthouseServer("127.0.0.1:0", token="s3cret")
server = ManagerServer(
    "a", lighthouse.address, "127.0.0.1", "127.0.0.1:0", "", 1, token="s3cret", in_process=sys.argv[1] == "in_process"
)
client = ManagerClient(server.address(), token="s3cret", group_rank=0)
client.quorum(0, RankRequest(step=1), timedelta(seconds=20))
"""


@pytest.mark.parametrize("client_ends", ["at once", "late"])
@pytest.mark.parametrize("where", ["in_process", "child"])
def test_a_program_that_forgets_to_shut_down_ends_without_a_word(where: str, client_ends: str) -> None:
    command = [sys.executable, "-X", "dev", "-c", FORGOTTEN, where, client_ends]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    # On a busy machine asyncio's debug mode, which -X dev sets, names callbacks that took 0.1 s.
    words = [line for line in done.stderr.splitlines() if not line.startswith("Executing <")]
    assert (done.returncode, done.stdout, words) == (0, "", [])


def test_a_port_that_is_taken_is_said_in_one_sentence(lighthouse: LighthouseServer) -> None:
    taken = lighthouse.address.removeprefix("http://")
    with pytest.raises(ConfigError, match=f"can't listen at {taken}: the port is in use"):
        LighthouseServer(taken)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"bind": "localhost"}, "bind is 'localhost'; give host:port"),
        ({"hostname": "node-1:29510"}, "hostname is 'node-1:29510'; give a host's name or address without a port"),
        ({"hostname": ""}, "hostname is ''; give a host's name"),
        ({"bind": "localhost:99999"}, "bind is 'localhost:99999'"),
        ({"min_replicas": 0}, "min_replicas is 0; give at least 1"),
        ({"quorum_tick_ms": 6000}, r"quorum_tick_ms \(6000 ms\) exceeds heartbeat_timeout_ms \(5000 ms\)"),
        ({"join_timeout_ms": -1}, "join_timeout_ms is -1"),
        ({"on_lost_state": "die"}, "on_lost_state is 'die'; give wait or restart"),
        ({"stragglers": "leave-out"}, "stragglers is 'leave-out'; give a StragglerPolicy"),
        (
            {"on_lost_state": "restart", "lost_state_timeout_ms": 100},
            "on_lost_state is 'restart' and lost_state_timeout_ms is 100, which needs 'wait'; leave one of",
        ),
        ({"lost_state_timeout_ms": -1}, "lost_state_timeout_ms is -1"),
        ({"token": ""}, "shared secret"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LighthouseServer(**{"bind": "127.0.0.1:0", **settings})  # type: ignore[arg-type]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tft-")]


@pytest.mark.parametrize(
    ("settings", "expected_ms"),
    [
        ({}, 30_000),
        ({"lost_state_timeout_ms": 90_000}, 90_000),
        ({"lost_state_timeout_ms": 10}, 5_000),
        ({"on_lost_state": "restart"}, 5_000),
    ],
)
def test_it_says_how_long_it_waits_for_a_lost_state(settings: dict[str, Any], expected_ms: int) -> None:
    with LighthouseServer("127.0.0.1:0", **settings) as server, LighthouseClient(server.address, LATE) as client:
        assert client.describe().lost_state_timeout_ms == expected_ms


def test_its_first_line_and_its_description_say_its_policies(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    policy = StragglerPolicy(action=StragglerAction.LEAVE_OUT, ratio=1.5)
    with (
        LighthouseServer("127.0.0.1:0", stragglers=policy, on_lost_state="restart") as server,
        LighthouseClient(server.address, LATE) as client,
    ):
        assert client.describe().stragglers == "leave-out (ratio 1.5)"
    assert "min_replicas 1, stragglers leave-out (ratio 1.5), on_lost_state restart, for 5 s)" in caplog.text
    assert StragglerPolicy(action=StragglerAction.OFF).describe() == "off"


def test_time_outs_that_do_not_go_together_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with (
        LighthouseServer("127.0.0.1:0", join_timeout_ms=90_000, heartbeat_timeout_ms=500, quorum_tick_ms=20) as server,
        LighthouseClient(server.address, LATE) as client,
        Trainer("a", server.address) as trainer,
    ):
        trainer.train()
        described = client.describe()
        assert (described.join_timeout_ms, described.heartbeat_timeout_ms) == (90_000, 500)
        assert [(job.name, job.num_members) for job in described.jobs] == [("default", 1)]
        trainer.train()
    (doubt,) = [record.message for record in caplog.records if "join_timeout_ms (90000)" in record.message]
    assert "quorum_timeout_ms (64000)" in doubt
    assert "is lost" not in caplog.text  # it beats as often as this lighthouse wants


def test_torchfts_members_are_described_and_a_drain_of_one_says_that_they_can_not_be_asked() -> None:
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1, quorum_tick_ms=20) as server,
        LighthouseClient(server.address, LATE) as client,
    ):
        assert client.describe().torchft is None
        client.quorum("theirs", LATE)
        client.heartbeat("theirs")
        described = client.describe().torchft
        assert described is not None
        assert (described.name, described.num_members) == ("default", 1)
        with pytest.raises(
            RefusedError, match=r"knows no job 'default'.*; theirs is torchft's, which can't be asked to leave"
        ):
            client.drain("default", "theirs", LATE)
        with pytest.raises(RefusedError, match=r"knows no job 'other'; known jobs: none so far$"):
            client.drain("other", "theirs", LATE)


def test_a_lighthouse_of_another_cluster_is_spoken_of_while_the_own_one_works(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = (
        LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=2_000, cluster_id=name)
        for name in ("ours", "theirs")
    )
    hosts = [server.address.removeprefix("http://") for server in (ours, theirs)]
    said = threading.Event()

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "belongs to cluster theirs;" in record.getMessage():
                said.set()

    logger, hears = logging.getLogger("tft_coord.manager_server.link"), Hears()
    logger.addHandler(hears)
    try:
        with ours, theirs, Trainer("a", ",".join(hosts)) as trainer:
            trainer.train()
            assert said.wait(20)
            trainer.train()
    finally:
        logger.removeHandler(hears)
    told = [record.getMessage() for record in caplog.records if "belongs to cluster theirs" in record.getMessage()]
    assert len(told) == 1
    assert (
        f"the lighthouse at {hosts[1]} belongs to cluster theirs; of several lighthouses only those of cluster ours"
        in (told[0])
    )


@pytest.mark.parametrize(
    ("bind", "interface"),
    [("[::]:1", ""), ("[::0]:1", ""), ("[0::0]:1", ""), ("0.0.0.0:1", ""), ("[::1]:1", "::1"), ("a-host:1", "a-host")],
)
def test_all_interfaces_are_known_however_they_are_written(bind: str, interface: str) -> None:
    assert interface_of(bind) == interface
