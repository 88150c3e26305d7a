"""One rank's side of its group: the server that is replaced, the group that is lost, the store that outlives both."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import DistNetworkError, DistStoreError, HashStore  # type: ignore[attr-defined]

import tft_coord
from tft_algos.errors import ConfigError, ServerRestartedError, UsageError
from tft_algos.manager.config import ResolvedConfig, config_of, from_environment
from tft_algos.manager.quorum import coordinator as module
from tft_algos.manager.quorum import group_store
from tft_algos.manager.quorum.coordinator import GroupCoordinator
from tft_algos.manager.quorum.group_store import GroupStore, is_loopback, join_address, open_group_store
from tft_algos.testing import plan_of
from tft_coord.core import waits
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.types import LeaveRequest, NewcomerAsks, Purpose, QuorumKey, RankRequest, Verdict
from tft_coord.errors import (
    ConfigError as CoordinationConfigError,
)
from tft_coord.errors import (
    CoordinationClosedError,
    CoordinationError,
    ReplicaGroupLostError,
    RequestTimeoutError,
    UnreachableError,
)

SECOND = timedelta(seconds=1)
KEY = QuorumKey(7, 7)


class Server:
    """A manager server that a test can end, and hold while it starts."""

    made: list[Server]
    starts: threading.Event
    failure: Exception | None
    kills: int  # of the next servers, each while it starts

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.ended = threading.Event()
        self.closed = False
        self.num_kills = 0
        self.killed = Server.kills > 0
        Server.kills -= self.killed
        self.made.append(self)

    def address(self) -> str:
        assert self.starts.wait(10)
        if self.closed:
            raise CoordinationClosedError("it was shut down while it started")
        if self.failure is not None:
            raise self.failure
        if self.killed:
            raise CoordinationError("it ended before it served")
        return f"server:{len(self.made)}"

    def link(self) -> None:
        """There is no child process."""

    def alive(self) -> bool:
        return not self.ended.is_set()

    def was_killed(self) -> bool:
        return self.killed

    def kill(self) -> None:
        self.num_kills += 1
        self.killed = True

    def shutdown(self) -> None:
        self.closed = True
        self.starts.set()


class Client:
    """A client whose calls wait until it is closed, unless it has an answer."""

    made: list[Client]
    first_answer: Any

    def __init__(self, addr: str, connect_timeout: timedelta, **kwargs: Any) -> None:
        self.addr, self.connect_timeout, self.kwargs = addr, connect_timeout, kwargs
        self.closed = threading.Event()
        self.is_answered = True
        self.answer: Any = self.first_answer
        self.healed_bytes = 0
        self.wishes: list[bool] = []
        self.left: list[tuple[str, int, int | None]] = []
        self.beats: list[Any] = []
        self.limits: list[timedelta] = []
        self.made.append(self)

    def quorum(self, group_rank: int, request: RankRequest, timeout: timedelta) -> Any:
        self.limits.append(timeout)
        return self._answered()

    def vote(
        self, group_rank: int, step: int, yes: bool, timeout: timedelta, *, leaving: bool = False, **_: Any
    ) -> Any:
        self.wishes.append(leaving)
        self.limits.append(timeout)
        return self._answered()

    def leave(
        self, group_rank: int, reason: str, serve_ms: int, timeout: timedelta, *, finished_step: int | None
    ) -> None:
        self.left.append((reason, serve_ms, finished_step))
        self.limits.append(timeout)

    def checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        return f"state of rank {rank} at {self.addr}"

    def healed(self, healed_bytes: int) -> None:
        self.healed_bytes = healed_bytes

    def beat(self) -> None:
        self.beats.append(self.kwargs["progress"]())

    def _answered(self) -> Any:
        if self.answer is None:
            assert self.closed.wait(10)
            raise CoordinationClosedError("this client was closed")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.closed.set()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def resolved(**settings: Any) -> ResolvedConfig:
    environ = settings.pop("environ", {})
    return from_environment(
        config_of(None, {"lighthouse_addr": "localhost:1", **settings}), environ, own_host=lambda: "localhost"
    )


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`make(**settings)` is a coordinator over stand-ins, with a store of its own."""
    Server.made, Client.made = [], []
    Server.starts, Server.failure, Server.kills = threading.Event(), None, 0
    Server.starts.set()
    Client.first_answer = None
    made: list[GroupCoordinator] = []
    store = HashStore()
    monkeypatch.setattr(module, "ManagerServer", Server)
    monkeypatch.setattr(tft_coord, "ManagerClient", Client)
    monkeypatch.setattr(
        module, "open_group_store", lambda config: GroupStore(store, "store:1", config.run_scope, config.group_scope)
    )

    def start(**settings: Any) -> GroupCoordinator:
        made.append(GroupCoordinator(resolved(**settings)))
        if Server.starts.is_set() and Server.failure is None:
            made[-1]._client_in_use(10 * SECOND)
        return made[-1]

    yield start
    for each in made:
        each.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tft-")]


TWO = {"world_size": 2, "store_addr": "store", "store_port": 1}


def test_a_host_name_that_is_unknown_is_said_at_once_and_in_each_line_of_the_wait(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def look_up(host: str, *_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    connects, may_connect = threading.Event(), threading.Event()

    class Waits(Client):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            connects.set()
            assert may_connect.wait(10)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(tft_coord, "ManagerClient", Waits)
    monkeypatch.setattr(waits, "FIRST_MS", 20)
    Server.starts.clear()
    try:
        coordinator = make(hostname="nosuchhost", token="secret")
        Server.starts.set()
        assert connects.wait(10)
        with pytest.raises(
            RequestTimeoutError, match=r"within 1\.2 s; the name nosuchhost can't be resolved on this host"
        ):
            coordinator._client_in_use(timedelta(milliseconds=1200))
    finally:
        may_connect.set()
    said = [record.getMessage() for record in caplog.records]
    name = "the name nosuchhost can't be resolved on this host (Name or service not known), and other replicas would"
    assert name in said[0]
    assert f"the manager server has not started for 1 s: {name}" in said[1]


def test_a_second_one_of_a_replica_in_a_process_is_refused_before_anything_is_waited_for(make: Any) -> None:
    """It waited for ever for the first, in which no loop runs any more."""
    first = make(replica_id="replica_1")
    with pytest.raises(UsageError, match=r"earlier Manager of replica replica_1:[0-9a-f]{8}, rank 0, of job default"):
        make(replica_id="replica_1")
    assert len(Server.made) == 1
    first.close()
    second = make(replica_id="replica_1")
    first.close()
    with pytest.raises(UsageError, match=r"call shutdown\(\) on it first"):
        make(replica_id="replica_1")
    second.close()


@pytest.mark.parametrize("other", [{"replica_id": "b"}, {"job": "eval"}, {"lighthouse_addr": "localhost:2"}])
def test_other_replicas_and_those_without_a_name_may_share_a_process(make: Any, other: dict[str, str]) -> None:
    make(replica_id="a")
    make(**{"replica_id": "a", **other})
    make()
    make()


def test_whoever_follows_a_step_is_asked_at_once_and_by_every_client_to_come(make: Any) -> None:
    coordinator = make()
    said = Progress(3, Phase.OWN, 5)
    coordinator.follow(lambda: said)
    assert Client.made[0].beats == [None, said]


def test_a_server_that_starts_is_waited_for_by_the_first_call_and_by_nothing_before(make: Any) -> None:
    Server.starts.clear()
    coordinator = make()
    said = Progress(3, Phase.OWN, 5)
    coordinator.follow(lambda: said)
    coordinator.listen(lambda _: None)
    with pytest.raises(RequestTimeoutError, match=r"has not started within 0\.05 s; look whether the machine"):
        coordinator.quorum(RankRequest(step=0), SECOND / 20)
    assert Client.made == []
    answers: list[Any] = []
    asks = threading.Thread(target=lambda: answers.append(coordinator.quorum(RankRequest(step=0), 10 * SECOND)))
    Client.first_answer = plan_of(7)
    asks.start()
    Server.starts.set()
    asks.join(10)
    assert answers == [Client.first_answer]
    assert Client.made[0].beats[0] == said


@pytest.mark.parametrize(
    "call",
    [
        lambda coordinator, limit: coordinator.quorum(RankRequest(step=0), limit),
        lambda coordinator, limit: coordinator.vote(0, True, limit, key=KEY, purpose=Purpose.COMMIT),
        lambda coordinator, limit: coordinator.leave("it is preempted", SECOND, limit),
        lambda coordinator, limit: coordinator.gather("shape", "8", limit),
    ],
    ids=["quorum", "vote", "leave", "gather"],
)
def test_a_call_that_waited_for_the_start_has_only_what_is_left_of_its_time(
    make: Any, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    gathers: list[timedelta] = []
    monkeypatch.setattr(GroupStore, "gather", lambda *arguments: gathers.append(arguments[-1]))
    monkeypatch.setattr(GroupStore, "answer", lambda *_: True)
    Server.starts.clear()
    Client.first_answer = plan_of(7)
    coordinator = make(rank=0, **TWO)
    waited_s = 0.1
    start = threading.Timer(waited_s, Server.starts.set)
    start.start()
    call(coordinator, 10 * SECOND)
    start.join()
    (left,) = [*Client.made[0].limits, *gathers]
    assert left <= (10 - waited_s / 2) * SECOND


@pytest.mark.parametrize("failure", [CoordinationConfigError("the address is taken"), DistStoreError("no store")])
def test_a_server_that_does_not_start_is_said_to_whoever_asks_and_to_the_listener(
    make: Any, failure: Exception
) -> None:
    Server.failure = failure
    coordinator = make()
    said = f"does not start: {failure}"
    for _ in range(2):
        with pytest.raises(ReplicaGroupLostError, match=said) as caught:
            coordinator.quorum(RankRequest(step=0), SECOND)
        assert caught.value.__cause__ is failure
    heard: list[Any] = []
    coordinator._watch.join(10)
    coordinator.listen(heard.append)
    assert [type(news) for news in heard] == [ReplicaGroupLostError]
    assert said in str(heard[0])


@pytest.mark.parametrize("size", [{}, {"rank": 0, **TWO}], ids=["alone", "with another rank"])
def test_a_server_that_is_killed_while_it_starts_is_replaced(make: Any, size: dict[str, Any]) -> None:
    Server.kills = 2
    Client.first_answer = plan_of(7)
    assert make(**size).quorum(RankRequest(step=0), 10 * SECOND) is Client.first_answer
    assert [server.closed for server in Server.made] == [True, True, False]
    assert [client.addr for client in Client.made] == ["server:3"]


def test_a_server_that_is_killed_before_its_client_is_connected_is_replaced(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address is known by then, and no server listens there any more: field report D9."""

    class Connects(Client):
        def __init__(self, addr: str, connect_timeout: timedelta, **kwargs: Any) -> None:
            if addr == "server:1":
                Server.made[0].killed = True
                Server.made[0].ended.set()
                assert not kwargs["is_alive"]()
                raise UnreachableError("no server listens there")
            super().__init__(addr, connect_timeout, **kwargs)

    monkeypatch.setattr(tft_coord, "ManagerClient", Connects)
    Client.first_answer = plan_of(7)
    assert make().quorum(RankRequest(step=0), 10 * SECOND) is Client.first_answer
    assert [client.addr for client in Client.made] == ["server:2"]


def test_a_server_that_is_stopped_while_it_starts_is_killed_and_replaced(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = Server.address

    def stopped(server: Server) -> str:
        if server is Server.made[0]:
            raise RequestTimeoutError("it did not start within 60 s")
        return address(server)

    monkeypatch.setattr(Server, "address", stopped)
    Client.first_answer = plan_of(7)
    assert make().quorum(RankRequest(step=0), 10 * SECOND) is Client.first_answer
    assert [(server.num_kills, server.closed) for server in Server.made] == [(1, True), (0, False)]


def test_a_server_that_is_stopped_before_its_rank_has_connected_is_killed_and_replaced(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[timedelta] = []

    class Connects(Client):
        def __init__(self, addr: str, connect_timeout: timedelta, **kwargs: Any) -> None:
            limits.append(connect_timeout)
            if addr != "server:3":
                raise UnreachableError("it was not accepted")
            super().__init__(addr, connect_timeout, **kwargs)

    monkeypatch.setattr(tft_coord, "ManagerClient", Connects)
    Client.first_answer = plan_of(7)
    coordinator = make(connect_timeout=9 * SECOND)
    assert coordinator.quorum(RankRequest(step=0), 10 * SECOND) is Client.first_answer
    assert [(server.num_kills, server.closed) for server in Server.made] == [(1, True), (1, True), (0, False)]
    assert limits == [3 * SECOND, 3 * SECOND, 9 * SECOND]


def test_whoever_closes_does_not_wait_for_the_connection_to_the_server(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connects = threading.Event()

    class Waits(Client):
        def __init__(self, addr: str, connect_timeout: timedelta, **kwargs: Any) -> None:
            connects.set()
            while kwargs["is_alive"]():
                Server.made[0].ended.wait(0.01)
            raise UnreachableError("it was not accepted")

    monkeypatch.setattr(tft_coord, "ManagerClient", Waits)
    monkeypatch.setattr(Server, "alive", lambda server: not server.closed)
    Server.starts.clear()
    coordinator = make()
    Server.starts.set()
    assert connects.wait(10)
    coordinator.close()
    assert [server.closed for server in Server.made] == [True]


def test_a_server_that_does_not_answer_is_killed_and_replaced(make: Any) -> None:
    """It was stopped, say: field report D6."""
    coordinator = make()
    Client.made[0].is_answered = False
    with pytest.raises(ServerRestartedError):
        coordinator.quorum(RankRequest(step=0), 10 * SECOND)
    assert [(server.num_kills, server.closed) for server in Server.made] == [(1, True), (0, False)]
    Client.made[1].answer = plan_of(8)
    assert coordinator.quorum(RankRequest(step=0), SECOND) is Client.made[1].answer


def test_a_server_of_a_larger_group_is_not_killed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks would be lost by that; it may go on."""
    monkeypatch.setattr(module, "UNANSWERED_LOOKS_MOST", 1)
    coordinator = make(rank=0, **TWO)
    looks = threading.Semaphore(0)

    class Unanswered:
        def __get__(self, client: object, _: object = None) -> bool:
            looks.release()
            return False

    del Client.made[0].is_answered
    monkeypatch.setattr(Client, "is_answered", Unanswered(), raising=False)
    for _ in range(5):
        assert looks.acquire(timeout=10)
    assert Server.made[0].num_kills == 0
    assert coordinator._client is Client.made[0]


def test_servers_that_are_killed_again_and_again_are_given_up(make: Any) -> None:
    Server.kills = 5
    with pytest.raises(ReplicaGroupLostError, match="does not start: it ended before it served"):
        make().quorum(RankRequest(step=0), 10 * SECOND)
    assert len(Server.made) == 3


def test_a_server_whose_successor_is_killed_while_it_starts_gets_another_one(make: Any) -> None:
    coordinator = make()
    Client.first_answer = plan_of(7)
    Server.kills = 1
    Server.made[0].ended.set()
    with pytest.raises(ServerRestartedError):
        coordinator.quorum(RankRequest(step=0), 10 * SECOND)
    assert coordinator.quorum(RankRequest(step=0), 10 * SECOND) is Client.first_answer
    assert [client.addr for client in Client.made] == ["server:1", "server:3"]


def test_whoever_closes_does_not_wait_for_a_new_start_either(make: Any) -> None:
    coordinator = make()
    Server.starts.clear()
    Server.made[0].ended.set()
    while len(Server.made) == 1:
        Client.made[0].closed.wait(1)
    coordinator.close()
    assert [server.closed for server in Server.made] == [True, True]


def test_whoever_closes_does_not_wait_for_the_start(make: Any) -> None:
    Server.starts.clear()
    coordinator = make()
    coordinator.close()
    assert Server.made[0].closed
    with pytest.raises(CoordinationClosedError, match="was shut down; make a new one"):
        coordinator.quorum(RankRequest(step=0), SECOND)


def test_what_ranks_give_each_other_waits_for_the_address_that_the_others_wait_for(make: Any) -> None:
    """A store makes one call at a time: a rank 0 that waits in it for the others could not tell them where it is."""
    Server.starts.clear()
    coordinator = make(rank=0, **TWO)
    with pytest.raises(RequestTimeoutError, match="has not started"):
        coordinator.gather("shape", "8", SECOND / 20)
    Server.starts.set()
    with pytest.raises(
        RequestTimeoutError, match=r"timed out after 1 s waiting for all 2 ranks of replica .* to start"
    ):
        coordinator.gather("shape", "8", SECOND)
    other = make(rank=1, **TWO)
    assert (other.replica_id, Client.made[-1].addr) == (coordinator.replica_id, "server:1")
    with pytest.raises(
        RequestTimeoutError, match=r"for the values of the other ranks of its replica group for '.*shape'"
    ):
        coordinator.gather("shape", "8", SECOND)


def test_what_is_told_before_anybody_listens_is_heard_in_order(make: Any) -> None:
    """A drain that waits for a rank is told right behind its hello, while the Manager around it is still made."""
    coordinator = make()
    told = Client.made[0].kwargs["listener"]
    news = [LeaveRequest("it is drained", 0), NewcomerAsks("c"), NewcomerAsks("d")]
    told(news[0])
    told(news[1])
    heard: list[Any] = []
    coordinator.listen(heard.append)
    told(news[2])
    assert heard == news


def test_the_connect_time_out_reaches_server_client_and_sources(make: Any) -> None:
    """The fault of torchft: the variable reaches the client used for healing only."""
    coordinator = make(environ={"TORCHFT_CONNECT_TIMEOUT_SEC": "1.5", "TORCHFT_QUORUM_RETRIES": "3"})
    limit = timedelta(seconds=1.5)
    assert Server.made[0].args[7:] == (limit, 3)
    assert Client.made[0].connect_timeout == limit / 3  # of the first of three servers
    assert coordinator.source_metadata("source:1", timedelta(minutes=1)) == "state of rank 0 at source:1"
    assert Client.made[1].connect_timeout == limit
    assert Server.made[0].kwargs["timeouts"].connect_timeout_ms == 1_500


def test_answers_and_verdicts_pass_through(make: Any) -> None:
    coordinator = make(rank=0, **TWO)
    client = Client.made[0]
    client.answer = plan_of(7)
    assert coordinator.quorum(RankRequest(step=0), SECOND) is client.answer
    client.answer = Verdict(yes=True, leaves=True)
    assert coordinator.vote(0, True, SECOND, key=KEY, purpose=Purpose.COMMIT, leaving=True) == client.answer
    assert client.wishes == [True]
    coordinator.leave("it is preempted", SECOND, SECOND)
    coordinator.leave("finished at step 8", SECOND, SECOND, finished_step=8)
    assert client.left == [("it is preempted", 1_000, None), ("finished at step 8", 1_000, 8)]
    coordinator.healed(5)
    assert client.healed_bytes == 5


def test_the_verdict_of_one_rank_is_its_vote_if_there_are_other_members(make: Any) -> None:
    coordinator = make()
    client = Client.made[0]
    about: Any = {"key": KEY, "purpose": Purpose.COMMIT}
    client.answer = plan_of(7, size=2)
    coordinator.quorum(RankRequest(step=0), SECOND)
    client.answer = ReplicaGroupLostError("nobody asks")
    assert coordinator.vote(0, True, SECOND, **about) == Verdict(yes=True)
    assert coordinator.vote(0, False, SECOND, **about, leaving=True) == Verdict(yes=False, leaves=True)
    assert client.wishes == []


def test_the_only_member_asks_its_manager_server_for_the_verdict(make: Any) -> None:
    coordinator = make()
    client = Client.made[0]
    about: Any = {"key": KEY, "purpose": Purpose.COMMIT}
    for size in (2, 1):
        client.answer = plan_of(7, size=size)
        coordinator.quorum(RankRequest(step=0), SECOND)
    client.answer = Verdict(yes=False)
    assert coordinator.vote(0, True, SECOND, **about) == Verdict(yes=False)
    assert client.wishes == [False]


def test_a_rank_that_leaves_leaves_a_group_that_has_ended_too(make: Any) -> None:
    Client.first_answer = ReplicaGroupLostError("replica_0 has left the job")
    coordinator = make(rank=0, **TWO)
    about: Any = {"key": KEY, "purpose": Purpose.COMMIT}
    assert coordinator.vote(0, True, SECOND, **about, leaving=True) == Verdict(yes=False, leaves=True)
    with pytest.raises(ReplicaGroupLostError, match="has left the job"):
        coordinator.vote(0, True, SECOND, **about)


def test_a_group_of_one_gets_a_new_server_and_asks_it_again(make: Any) -> None:
    coordinator = make()
    Server.made[0].ended.set()
    with pytest.raises(ServerRestartedError):
        coordinator.quorum(RankRequest(step=0), SECOND)
    assert [server.closed for server in Server.made] == [True, False]
    assert Server.made[1].args[0] == coordinator.replica_id
    Client.made[1].answer = plan_of(8)
    assert coordinator.quorum(RankRequest(step=0), SECOND) is Client.made[1].answer


def test_a_connection_that_ends_a_moment_before_its_process_is_a_server_that_ended(make: Any) -> None:
    coordinator = make()
    Client.made[0].answer = UnreachableError("it closed the connection")
    threading.Timer(0.05, Server.made[0].ended.set).start()
    with pytest.raises(ServerRestartedError):
        coordinator.quorum(RankRequest(step=0), SECOND)


def test_a_group_of_two_is_lost_with_its_server(make: Any) -> None:
    coordinator = make(rank=0, **TWO)
    Server.made[0].ended.set()
    with pytest.raises(ReplicaGroupLostError, match="its 2 ranks can't vote without it"):
        coordinator.vote(0, True, SECOND, key=KEY, purpose=Purpose.COMMIT)
    with pytest.raises(ReplicaGroupLostError, match="start the group again"):
        coordinator.quorum(RankRequest(step=0), SECOND)
    assert len(Server.made) == 1


def test_the_other_rank_hears_nothing_any_more_and_is_lost_too(make: Any) -> None:
    make(rank=0, **TWO)
    other = make(rank=1, **TWO)
    Client.made[1].answer = UnreachableError("connection refused")
    with pytest.raises(ReplicaGroupLostError, match="this is rank 1"):
        other.quorum(RankRequest(step=0), SECOND)


def test_a_server_that_lives_and_does_not_answer_is_told_from_a_dead_one(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NOTICED_WITHIN_S", 0.05)
    coordinator = make()
    Client.made[0].answer = UnreachableError("no connection")
    with pytest.raises(RequestTimeoutError, match="runs but does not answer"):
        coordinator.quorum(RankRequest(step=0), SECOND)


def test_a_call_that_waits_ends_when_the_manager_is_shut_down(make: Any) -> None:
    coordinator = make()
    errors: list[Exception] = []

    def ask() -> None:
        try:
            coordinator.quorum(RankRequest(step=0), SECOND)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    coordinator.close()
    thread.join(10)
    assert [type(error) for error in errors] == [CoordinationClosedError]


@pytest.mark.parametrize("count", ["it is raised", "it is not", "there is none"])
def test_a_restarted_group_takes_its_predecessors_place_and_not_its_addresses(make: Any, count: str) -> None:
    starts = 0

    def start(rank: int) -> GroupCoordinator:
        environ = {} if count == "there is none" else {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "0"}
        if count == "it is raised":
            environ["TORCHELASTIC_RESTART_COUNT"] = str(starts)
        coordinator: GroupCoordinator = make(
            rank=rank, replica_id="a", connect_timeout=timedelta(milliseconds=500), environ=environ, **TWO
        )
        return coordinator

    first = start(0)
    assert Server.made[0].kwargs["replaces"] == ""
    before = start(1)
    assert before.replica_id == first.replica_id
    before.close()
    first.close()
    starts = 1
    # The rank that comes back first must not find the server of the start before.
    with pytest.raises(RequestTimeoutError, match="check whether group rank 0 has started"):
        start(1)
    second = start(0)
    assert Server.made[1].kwargs["replaces"] == first.replica_id
    assert start(1).replica_id == second.replica_id != first.replica_id
    assert second.replica_id.startswith("a:")


def test_a_restarted_group_may_have_another_size_and_its_ranks_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    store = GroupStore(HashStore(), "store:1", "run/0", "run")  # torchrun doesn't raise the count for new members
    monkeypatch.setattr(group_store.socket, "gethostname", lambda: "one")
    store.check_alone(1)
    store.claim("first", 1, 2)
    monkeypatch.setattr(group_store.socket, "gethostname", lambda: "other")
    store.check_alone(1)
    store.claim("second", 1, 4)
    with pytest.raises(ConfigError, match=r"rank 2 has WORLD_SIZE 2, and another .* has 4"):
        store.claim("second", 2, 2)
    monkeypatch.setattr(group_store.socket, "gethostname", lambda: "one")
    with pytest.raises(ConfigError, match="on other is rank 1 of this replica group already"):
        store.claim("second", 1, 4)


@pytest.mark.parametrize("finished_step", [None, 9])
def test_who_has_finished_is_nobodys_predecessor(make: Any, finished_step: int | None) -> None:
    environ = {"TORCHELASTIC_RUN_ID": "run"}
    first = make(rank=0, replica_id="a", environ=environ, **TWO)
    first.leave("it is over", SECOND, SECOND, finished_step=finished_step)
    first.close()
    make(rank=0, replica_id="a", environ=environ, **TWO)
    assert Server.made[1].kwargs["replaces"] == ("" if finished_step else first.replica_id)


def running() -> subprocess.Popen[bytes]:
    """A process that ends with its input."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def test_a_rank_whose_process_runs_is_refused_and_one_that_ended_unreaped_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launcher that restarts the ranks may not have reaped the processes of the start before."""
    store = GroupStore(HashStore(), "store:1", "run/0", "run")
    with running() as before:
        with monkeypatch.context() as as_before:
            as_before.setattr(group_store.os, "getpid", lambda: before.pid)
            store.check_alone(1)
        with pytest.raises(ConfigError, match=f"process {before.pid} on .* is rank 1 of this replica group already"):
            store.check_alone(1)
        assert before.stdin is not None
        before.stdin.close()
        os.waitid(os.P_PID, before.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        store.check_alone(1)
    store.check_alone(1)


def test_a_rank_is_not_refused_because_another_process_has_the_pid_of_the_start_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = GroupStore(HashStore(), "store:1", "run/0", "run")
    monkeypatch.setattr(group_store, "_PROC", str(tmp_path))

    def starts(pid: int, start: int) -> None:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a (name) S 1) S {' '.join(['0'] * 18)} {start} 0 0\n")

    starts(os.getpid(), 300)
    with running() as other:
        starts(other.pid, 100)
        with monkeypatch.context() as as_before:
            as_before.setattr(group_store.os, "getpid", lambda: other.pid)
            store.check_alone(1)
        with pytest.raises(ConfigError, match="is rank 1 of this replica group already"):
            store.check_alone(1)
        starts(other.pid, 200)
        store.check_alone(1)


def test_asks_are_answered_until_all_places_are_taken() -> None:
    store = GroupStore(HashStore(), "store:1", "run/0", "run")
    assert not store.answer("a", "server:1", 2)
    store.claim("a", 0, 2)
    with pytest.raises(RequestTimeoutError, match=r"rank 1 timed out after 0\.001 s"):
        store.ask(1, SECOND / 1_000)
    assert not store.answer("a", "server:1", 2), "who asked has died"
    store.claim("a", 1, 2)
    assert store.answer("a", "server:1", 2)


def addresses_listened_at(port: int) -> set[str]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port == port}


@pytest.mark.parametrize(
    ("hostname", "listens"),
    [("localhost", {"127.0.0.1"}), ("127.0.0.2", {"127.0.0.2"}), ("::1", {"::1"}), ("192.0.2.1", {"::"})],
)
def test_a_store_that_is_hosted_listens_at_the_address_that_others_are_told(hostname: str, listens: set[str]) -> None:
    """Of all interfaces only where that address is forwarded to this machine."""
    group = open_group_store(resolved(hostname=hostname, token="secret"))
    assert addresses_listened_at(group.store.port) == listens


def test_a_group_of_one_hosts_its_own_store() -> None:
    store = open_group_store(resolved())
    assert store.address == f"localhost:{store.store.port}"
    assert store.predecessor() == ""
    store.publish_id("a")
    assert store.predecessor() == "a"
    store.forget_id()
    assert store.predecessor() == ""


def test_an_own_address_that_can_not_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DistNetworkError("the client socket has failed to connect to (127.0.0.1, 1)\nat a place in C++")

    monkeypatch.setattr(group_store, "TCPStore", refuse)
    with pytest.raises(
        UnreachableError, match=r"hosts at 127\.0\.0\.1 .*connect to \(127\.0\.0\.1, 1\)\); check what blocks"
    ):
        open_group_store(resolved())


def test_a_store_that_nobody_runs_is_named() -> None:
    closed = open_group_store(resolved())
    port = closed.store.port
    del closed
    with pytest.raises(UnreachableError, match=f"can't reach its replica group's store at localhost:{port}"):
        open_group_store(resolved(store_addr="localhost", store_port=port, connect_timeout=timedelta(milliseconds=300)))


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.0.0.2", True), ("::1", True), ("10.0.0.1", False), ("node", False)],
)
def test_loopback_is_told_from_the_network(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_addresses_have_brackets_where_they_need_them() -> None:
    assert (join_address("::1", 1), join_address("node", 1)) == ("[::1]:1", "node:1")
