"""Coordination between real processes: deaths are reported, a busy process is not dead, no process is left behind."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Final

import psutil
import pytest

from tft_coord import (
    ManagerClient,
    ManagerServer,
    Plan,
    QuorumKey,
    RankRequest,
    ReplicaGroupLostError,
    Timeouts,
    Unchanged,
)
from tft_coord.core.lineage import fold_lineage, initial_lineage
from tft_coord.core.types import LossNotice, NewcomerAsks
from tft_coord.notifications import Notification
from tft_lighthouse import LighthouseServer

LATE: Final = timedelta(seconds=30)
STEP_S: Final = 0.005  # duration of a forward and a backward pass here
# Long enough that these tests lose nothing by silence, unless a test asks for it.
PATIENT: Final = Timeouts(heartbeat_timeout_ms=20_000)
QUICK: Final = Timeouts(heartbeat_timeout_ms=1_500, beat_interval_ms=300)


class Rank:
    """One rank's part of coordination: it keeps its step and lineage."""

    def __init__(self, address: str, rank: int, timeouts: Timeouts) -> None:
        self.losses: queue.Queue[tuple[float, Notification]] = queue.Queue()  # with the time of each notice
        self.client = ManagerClient(
            address,
            LATE,
            group_rank=rank,
            timeouts=timeouts,
            listener=self._hear,
        )
        self.rank = rank
        self.step = 0
        self.lineage = initial_lineage("default")
        self.live = False
        self.key: QuorumKey | None = None

    def _hear(self, news: Notification) -> None:
        if not isinstance(news, NewcomerAsks):
            self.losses.put((time.monotonic(), news))

    def ask(self, **fields: Any) -> Plan | Unchanged:
        request = RankRequest(step=self.step, lineage=self.lineage, live=self.live, held=self.key, **fields)
        answer = self.client.quorum(self.rank, request, LATE)
        self.key = answer.key
        if isinstance(answer, Plan) and answer.heal:
            self.step, self.lineage = answer.step, answer.lineage
        return answer

    def vote(self) -> bool:
        assert self.key is not None
        verdict = self.client.should_commit(self.rank, self.step, True, LATE, key=self.key)
        if verdict:
            self.step += 1
            self.lineage = fold_lineage(self.lineage, self.key, self.step)
            self.live = True
        return verdict


def serve(name: str, lighthouse: str, world_size: int, timeouts: Timeouts) -> ManagerServer:
    return ManagerServer(name, lighthouse, "127.0.0.1", "127.0.0.1:0", "", world_size, timeouts=timeouts)


def group(name: str, lighthouse: str, timeouts: Timeouts, tell: Connection) -> None:
    """Run a replica group of one rank: train until it is killed, and report the replica ids of every plan."""
    server = serve(name, lighthouse, 1, timeouts)
    rank = Rank(server.address(), 0, timeouts)
    tell.send(server._server._process.pid)  # type: ignore[union-attr]
    while True:
        answer = rank.ask()
        if isinstance(answer, Plan):
            tell.send(answer.replica_ids)
        time.sleep(STEP_S)
        rank.vote()


def second_rank(address: str, timeouts: Timeouts, orders: Connection) -> None:
    """Run rank 1 of a group: perform one order at a time."""
    rank = Rank(address, 1, timeouts)
    orders.send("ready")
    while True:
        match orders.recv():
            case ("ask", fields):
                rank.ask(**fields)
                orders.send("asked")
            case ("vote",):
                orders.send(rank.vote())
            case ("hold the interpreter lock", seconds):
                ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))
                orders.send("held")
            case ("close",):
                rank.client.close()
                orders.send("closed")
                return


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer(
        "127.0.0.1:0", min_replicas=1, quorum_tick_ms=20, join_timeout_ms=10_000, heartbeat_timeout_ms=20_000
    ) as lighthouse:
        yield lighthouse


class Recorded(logging.Handler):
    """The lighthouse's log, with a way to wait for a line of it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.more = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.more:
            self.lines.append(record.getMessage())
            self.more.notify_all()

    def wait_for(self, pattern: str) -> str:
        """Return the first line that matches."""
        with self.more:
            assert self.more.wait_for(lambda: self.find(pattern) is not None, 30), f"{pattern} not in {self.lines}"
        found = self.find(pattern)
        assert found is not None
        return found

    def find(self, pattern: str) -> str | None:
        return next((line for line in self.lines if re.search(pattern, line)), None)


@pytest.fixture
def log() -> Iterator[Recorded]:
    recorded = Recorded()
    logger = logging.getLogger("tft_lighthouse")
    level = logger.level
    logger.addHandler(recorded)
    logger.setLevel(logging.INFO)
    yield recorded
    logger.removeHandler(recorded)
    logger.setLevel(level)


Spawn = Callable[..., ForkServerProcess]


def start_group(
    spawn: Spawn, forkserver: ForkServerContext, name: str, lighthouse: LighthouseServer
) -> tuple[ForkServerProcess, int, Connection]:
    """Return the trainer's process, its manager server's pid, and the connection with its reports."""
    hear, tell = forkserver.Pipe(duplex=False)
    process = spawn(group, name, str(lighthouse.address), PATIENT, tell)
    tell.close()
    assert hear.poll(30)
    return process, hear.recv(), hear


def until(hear: Connection, replica_ids: tuple[str, ...]) -> None:
    """Wait until the group has a plan of these members."""
    while True:
        assert hear.poll(30), f"no plan of {replica_ids}"
        if hear.recv() == replica_ids:
            return


def gone(pid: int) -> bool:
    try:
        psutil.Process(pid).wait(10)
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_a_killed_trainer_is_reported_by_its_manager_server_and_the_others_go_on(
    lighthouse: LighthouseServer,
    log: Recorded,
    spawn: Spawn,
    forkserver: ForkServerContext,
    kill: Callable[[int], None],
) -> None:
    _, _, a_tells = start_group(spawn, forkserver, "a:1", lighthouse)
    b, b_server, b_tells = start_group(spawn, forkserver, "b:1", lighthouse)
    until(a_tells, ("a:1", "b:1"))
    until(b_tells, ("a:1", "b:1"))
    assert b.pid is not None
    kill(b.pid)
    until(a_tells, ("a:1",))
    # The loss is not by silence, and not by a broken stream. The manager server saw its parent end, and reported it.
    lost = log.wait_for("lost replica b:1")
    assert lost == "lost replica b:1 of job default: its manager server reports: rank 0 ended: its process ended"
    assert gone(b_server)
    assert log.find("lost replica a:1") is None
    # A successor under a new name joins.
    _, _, c_tells = start_group(spawn, forkserver, "c:1", lighthouse)
    until(c_tells, ("a:1", "c:1"))
    until(a_tells, ("a:1", "c:1"))


def test_a_killed_manager_server_is_lost_by_its_stream(
    lighthouse: LighthouseServer,
    log: Recorded,
    spawn: Spawn,
    forkserver: ForkServerContext,
    kill: Callable[[int], None],
) -> None:
    _, _, a_tells = start_group(spawn, forkserver, "a:1", lighthouse)
    _, b_server, _ = start_group(spawn, forkserver, "b:1", lighthouse)
    until(a_tells, ("a:1", "b:1"))
    os.kill(b_server, signal.SIGKILL)
    until(a_tells, ("a:1",))
    assert "its stream disconnected and did not return within 300 ms" in log.wait_for("lost replica b:1")


@pytest.mark.parametrize("who", ["trainer", "manager server"])
def test_survivors_are_told_of_a_death_at_once(
    who: str,
    lighthouse: LighthouseServer,
    spawn: Spawn,
    forkserver: ForkServerContext,
    kill: Callable[[int], None],
) -> None:
    with ExitStack() as ends:
        server = ends.enter_context(serve("a:1", lighthouse.address, 1, PATIENT))
        rank = Rank(server.address(), 0, PATIENT)
        ends.enter_context(rank.client)
        b, b_server, b_tells = start_group(spawn, forkserver, "b:1", lighthouse)
        answer = rank.ask()
        while not (isinstance(answer, Plan) and answer.replica_ids == ("a:1", "b:1")):
            rank.vote()
            answer = rank.ask()
        until(b_tells, ("a:1", "b:1"))
        assert rank.losses.empty()
        assert b.pid is not None
        killed_at = time.monotonic()
        if who == "trainer":
            kill(b.pid)
        else:
            os.kill(b_server, signal.SIGKILL)
        told_at, notice = rank.losses.get(timeout=30)
        assert isinstance(notice, LossNotice)
        assert (notice.key, notice.replica_id) == (rank.key, "b:1")
        assert told_at - killed_at < 0.5


@pytest.fixture
def orders(forkserver: ForkServerContext) -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = forkserver.Pipe()
    yield ours, theirs
    ours.close()


def order(orders: Connection, *words: Any) -> Any:
    """Send rank 1 an order, and return its answer."""
    if words:
        orders.send(words)
    assert orders.poll(30), f"no answer to {words}"
    return orders.recv()


def test_a_group_of_two_ranks_asks_with_one_voice(
    lighthouse: LighthouseServer,
    log: Recorded,
    spawn: Spawn,
    orders: tuple[Connection, Connection],
) -> None:
    with serve("a:1", lighthouse.address, 2, PATIENT) as server:
        zero = Rank(server.address(), 0, PATIENT)
        spawn(second_rank, server.address(), PATIENT, orders[1])
        assert order(orders[0]) == "ready"
        orders[0].send(("ask", {"commit_failures": 3, "checkpoint_metadata": "http://one"}))
        plan = zero.ask(commit_failures=1, checkpoint_metadata="http://zero")
        assert order(orders[0]) == "asked"
        assert isinstance(plan, Plan)
        assert plan.commit_failures == 3
        assert "world_size=2 shrink_only=False commit_failures=3" in log.wait_for("new quorum")
        assert [zero.client.checkpoint_metadata(rank, LATE) for rank in (0, 1)] == ["http://zero", "http://one"]
        orders[0].send(("vote",))
        assert zero.vote()
        assert order(orders[0]) is True
        assert order(orders[0], "close") == "closed"
        zero.client.close()


def test_a_rank_is_told_of_its_sisters_death_at_once(
    lighthouse: LighthouseServer, spawn: Spawn, orders: tuple[Connection, Connection], kill: Callable[[int], None]
) -> None:
    with serve("a:1", lighthouse.address, 2, PATIENT) as server:
        zero = Rank(server.address(), 0, PATIENT)
        one = spawn(second_rank, server.address(), PATIENT, orders[1])
        assert order(orders[0]) == "ready"
        assert one.pid is not None
        killed_at = time.monotonic()
        kill(one.pid)
        told_at, news = zero.losses.get(timeout=30)
        assert isinstance(news, ReplicaGroupLostError)
        assert "rank 1's stream disconnected" in str(news)
        assert "end this process and start the group again" in str(news)
        assert told_at - killed_at < 0.5
        zero.client.close()


def test_a_rank_that_is_killed_ends_its_group(
    lighthouse: LighthouseServer, log: Recorded, spawn: Spawn, orders: tuple[Connection, Connection]
) -> None:
    with serve("a:1", lighthouse.address, 2, QUICK) as server:
        zero = Rank(server.address(), 0, QUICK)
        one = spawn(second_rank, server.address(), QUICK, orders[1])
        assert order(orders[0]) == "ready"
        orders[0].send(("ask", {}))
        zero.ask()
        assert order(orders[0]) == "asked"
        assert one.pid is not None
        os.kill(one.pid, signal.SIGKILL)
        assert zero.vote() is False  # long before its deadline of 30 s
        with pytest.raises(
            ReplicaGroupLostError, match="rank 1's stream disconnected and did not return within 300 ms"
        ):
            zero.ask()
        assert "its manager server reports: rank 1's stream disconnected" in log.wait_for("lost replica a:1")
        zero.client.close()


@pytest.mark.in_parts
def test_a_rank_that_holds_the_interpreter_lock_is_not_taken_for_dead(
    lighthouse: LighthouseServer,
    log: Recorded,
    spawn: Spawn,
    orders: tuple[Connection, Connection],
) -> None:
    with serve("a:1", lighthouse.address, 2, QUICK) as server:
        zero = Rank(server.address(), 0, QUICK)
        spawn(second_rank, server.address(), QUICK, orders[1])
        assert order(orders[0]) == "ready"
        assert order(orders[0], "hold the interpreter lock", 2 * QUICK.heartbeat_timeout_ms / 1000) == "held"
        orders[0].send(("ask", {}))
        zero.ask()
        assert order(orders[0]) == "asked"
        orders[0].send(("vote",))
        assert zero.vote() is True
        assert order(orders[0]) is True
        assert log.find("lost replica") is None
        assert order(orders[0], "close") == "closed"
        zero.client.close()
