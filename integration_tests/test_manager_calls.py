"""Calls of a trainer to the manager server that it started."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest

from tft_coord import (
    ConfigError,
    CoordinationClosedError,
    ManagerClient,
    ManagerServer,
    Plan,
    QuorumKey,
    RankRequest,
    RequestTimeoutError,
    Timeouts,
    Unchanged,
    UnreachableError,
)
from tft_coord.core.lineage import fold_lineage, initial_lineage
from tft_lighthouse import LighthouseServer

SOON = timedelta(milliseconds=200)
LATER = timedelta(seconds=20)
PATIENT = Timeouts(heartbeat_timeout_ms=20_000)  # a call that ends sooner has ended for another reason


@pytest.fixture(params=[1, 2], ids=["alone", "waits for another"])
def min_replicas(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def server(min_replicas: int) -> Iterator[ManagerServer]:
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=min_replicas) as lighthouse,
        ManagerServer("a", str(lighthouse.address), "localhost", "127.0.0.1:0", "store:1", 1) as started,
    ):
        yield started


@pytest.fixture
def client(server: ManagerServer) -> Iterator[ManagerClient]:
    with ManagerClient(server.address(), group_rank=0, timeouts=PATIENT, is_alive=server.alive) as connected:
        yield connected


def request(step: int = 0, lineage: int | None = None, held: QuorumKey | None = None) -> RankRequest:
    return RankRequest(step=step, lineage=initial_lineage("default") if lineage is None else lineage, held=held)


@pytest.mark.parametrize("min_replicas", [1], indirect=True)
def test_quorums_and_votes_are_answered(client: ManagerClient) -> None:
    plan = client.quorum(0, request(), LATER)
    assert isinstance(plan, Plan)
    assert client.should_commit(0, 0, True, LATER, key=plan.key)
    next_request = request(1, fold_lineage(plan.lineage, plan.key, 1), plan.key)
    assert client.quorum(0, next_request, LATER) == Unchanged(plan.key)


@pytest.mark.parametrize("min_replicas", [2], indirect=True)
def test_a_deadline_says_who_was_waited_for_and_the_session_goes_on(client: ManagerClient) -> None:
    for _ in range(2):
        with pytest.raises(RequestTimeoutError, match="the lighthouse has not answered"):
            client.quorum(0, request(), SOON)


@pytest.mark.parametrize("min_replicas", [1], indirect=True)
def test_a_time_out_that_can_t_be_sent_is_refused_and_the_session_goes_on(client: ManagerClient) -> None:
    for timeout in (timedelta(days=25), timedelta.max):
        with pytest.raises(ConfigError, match="give at most 24 days"):
            client.quorum(0, request(), timeout)
    plan = client.quorum(0, request(), timedelta(days=24))
    assert isinstance(plan, Plan)
    with pytest.raises(ConfigError, match="give at most 24 days"):
        client.should_commit(0, 0, True, timedelta(days=25), key=plan.key)
    assert client.should_commit(0, 0, True, timedelta(days=24), key=plan.key)


@pytest.mark.parametrize("min_replicas", [2], indirect=True)
@pytest.mark.parametrize("end", ["the server is killed", "the client is closed"])
def test_a_call_that_waits_ends_at_once(client: ManagerClient, end: str) -> None:
    errors: list[Exception] = []
    asked = threading.Event()

    def ask() -> None:
        asked.set()
        try:
            client.quorum(0, request(), LATER)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    asked.wait()
    if end == "the client is closed":
        client.close()
    else:
        (process,) = (child for child in psutil.Process().children() if "tft-manager-server" in child.cmdline())
        process.kill()
    thread.join(10)
    assert [type(error) for error in errors] == [
        CoordinationClosedError if end == "the client is closed" else UnreachableError
    ]
