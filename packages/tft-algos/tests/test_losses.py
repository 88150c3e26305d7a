"""What a Manager does when it is told that a member of a quorum, or its own group, is lost."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from tft_algos import QuorumBrokenError, UsageError
from tft_algos.manager.recovery.healing import state_key
from tft_algos.testing import ManualClock, MemoryTransport, plan_of
from tft_coord.core.step.attempt import MAX_ERRORS_KEPT
from tft_coord.core.types import LossNotice, Purpose, QuorumKey
from tft_coord.errors import RefusedError, ReplicaGroupLostError
from tft_pg.errors import AbortedError, ConfigureError, PeerDisconnectedError


def loss(quorum_id: int, replica_id: str = "replica_1") -> LossNotice:
    return LossNotice(QuorumKey(quorum_id, quorum_id), replica_id, 1, "its manager server reports: killed")


def join_breakers() -> None:
    for thread in threading.enumerate():
        if thread.name == "tft-break":
            thread.join()


def test_a_loss_ends_the_reduction_that_runs(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), plan_of(8))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.group.holds = True
    reduction = rig.manager.allreduce(torch.ones(2))
    rig.coordinator.listener(loss(7))
    assert not reduction.wait()
    assert not rig.manager.should_commit()
    rig.group.holds = False
    assert rig.step()
    assert rig.coordinator.requests[1].needs_configure
    assert rig.group.num_aborts == 1


def test_after_a_loss_nothing_is_started_in_that_quorum(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.coordinator.listener(loss(7))
    rig.manager.allreduce(torch.ones(2)).wait()
    assert rig.group.calls == []
    assert not rig.manager.should_commit()
    says = "quorum 7.0000000000000007 is broken: replica replica_1 was lost (its manager server reports: killed)"
    assert says in caplog.text


def test_one_loss_is_one_line_with_short_ids(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each failure stood twice, with 450 characters and UUIDs in it."""
    caplog.set_level(logging.INFO)
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.coordinator.listener(loss(7, "victim:0f3a9c1d-1234-4abc-8def-0123456789ab"))
    assert not rig.manager.allreduce(torch.ones(2)).wait()
    assert not rig.manager.should_commit()
    lines = [message for message in caplog.messages if "victim" in message]
    assert lines == [
        "[replica_0/0 - step 0] quorum 7.0000000000000007 is broken: replica victim:0f3a9c1d was lost (its manager "
        "server reports: killed); its running operations are aborted"
    ]
    assert "should_commit=False" not in caplog.text


RESET: Final = "allreduce failed (rank 0 of 2): a connection to another rank ended (Connection reset by peer)"
LOST: Final = (
    "[replica_0/0 - step 0] quorum 7.0000000000000007 is broken: replica replica_1 was lost (its manager server "
    "reports: killed); "
)


@pytest.mark.parametrize("first", ["the failure", "the loss"])
@pytest.mark.parametrize("kind", [PeerDisconnectedError, AbortedError])
def test_a_failure_and_the_loss_behind_it_are_one_line(
    rigs: Any, caplog: pytest.LogCaptureFixture, first: str, kind: type[Exception]
) -> None:
    """The process group sees that a connection ended before anybody knows that a replica died."""
    caplog.set_level(logging.INFO)
    rig = rigs(plan_of(7, size=2), verdicts=[False])
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    caplog.clear()
    if first == "the loss":
        rig.coordinator.listener(loss(7))
    rig.manager.report_error(kind(RESET))
    assert not rig.manager.should_commit()
    if first == "the failure":
        rig.coordinator.listener(loss(7))
    rig.manager.shutdown()
    says = "step 0 will not commit, and its running operations are aborted"
    assert caplog.messages == [LOST + (says if first == "the failure" else "its running operations are aborted")]


def test_a_failure_that_a_loss_may_explain_is_held_for_beats_however_often_it_is_looked_at(
    rigs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    rig = rigs(plan_of(7, size=2), verdicts=[False], clock=clock)
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.manager.report_error(PeerDisconnectedError(RESET))
    assert not rig.manager.should_commit()
    for _ in range(10):
        clock.pass_s(0.1)
        rig.coordinator.progress()
    assert RESET not in caplog.text
    for _ in range(20):
        clock.pass_s(0.1)
        rig.coordinator.progress()
    assert RESET in caplog.text


@pytest.mark.parametrize("end", ["two beats", "shutdown", "another failure"])
def test_a_failure_that_no_loss_explains_is_told_soon(rigs: Any, caplog: pytest.LogCaptureFixture, end: str) -> None:
    rig = rigs(plan_of(7, size=2), plan_of(7, size=2), verdicts=[False, False])
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.manager.report_error(PeerDisconnectedError(RESET))
    assert not rig.manager.should_commit()
    assert RESET not in caplog.text
    if end == "shutdown":
        rig.manager.shutdown()
    elif end == "two beats":
        for _ in range(3):
            rig.manager._life.look()
    else:
        rig.manager.start_quorum()
        rig.manager.wait_quorum()
        rig.manager.report_error(PeerDisconnectedError("another"))
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [f"[replica_0/0 - step 0] this step did not commit: {RESET}"]


def test_a_failure_of_the_users_own_is_told_beside_a_loss(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.coordinator.listener(loss(7))
    rig.manager.report_error(RuntimeError("not a number"))
    assert "this step will not commit: not a number" in caplog.text


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines at WARNING and above, without who tells them."""
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [line.partition("] ")[2] for line in lines]


OWN: Final = "this step will not commit: CUDA out of memory"


@pytest.mark.parametrize("before", ["a failure of a peer", "a loss", "an error of the user's"])
def test_each_other_failure_of_a_step_is_told_once(rigs: Any, caplog: pytest.LogCaptureFixture, before: str) -> None:
    """Only the first failure of a step was told: the loss, or what the process group said, and not what to mend."""
    rig = rigs(plan_of(7, size=2), verdicts=[False])
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    if before == "a loss":
        rig.coordinator.listener(loss(7))
    first: Exception = ValueError("bad batch") if before == "an error of the user's" else PeerDisconnectedError(RESET)
    for error in (
        first,
        AbortedError("abort was called"),
        RuntimeError("CUDA out of memory"),
        PeerDisconnectedError(RESET),
    ) * 2:
        rig.manager.report_error(error)
    assert not rig.manager.should_commit()
    rig.manager.shutdown()
    peer = f"this step did not commit: {RESET}"
    assert (
        told(caplog)
        == {
            "a failure of a peer": [OWN, peer],
            "a loss": [LOST.partition("] ")[2] + "its running operations are aborted", OWN],
            "an error of the user's": ["this step will not commit: bad batch", OWN, peer],
        }[before]
    )


def test_a_step_tells_a_bounded_number_of_failures(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(plan_of(7), verdicts=[False])
    rig.manager.start_quorum()
    for number in range(MAX_ERRORS_KEPT + 1):
        rig.manager.report_error(RuntimeError(f"the {number}th"))
    assert not rig.manager.should_commit()
    assert told(caplog) == [f"this step will not commit: the {number}th" for number in range(MAX_ERRORS_KEPT)]


@pytest.mark.parametrize("is_told", ["the notice comes late", "nobody tells it"])
def test_a_failure_names_who_is_gone_though_the_next_quorum_came_first(
    rigs: Any, caplog: pytest.LogCaptureFixture, is_told: str
) -> None:
    """A closed connection is seen before the notice of the loss, and of a leave there is none: nobody was named."""
    rig = rigs(plan_of(7, size=2), plan_of(8))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.manager.report_error(PeerDisconnectedError(RESET))
    assert not rig.manager.should_commit()
    assert rig.step()
    if is_told == "the notice comes late":
        rig.coordinator.listener(loss(7))
    for _ in range(3):
        rig.manager._life.look()
    assert told(caplog) == [
        LOST.partition("] ")[2] + "step 0 did not commit"
        if is_told == "the notice comes late"
        else "replica replica_1 was lost or has left in step 0, which did not commit"
    ]


def test_a_failure_is_told_as_it_is_where_nobody_is_gone(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(plan_of(7, size=2), plan_of(8, size=2), plan_of(9))
    for _ in range(2):
        rig.manager.start_quorum()
        rig.manager.wait_quorum()
        rig.manager.report_error(PeerDisconnectedError(RESET))
        assert not rig.manager.should_commit()
    assert rig.step()
    rig.manager.shutdown()
    assert told(caplog) == [
        f"this step did not commit: {RESET}",
        "replica replica_1 was lost or has left in step 0, which did not commit",
    ]


def test_a_member_that_asks_for_another_group_explains_what_that_aborts(
    rigs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs(plan_of(7, size=2), verdicts=[False])
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.coordinator.listener(replace(loss(7), lives=True))
    rig.manager.report_error(AbortedError("abort was called"))
    assert not rig.manager.should_commit()
    rig.manager.shutdown()
    assert told(caplog) == []


@pytest.mark.parametrize("comes", ["before the failure", "after it"])
def test_a_member_that_asks_for_another_group_explains_the_failure_of_its_peers(
    rigs: Any, caplog: pytest.LogCaptureFixture, comes: str
) -> None:
    """The connection ends with the child process of a living member. Seconds later it was a warning of an old step."""
    caplog.set_level(logging.INFO)
    rig = rigs(plan_of(7, size=2), plan_of(8, size=2), verdicts=[False])
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    wants = replace(loss(7), reason="asks for a new process group", lives=True)
    if comes == "before the failure":
        rig.coordinator.listener(wants)
    rig.manager.report_error(PeerDisconnectedError(RESET))
    if comes == "after it":
        rig.coordinator.listener(wants)
    assert not rig.manager.should_commit()
    assert rig.step()
    for _ in range(3):
        rig.manager._life.look()
    rig.manager.shutdown()
    assert "replica replica_1 asks for a new process group; its running operations are aborted" in caplog.text
    assert RESET not in caplog.text
    assert told(caplog) == []


def test_a_lost_replica_is_named_though_a_living_one_asked_for_another_group(
    rigs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs(plan_of(7, size=3), plan_of(8, size=2), verdicts=[False])
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.manager.report_error(PeerDisconnectedError(RESET))
    rig.coordinator.listener(replace(loss(7), reason="asks for a new process group", lives=True))
    assert not rig.manager.should_commit()
    assert rig.step()
    for _ in range(3):
        rig.manager._life.look()
    assert told(caplog) == ["replica replica_2 was lost or has left in step 0, which did not commit"]


def test_a_failure_that_is_told_in_its_step_says_what_will_be(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(plan_of(7, size=2), verdicts=[False])
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.manager.report_error(PeerDisconnectedError(RESET))
    for _ in range(3):
        rig.manager._life.look()
    assert told(caplog) == [f"this step will not commit: {RESET}"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, PeerDisconnectedError])
def test_an_error_without_a_text_is_named_by_its_type(
    rigs: Any, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    rig = rigs(plan_of(7, size=2), verdicts=[False])
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.manager.report_error(error("  "))
    rig.manager._life.look()
    rig.manager.shutdown()
    assert told(caplog)[0] == f"this step will not commit: {error.__name__}"


@pytest.mark.parametrize("comes", ["before the failure", "after it"])
def test_a_straggler_that_is_left_out_in_a_step_is_one_line(
    rigs: Any, caplog: pytest.LogCaptureFixture, comes: str
) -> None:
    """The failed step was explained a second time, by a replica that was lost or had left."""
    rig = rigs(plan_of(7, size=2), plan_of(8, size=1), verdicts=[False])
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    notice = replace(loss(7), reason="is left out as a straggler: it takes 9 s", lives=True)
    if comes == "before the failure":
        rig.coordinator.listener(notice)
    rig.manager.report_error(PeerDisconnectedError(RESET))
    if comes == "after it":
        rig.coordinator.listener(notice)
    assert not rig.manager.should_commit()
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.manager.shutdown()
    (line,) = told(caplog)
    assert "replica replica_1 is left out as a straggler: it takes 9 s; " in line
    assert line.endswith("its running operations are aborted")


@pytest.mark.parametrize("news", ["before the failure", "before the vote", "never"])
def test_a_lost_rank_is_one_line_and_raised_with_its_name(
    rigs: Any, caplog: pytest.LogCaptureFixture, news: str
) -> None:
    """What Gloo says of a closed connection stood there twice, before the line that says which rank was lost."""
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    lost = ReplicaGroupLostError("replica replica_0 lost a rank (rank 1 ended: its process ended)")
    if news == "before the failure":
        rig.coordinator.listener(lost)
    rig.manager.report_error(PeerDisconnectedError(RESET))
    rig.manager.report_error(ReplicaGroupLostError("a reduction among the processes of this replica failed (GLHF!)"))
    if news == "before the vote":
        rig.coordinator.listener(lost)
    with pytest.raises(ReplicaGroupLostError) as raised:
        rig.manager.should_commit()
    rig.manager.shutdown()
    if news == "never":
        assert "(GLHF!)" in str(raised.value)
        assert told(caplog) == [f"this step will not commit: {RESET}"]
    else:
        assert str(raised.value) == str(lost)
        assert told(caplog) == [str(lost)]


def test_a_group_that_a_dead_member_keeps_from_being_built_is_one_line(
    rigs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs(plan_of(7, size=2), verdicts=[False])
    rig.group.failing_configure = ConfigureError("rank 1 did not come")
    rig.manager.start_quorum()
    assert not rig.manager.should_commit()
    rig.coordinator.listener(loss(7))
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line == LOST + "step 0 will not commit, and its running operations are aborted"


def test_who_ends_does_not_blame_who_survives(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its own end fails the survivor's reduction, and the survivor asks for a new process group."""
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.manager.shutdown()
    wants = LossNotice(QuorumKey(7, 7), "replica_1", 1, "asks for a new process group", lives=True)
    rig.coordinator.listener(wants)
    assert not [record for record in caplog.records if record.levelno >= logging.INFO and "replica_1" in record.message]


def test_a_reduction_that_had_its_data_commits_although_its_quorum_broke(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    assert rig.manager.allreduce(torch.ones(2)).wait()
    rig.coordinator.listener(loss(7))
    join_breakers()
    assert rig.group.num_aborts == 1
    assert rig.manager.should_commit()


def test_a_loss_ends_a_rendezvous(rigs: Any, use_async_quorum: bool) -> None:
    rig = rigs(plan_of(7, size=2), plan_of(8), use_async_quorum=use_async_quorum)
    rig.group.holds = True

    def tell() -> None:
        rig.group.waits.wait()
        rig.coordinator.listener(loss(7))
        rig.coordinator.listener(loss(7))  # twice

    teller = threading.Thread(target=tell)
    teller.start()
    rig.manager.start_quorum()
    rig.manager.allreduce(torch.ones(2)).wait()
    assert [str(error) for error in rig.manager.status().errors] == ["aborted"]
    assert not rig.manager.should_commit()
    teller.join()
    rig.group.holds = False
    assert rig.step()


def test_a_notice_that_comes_before_its_quorum_is_kept_for_it(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), plan_of(8, size=2))
    assert rig.step()
    rig.coordinator.listener(loss(8))
    rig.manager.start_quorum()
    rig.manager.allreduce(torch.ones(2)).wait()
    error = rig.manager.errored()
    assert error is not None
    assert isinstance(error.original_exception, QuorumBrokenError)
    assert error.original_exception.replica_id == "replica_1"
    assert not rig.manager.should_commit()
    assert len(rig.group.configured) == 1


@pytest.mark.parametrize("quorum_id", [7, 9])
def test_a_loss_in_another_quorum_changes_nothing(rigs: Any, quorum_id: int) -> None:
    rig = rigs(plan_of(8, size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.coordinator.listener(loss(quorum_id))
    rig.manager.allreduce(torch.ones(2)).wait()
    assert rig.manager.should_commit()
    join_breakers()
    assert rig.group.num_aborts == 0


def test_the_abort_of_one_quorum_never_meets_the_next(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), plan_of(8))
    assert rig.step()
    rig.coordinator.listener(loss(7))
    assert rig.step()  # configured anew before the abort is due
    join_breakers()
    assert rig.group.num_aborts == 0
    assert rig.group.errored() is None


def test_ones_own_loss_breaks_the_quorum_here_too(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.coordinator.listener(loss(7, "replica_0"))
    rig.manager.allreduce(torch.ones(2)).wait()
    assert not rig.manager.should_commit()


def test_who_is_alone_in_its_quorum_has_nothing_that_could_break(rigs: Any) -> None:
    rig = rigs(plan_of(7))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.coordinator.listener(loss(7, "replica_0"))
    rig.manager.allreduce(torch.ones(2)).wait()
    assert rig.manager.should_commit()


def test_the_loss_of_this_group_ends_its_reduction_and_is_raised(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.group.holds = True
    reduction = rig.manager.allreduce(torch.ones(2))
    rig.coordinator.listener(ReplicaGroupLostError("replica a lost a rank (rank 1 ended: killed); end this process"))
    assert not reduction.wait()
    with pytest.raises(ReplicaGroupLostError, match="rank 1 ended: killed"):
        rig.manager.should_commit()


def test_the_loss_of_this_group_is_raised_however_much_went_wrong_before(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    for number in range(MAX_ERRORS_KEPT):
        rig.manager.report_error(RuntimeError(f"error {number}"))
    rig.coordinator.listener(ReplicaGroupLostError("replica a lost a rank (rank 1 ended: killed); end this process"))
    with pytest.raises(ReplicaGroupLostError, match="rank 1 ended: killed"):
        rig.manager.should_commit()
    assert len(rig.manager.status().errors) == MAX_ERRORS_KEPT


def test_the_loss_of_this_group_between_two_steps_is_raised_by_the_next(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), QuorumKey(7, 7))
    assert rig.step()
    rig.coordinator.listener(ReplicaGroupLostError("replica a lost a rank (rank 1 ended: killed); end this process"))
    rig.manager.start_quorum()
    with pytest.raises(ReplicaGroupLostError, match="rank 1 ended: killed"):
        rig.manager.should_commit()


@pytest.mark.parametrize("error", [RefusedError("who are you"), UsageError("call attach first")])
def test_a_quorum_that_can_never_be_is_raised_however_much_went_wrong_before(rigs: Any, error: Exception) -> None:
    rig = rigs(error)
    rig.manager.start_quorum()
    for number in range(MAX_ERRORS_KEPT):
        rig.manager.report_error(RuntimeError(f"error {number}"))
    with pytest.raises(type(error), match=str(error)):
        rig.manager.should_commit()


def test_a_transfer_ends_when_its_last_source_is_lost_and_not_before(rigs: Any, use_async_quorum: bool) -> None:
    transport = MemoryTransport(endless=True)
    rig = rigs(
        plan_of(7, step=3, rank=0, size=3, healing=[0]),
        checkpoint_transport=transport,
        use_async_quorum=use_async_quorum,
    )
    still_receiving: list[bool] = []

    def tell() -> None:
        transport.receiving.wait()
        for name in ("replica_1", "replica_2"):  # they live, and serve on
            rig.coordinator.listener(LossNotice(QuorumKey(7, 7), name, 1, "asks for a new process group", lives=True))
        rig.coordinator.listener(loss(7, "replica_1"))
        join_breakers()
        still_receiving.append(any(thread.name == "tft-heal" for thread in threading.enumerate()))
        rig.coordinator.listener(loss(7, "replica_2"))

    teller = threading.Thread(target=tell)
    teller.start()
    rig.manager.start_quorum()
    assert not rig.manager.should_commit()
    teller.join()
    assert still_receiving == [True]
    assert rig.manager.current_step() == 0


def test_a_source_that_is_lost_before_the_fetch_begins_is_not_waited_for(rigs: Any) -> None:
    """The notice came on another thread between the plan and the fetch, and nobody told the fetch of it."""
    transport = MemoryTransport(endless=True)
    rig = rigs(plan_of(7, step=3, rank=0, size=2, healing=[0]), checkpoint_transport=transport)
    speculative, right = rig.manager._parts.speculative, rig.manager._parts.speculative.plan_arrived

    def told_meanwhile(plan: Any) -> None:
        right(plan)
        rig.coordinator.listener(loss(7, "replica_1"))

    speculative.plan_arrived = told_meanwhile
    rig.manager.start_quorum()
    assert not rig.manager.should_commit()
    assert rig.manager.current_step() == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_who_could_not_configure_does_not_wait_for_a_source_that_waits_for_it(
    rigs: Any, use_async_quorum: bool, world_size: int
) -> None:
    """The source serves at the end of its step, and is in the rendezvous until this replica asks again."""
    transport = MemoryTransport(endless=True)
    plans = [plan_of(key, step=3, rank=0, size=2, healing=[0]) for key in (7, 8)]
    launched = {"rank": 1, "world_size": 2, "store_addr": "localhost", "store_port": 1} if world_size == 2 else {}
    rig = rigs(*plans, checkpoint_transport=transport, use_async_quorum=use_async_quorum, **launched)
    rig.group.failing_configure = RuntimeError("no such interface")
    rig.manager.start_quorum()
    assert not rig.manager.should_commit()
    assert [str(error).partition(",")[0] for error in rig.manager.status().errors] == [
        "no such interface",
        "replica replica_0 does not wait for the state of step 3",
    ]
    votes = [(yes, purpose) for _, _, yes, purpose in rig.coordinator.votes]
    assert votes == [(False, Purpose.STAGED)] * (world_size - 1) + [(False, Purpose.COMMIT)]
    rig.group.failing_configure = RuntimeError("still no such interface")
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    request = rig.coordinator.requests[1]
    assert (request.held, request.needs_configure, request.failed_heals) == (QuorumKey(7, 7), True, 0)


def test_who_could_not_configure_in_a_broken_quorum_heals_all_the_same(rigs: Any, use_async_quorum: bool) -> None:
    """The source was told too, so it leaves the rendezvous and serves."""
    served = plan_of(7, step=3, rank=0, size=3, healing=[0])
    state = {
        "user": {"default": {"tensor": torch.full((2,), 5.0)}},
        "tft": {"step": 3, "batches_committed": 9, "lineage": f"{served.lineage:016x}"},
    }
    rig = rigs(
        served, checkpoint_transport=MemoryTransport({state_key(served): state}), use_async_quorum=use_async_quorum
    )
    rig.coordinator.listener(loss(7, "replica_2"))
    rig.manager.start_quorum()
    assert not rig.manager.should_commit()
    assert rig.manager.current_step() == 3
    assert rig.group.configured == []
