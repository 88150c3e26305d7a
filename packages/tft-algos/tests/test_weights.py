"""Weighted means, time-outs of single reductions, reductions outside a step: one member, the others are a number."""

from __future__ import annotations

import logging
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tft_algos import ConfigError, UsageError, ZeroWeightError
from tft_algos.testing import ManualClock, plan_of
from tft_coord.core.step.reducing import WEIGHT_SCALE
from tft_coord.core.types import QuorumKey
from tft_coord.errors import RequestTimeoutError
from tft_pg import ManagedProcessGroup
from tft_pg.errors import CollectiveTimeoutError

SPARE = {"size": 3, "rank": 2, "participants": [0, 1]}


def gave(rig: Any, scale: float = WEIGHT_SCALE) -> list[tuple[torch.dtype, list[float]]]:
    """Return what was given to each reduction, in order, without the scale that keeps products in range."""
    return [(call.dtype, (call / scale).tolist()) for call in rig.group.calls]


# --- the weighted mean ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("by_future", [False, True])
def test_a_weighted_mean_is_a_sum_divided_by_the_sum_of_the_weights(
    rigs: Any, dtype: torch.dtype, by_future: bool
) -> None:
    rig = rigs(plan_of(7, size=2), others=5.0 * WEIGHT_SCALE)
    rig.manager.start_quorum()
    tensor = torch.tensor([1.0, 2.0], dtype=dtype)
    work = rig.manager.allreduce(tensor, weight=3)
    if by_future:
        assert work.get_future().then(lambda done: done.value()[0].tolist()).wait() == [1.0, 1.375]
    assert work.wait()
    assert tensor.tolist() == [8 / 8, 11 / 8]
    assert gave(rig) == [(torch.float64, [3.0]), (dtype, [3.0, 6.0])]
    assert rig.manager.should_commit()


def test_the_data_of_a_weighted_mean_is_not_copied(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), others=5.0)
    rig.manager.start_quorum()
    reduced: list[int] = []
    reduce = rig.group.allreduce
    rig.group.allreduce = lambda tensors, op: reduced.append(tensors[0].data_ptr()) or reduce(tensors, op)
    tensor = torch.ones(2)
    rig.manager.allreduce(tensor, weight=3).wait()
    assert reduced[1] == tensor.data_ptr()


def test_half_precision_that_a_weight_would_overflow_is_reduced_in_single(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), others=20_000.0 * WEIGHT_SCALE)
    rig.manager.start_quorum()
    tensor = torch.full((2,), 1_000.0, dtype=torch.float16)
    assert rig.manager.allreduce(tensor, weight=20_000).wait()
    assert gave(rig)[1] == (torch.float32, [2e7, 2e7])
    assert (tensor.dtype, tensor.tolist()) == (torch.float16, [500.5, 500.5])


def test_data_and_weights_are_in_flight_at_the_same_time(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.group.holds = True
    work = rig.manager.allreduce(torch.ones(2), weight=3)
    assert len(rig.group.calls) == 2
    assert not work.is_completed()
    rig.group.abort()
    assert not work.wait()


@pytest.mark.parametrize("plan", [{"size": 2, "rank": 1, "healing": [1], "step": 5}, SPARE])
def test_who_does_not_participate_weighs_zero(rigs: Any, plan: dict[str, Any]) -> None:
    rig = rigs(plan_of(7, **plan), others=4.0)
    rig.manager.start_quorum()
    tensor = torch.tensor([1.0, float("nan")])
    assert rig.manager.allreduce(tensor, weight=3).wait()
    assert gave(rig) == [(torch.float64, [0.0]), (torch.float32, [0.0, 0.0])]
    assert tensor.tolist() == [1.0, 1.0]


def test_what_weighs_zero_adds_nothing_even_if_it_is_no_number(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), others=4.0)
    rig.manager.start_quorum()
    tensor = torch.tensor([1.0, float("nan")])
    assert rig.manager.allreduce(tensor, weight=0).wait()
    assert tensor.tolist() == [1.0, 1.0]


def test_the_weights_of_a_step_are_summed_once_for_all_its_means(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), QuorumKey(7, 7), others=5)
    rig.manager.start_quorum()
    rig.manager.set_weight(3)
    tensors = [torch.ones(2), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64), torch.ones(2)]
    ops: list[Any] = [dist.ReduceOp.AVG, dist.ReduceOp.AVG, dist.ReduceOp.SUM, dist.ReduceOp.AVG]
    works = [rig.manager.allreduce(tensor, reduce_op=op) for tensor, op in zip(tensors[:3], ops[:3], strict=True)]
    managed = ManagedProcessGroup(rig.manager)
    works.append(managed.allreduce([tensors[3]], dist.ReduceOp.AVG))
    assert all(work.wait() for work in works)
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 1.0], [1.0, 1.0], [6, 6], [1.0, 1.0]]
    assert [dtype for dtype, _ in gave(rig)].count(torch.float64) == 1
    assert rig.manager.should_commit()
    # The next step has forgotten it, and sums its own.
    rig.group.calls.clear()
    rig.manager.start_quorum()
    tensor = torch.ones(2)
    assert rig.manager.allreduce(tensor).wait()
    assert (gave(rig, 0.5), tensor.tolist()) == ([(torch.float32, [1.0, 1.0])], [5.5, 5.5])


def test_a_weight_of_its_own_beats_that_of_the_step(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), others=5.0)
    rig.manager.start_quorum()
    rig.manager.set_weight(3)
    tensor = torch.ones(2)
    assert rig.manager.allreduce(tensor, weight=1).wait()
    assert gave(rig) == [(torch.float64, [1.0]), (torch.float32, [1.0, 1.0])]
    assert rig.manager.allreduce(torch.ones(2)).wait()
    assert gave(rig)[2:] == [(torch.float64, [3.0]), (torch.float32, [3.0, 3.0])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plan", [{"size": 1}, {"size": 2, "healing": [1]}])
def test_the_mean_of_the_only_participant_is_its_own_to_the_last_bit(
    rigs: Any, dtype: torch.dtype, plan: dict[str, Any]
) -> None:
    rig = rigs(plan_of(7, **plan))
    rig.manager.start_quorum()
    tensor = torch.randn(1_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = tensor.clone()
    assert rig.manager.allreduce(tensor, weight=7).wait()
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("plan", [{"size": 1}, {"size": 2, "healing": [1]}, {"size": 2}])
def test_weights_that_sum_to_zero_fail_the_step(rigs: Any, plan: dict[str, Any]) -> None:
    rig = rigs(plan_of(7, **plan), plan_of(8, **plan))
    rig.manager.start_quorum()
    rig.manager.set_weight(0)
    rig.manager.allreduce(torch.ones(2)).wait()
    (error,) = rig.manager.status().errors
    assert isinstance(error, ZeroWeightError)
    assert "step 0, quorum 7" in str(error)
    assert "so there is no mean; " in str(error)
    assert not rig.manager.should_commit()
    assert rig.step()


def test_weights_whose_sum_is_not_finite_fail_the_step(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), others=float("inf"))
    rig.manager.start_quorum()
    assert not rig.manager.allreduce(torch.ones(2, dtype=torch.float64), weight=1.0).wait()
    assert not rig.manager.should_commit()


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (-1, "weight is -1; give a finite number that is not below zero"),
        (float("nan"), "weight is nan; give a finite number"),
        (float("inf"), "weight is inf; give a finite number"),
        pytest.param(10**400, "weight is inf; give a finite number", id="above all floats"),
        ("3", "weight is a str; give a number"),
        (1e19, "weight is 1e.19, by which a gradient can't be multiplied in its own dtype; give zero, or a number"),
        (1e-19, "weight is 1e-19, by which a gradient can't be multiplied"),
        (True, "weight is a bool; give a number"),
        (1j, "weight is a complex; give a number"),
        (torch.tensor(3.0), "weight is a Tensor; give a number"),
        (Decimal(3), "weight is a Decimal; give a number"),
    ],
)
def test_what_is_no_weight_is_refused_at_once(rigs: Any, weight: Any, says: str) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    with pytest.raises(ConfigError, match=says):
        rig.manager.set_weight(weight)
    with pytest.raises(ConfigError, match=says):
        rig.manager.allreduce(torch.ones(2), weight=weight)
    assert rig.group.calls == []
    assert rig.manager.should_commit()


def test_a_weight_belongs_to_a_mean(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    with pytest.raises(ConfigError, match=r"a weight belongs to ReduceOp\.AVG, and this reduction is"):
        rig.manager.allreduce(torch.ones(2), reduce_op=dist.ReduceOp.SUM, weight=3)


def test_a_step_has_one_weight_and_only_a_step_has_one(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    with pytest.raises(UsageError, match="set_weight was called outside a step; call it after start_quorum"):
        rig.manager.set_weight(3)
    rig.manager.start_quorum()
    rig.manager.set_weight(3)
    rig.manager.set_weight(4)
    rig.manager.allreduce(torch.ones(2))
    rig.manager.set_weight(4)
    with pytest.raises(UsageError, match="called with 5 after a reduction of this step was weighted with 4"):
        rig.manager.set_weight(5)
    assert rig.manager.should_commit()
    with pytest.raises(UsageError, match="outside a step"):
        rig.manager.set_weight(3)


@pytest.mark.parametrize("failing_first", [True, False])
@pytest.mark.parametrize("by_future", [True, False])
def test_a_weighted_mean_fails_if_either_of_its_reductions_does(
    rigs: Any, failing_first: bool, by_future: bool
) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    reduce = rig.group.allreduce
    started: list[int] = []

    def failing(tensors: Any, op: Any) -> Any:
        started.append(1)
        if len(started) == (1 if failing_first else 2):
            rig.group.failing_wait = RuntimeError("the peer died")
        rig.group._error = None
        return reduce(tensors, op)

    rig.group.allreduce = failing
    tensor = torch.ones(2)
    work = rig.manager.allreduce(tensor, weight=3)
    if by_future:
        assert work.get_future().wait()[0] is tensor
    assert not work.wait()
    (error,) = rig.manager.status().errors
    assert "the peer died" in str(error)
    assert not rig.manager.should_commit()


# --- time-outs of single reductions -----------------------------------------------------------------------------------


def held(rigs: Any, *plans: Any) -> Any:
    """A rig in a step, whose reductions wait for others that never come; its clock stands still."""
    rig = rigs(*plans, clock=ManualClock())
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.group.holds = True
    return rig


@pytest.mark.parametrize("weight", [None, 3])
@pytest.mark.parametrize("by_future", [True, False])
def test_a_time_out_that_passes_fails_the_reduction_and_ends_what_runs(
    rigs: Any, weight: float | None, by_future: bool
) -> None:
    rig = held(rigs, plan_of(7, size=2), plan_of(8, size=2))
    clock = rig.manager._parts.shared.clock
    work = rig.manager.allreduce(torch.ones(2), weight=weight, timeout=timedelta(seconds=2))
    future = work.get_future() if by_future else None
    clock.pass_s(1.9)
    assert rig.manager.errored() is None
    clock.pass_s(0.2)
    (error,) = rig.manager.status().errors
    assert isinstance(error, CollectiveTimeoutError)
    assert isinstance(error, TimeoutError)
    assert "a reduction of step 0, quorum 7.0000000000000007 timed out after 2 s and was aborted" in str(error)
    assert rig.group.num_aborts == 1
    if future is not None:
        assert len(future.wait()) == 1
    assert not work.wait()
    assert not rig.manager.should_commit()
    rig.group.holds = False
    assert rig.step()
    assert rig.coordinator.requests[1].needs_configure


def test_the_time_out_of_a_wait_ends_what_runs_too(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    rig.group.holds = True
    work = rig.manager.allreduce(torch.ones(2))
    assert not work.wait(timedelta(milliseconds=1))
    assert "timed out after 0.001 s" in str(rig.manager.status().errors[0])
    assert rig.group.errored() is not None
    assert not rig.manager.should_commit()


def test_a_reduction_that_ends_in_time_leaves_no_alarm(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), clock=ManualClock())
    clock = rig.manager._parts.shared.clock
    rig.manager.start_quorum()
    assert rig.manager.allreduce(torch.ones(2), timeout=timedelta(seconds=2)).wait(timedelta(seconds=1))
    assert clock.num_alarms == 0
    assert rig.manager.should_commit()


def test_a_time_out_of_what_has_ended_and_was_not_waited_for_changes_nothing(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), clock=ManualClock())
    rig.manager.start_quorum()
    rig.manager.allreduce(torch.ones(2), timeout=timedelta(seconds=2))
    rig.manager._parts.shared.clock.pass_s(3)
    assert rig.manager.should_commit()


@pytest.mark.parametrize("timeout", [5, timedelta(), timedelta(seconds=-1)])
def test_a_time_out_that_is_no_timedelta_is_refused(rigs: Any, timeout: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    with pytest.raises(ConfigError, match=r"timeout is .*; give a timedelta above zero"):
        rig.manager.allreduce(torch.ones(2), timeout=timeout)


# --- outside a step ---------------------------------------------------------------------------------------------------

REDUCTIONS = [
    (dist.ReduceOp.SUM, torch.float32, 0),
    (dist.ReduceOp.SUM, torch.int64, 0),
    (dist.ReduceOp.MAX, torch.float32, -float("inf")),
    (dist.ReduceOp.MAX, torch.int64, -(2**63)),
]


@pytest.mark.parametrize(("reduce_op", "dtype", "nothing"), REDUCTIONS)
@pytest.mark.parametrize("committed", [True, False])
def test_after_the_verdict_those_give_that_committed(
    rigs: Any, reduce_op: Any, dtype: torch.dtype, nothing: float, committed: bool
) -> None:
    rig = rigs(plan_of(7, size=2), verdicts=[committed], others=0)
    assert rig.step() is committed
    rig.group.calls.clear()
    assert rig.manager.allreduce(torch.ones(1, dtype=dtype), reduce_op=reduce_op).wait()
    assert rig.group.calls[0].tolist() == [1 if committed else nothing]


def test_after_the_verdict_a_mean_is_over_those_that_committed(rigs: Any) -> None:
    """The others gave 5 together, and weigh as much; with its own, it is the mean of six."""
    rig = rigs(plan_of(7, size=2), plan_of(8, size=2), verdicts=[True, False], others=5.0 / 2)  # scaled by 1/2
    assert rig.step()
    tensor = torch.full((1,), 7.0)
    assert rig.manager.allreduce(tensor).wait()
    assert tensor.item() == (7 + 5) / (1 + 5)
    assert not rig.step()
    assert rig.manager.allreduce(tensor, weight=100).wait()
    assert tensor.item() == 5 / 5


def test_an_error_of_the_step_that_is_over_keeps_nobody_out(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), QuorumKey(7, 7), others=5)
    rig.manager.start_quorum()
    rig.manager.allreduce(torch.ones(2)).wait()
    rig.manager.report_error(ValueError("nan"))
    assert not rig.manager.should_commit()
    count = torch.full((1,), 7, dtype=torch.int64)
    assert rig.manager.allreduce(count, reduce_op=dist.ReduceOp.SUM).wait()
    assert (count.item(), rig.group.num_aborts) == (5, 0)
    assert rig.step()


@pytest.mark.parametrize("plan", [{"size": 2, "rank": 1, "healing": [1]}, SPARE])
def test_after_the_verdict_who_did_not_participate_gives_nothing(rigs: Any, plan: dict[str, Any]) -> None:
    rig = rigs(plan_of(7, **plan), verdicts=[True], others=5.0)
    rig.step()
    rig.group.calls.clear()
    tensor = torch.ones(1)
    assert rig.manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()
    assert (gave(rig), tensor.item()) == ([(torch.float32, [0.0])], 5.0)


@pytest.mark.parametrize("moment", ["failing_call", "failing_wait"])
def test_a_failure_after_the_verdict_is_logged_and_costs_a_reconfiguration(
    rigs: Any, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    rig = rigs(plan_of(7, size=2), plan_of(8, size=2, step=1))
    assert rig.step()
    setattr(rig.group, moment, RuntimeError("the peer died"))
    work = rig.manager.allreduce(torch.ones(1), reduce_op=dist.ReduceOp.SUM)
    assert not work.wait()
    assert len(work.get_future().wait()) == 1
    assert "arrived after its end: the peer died" in caplog.text
    assert not rig.manager.allreduce(torch.ones(1), reduce_op=dist.ReduceOp.SUM).wait()
    assert rig.step()
    assert rig.coordinator.requests[1].needs_configure
    assert rig.manager.current_step() == 2


def test_after_a_quorum_that_failed_nothing_is_reduced(rigs: Any) -> None:
    rig = rigs(RequestTimeoutError("nobody answered"))
    assert not rig.step()
    work = rig.manager.allreduce(torch.ones(1), reduce_op=dist.ReduceOp.SUM)
    assert not work.wait()
    assert work.is_completed()


@pytest.mark.parametrize("committed", [True, False])
def test_alone_after_the_verdict(rigs: Any, committed: bool, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(plan_of(7), verdicts=[committed])
    caplog.set_level(logging.WARNING)
    rig.step()
    tensor = torch.full((1,), 3.0)
    assert rig.manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()
    assert tensor.item() == (3.0 if committed else 0.0)
    assert rig.manager.allreduce(torch.ones(1)).wait() is committed
    assert ("so there is no mean" in caplog.text) is not committed
