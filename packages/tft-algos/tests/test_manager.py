"""The Manager in one process: the test is the lighthouse, the other replicas and the wire."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tft_algos import (
    ConfigError,
    HealingError,
    Manager,
    ManagerClosedError,
    TooManyFailuresError,
    UnsupportedFeatureError,
    UsageError,
    UserStateError,
)
from tft_algos.errors import ServerRestartedError
from tft_algos.manager.recovery.healing import state_key
from tft_algos.manager.reduce import reduction
from tft_algos.testing import FakeGroup, ManualClock, MemoryTransport, plan_of
from tft_ckpt import StateUnavailableError, StateUnsupportedError
from tft_coord.core.types import Purpose, QuorumKey
from tft_coord.errors import RefusedError, ReplicaGroupLostError, RequestTimeoutError

# --- a step -----------------------------------------------------------------------------------------------------------


def test_a_step_configures_the_group_and_commits(rigs: Any, use_async_quorum: bool) -> None:
    rig = rigs(plan_of(7, size=2), use_async_quorum=use_async_quorum)
    assert rig.step()
    assert rig.group.configured == [("localhost:1/tft/default/7.0000000000000007/0", 0, 2)]
    assert rig.coordinator.votes == [(QuorumKey(7, 7), 0, True, Purpose.COMMIT)]
    assert (rig.manager.current_step(), rig.manager.batches_committed()) == (1, 2)


def test_an_unchanged_quorum_is_not_configured_again(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), QuorumKey(7, 7), QuorumKey(7, 7))
    assert [rig.step() for _ in range(3)] == [True, True, True]
    assert len(rig.group.configured) == 1


def test_before_the_first_quorum_nobody_participates(rigs: Any) -> None:
    manager = rigs().manager
    assert (manager.num_participants(), manager.participating_rank(), manager.is_participating()) == (0, None, False)
    with pytest.raises(UsageError, match="start_quorum first"):
        manager.wait_quorum()
    with pytest.raises(UsageError, match="start_quorum first"):
        manager.allreduce(torch.ones(1))
    with pytest.raises(UsageError, match="start_quorum first"):
        manager.should_commit()


def test_a_verdict_ends_the_step(rigs: Any) -> None:
    rig = rigs(plan_of(7))
    assert rig.step()
    with pytest.raises(UsageError, match="start_quorum first"):
        rig.manager.should_commit()
    assert rig.manager.current_step() == 1


def test_the_groups_verdict_counts_and_not_the_own_vote(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), verdicts=[False])
    assert not rig.step()
    assert rig.manager.current_step() == 0


def test_a_vote_without_an_answer_neither_steps_nor_goes_on(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), verdicts=[RequestTimeoutError("no verdict")])
    with pytest.raises(RequestTimeoutError, match="no verdict"):
        rig.step()
    assert rig.manager.current_step() == 0


def test_max_retries(rigs: Any) -> None:
    rig = rigs(plan_of(7), plan_of(8), verdicts=[False, False], max_retries=1)
    assert not rig.step()
    with pytest.raises(TooManyFailuresError, match="failed to commit 2 times in a row, and max_retries is 1"):
        rig.step()


# --- reductions -------------------------------------------------------------------------------------------------------


def test_an_average_is_the_sum_divided_by_the_participants_in_place(rigs: Any) -> None:
    rig = rigs(
        plan_of(7, size=4, healing=[3]), others=1.25
    )  # three participants: each gives a quarter, and the sum is divided by 3 / 4
    rig.manager.start_quorum()
    tensor = torch.ones(2)
    assert rig.manager.allreduce(tensor).wait()
    assert tensor.tolist() == [2.0, 2.0]


def test_a_future_holds_the_average(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), others=2.5)
    rig.manager.start_quorum()
    tensor = torch.ones(2)
    work = rig.manager.allreduce(tensor)
    assert work.get_future().wait()[0] is tensor
    assert work.wait()
    assert tensor.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX])
def test_other_operations_pass_as_they_are(rigs: Any, op: dist.ReduceOp.RedOpType) -> None:
    rig = rigs(plan_of(7, size=2), others=5)
    rig.manager.start_quorum()
    tensor = torch.ones(2, dtype=torch.int64)
    assert rig.manager.allreduce(tensor, reduce_op=op).wait()
    assert tensor.tolist() == [6, 6]


def test_an_average_of_whole_numbers_is_refused(rigs: Any) -> None:
    rig = rigs(plan_of(7))
    rig.manager.start_quorum()
    with pytest.raises(ValueError, match=r"needs a floating point tensor, and this one is torch\.int64"):
        rig.manager.allreduce(torch.ones(1, dtype=torch.int64))


def test_should_quantize_is_refused_by_a_group_that_cannot_and_never_silently_ignored(rigs: Any) -> None:
    """The fault of torchft: without Triton, unquantized data is sent."""
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    with pytest.raises(UnsupportedFeatureError, match="a FakeGroup has no alltoall_base"):
        rig.manager.allreduce(torch.ones(1), should_quantize=True)
    assert rig.group.calls == []


def test_the_only_member_reduces_nothing(rigs: Any) -> None:
    rig = rigs(plan_of(7))
    rig.manager.start_quorum()
    tensor = torch.full((2,), 3.0)
    assert rig.manager.allreduce(tensor).wait()
    assert (tensor.tolist(), rig.group.calls, rig.manager.num_participants()) == ([3.0, 3.0], [], 1)


def test_a_spare_gives_zeros_and_takes_the_mean(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=3, rank=2, participants=[0, 1]), others=2.0)
    rig.manager.start_quorum()
    tensor = torch.ones(2)
    assert rig.manager.allreduce(tensor).wait()
    assert rig.group.calls[0].tolist() == [0.0, 0.0]
    assert tensor.tolist() == [2.0, 2.0]
    assert (rig.manager.is_participating(), rig.manager.participating_rank()) == (False, None)


@pytest.mark.parametrize(
    ("reduce_op", "dtype", "nothing"),
    [
        (dist.ReduceOp.SUM, torch.int64, 0),
        (dist.ReduceOp.MAX, torch.float32, -float("inf")),
        (dist.ReduceOp.MAX, torch.int64, -(2**63)),
        (dist.ReduceOp.MAX, torch.bool, False),
        (dist.ReduceOp.MIN, torch.bfloat16, float("inf")),
        (dist.ReduceOp.MIN, torch.uint8, 255),
        (dist.ReduceOp.PRODUCT, torch.float64, 1),
        (dist.ReduceOp.BAND, torch.int32, -1),
        (dist.ReduceOp.BOR, torch.int32, 0),
    ],
)
def test_a_spare_changes_no_reduction(rigs: Any, reduce_op: Any, dtype: torch.dtype, nothing: float) -> None:
    rig = rigs(plan_of(7, size=3, rank=2, participants=[0, 1]))
    rig.manager.start_quorum()
    rig.manager.allreduce(torch.full((2,), 1, dtype=dtype), reduce_op=reduce_op).wait()
    assert rig.group.calls[0].tolist() == [nothing, nothing]


def _leaf() -> torch.Tensor:
    return torch.nn.Parameter(torch.ones(2))


def _result() -> torch.Tensor:
    return torch.nn.Parameter(torch.ones(2)) * 1


def _inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


@pytest.mark.parametrize("make", [_leaf, _result, _inferred])
@pytest.mark.parametrize("by_future", [False, True])
@pytest.mark.parametrize("is_spare", [False, True])
def test_what_autograd_guards_is_reduced_behind_its_back(
    rigs: Any, make: Callable[[], torch.Tensor], by_future: bool, is_spare: bool
) -> None:
    spare = plan_of(7, size=3, rank=2, participants=[0, 1])
    rig = rigs(spare, others=2.0) if is_spare else rigs(plan_of(7, size=2), others=1.5)
    rig.manager.start_quorum()
    tensor = make()
    before = tensor.grad_fn
    work = rig.manager.allreduce(tensor)
    if by_future:
        work.get_future().wait()
    assert work.wait()
    assert tensor.tolist() == [2.0, 2.0]
    assert tensor.grad_fn is before


def test_a_division_that_fails_costs_one_step(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs(plan_of(7, size=2), plan_of(8, size=2))

    def changing(_: torch.Tensor) -> Any:
        raise RuntimeError("no such thing can be divided")

    rig.manager.start_quorum()
    work = rig.manager.allreduce(torch.ones(2), weight=3)
    monkeypatch.setattr(reduction, "changing", changing)
    assert not work.wait()
    assert "no such thing" in str(rig.manager.errored())
    assert not rig.manager.should_commit()
    monkeypatch.undo()
    assert rig.step()


@pytest.mark.parametrize("moment", ["failing_call", "failing_wait"])
def test_a_failed_reduction_is_reported_and_never_raised(rigs: Any, moment: str) -> None:
    rig = rigs(plan_of(7, size=2), plan_of(8, size=2))
    setattr(rig.group, moment, RuntimeError("the peer died"))
    rig.manager.start_quorum()
    assert not rig.manager.allreduce(torch.ones(2)).wait()
    assert "the peer died" in str(rig.manager.errored())
    assert not rig.manager.should_commit()
    assert rig.coordinator.votes[-1][2] is False
    assert rig.step()


def test_a_failed_reduction_leaves_a_finished_future(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.group.failing_wait = RuntimeError("the peer died")
    rig.manager.start_quorum()
    tensor = torch.ones(2)
    assert rig.manager.allreduce(tensor).get_future().wait()[0] is tensor
    assert rig.manager.errored() is not None


def test_should_commit_waits_for_reductions_that_nobody_waited_for(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.group.failing_wait = RuntimeError("the peer died")
    rig.manager.start_quorum()
    rig.manager.allreduce(torch.ones(2))
    assert not rig.manager.should_commit()


def test_after_an_error_the_others_are_not_left_waiting_in_a_reduction(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.manager.report_error(ValueError("nan"))
    assert rig.group.errored() is None
    assert not rig.manager.allreduce(torch.ones(2)).wait()
    assert rig.group.calls == []
    assert rig.group.errored() is not None
    assert not rig.manager.should_commit()


def test_a_user_error_votes_no(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.manager.report_error(ValueError("nan"))
    assert [str(error) for error in rig.manager.status().errors] == ["nan"]
    assert not rig.manager.should_commit()


def test_a_late_error_of_the_step_before_does_not_count(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(plan_of(7, size=2), QuorumKey(7, 7))
    future: torch.futures.Future[int] = torch.futures.Future()
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.manager.wrap_future(future, 3)
    assert rig.manager.should_commit()
    rig.manager.start_quorum()
    future.set_exception(RuntimeError("late"))
    assert rig.manager.should_commit()
    assert "arrived after its end: late" in caplog.text


# --- wrapped futures --------------------------------------------------------------------------------------------------


def test_a_wrapped_future_that_fails_gives_the_default_and_is_reported(rigs: Any) -> None:
    rig = rigs(plan_of(7))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    future: torch.futures.Future[int] = torch.futures.Future()
    wrapped = rig.manager.wrap_future(future, 3)
    future.set_exception(RuntimeError("no"))
    assert wrapped.wait() == 3
    assert not rig.manager.should_commit()


def test_a_wrapped_future_passes_its_result_on(rigs: Any) -> None:
    rig = rigs(plan_of(7))
    rig.manager.start_quorum()
    future: torch.futures.Future[int] = torch.futures.Future()
    wrapped = rig.manager.wrap_future(future, 3)
    future.set_result(4)
    assert wrapped.wait() == 4
    assert rig.manager.should_commit()


def test_a_wrapped_future_that_never_ends_is_reported(rigs: Any) -> None:
    rig = rigs(plan_of(7))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    wrapped = rig.manager.wrap_future(torch.futures.Future(), 3, timedelta(milliseconds=1))
    assert wrapped.wait() == 3
    assert "future did not complete within 0.001 s" in str(rig.manager.errored())


def test_wrapped_futures_cost_no_thread_each_and_leave_nothing(rigs: Any) -> None:
    clock = ManualClock()
    rig = rigs(plan_of(7), clock=clock)
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    threads = threading.active_count()
    futures: list[torch.futures.Future[int]] = [torch.futures.Future() for _ in range(100)]
    wrapped = [rig.manager.wrap_future(future, -1, timedelta(seconds=5)) for future in futures]
    assert (threading.active_count(), clock.num_alarms) == (threads, 100)
    for future in futures[1:]:
        future.set_result(4)
    assert clock.num_alarms == 1
    clock.pass_s(5)
    assert [each.wait() for each in wrapped] == [-1, *[4] * 99]
    late: torch.futures.Future[int] = torch.futures.Future()
    rig.manager.wrap_future(late, -1)
    assert clock.num_alarms == 1
    rig.manager.shutdown()
    assert clock.num_alarms == 0


# --- the quorum -------------------------------------------------------------------------------------------------------


def test_what_fails_again_and_again_is_asked_for_after_a_pause(rigs: Any) -> None:
    clock = ManualClock()
    rig = rigs(*[RequestTimeoutError("late")] * 5, plan_of(7, size=2), clock=clock)
    for _ in range(5):
        assert not rig.step()
    assert rig.step()
    assert clock.waited_s == [0.01, 0.02, 0.04, 0.08]


def test_after_one_failed_quorum_the_manager_is_usable_again(rigs: Any) -> None:
    """The fault of torchft: every later start_quorum raises the old error again, at once."""
    rig = rigs(RequestTimeoutError("nobody answered"), plan_of(7, size=2))
    assert not rig.step()
    assert rig.coordinator.votes == []
    assert rig.step()
    assert rig.coordinator.requests[1].commit_failures == 0


def test_after_one_failed_synchronous_quorum_the_manager_is_usable_again(rigs: Any) -> None:
    rig = rigs(RequestTimeoutError("nobody answered"), plan_of(7, size=2), use_async_quorum=False)
    with pytest.raises(RequestTimeoutError, match="nobody answered"):
        rig.manager.start_quorum()
    assert rig.step()


@pytest.mark.parametrize(
    "error", [ReplicaGroupLostError("rank 1 ended"), RefusedError("two of that name", code="duplicate")]
)
def test_what_this_process_can_do_nothing_about_is_raised(rigs: Any, error: Exception) -> None:
    rig = rigs(error)
    rig.manager.start_quorum()
    rig.manager.allreduce(torch.ones(2)).wait()
    with pytest.raises(type(error), match=str(error)):
        rig.manager.should_commit()


def test_a_lost_group_is_raised_whoever_noticed_it(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.manager.report_error(RuntimeError("first"))
    rig.manager.report_error(ReplicaGroupLostError("rank 1 ended"))
    with pytest.raises(ReplicaGroupLostError, match="rank 1 ended"):
        rig.manager.should_commit()


def test_a_group_that_can_not_be_configured_is_an_error_of_the_step(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), plan_of(8, size=2))
    rig.group.failing_configure = RuntimeError("rank 1 did not come")
    assert not rig.step()
    assert rig.step()
    assert rig.coordinator.requests[1].needs_configure


def test_a_group_that_failed_after_the_step_asks_for_a_new_id(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), plan_of(8, size=2, step=1))
    assert rig.step()
    rig.group.abort()
    assert rig.step()
    assert rig.coordinator.requests[1].needs_configure
    assert rig.coordinator.requests[1].commit_failures == 0


def test_a_new_manager_server_is_asked_again_and_hears_of_the_newest_quorum(rigs: Any) -> None:
    rig = rigs(plan_of(7), ServerRestartedError(), plan_of(8, step=1))
    assert rig.step()
    assert rig.step()
    held = [request.held for request in rig.coordinator.requests]
    assert held == [None, QuorumKey(7, 7), QuorumKey(7, 7)]


def test_a_manager_server_that_ended_in_the_vote_counts_as_no(rigs: Any) -> None:
    rig = rigs(plan_of(7), plan_of(8), verdicts=[ServerRestartedError()])
    assert not rig.step()
    assert rig.step()
    assert not rig.coordinator.requests[1].needs_configure


def test_what_start_quorum_and_should_commit_say_reaches_the_coordinator(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), QuorumKey(7, 7), timeout=timedelta(seconds=3), quorum_timeout=timedelta(seconds=4))
    limits: list[timedelta] = []
    ask, vote = rig.coordinator.quorum, rig.coordinator.vote

    def asked(request: Any, timeout: timedelta) -> Any:
        limits.append(timeout)
        return ask(request, timeout)

    def voted(step: int, yes: bool, timeout: timedelta, **about: Any) -> Any:
        limits.append(timeout)
        return vote(step, yes, timeout, **about)

    rig.coordinator.quorum, rig.coordinator.vote = asked, voted
    assert rig.step()
    rig.manager.start_quorum(allow_heal=False, shrink_only=True, timeout=timedelta(seconds=8))
    assert rig.manager.should_commit(timeout=timedelta(seconds=9))
    assert [round(limit.total_seconds()) for limit in limits] == [4, 3, 8, 9]
    said = [(request.allow_heal, request.shrink_only) for request in rig.coordinator.requests]
    assert said == [(True, False), (False, True)]


def test_who_participated_can_be_asked_until_the_next_quorum_is_started(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=3, rank=1), RequestTimeoutError("late"), verdicts=[True])
    assert rig.step()
    manager = rig.manager
    assert (manager.num_participants(), manager.participating_rank(), manager.is_participating()) == (3, 1, True)
    manager.start_quorum()
    assert (manager.num_participants(), manager.participating_rank(), manager.is_participating()) == (0, None, False)


def test_the_time_out_reaches_the_process_group_when_it_was_said(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rigs().group.timeout is None
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "1.5")
    assert rigs().group.timeout == timedelta(seconds=1.5)
    assert rigs(timeout=timedelta(seconds=3)).group.timeout == timedelta(seconds=3)


# --- live state -------------------------------------------------------------------------------------------------------


def test_a_member_heals_while_it_gives_zeros(rigs: Any, use_async_quorum: bool) -> None:
    shelf: dict[Any, Any] = {}
    facts = {"size": 2, "healing": [1], "step": 5, "lineage": 99}
    source = rigs(plan_of(7, **facts), checkpoint_transport=MemoryTransport(shelf), use_async_quorum=use_async_quorum)
    source.manager.load_state_dict({"step": 5, "batches_committed": 10, "lineage": f"{99:016x}"})
    source.weights.tensor.fill_(8.0)
    assert source.step()
    member = rigs(
        plan_of(7, rank=1, **facts), checkpoint_transport=MemoryTransport(shelf), use_async_quorum=use_async_quorum
    )
    assert member.step()
    assert member.weights.tensor.tolist() == [8.0, 8.0]
    assert (member.manager.current_step(), member.manager.batches_committed()) == (6, 11)
    assert member.manager.state_dict() == source.manager.state_dict()
    if use_async_quorum:
        assert member.group.calls[0].tolist() == [0.0, 0.0]
    # User state is touched on the training thread alone.
    assert set(source.weights.threads + member.weights.threads) == {threading.current_thread().name}


def test_the_snapshot_is_taken_after_the_reductions_and_before_the_vote(rigs: Any) -> None:
    order: list[str] = []
    rig = rigs(plan_of(7, size=2, healing=[1]))
    rig.manager.register_state_dict_fn("order", lambda _: None, lambda: order.append("snapshot"))
    reduce, vote = rig.group.allreduce, rig.coordinator.vote
    rig.group.allreduce = lambda *args: order.append("reduction") or reduce(*args)
    rig.coordinator.vote = lambda *args, **kwargs: order.append("vote") or vote(*args, **kwargs)
    assert rig.step()
    order.append("optimizer")
    assert order == ["reduction", "snapshot", "vote", "optimizer"]


def test_the_snapshot_is_taken_when_the_reductions_failed_too(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2, healing=[1]))
    rig.group.failing_wait = RuntimeError("the peer died")
    assert not rig.step()
    assert len(rig.transport.shelf) == 1


def test_with_a_synchronous_quorum_the_snapshot_is_taken_in_start_quorum(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2, healing=[1]), use_async_quorum=False)
    rig.manager.start_quorum()
    assert len(rig.transport.shelf) == 1


def test_a_healing_that_fails_votes_no_and_changes_nothing(rigs: Any, use_async_quorum: bool) -> None:
    rig = rigs(plan_of(7, rank=1, size=2, healing=[1], step=5), plan_of(8, size=1), use_async_quorum=use_async_quorum)
    assert not rig.step()
    assert (rig.weights.tensor.tolist(), rig.manager.current_step()) == ([1.0, 1.0], 0)
    assert rig.step()
    assert rig.coordinator.requests[1].failed_heals == 1


def test_a_synchronous_healing_that_fails_ends_the_reduction_for_the_others(rigs: Any) -> None:
    rig = rigs(plan_of(7, rank=1, size=2, healing=[1], step=5), use_async_quorum=False)
    rig.manager.start_quorum()
    assert rig.group.errored() is not None
    assert isinstance(rig.manager.status().errors[0], HealingError)


def test_state_under_several_keys_registered_after_the_quorum_was_started_travels(rigs: Any) -> None:
    shelf: dict[Any, Any] = {}
    scheduler = {"source": {"last_epoch": 7}, "member": {"last_epoch": 0}}
    source = rigs(plan_of(7, size=2, healing=[1]), checkpoint_transport=MemoryTransport(shelf))
    member = rigs(plan_of(7, rank=1, size=2, healing=[1]), checkpoint_transport=MemoryTransport(shelf))
    source.weights.tensor.fill_(8.0)
    for name, rig in (("source", source), ("member", member)):
        rig.manager.start_quorum()
        own = scheduler[name]
        rig.manager.register_state_dict_fn("scheduler", own.update, own.copy)
        assert rig.manager.should_commit()
    assert member.weights.tensor.tolist() == [8.0, 8.0]
    assert scheduler["member"] == {"last_epoch": 7}


def test_state_registered_under_other_keys_is_refused_whole(rigs: Any) -> None:
    shelf: dict[Any, Any] = {}
    source = rigs(plan_of(7, size=2, healing=[1]), checkpoint_transport=MemoryTransport(shelf))
    source.manager.register_state_dict_fn("more", lambda _: None, lambda: 1)
    source.weights.tensor.fill_(8.0)
    assert source.step()
    member = rigs(plan_of(7, rank=1, size=2, healing=[1]), checkpoint_transport=MemoryTransport(shelf))
    assert not member.step()
    assert "under ['default', 'more'] and this replica under ['default']" in str(member.manager.status().errors[0])
    assert member.weights.tensor.tolist() == [1.0, 1.0]


def test_a_load_that_raises_leaves_a_torn_state(rigs: Any) -> None:
    shelf: dict[Any, Any] = {}
    assert rigs(plan_of(7, size=2, healing=[1]), checkpoint_transport=MemoryTransport(shelf)).step()
    member = rigs(plan_of(7, rank=1, size=2, healing=[1]), plan_of(8), checkpoint_transport=MemoryTransport(shelf))

    def load(state: object) -> None:
        raise KeyError("missing")

    member.weights.load = load
    member.manager._parts.shared.user_state._functions["default"] = (load, member.weights.take)
    assert not member.step()
    member.manager.start_quorum()
    member.manager.wait_quorum()
    assert member.coordinator.requests[1].torn


def test_a_state_that_can_not_travel_costs_the_source_nothing(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(plan_of(7, size=2, healing=[1]))

    def refuse(*args: object, **kwargs: object) -> None:
        raise StateUnsupportedError("user['f'] is a function", path="user['f']")

    rig.transport.send_checkpoint = refuse
    assert rig.step()
    assert "can't serve step 0 to ['replica_1']: user['f'] is a function" in caplog.text


def test_a_state_dict_that_raises_costs_the_source_nothing_and_the_healer_is_told_why(
    rigs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shelf: dict[Any, Any] = {}
    source = rigs(plan_of(7, size=2, healing=[1]), checkpoint_transport=MemoryTransport(shelf))

    def take() -> object:
        raise KeyError("missing")

    source.manager._parts.shared.user_state._functions["default"] = (source.weights.load, take)
    assert source.step()
    said = "the state_dict registered under 'default' raised KeyError('missing')"
    assert f"can't serve step 0: {said}" in caplog.text
    member = rigs(plan_of(7, rank=1, size=2, healing=[1]), checkpoint_transport=MemoryTransport(shelf))
    assert not member.step()
    told = [record.getMessage() for record in caplog.records if "could not fetch step 0" in record.getMessage()]
    assert told
    assert all(said in sentence for sentence in told)


def test_those_that_heal_are_named_to_the_transport_that_refuses_them_and_it_may_fail(
    rigs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = rigs(plan_of(7, size=2, healing=[1]))
    refused: list[Any] = []

    def take() -> object:
        raise KeyError("missing")

    def refuse(step: int, sentence: str, **more: Any) -> None:
        refused.append((step, more["dst_ranks"]))
        raise ManagerClosedError("the transport was shut down")

    source.manager._parts.shared.user_state._functions["default"] = (source.weights.load, take)
    source.transport.refuse_checkpoint = refuse
    assert source.step()
    assert refused == [(0, [1])]
    assert "this source has failed: the transport was shut down" in caplog.text


def test_a_transport_that_fails_before_it_knows_the_key_keeps_no_healer_waiting(rigs: Any) -> None:
    shelf: dict[Any, Any] = {}
    source = rigs(plan_of(7, size=2, healing=[1]), checkpoint_transport=MemoryTransport(shelf))

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    source.transport.send_checkpoint = fail
    assert source.step()
    told = shelf[state_key(plan_of(7, size=2, healing=[1]))]
    assert isinstance(told, StateUnavailableError), "the healer is told"
    assert "Too many open files" in str(told)


def test_a_state_that_was_declared_half_written_is_not_served(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2, healing=[1]), plan_of(8, size=2, healing=[1]))
    refused: list[tuple[int, str, list[int]]] = []
    rig.transport.refuse_checkpoint = lambda step, why, *, key, dst_ranks: refused.append((step, why, list(dst_ranks)))
    rig.manager.disallow_state_dict_read()
    rig.manager.start_quorum()
    with pytest.raises(UserStateError, match="call allow_state_dict_read first"):
        rig.manager.should_commit()
    ((step, why, told),) = refused
    assert (step, told) == (0, [1]), "who heals does not wait for it"
    assert "is marked as half written" in why
    rig.manager.allow_state_dict_read()
    assert rig.step()


def test_a_torn_replica_asks_to_heal(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), plan_of(8, size=2, step=1))
    assert rig.step()
    rig.manager.strategy.report_torn(RuntimeError("out of memory"))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    assert rig.coordinator.requests[1].torn


def test_two_ranks_agree_that_all_have_staged_before_one_loads(rigs: Any) -> None:
    shelf: dict[Any, Any] = {}
    assert rigs(plan_of(7, size=2, healing=[1]), checkpoint_transport=MemoryTransport(shelf)).step()
    place = {"rank": 0, "world_size": 2, "store_addr": "localhost", "store_port": 1}
    member = rigs(
        plan_of(7, rank=1, size=2, healing=[1]),
        verdicts=[False, False],
        checkpoint_transport=MemoryTransport(shelf),
        **place,
    )
    member.weights.tensor.fill_(2.0)
    assert not member.step()
    assert [(yes, purpose) for _, _, yes, purpose in member.coordinator.votes] == [
        (True, Purpose.STAGED),
        (False, Purpose.COMMIT),
    ]
    assert member.weights.tensor.tolist() == [2.0, 2.0]
    assert "another rank of replica" in str(member.manager.status().errors[0])


# --- registering, logging, ending -------------------------------------------------------------------------------------


def test_state_is_registered_once_under_each_key(rigs: Any) -> None:
    manager = rigs().manager
    with pytest.raises(ConfigError, match="'default' already"):
        manager.register_state_dict_fn("default", lambda _: None, dict)
    with pytest.warns(DeprecationWarning, match="register_state_dict_fn"):
        manager.set_state_dict_fns(lambda _: None, dict)


def test_one_of_the_two_state_functions_is_not_enough() -> None:
    with pytest.raises(ConfigError, match="give both or neither"):
        Manager(FakeGroup(), lambda _: None, None)


def test_the_log_says_what_happened_where(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tft_algos.manager")
    rig = rigs(plan_of(7, size=2, healing=[1]), verdicts=[False])
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.manager.report_error(RuntimeError("50% gone"))
    rig.manager.should_commit()
    lines = [record.getMessage() for record in caplog.records if record.name == "tft_algos.manager"]
    assert all(line.startswith("[replica_0/0 - step 0] ") for line in lines)
    text = "\n".join(lines)
    assert "reconfigured: quorum 7.0000000000000007, rank 0 of 2, 1 participants" in text
    assert "serving step 0 to ['replica_1']" in text
    assert "this step will not commit: 50% gone" in text
    assert "should_commit=False enough_replicas=True errored=RuntimeError" in text
    assert text.count("gone") == 1


def test_a_source_that_nobody_asks_first_says_what_it_serves_for(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It said that it serves "to nobody first"."""
    caplog.set_level(logging.INFO, "tft_algos.manager")
    plan = plan_of(7, size=3, rank=1, healing=[2])
    assert plan.serve
    assert plan.recover_dst_replica_ranks == ()
    rig = rigs(plan)
    assert rig.step()
    assert "serving step 0 in case another source fails, offered in" in caplog.text


@pytest.mark.parametrize(("asked_first", "level"), [(True, logging.ERROR), (False, logging.WARNING)])
def test_no_memory_for_a_state_that_nobody_asks_for_first_is_no_error(
    rigs: Any, caplog: pytest.LogCaptureFixture, asked_first: bool, level: int
) -> None:
    plan = plan_of(7, size=3, rank=0 if asked_first else 1, healing=[2])
    rig = rigs(plan)

    def refuse(*args: object, **kwargs: object) -> None:
        raise StateUnavailableError("there is no memory for a second copy of the state")

    rig.transport.send_checkpoint = refuse
    assert rig.step()
    (said,) = [record for record in caplog.records if "no memory for a second copy" in record.getMessage()]
    assert said.levelno == level
    assert "no memory for a second copy" in str(rig.transport.shelf[state_key(plan)]), "who heals is told"


def test_what_fails_a_step_is_told_once_a_step(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One loss fails each of a model's reductions, with the same words."""
    rig = rigs()
    for _ in range(2):
        rig.manager.start_quorum()
        for _ in range(3):
            rig.manager.report_error(RuntimeError("gone"))
        assert not rig.manager.should_commit()
    told = [record.levelname for record in caplog.records if "this step will not commit: gone" in record.getMessage()]
    assert told == ["WARNING"] * 2


def test_too_few_replicas_are_told_with_their_number_once(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(*(plan_of(7 + quorum, min_replica_size=2) for quorum in range(3)), verdicts=[False] * 3)
    for _ in range(3):
        rig.manager.start_quorum()
        assert not rig.manager.should_commit()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert told[0].endswith(
        "1 replicas take part, and min_replica_size is 2, so no step commits until more have joined"
    )


def test_quorums_verdicts_and_errors_are_records_for_machines(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    rig = rigs(plan_of(7, size=2, participants=[0]), QuorumKey(7, 7), RequestTimeoutError("late"), clock=clock)
    for name in ("tft_quorums", "tft_commits", "tft_errors"):
        caplog.set_level(logging.DEBUG, name)
    configure = rig.group.configure
    rig.group.configure = lambda *args, **kwargs: (clock.pass_s(1.5), configure(*args, **kwargs))
    assert rig.step()
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.manager.report_error(ValueError("not a number"))
    assert not rig.manager.should_commit()
    rig.step()

    def told(logger: logging.Logger, *names: str) -> list[tuple[Any, ...]]:
        records = [record for record in caplog.records if record.name == logger.name]
        who = {(vars(record)["job_id"], vars(record)["replica_id"], vars(record)["rank"]) for record in records}
        assert who == {("default", "replica_0", 0)}
        return [tuple(vars(record)[name] for name in ("quorum_id", "step", *names)) for record in records]

    names = ("replica_world_size", "num_participants", "heal", "reconfigured", "duration_s")
    assert told(rig.manager.quorum_logger, *names) == [(7, 0, 2, 1, False, True, 1.5), (7, 1, 2, 2, False, False, 0.0)]
    verdicts = [(7, 0, True, 1), (7, 1, False, 2), (None, 1, False, 0)]
    assert told(rig.manager.commits_logger, "commit_result", "num_participants") == verdicts
    assert told(rig.manager.errors_logger, "error_type", "error", "counts") == [
        (7, 1, "ValueError", "not a number", True),
        (None, 1, "RequestTimeoutError", "late", True),
    ]


def test_nobody_listens_so_nothing_is_recorded(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = rigs(plan_of(7))
    assert rig.step()
    assert not [record for record in caplog.records if record.name.startswith("tft_commits")]
    assert not any(logging.getLogger(name).handlers for name in ("tft_quorums", "tft_commits", "tft_errors"))


def test_shutdown_ends_all_parts_and_may_be_repeated(rigs: Any) -> None:
    rig = rigs(plan_of(7))
    with rig.manager:
        assert rig.step()
    rig.manager.shutdown()
    assert (rig.group.closed, rig.coordinator.closed, rig.transport.closed) == (True, True, True)
    with pytest.raises(ManagerClosedError, match="make a new one"):
        rig.manager.start_quorum()


@pytest.mark.parametrize("broken", ["group", "transport"])
def test_a_part_that_raises_at_its_end_keeps_no_other_from_ending(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("mine")

    rig = rigs(plan_of(7))
    monkeypatch.setattr(getattr(rig, broken), "shutdown", fail)
    with pytest.raises(RuntimeError, match="mine"):
        rig.manager.shutdown()
    closed = {"group": rig.group.closed, "coordinator": rig.coordinator.closed, "transport": rig.transport.closed}
    assert closed == {**dict.fromkeys(closed, True), broken: False}
    rig.manager.shutdown()


def test_a_forked_child_is_told_that_the_manager_is_its_parents(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs(plan_of(7))
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(UsageError, match="the parent of this process; use it there, or make a new one here"):
        rig.manager.start_quorum()
    rig.manager.shutdown()
    assert not rig.coordinator.closed
    monkeypatch.undo()
    assert rig.step()


def test_after_shutdown_nothing_is_begun(rigs: Any) -> None:
    manager = rigs(plan_of(7)).manager
    manager.shutdown()
    for call in (
        lambda: manager.allreduce(torch.ones(1)),
        lambda: manager.wrap_future(torch.futures.Future(), 1),
        lambda: manager.register_state_dict_fn("late", lambda _: None, dict),
        manager.leave_on_signal,
        manager.__enter__,
    ):
        with pytest.raises(ManagerClosedError, match="was shut down; make a new one"):
            call()


def test_what_is_pending_at_shutdown_has_its_default(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(plan_of(7))
    bounded = rig.manager.wrap_future(torch.futures.Future(), "default")
    rig.manager.shutdown()
    assert (bounded.done(), bounded.value(), caplog.records) == (True, "default", [])


def test_too_few_participants_are_what_max_retries_names(rigs: Any) -> None:
    rig = rigs(plan_of(7, min_replica_size=2), max_retries=0)
    rig.manager.start_quorum()
    with pytest.raises(TooManyFailuresError, match="1 replicas take part, and min_replica_size is 2"):
        rig.manager.should_commit()


@pytest.mark.parametrize("heals", [False, True])
def test_state_that_is_registered_late_is_warned_of_where_nothing_makes_it_alike(
    rigs: Any, caplog: pytest.LogCaptureFixture, heals: bool
) -> None:
    rig = rigs(plan_of(7, size=2), *[QuorumKey(7, 7)] * 2)
    rig.manager.register_state_dict_fn("first", lambda _: None, dict)
    rig.step()
    rig.manager.register_state_dict_fn("in the first step", lambda _: None, dict)
    rig.step()
    assert "was registered" not in caplog.text
    rig.manager.register_state_dict_fn("late", lambda _: None, dict, compared=not heals)
    assert ("state was registered under 'late' in attempt 2" in caplog.text) is not heals


# --- what can't be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pg", "says"),
    [(None, "pg is a NoneType"), (FakeGroup, "pg is the class FakeGroup"), ("gloo", "pg is a str")],
)
def test_what_is_no_process_group_is_refused_by_name(pg: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Manager(pg, lighthouse_addr="localhost:1")


def test_a_group_is_prepared_before_anything_else_begins() -> None:
    """The other replicas wait for its `configure` as soon as this one has asked for a quorum."""

    def prepare() -> None:
        raise RuntimeError("there is no helper process")

    group: Any = FakeGroup()
    group.prepare = prepare
    with pytest.raises(RuntimeError, match="no helper process"):
        Manager(group, lighthouse_addr="localhost:1")


class Lookalike:
    """What a transport of torchft's has."""

    def send_checkpoint(self) -> None: ...

    def shutdown(self) -> None: ...


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"config": 3}, "config is a int; give a ManagerConfig"),
        ({"coordinator": 3}, "coordinator is a int; give an object that has quorum and vote"),
        (
            {"coordinator": lambda _: None},
            "coordinator is a function that returned None; return the coordinator from it",
        ),
        ({"coordinator": lambda _: 3}, "coordinator is a int; give an object that has quorum and vote"),
        ({"checkpoint_transport": Lookalike()}, "checkpoint_transport is a Lookalike; make that class a subclass"),
        (
            {"clock": ManualClock},
            "clock is the class ManualClock; give an object that has monotonic and wait and after",
        ),
    ],
)
def test_what_is_no_part_of_a_manager_is_refused_by_name(part: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Manager(FakeGroup(), lighthouse_addr="localhost:1", **part)


@pytest.mark.parametrize("said", [{"allow_heal": "no"}, {"shrink_only": 2}, {"use_async_quorum": 0}])
def test_a_flag_that_is_none_is_refused_by_name_and_nothing_is_begun(rigs: Any, said: dict[str, Any]) -> None:
    manager = rigs(plan_of(7)).manager
    with pytest.raises(ConfigError, match=f"{next(iter(said))} is .*; give True"):
        manager.start_quorum(**said)
    assert manager.strategy.attempt == 0


def test_a_wait_without_a_timedelta_is_refused(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    with pytest.raises(UsageError, match=r"wait was given the timeout 5; give a timedelta"):
        rig.manager.allreduce(torch.ones(2)).wait(5)


def test_premul_sum_is_refused_alone_too(rigs: Any) -> None:
    rig = rigs(plan_of(7))
    rig.manager.start_quorum()
    with pytest.raises(UnsupportedFeatureError, match="PREMUL_SUM is not supported; multiply the tensor"):
        rig.manager.allreduce(torch.ones(2), reduce_op=dist._make_nccl_premul_sum(2.0))


@pytest.mark.parametrize("key", [3, "", None, ("model",)])
def test_state_has_a_name(rigs: Any, key: Any) -> None:
    with pytest.raises(ConfigError, match="give a name, the same on every replica"):
        rigs(plan_of(7)).manager.register_state_dict_fn(key, print, dict)


@pytest.mark.parametrize("error", ["no room", None, RuntimeError])
def test_what_is_no_error_is_not_reported(rigs: Any, error: Any) -> None:
    manager = rigs(plan_of(7)).manager
    manager.start_quorum()
    with pytest.raises(UsageError, match="give the exception"):
        manager.report_error(error)
    assert manager.should_commit()


def test_what_is_no_future_is_not_wrapped(rigs: Any) -> None:
    with pytest.raises(UsageError, match=r"given a int; give a torch\.futures\.Future"):
        rigs(plan_of(7)).manager.wrap_future(3, 4)


def test_state_functions_are_functions(rigs: Any) -> None:
    with pytest.raises(ConfigError, match="load_state_dict of 'more' is a dict; give a function"):
        rigs().manager.register_state_dict_fn("more", {}, dict)  # type: ignore[arg-type]


@pytest.mark.parametrize("tensor", ["a string", [torch.ones(1)]])
def test_allreduce_takes_one_tensor(rigs: Any, tensor: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    with pytest.raises(UsageError, match="give one tensor"):
        rig.manager.allreduce(tensor)


@pytest.mark.parametrize("state", [None, {"step": 2**70, "batches_committed": 0}, {"step": -1, "batches_committed": 0}])
def test_a_state_that_is_no_managers_is_refused(rigs: Any, state: Any) -> None:
    rig = rigs()
    with pytest.raises(UserStateError):
        rig.manager.load_state_dict(state)
    assert rig.manager.current_step() == 0


def test_a_name_that_would_break_a_log_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="replica_id has unprintable characters"):
        Manager(FakeGroup(), lighthouse_addr="localhost:1", replica_id="a\nb")


def test_who_is_told_while_it_heals_that_its_group_is_lost_does_not_vote(rigs: Any) -> None:
    lost = ReplicaGroupLostError("replica_1 lost a rank; start the group again")
    rig = rigs(plan_of(1, step=4, rank=1, size=2, healing=[1]))
    receive = rig.transport.recv_checkpoint

    def told_meanwhile(*args: Any, **kwargs: Any) -> Any:
        rig.coordinator.listener(lost)
        return receive(*args, **kwargs)

    rig.transport.recv_checkpoint = told_meanwhile
    with pytest.raises(ReplicaGroupLostError, match="lost a rank"):
        rig.step()
    assert rig.coordinator.votes == []


def test_a_vote_that_nobody_answers_because_the_group_is_lost_says_so(rigs: Any) -> None:
    rig = rigs(plan_of(1, size=2))
    lost = ReplicaGroupLostError("replica_0 lost a rank; start the group again")

    def vote(*args: Any, **kwargs: Any) -> bool:
        rig.coordinator.listener(lost)
        raise RequestTimeoutError("no answer")

    rig.coordinator.vote = vote
    with pytest.raises(ReplicaGroupLostError, match="lost a rank"):
        rig.step()


@pytest.mark.parametrize("timeout", [5, 0.5, timedelta(), timedelta(seconds=-1)])
def test_a_time_out_that_is_no_timedelta_is_refused_in_one_sentence(rigs: Any, timeout: Any) -> None:
    rig = rigs(plan_of())
    with pytest.raises(ConfigError, match=r"timeout is .*; give a timedelta above zero"):
        rig.manager.start_quorum(timeout=timeout)
    rig.manager.start_quorum()
    with pytest.raises(ConfigError, match=r"timeout is .*; give a timedelta above zero"):
        rig.manager.wrap_future(torch.futures.Future(), None, timeout=timeout)
    with pytest.raises(ConfigError, match=r"timeout is .*; give a timedelta above zero"):
        rig.manager.should_commit(timeout=timeout)
    assert rig.manager.should_commit()


@pytest.mark.parametrize("timeout", [timedelta.max, timedelta(days=7, seconds=1)])
def test_a_time_out_above_a_week_is_refused_and_the_manager_stays_usable(rigs: Any, timeout: timedelta) -> None:
    rig = rigs(plan_of())
    sentence = r"timeout is .*; give a timedelta of at most a week"
    with pytest.raises(ConfigError, match=sentence):
        rig.manager.start_quorum(timeout=timeout)
    assert not rig.coordinator.requests
    rig.manager.start_quorum(timeout=timedelta(days=7))
    for call in (
        lambda: rig.manager.wrap_future(torch.futures.Future(), None, timeout=timeout),
        lambda: rig.manager.allreduce(torch.ones(1), timeout=timeout),
        lambda: rig.manager.should_commit(timeout=timeout),
    ):
        with pytest.raises(ConfigError, match=sentence):
            call()
    assert rig.manager.should_commit(timeout=timedelta(days=7))


@pytest.mark.parametrize("reduce_op", ["avg", None, 0])
def test_a_reduction_by_what_is_no_operation_is_refused_alone_too(rigs: Any, reduce_op: Any) -> None:
    rig = rigs(plan_of())
    rig.manager.start_quorum()
    with pytest.raises(UsageError, match=r"reduce_op is .*; give one of torch's"):
        rig.manager.allreduce(torch.ones(1), reduce_op=reduce_op)
    assert rig.manager.should_commit()


@pytest.mark.parametrize("tensor", [torch.zeros(2, device="meta"), torch.zeros(2).to_sparse()], ids=["meta", "sparse"])
def test_what_can_not_be_reduced_fails_the_step_alone_too(rigs: Any, tensor: torch.Tensor) -> None:
    rig = rigs(plan_of(7))
    rig.manager.start_quorum()
    assert not rig.manager.allreduce(tensor).wait()
    assert "can't be reduced; give a dense one" in str(rig.manager.errored())
    assert not rig.manager.should_commit()
