"""A rank that can't reach a peer tells the lighthouse with its next request, once, and its log names the replica."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from tft_algos.manager.quorum.unreached import UnreachedPeers
from tft_algos.testing import ManualClock, plan_of
from tft_coord.core.types import Unreached, Via
from tft_pg.errors import AbortedError, ConfigureError, PeerDisconnectedError, StoreUnreachableError

REFUSED = ConfigureError("no group", unreached={2: "10.0.0.3 port 4321: connection refused"})
LATE = ConfigureError("no group", missing_ranks=(1,))
NO_STORE = StoreUnreachableError("no store", host="10.0.0.1", port=29500, why="connection refused")


def plan(quorum_id: int = 7, rank: int = 1, size: int = 3) -> Any:
    return plan_of(quorum_id, rank=rank, size=size)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- what is said --------------------------------------------------------------------------------------------------


def test_a_peer_that_refuses_is_said_once_by_its_replica_id() -> None:
    peers = UnreachedPeers()
    peers.configure_failed(plan(), REFUSED)
    assert peers.has_unsent
    assert peers.take() == (Unreached("replica_2", Via.GROUP, "10.0.0.3 port 4321: connection refused"),)
    assert peers.take() == ()
    assert not peers.has_unsent


def test_a_peer_that_did_not_come_is_said_from_the_second_time_in_a_row() -> None:
    peers = UnreachedPeers()
    said = []
    for _ in range(3):
        peers.configure_failed(plan(rank=0), LATE)
        said.append([(each.replica_id, each.via) for each in peers.take()])
    assert said == [[], [("replica_1", Via.GROUP)], [("replica_1", Via.GROUP)]]


@pytest.mark.parametrize("between", ["a group", "another's absence"])
def test_a_peer_that_came_in_between_is_not_said(between: str) -> None:
    peers = UnreachedPeers()
    peers.configure_failed(plan(rank=0), LATE)
    if between == "a group":
        peers.group_configured()
    else:
        peers.configure_failed(plan(rank=0), ConfigureError("no group", missing_ranks=(2,)))
    peers.configure_failed(plan(rank=0), LATE)
    assert peers.take() == ()


def test_an_abort_in_between_says_nothing_of_who_came() -> None:
    peers = UnreachedPeers()
    for error in (LATE, AbortedError("the quorum broke"), LATE):
        peers.configure_failed(plan(rank=0), error)
    assert [each.replica_id for each in peers.take()] == ["replica_1"]


@pytest.mark.parametrize(("rank", "whose"), [(1, "the rendezvous store of replica replica_0"), (0, "its own")])
def test_a_store_is_said_by_the_replica_that_it_belongs_to(rank: int, whose: str) -> None:
    peers = UnreachedPeers()
    found = peers.configure_failed(plan(rank=rank), NO_STORE)
    assert peers.take() == (Unreached("replica_0", Via.STORE, "10.0.0.1:29500: connection refused"),)
    assert isinstance(found.error, StoreUnreachableError)
    assert whose in str(found.error)
    for advice in ("still runs",) if rank == 0 else ("torchrun's agent", "has ended", "GLOO_SOCKET_IFNAME"):
        assert advice in found.warning


def test_a_manager_server_that_does_not_say_whose_store_it_is_gives_no_report() -> None:
    peers = UnreachedPeers()
    found = peers.configure_failed(replace(plan(), store_replica_id=""), NO_STORE)
    assert peers.take() == ()
    assert "the rendezvous store at 10.0.0.1:29500 could not be reached (connection refused)" in str(found.error)


def test_sources_of_state_are_said_too() -> None:
    peers = UnreachedPeers()
    peers.sources_failed({"replica_2": "no answer\nto a connection"})
    assert peers.take() == (Unreached("replica_2", Via.STATE, "no answer to a connection"),)


def test_an_error_of_another_kind_stays_as_it_is() -> None:
    error = RuntimeError("something else")
    peers = UnreachedPeers()
    found = peers.configure_failed(plan(), error)
    assert found.error is error
    assert not found.warning
    assert not peers.last


def test_a_replica_that_can_not_build_a_group_reports_itself() -> None:
    """No peer can: its next request ends their rendezvous before they miss it."""
    peers = UnreachedPeers()
    error = ConfigureError("Gloo can't listen on eth9", is_own=True)
    found = peers.configure_failed(plan(rank=1), error)
    assert peers.take() == (Unreached("replica_1", Via.GROUP, "Gloo can't listen on eth9"),)
    assert found.error is error
    assert "this replica can't build a process group of its own (1 times in a row)" in found.warning


def test_an_error_that_may_be_a_peers_counts_when_it_repeats() -> None:
    peers = UnreachedPeers()
    for error, broken in ((RuntimeError("no"), False), (RuntimeError("no"), True), (RuntimeError("no"), False)):
        assert not peers.configure_failed(plan(rank=1), error, broken=broken).warning
        assert peers.take() == ()
    assert peers.configure_failed(plan(rank=1), RuntimeError("no")).warning
    assert [each.replica_id for each in peers.take()] == ["replica_1"]
    peers.group_configured()
    peers.configure_failed(plan(rank=1), RuntimeError("no"))
    assert peers.take() == ()


def test_a_rank_that_can_not_be_is_not_named() -> None:
    peers = UnreachedPeers()
    error = ConfigureError("no group", missing_ranks=(9,), unreached={-1: "x", 7: "y"})
    assert peers.configure_failed(plan(), error).error is error
    assert peers.take() == ()


def test_the_error_and_the_warning_name_replicas_and_what_to_do() -> None:
    peers = UnreachedPeers()
    error = ConfigureError("no group", missing_ranks=(0,), unreached=REFUSED.unreached)
    found = peers.configure_failed(plan(), error)
    assert isinstance(found.error, ConfigureError)
    assert found.error.unreached == REFUSED.unreached
    assert found.error.__cause__ is error
    for sentence in (str(found.error), found.warning):
        assert "replica replica_2 could not be reached at 10.0.0.3 port 4321: connection refused" in sentence
        assert "replica replica_0 did not join its rendezvous" in sentence
        assert "firewall" in sentence
    assert peers.last in found.warning
    peers.group_configured()
    assert peers.last == ""


def test_a_lasting_failure_is_logged_ever_more_rarely() -> None:
    peers = UnreachedPeers()
    lines = [peers.configure_failed(plan(), REFUSED).warning for _ in range(9)]
    assert [index for index, line in enumerate(lines, start=1) if line] == [1, 2, 4, 8]
    assert lines[7].endswith("(8 times in a row)")


# --- a Manager that says it ----------------------------------------------------------------------------------------


def test_a_manager_says_it_with_its_next_request_and_not_again(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(*(plan_of(quorum_id, size=3) for quorum_id in (7, 8, 9)))
    rig.group.failing_configure = REFUSED
    assert not rig.step()
    assert rig.step()
    assert rig.step()
    said = [request.unreached for request in rig.coordinator.requests]
    assert said == [(), (Unreached("replica_2", Via.GROUP, REFUSED.unreached[2]),), ()]
    assert rig.coordinator.requests[1].needs_configure
    (line,) = warnings(caplog)
    assert "replica_2 could not be reached at 10.0.0.3 port 4321: connection refused" in line
    assert "check for a firewall" in line


def test_a_manager_that_has_something_to_say_does_not_wait_before_it_asks(rigs: Any) -> None:
    clock = ManualClock()
    rig = rigs(*(plan_of(quorum_id, size=3) for quorum_id in range(7, 17)), clock=clock)
    for _ in range(8):
        rig.group.failing_configure = REFUSED
        assert not rig.step()
    assert clock.waited_s == []
    rig.group.failing_configure = RuntimeError("nobody to blame")
    assert not rig.step()
    assert rig.step()
    assert clock.waited_s != []


def test_the_step_fails_by_an_error_that_names_the_replica(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=3), plan_of(8, size=3))
    rig.group.failing_configure = ConfigureError("rank 1 did not come", missing_ranks=(1,))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    error = rig.manager.errored()
    assert error is not None
    assert "replica replica_1 did not join its rendezvous" in str(error.original_exception)
    assert not rig.manager.should_commit()
    assert rig.step()
    assert rig.coordinator.requests[1].unreached == ()


def test_a_peer_that_falls_silent_in_a_reduction_is_said_with_the_next_request(
    rigs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs(plan_of(7, size=3), plan_of(8, size=3), plan_of(9, size=3, step=1))
    rig.group.failing_wait = PeerDisconnectedError(
        "allreduce failed", unreached={2: "10.0.0.3: nothing is acknowledged"}
    )
    assert not rig.step()
    assert rig.step()
    assert rig.step()
    said = [request.unreached for request in rig.coordinator.requests]
    assert said == [(), (Unreached("replica_2", Via.GROUP, "10.0.0.3: nothing is acknowledged"),), ()]
    assert "lost the connection to replica replica_2 at 10.0.0.3: nothing is acknowledged" in warnings(caplog)[-1]
