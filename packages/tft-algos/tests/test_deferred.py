"""Several steps in flight: begun one after the other, ended in the same order, and failed together."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from tft_algos import (
    DeferredStep,
    ManagerClosedError,
    SyncAbandonedError,
    TooManyFailuresError,
    UsageError,
    UserStateError,
)
from tft_algos.errors import ServerRestartedError
from tft_algos.manager.recovery.healing import state_key
from tft_algos.testing import ManualClock, MemoryTransport, plan_of
from tft_coord.core.lineage import fold_lineage, initial_lineage
from tft_coord.core.progress import Phase
from tft_coord.core.step.reducing import WEIGHT_SCALE
from tft_coord.core.types import LossNotice, Plan, Purpose, QuorumKey, RankRequest, Verdict
from tft_coord.errors import RefusedError, ReplicaGroupLostError, RequestTimeoutError

PLAN = plan_of(7, size=2)
STANDS = QuorumKey(7, 7)
ANOTHER = plan_of(8, size=2)
ANOTHER_STANDS = QuorumKey(8, 8)


def begin(rig: Any, tensor: torch.Tensor | None = None, *, holds: bool = False) -> DeferredStep:
    """One step that goes on beside later ones, and whose reduction waits for others, if it `holds`."""
    rig.manager.start_quorum(use_async_quorum=True)
    rig.manager.is_participating()  # waits for the quorum, and raises nothing
    rig.group.holds = holds
    rig.manager.allreduce(torch.ones(2) if tensor is None else tensor)
    step = rig.manager.strategy.defer()
    assert isinstance(step, DeferredStep)
    return step


def asked(rig: Any, what: str) -> list[Any]:
    return [getattr(request, what) for request in rig.coordinator.requests]


# --- they end in the order in which they were begun -----------------------------------------------------------------


def test_two_in_flight_are_voted_and_folded_in_their_order(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, STANDS, others=1.5)
    tensors = [torch.ones(2) for _ in range(3)]
    first, second = (begin(rig, tensor) for tensor in tensors[:2])
    assert rig.manager.strategy.num_deferred == 2
    assert first.should_commit()
    third = begin(rig, tensors[2])
    assert [second.should_commit(), third.should_commit()] == [True, True]
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0]] * 3
    assert rig.coordinator.votes == [(STANDS, step, True, Purpose.COMMIT) for step in (0, 1, 2)]
    assert (asked(rig, "step"), asked(rig, "attempt")) == ([0, 0, 1], [1, 2, 3]), "committed steps only"
    assert (rig.manager.current_step(), rig.manager.batches_committed(), rig.manager.strategy.num_deferred) == (3, 6, 0)
    lineage = initial_lineage("default")
    for step in (1, 2, 3):
        lineage = fold_lineage(lineage, STANDS, step)
    assert rig.manager.state_dict()["lineage"] == f"{lineage:016x}"
    assert len(rig.group.configured) == 1


def test_a_step_that_goes_on_keeps_its_own_plan(rigs: Any) -> None:
    rig = rigs(PLAN, plan_of(7, size=2, participants=[1]))
    first, second = begin(rig), begin(rig)
    assert first.plan is PLAN
    assert second.plan is not None
    assert second.plan.participants == (1,)
    assert first.should_commit()
    assert second.should_commit()
    assert rig.manager.batches_committed() == 2 + 1


def test_the_oldest_may_end_while_the_next_is_open(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS)
    first = begin(rig)
    rig.manager.start_quorum(use_async_quorum=True)
    rig.manager.allreduce(torch.ones(2))
    assert first.should_commit()
    assert (rig.manager.strategy.verdict, rig.manager.strategy.num_deferred) == (None, 0)
    assert rig.manager.should_commit()
    assert [step for _, step, _, _ in rig.coordinator.votes] == [0, 1]


def test_a_reduction_runs_on_while_others_begin_and_is_waited_for_at_its_own_end(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, others=1.5)
    tensors = [torch.ones(2), torch.ones(2)]
    first, second = (begin(rig, tensor, holds=True) for tensor in tensors)
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5]] * 2  # scaled for a mean of two
    rig.group.come()
    assert first.should_commit()
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0], [0.5, 0.5]]
    rig.group.come()
    assert second.should_commit()
    assert tensors[1].tolist() == [2.0, 2.0]


def test_weights_are_those_of_their_own_step(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS)
    rig.manager.start_quorum(use_async_quorum=True)
    rig.manager.set_weight(4.0)
    rig.manager.allreduce(torch.ones(2))
    first = rig.manager.strategy.defer()
    rig.manager.start_quorum(use_async_quorum=True)
    rig.manager.set_weight(2.0)
    rig.manager.allreduce(torch.ones(2))
    second = rig.manager.strategy.defer()
    assert [first.should_commit(), second.should_commit()] == [True, True]
    weights = [[value / WEIGHT_SCALE for value in call.tolist()] for call in rig.group.calls]
    assert weights == [[4.0], [4.0, 4.0], [2.0], [2.0, 2.0]]


def test_between_the_steps_losses_are_reduced_over_those_that_committed_the_last_that_ended(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, others=1.5)
    first, second = begin(rig), begin(rig)
    loss = torch.full((1,), 5.0)
    assert rig.manager.allreduce(loss).wait()
    assert rig.group.calls[-1].tolist() == [0.0], "none has ended"
    assert first.should_commit()
    rig.manager.allreduce(torch.full((1,), 5.0)).wait()
    assert rig.group.calls[-1].tolist() == [2.5], "half of it, for a mean of two"
    rig.group.failing_call = RuntimeError("a wire broke")
    assert not rig.manager.allreduce(torch.ones(1)).wait()
    assert second.failure is None, "no step fails by what is reduced between the steps"
    assert second.should_commit()


# --- calls in an order that can't work --------------------------------------------------------------------------------


def test_calls_in_another_order_are_refused_and_change_nothing(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, STANDS)
    manager = rig.manager
    with pytest.raises(UsageError, match="defer was called outside a step; call it after start_quorum"):
        manager.strategy.defer()
    first = begin(rig)
    with pytest.raises(UsageError, match="defer was called outside a step"):
        manager.strategy.defer()
    with pytest.raises(UsageError, match="start_quorum first"):
        manager.should_commit()
    second = begin(rig)
    with pytest.raises(UsageError, match=r"step 1, quorum 7\.\w+ is not the oldest step in flight; end the older"):
        second.should_commit()
    manager.start_quorum(use_async_quorum=True)
    with pytest.raises(UsageError, match="called while a step is open and earlier steps are in flight"):
        manager.start_quorum()
    with pytest.raises(
        UsageError, match="should_commit was called while 2 earlier steps are in flight; end those first"
    ):
        manager.should_commit()
    assert [first.should_commit(), second.should_commit(), manager.should_commit()] == [True, True, True]
    with pytest.raises(UsageError, match="has ended; should_commit is called once for each deferred step"):
        first.should_commit()
    assert manager.current_step() == 3


# --- another quorum fails all that are in flight ----------------------------------------------------------------------


def test_another_quorum_fails_all_in_flight_without_a_vote(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, ANOTHER, ANOTHER_STANDS)
    first, second = begin(rig), begin(rig)
    third = begin(rig)
    assert rig.manager.strategy.num_deferred == 1, "the one of the new quorum"
    for step in (first, second):
        assert isinstance(step.failure, SyncAbandonedError)
        assert not step.should_commit()
    assert "was in flight when quorum 8" in str(first.failure)
    assert rig.coordinator.votes == []
    fourth = begin(rig)
    assert [third.should_commit(), fourth.should_commit()] == [True, True]
    assert [(key, step) for key, step, _, _ in rig.coordinator.votes] == [(ANOTHER_STANDS, 0), (ANOTHER_STANDS, 1)]
    assert asked(rig, "commit_failures") == [0, 0, 0, 0], "or the id would rise again, and fail what was begun since"
    assert asked(rig, "needs_configure") == [False] * 4


def test_what_ran_in_the_old_quorum_writes_nowhere_when_its_step_has_ended(rigs: Any) -> None:
    rig = rigs(PLAN, ANOTHER, others=1.5)
    tensor = torch.ones(2)
    first = begin(rig, tensor, holds=True)
    rig.group.holds = False
    second = begin(rig)
    assert not first.should_commit()
    assert tensor.tolist() == [0.5, 0.5]
    assert second.should_commit()


def test_an_end_waits_for_the_plan_of_the_step_that_was_begun_last(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs(PLAN)
    first = begin(rig)
    comes, waits = threading.Event(), threading.Event()

    def quorum(_request: RankRequest, _timeout: timedelta) -> Plan:
        waits.set()
        assert comes.wait(20)
        return ANOTHER

    monkeypatch.setattr(rig.coordinator, "quorum", quorum)
    rig.manager.start_quorum(use_async_quorum=True)
    ended: list[bool] = []
    trainer = threading.Thread(target=lambda: ended.append(first.should_commit()))
    trainer.start()
    assert waits.wait(20)
    assert ended == []
    comes.set()
    trainer.join(20)
    assert ended == [False]
    assert rig.manager.should_commit()


def test_a_new_manager_server_holds_no_quorum_so_the_next_fails_all_in_flight(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, ServerRestartedError(), ANOTHER)
    first, second = begin(rig), begin(rig)
    third = begin(rig)
    assert asked(rig, "held") == [None, STANDS, STANDS, STANDS]
    assert [first.should_commit(), second.should_commit(), third.should_commit()] == [False, False, True]
    assert len(rig.group.configured) == 2


def test_without_a_quorum_all_in_flight_fail_because_nobody_knows_whether_theirs_stands(rigs: Any) -> None:
    """Another rank of the group may have got the plan, and votes: so this one says no."""
    rig = rigs(PLAN, STANDS, RequestTimeoutError("nobody came"), ANOTHER)
    first, second = begin(rig), begin(rig)
    third = begin(rig)
    assert third.plan is None
    assert not first.should_commit()
    assert [(step, yes) for _, step, yes, _ in rig.coordinator.votes] == [(0, False)]
    assert [second.should_commit(), third.should_commit()] == [False, False]
    assert len(rig.coordinator.votes) == 1
    assert begin(rig).should_commit()
    assert asked(rig, "needs_configure")[-1], "the others may have got that quorum, and wait in its reductions"
    assert asked(rig, "commit_failures")[-1] == 1


def test_without_a_quorum_and_with_nothing_else_in_flight_a_step_is_none(rigs: Any) -> None:
    rig = rigs(RequestTimeoutError("nobody came"), PLAN)
    first = begin(rig)
    assert not first.should_commit()
    assert rig.coordinator.votes == []
    assert begin(rig).should_commit()


@pytest.mark.parametrize("put_aside", [False, True])
def test_after_a_request_without_an_answer_the_others_may_have_one_more_in_flight(rigs: Any, put_aside: bool) -> None:
    """They would reduce its fragment with another one of ours."""
    rig = rigs(PLAN, RequestTimeoutError("nobody came"), ANOTHER, ANOTHER_STANDS)
    assert begin(rig).should_commit()
    if put_aside:
        begin(rig)
    else:
        rig.manager.start_quorum(use_async_quorum=True)
        assert not rig.manager.should_commit()
    assert begin(rig).should_commit()
    assert begin(rig).should_commit()
    assert asked(rig, "needs_configure") == [False, False, True, False]
    assert len(rig.group.configured) == 2


def test_after_a_request_without_an_answer_nobody_is_ahead_where_each_step_ends_before_the_next(rigs: Any) -> None:
    rig = rigs(PLAN, RequestTimeoutError("nobody came"), STANDS)
    for commits in (True, False, True):
        rig.manager.start_quorum(use_async_quorum=True)
        assert rig.manager.should_commit() == commits
    assert asked(rig, "needs_configure") == [False, False, False]


# --- a no fails all that were begun later -----------------------------------------------------------------------------


def test_a_no_fails_all_later_ones_without_a_vote(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, STANDS, ANOTHER, ANOTHER_STANDS, verdicts=[False])
    first, second = begin(rig), begin(rig)
    rig.manager.start_quorum(use_async_quorum=True)
    rig.manager.allreduce(torch.ones(2))
    assert not first.should_commit()
    assert "step 0, quorum 7.0000000000000007 was not committed" in str(second.failure)
    assert isinstance(rig.manager.errored().original_exception, SyncAbandonedError)
    assert not second.should_commit()
    assert not rig.manager.should_commit(), "the open one was begun later too"
    assert len(rig.coordinator.votes) == 1
    assert (rig.manager.current_step(), rig.manager.strategy.num_deferred) == (0, 0)
    third, fourth = begin(rig), begin(rig)
    assert asked(rig, "commit_failures")[3:] == [1, 0], "once: each time the id rises, which fails what is in flight"
    assert [third.should_commit(), fourth.should_commit()] == [True, True]


def test_an_open_step_that_failed_with_others_starts_no_reduction_and_frees_who_waits_in_it(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, ANOTHER, verdicts=[False])
    first = begin(rig)
    rig.manager.start_quorum(use_async_quorum=True)
    assert not first.should_commit()
    assert not rig.manager.allreduce(torch.ones(2)).wait()
    assert (len(rig.group.calls), rig.group.num_aborts) == (1, 1)
    second = rig.manager.strategy.defer()
    assert rig.manager.strategy.num_deferred == 0
    assert not second.should_commit()
    assert begin(rig).should_commit()
    assert asked(rig, "needs_configure") == [False, False, True]


def test_it_frees_them_by_its_next_request_if_it_starts_none_at_all(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, ANOTHER, verdicts=[False])
    first = begin(rig)
    rig.manager.start_quorum(use_async_quorum=True)
    assert not first.should_commit()
    assert not rig.manager.should_commit()
    assert begin(rig).should_commit()
    assert asked(rig, "needs_configure") == [False, False, True]


def test_a_failed_reduction_is_of_its_own_step(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, plan_of(8, step=1, size=2))
    first = begin(rig)
    rig.group.failing_wait = RuntimeError("a wire broke")
    second = begin(rig)
    assert first.should_commit(), "the later failure is none of its own"
    assert not second.should_commit()
    assert "a wire broke" in str(second.failure)
    assert [(step, yes) for _, step, yes, _ in rig.coordinator.votes] == [(0, True), (1, False)]
    assert begin(rig).should_commit()
    assert asked(rig, "needs_configure") == [False, False, True]


def test_an_error_that_comes_late_is_of_the_step_that_it_belongs_to(rigs: Any) -> None:
    """Later ones were begun by then; and one that comes when its step is over is none."""
    rig = rigs(PLAN, STANDS, STANDS)
    rig.manager.start_quorum(use_async_quorum=True)
    future: torch.futures.Future[int] = torch.futures.Future()
    later: torch.futures.Future[int] = torch.futures.Future()
    wrapped = [rig.manager.wrap_future(each, 0) for each in (future, later)]
    first = rig.manager.strategy.defer()
    second = begin(rig)
    future.set_exception(RuntimeError("copied to nowhere"))
    assert wrapped[0].wait() == 0
    assert "copied to nowhere" in str(first.failure)
    assert second.failure is None
    assert not first.should_commit()
    later.set_exception(RuntimeError("too late"))
    assert wrapped[1].wait() == 0
    assert not second.should_commit()
    third = begin(rig)
    assert third.failure is None


def test_a_reported_error_is_of_the_open_step_unless_it_is_told_to_another(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, STANDS)
    first = begin(rig)
    rig.manager.report_error(RuntimeError("between two steps"))
    assert first.failure is None
    second = begin(rig)
    rig.manager.start_quorum(use_async_quorum=True)
    rig.manager.report_error(RuntimeError("of the open one"))
    second.report_error(RuntimeError("of the second"))
    assert [str(step.failure) for step in (first, second)] == ["None", "of the second"]
    assert first.should_commit()
    assert not second.should_commit()
    assert not rig.manager.should_commit()


def test_max_retries_counts_a_no_once_and_another_quorum_once(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, ANOTHER, ANOTHER_STANDS, plan_of(9, size=2), verdicts=[False], max_retries=2)
    steps = [begin(rig), begin(rig)]
    assert [step.should_commit() for step in steps] == [False, False]
    steps = [begin(rig), begin(rig)]
    rig.manager.start_quorum(use_async_quorum=True)
    assert [step.should_commit() for step in steps] == [False, False]
    rig.manager.report_error(RuntimeError("of the open one"))
    with pytest.raises(TooManyFailuresError, match="failed to commit 3 times in a row, and max_retries is 2"):
        rig.manager.should_commit()


def test_a_commit_ends_the_row_of_failures(rigs: Any) -> None:
    rig = rigs(PLAN, ANOTHER, plan_of(9, step=1, size=2), plan_of(10, step=1, size=2), max_retries=1)
    first, second = begin(rig), begin(rig)
    assert [first.should_commit(), second.should_commit()] == [False, True]
    third, fourth = begin(rig), begin(rig)
    assert [third.should_commit(), fourth.should_commit()] == [False, True]


def test_what_is_given_up_fails_here_and_at_the_others(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, STANDS, ANOTHER)
    steps = [begin(rig), begin(rig)]
    rig.manager.start_quorum(use_async_quorum=True)
    rig.manager.strategy.give_up_deferred()
    assert (rig.manager.strategy.num_deferred, [step.is_abandoned for step in steps]) == (0, [True, True])
    assert begin(rig).should_commit()
    assert asked(rig, "needs_configure") == [False, False, False, True]
    assert len(rig.coordinator.votes) == 1
    assert not steps[0].should_commit()


def test_what_was_abandoned_need_not_be_ended(rigs: Any) -> None:
    rig = rigs(PLAN, ANOTHER, ANOTHER_STANDS, verdicts=[True, True])
    first, second = begin(rig), begin(rig)
    assert first.is_abandoned
    assert second.should_commit()
    third = begin(rig)
    assert third.should_commit()
    assert not first.should_commit(), "it may be, though"
    assert rig.manager.current_step() == 2


# --- losses -----------------------------------------------------------------------------------------------------------


def test_the_notice_of_a_loss_fails_what_still_waits_and_leaves_alone_what_has_its_data(
    rigs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(PLAN, STANDS)
    aborted, abort = threading.Event(), rig.group.abort

    def aborts() -> None:
        abort()
        aborted.set()

    monkeypatch.setattr(rig.group, "abort", aborts)
    first, second = begin(rig, holds=True), begin(rig, holds=True)
    rig.group.come()
    rig.coordinator.listener(LossNotice(STANDS, "replica_1", 1, "its stream broke"))
    assert aborted.wait(20)
    assert first.should_commit()
    assert not second.should_commit()
    assert (str(first.failure), str(second.failure)) == ("None", "aborted")


def test_the_quorum_that_follows_a_loss_fails_both(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, plan_of(8, size=1))
    first, second = begin(rig), begin(rig)
    rig.coordinator.listener(LossNotice(STANDS, "replica_1", 1, "its stream broke"))
    third = begin(rig)
    assert [first.should_commit(), second.should_commit(), third.should_commit()] == [False, False, True]
    assert asked(rig, "needs_configure") == [False, False, True]


def test_a_group_that_is_lost_ends_no_step(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS)
    first, second = begin(rig, holds=True), begin(rig, holds=True)
    rig.coordinator.listener(ReplicaGroupLostError("replica_0 lost a rank; start the group again"))
    for step in (first, second):
        with pytest.raises(ReplicaGroupLostError):
            step.should_commit()
    assert rig.coordinator.votes == []
    assert rig.manager.current_step() == 0


def test_who_is_refused_raises_at_the_next_end(rigs: Any) -> None:
    rig = rigs(PLAN, RefusedError("replica_0 differs from the job", code="differs"))
    first = begin(rig)
    rig.manager.start_quorum(use_async_quorum=True)
    with pytest.raises(RefusedError, match="differs from the job"):
        first.should_commit()


def test_a_vote_without_an_answer_neither_steps_nor_goes_on(rigs: Any) -> None:
    rig = rigs(PLAN, verdicts=[RequestTimeoutError("no verdict")])
    first = begin(rig)
    with pytest.raises(RequestTimeoutError, match="no verdict"):
        first.should_commit()
    assert rig.manager.current_step() == 0


# --- healing, and state ---------------------------------------------------------------------------------------------


def source(plan: Plan, value: float) -> dict[Any, Any]:
    own = {"step": plan.step, "batches_committed": 2 * plan.step, "lineage": f"{plan.lineage:016x}"}
    return {state_key(plan): {"user": {"default": {"tensor": torch.full((2,), value)}}, "tft": own}}


def test_who_heals_gives_zeros_and_goes_on_with_the_others(rigs: Any) -> None:
    healing = plan_of(7, step=5, lineage=9, size=2, rank=1, healing=[1])
    rig = rigs(
        healing,
        plan_of(7, step=5, lineage=9, size=2, rank=1),
        checkpoint_transport=MemoryTransport(source(healing, 3.0)),
    )
    first = begin(rig)
    assert rig.group.calls[0].tolist() == [0.0, 0.0]
    assert rig.weights.tensor.tolist() == [3.0, 3.0], "defer exchanges, where exchange_state was not called"
    second = begin(rig)
    assert rig.group.calls[1].tolist() == [0.5, 0.5], "half of it, for a mean of two"
    assert [first.should_commit(), second.should_commit()] == [True, True]
    assert rig.manager.current_step() == 7
    assert asked(rig, "step") == [0, 5]


def test_who_heals_in_the_same_quorum_keeps_what_is_in_flight(rigs: Any) -> None:
    """What was reduced is the same everywhere, and is applied to the state that was healed."""
    healing = plan_of(7, step=1, lineage=9, size=2, healing=[0])
    rig = rigs(PLAN, STANDS, healing, checkpoint_transport=MemoryTransport(source(healing, 3.0)))
    first, second = begin(rig), begin(rig)
    assert first.should_commit()
    rig.manager.strategy.report_torn(RuntimeError("the outer optimizer raised"))
    third = begin(rig)
    assert asked(rig, "torn") == [False, False, True]
    assert rig.manager.strategy.num_deferred == 2
    assert [second.should_commit(), third.should_commit()] == [True, True]
    assert [(step, yes) for _, step, yes, _ in rig.coordinator.votes] == [(0, True), (1, True), (2, True)]
    assert (rig.manager.current_step(), rig.manager.status().is_torn) == (3, False)


def test_a_healing_that_failed_fails_its_own_step_and_those_after_it(rigs: Any) -> None:
    rig = rigs(plan_of(7, step=5, lineage=9, size=2, rank=1, healing=[1]), ANOTHER)
    first = begin(rig)
    assert "could not fetch step 5" in str(first.failure)
    assert not first.should_commit()


def test_state_is_served_before_an_older_step_ends_and_changes_it(rigs: Any) -> None:
    serving = plan_of(7, size=3, healing=[2])
    rig = rigs(PLAN, serving)
    first = begin(rig)
    rig.manager.start_quorum(use_async_quorum=True)
    assert rig.transport.sent_to == []
    assert first.should_commit()
    assert rig.transport.sent_to == [[2]]
    assert rig.transport.shelf[state_key(serving)]["tft"]["step"] == 0
    assert rig.manager.should_commit()
    assert rig.transport.sent_to == [[2]]


def test_a_state_that_can_not_be_read_leaves_the_step_open(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2, healing=[1]))
    rig.manager.disallow_state_dict_read()
    rig.manager.start_quorum(use_async_quorum=True)
    with pytest.raises(UserStateError):
        rig.manager.strategy.defer()
    rig.manager.allow_state_dict_read()
    assert rig.manager.strategy.defer().should_commit()


def test_a_state_that_is_loaded_by_hand_fails_what_is_in_flight(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, plan_of(8, step=40, lineage=9, size=2))
    first, second = begin(rig), begin(rig)
    rig.manager.load_state_dict({"step": 40, "batches_committed": 80, "lineage": f"{9:016x}"})
    assert [first.should_commit(), second.should_commit()] == [False, False]
    assert begin(rig).should_commit()
    assert rig.manager.current_step() == 41
    assert asked(rig, "needs_configure") == [False, False, True], "the others have theirs in flight still"


# --- leaving, and the end ---------------------------------------------------------------------------------------------


def test_who_leaves_does_so_after_the_next_end_and_loses_what_is_in_flight(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, STANDS)
    first, second = begin(rig), begin(rig)
    rig.manager.start_quorum(use_async_quorum=True)
    rig.manager.leave(reason="it is preempted")
    assert first.should_commit()
    assert rig.manager.left
    assert not second.should_commit()
    assert "has left the job while this step was in flight" in str(second.failure)
    assert not rig.manager.should_commit()
    assert len(rig.coordinator.votes) == 1
    assert rig.coordinator.left == [("it is preempted", timedelta())]


def test_another_ranks_wish_is_enough(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS, verdicts=[Verdict(yes=True, leaves=True)])
    first, second = begin(rig), begin(rig)
    assert first.should_commit()
    assert rig.manager.left
    assert not second.should_commit()


def test_shutdown_ends_what_is_in_flight(rigs: Any) -> None:
    clock = ManualClock()
    rig = rigs(PLAN, STANDS, clock=clock)
    rig.manager.start_quorum(use_async_quorum=True)
    rig.manager.wait_quorum()
    rig.group.holds = True
    reduced = rig.manager.allreduce(torch.ones(2), timeout=timedelta(seconds=60))
    first = rig.manager.strategy.defer()
    begin(rig, holds=True)
    rig.manager.shutdown()
    assert clock.num_alarms == 0
    assert not reduced.wait()
    with pytest.raises(ManagerClosedError):
        first.should_commit()
    with pytest.raises(ManagerClosedError):
        rig.manager.strategy.defer()


# --- where a trainer is ---------------------------------------------------------------------------------------------


def test_a_trainer_with_steps_in_flight_is_busy_and_reduces_only_when_it_ends_one(
    rigs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    rig = rigs(PLAN, *[STANDS] * 3, clock=clock, slowest_step=timedelta(seconds=2))

    def phase() -> Phase:
        progress = rig.coordinator.progress().phase
        assert isinstance(progress, Phase)
        return progress

    assert begin(rig).should_commit(), "the first is excused"
    first = begin(rig, holds=True)
    assert phase() is Phase.OWN
    second = begin(rig, holds=True)
    assert phase() is Phase.OWN
    clock.now_s += 1.5
    assert not rig.coordinator.progress().is_hung
    rig.manager.strategy.inner_step_ended()
    assert rig.coordinator.progress().since_ms == 0
    clock.now_s += 2
    assert rig.coordinator.progress().is_hung
    seen: list[Phase] = []
    wait, vote = first.started.finish, rig.coordinator.vote

    def finish() -> None:
        seen.append(phase())
        rig.group.come()
        wait()

    def votes(*args: Any, **kwargs: Any) -> Verdict:
        seen.append(phase())
        verdict = vote(*args, **kwargs)
        assert isinstance(verdict, Verdict)
        return verdict

    monkeypatch.setattr(first.started, "finish", finish)
    monkeypatch.setattr(rig.coordinator, "vote", votes)
    assert first.should_commit()
    assert [*seen, phase()] == [Phase.REDUCING, Phase.WAITING, Phase.OWN]
    rig.group.come()
    assert second.should_commit()
    assert phase() is Phase.OUTSIDE


def test_an_open_step_whose_trainer_goes_on_is_busy_too(rigs: Any) -> None:
    rig = rigs(PLAN, STANDS)
    for _ in range(2):
        rig.manager.start_quorum(use_async_quorum=True)
        rig.manager.wait_quorum()
        rig.group.holds = True
        rig.manager.allreduce(torch.ones(2))
        assert rig.coordinator.progress().phase is Phase.REDUCING, "as far as anybody knows"
        rig.manager.strategy.inner_step_ended()
        assert rig.coordinator.progress().phase is Phase.OWN
        rig.group.come()
        assert rig.manager.should_commit()


# --- records ----------------------------------------------------------------------------------------------------------


def test_records_name_the_step_that_ended(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tft_commits")
    rig = rigs(PLAN, STANDS, verdicts=[True, False])
    first, second = begin(rig), begin(rig)
    first.should_commit()
    second.should_commit()
    told = [vars(record) for record in caplog.records if record.name == "tft_commits"]
    assert [(each["step"], each["commit_result"], each["quorum_id"]) for each in told] == [(0, True, 7), (1, False, 7)]
