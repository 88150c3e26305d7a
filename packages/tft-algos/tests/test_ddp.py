"""One layout of buckets in every step, reduced in its order and waited for at the end of the backward pass."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join

from tft_algos import (
    ConfigError,
    DistributedDataParallel,
    Optimizer,
    PureDistributedDataParallel,
    UnsupportedFeatureError,
    UsageError,
    backward,
)
from tft_algos.backward import reductions_of
from tft_algos.testing import plan_of
from tft_coord.core.types import LossNotice, QuorumKey
from tft_coord.errors import ReplicaGroupLostError
from tft_pg.work import DummyWork, PendingWork


class Sums:
    """A Manager that doubles what it is given, when it is waited for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.errors: list[Exception] = []
        self.attempt = 1
        self.verdict: bool | None = None
        self.step = 7
        self.strategy = self

    def current_step(self) -> int:
        return self.step

    def is_participating(self) -> bool:
        return True

    def allreduce(self, tensor: torch.Tensor, reduce_op: Any = None) -> dist.Work:
        self.sizes.append(tensor.numel())
        return Doubled(tensor)

    def report_error(self, error: Exception) -> None:
        self.errors.append(error)


class Doubled(dist.Work):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def wait(self, timeout: Any = None) -> bool:
        self.tensor.mul_(2)
        return True


def row_of(manager: Any, monkeypatch: pytest.MonkeyPatch) -> backward.BackwardReductions:
    """Its row of reductions, whose end is called by hand."""
    monkeypatch.setattr(backward, "at_end_of_backward", lambda _: None)
    return backward.reductions_of(manager)


class OtherOrder(torch.nn.Module):
    """Modules are used in another order than that in which they are defined."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(300, 300)
        self.b = torch.nn.Linear(300, 400)
        self.c = torch.nn.Linear(400, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.a(self.c(self.b(x)))
        return result


def made(**kwargs: Any) -> tuple[Sums, DistributedDataParallel, OtherOrder]:
    torch.manual_seed(0)
    manager, module = Sums(), OtherOrder()
    return manager, DistributedDataParallel(manager, module, bucket_cap_mb=0.5, **kwargs), module  # type: ignore[arg-type]


@pytest.mark.parametrize("kwargs", [{}, {"gradient_as_bucket_view": False}, {"static_graph": True}])
def test_every_step_reduces_the_same_buckets_in_the_same_order(kwargs: dict[str, Any]) -> None:
    manager, model, module = made(**kwargs)
    seen = []
    for _ in range(4):
        manager.sizes.clear()
        model(torch.ones(2, 300)).sum().backward()
        seen.append(list(manager.sizes))
        model.zero_grad()
    assert len(seen[0]) > 1
    assert seen == [seen[0]] * 4
    assert sum(seen[0]) == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("kwargs", [{}, {"gradient_as_bucket_view": False}, {"static_graph": True}])
def test_after_backward_the_gradients_are_the_reduced_ones(kwargs: dict[str, Any]) -> None:
    _, model, module = made(**kwargs)
    alone = OtherOrder()
    alone.load_state_dict(module.state_dict())
    for _ in range(2):
        x = torch.randn(2, 300)
        model.zero_grad()
        alone.zero_grad()
        model(x).square().mean().backward()
        alone(x).square().mean().backward()
        for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad, 2 * theirs.grad, rtol=0, atol=0)


def test_without_synchronization_gradients_add_up_and_are_reduced_once() -> None:
    manager, model, module = made()
    x = torch.ones(1, 300)
    with model.no_sync():
        model(x).sum().backward()
    assert manager.sizes == []
    model(x).sum().backward()
    assert sum(manager.sizes) == sum(parameter.numel() for parameter in module.parameters())
    # d sum / d bias is 1 in each pass, and the stand-in doubles what it reduces.
    assert module.a.bias.grad is not None
    assert module.a.bias.grad.tolist() == [4.0] * 300


def test_a_group_is_averaged_inside_first_and_passed_on_in_the_order_of_the_buckets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(dist.Work):
        """Ends only when it is waited for."""

        def is_completed(self) -> bool:
            return False

        def wait(self, timeout: Any = None) -> bool:
            return True

    class Inside:
        """A group of two whose other rank gives nothing; its first reduction ends last."""

        def __init__(self) -> None:
            self.sizes: list[int] = []

        def size(self) -> int:
            return 2

        def allreduce(self, tensors: list[torch.Tensor], op: object) -> dist.Work:
            self.sizes.append(tensors[0].numel())
            return Slow() if len(self.sizes) == 1 else DummyWork(tensors)

    manager: Any = Sums()
    inside: Any = Inside()
    row = row_of(manager, monkeypatch)
    first, second = torch.full((2,), 4.0), torch.full((3,), 4.0)
    row.start(manager, first, group=inside)
    row.start(manager, second, group=inside)
    assert (inside.sizes, manager.sizes) == ([2, 3], [])
    row.end()
    assert manager.sizes == [2, 3]
    assert (first.tolist(), second.tolist()) == ([4.0] * 2, [4.0] * 3)


def test_a_reduction_that_fails_inside_the_group_is_the_end_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(dist.Work):
        def wait(self, timeout: Any = None) -> bool:
            raise RuntimeError("Connection closed by peer")

        def is_completed(self) -> bool:
            return True

    class Inside:
        def size(self) -> int:
            return 2

        def allreduce(self, tensors: list[torch.Tensor], op: object) -> dist.Work:
            return Broken()

    manager: Any = Sums()
    row = row_of(manager, monkeypatch)
    other: Any = Inside()
    row.start(manager, torch.ones(2), group=other)
    row.end()
    assert [type(error) for error in manager.errors] == [ReplicaGroupLostError]
    assert "Connection closed by peer" in str(manager.errors[0])


def test_reductions_of_two_models_share_one_row_whoever_is_ready_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inside:
        """A group whose first reduction ends last."""

        def size(self) -> int:
            return 1

        def allreduce(self, tensors: list[torch.Tensor], op: object) -> dist.Work:
            work = PendingWork(on_timeout=lambda limit: TimeoutError(), limit=timedelta(seconds=1))
            pending.append(work)
            return work

    pending: list[PendingWork] = []
    manager: Any = Sums()
    inside: Any = Inside()
    row = row_of(manager, monkeypatch)
    for size in (2, 3):  # of one model, of another
        row.start(manager, torch.ones(size), group=inside)
    row.start(manager, torch.ones(4))  # of a third, whose replica group is this process
    pending[1].finish([])
    row.start(manager, torch.ones(5))
    assert manager.sizes == []
    pending[0].finish([])
    row.end()
    assert manager.sizes == [2, 3, 4, 5]


def test_what_a_pass_that_raised_has_left_is_not_reduced_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never(dist.Work):
        def is_completed(self) -> bool:
            return False

    class Inside:
        def size(self) -> int:
            return 2

        def allreduce(self, tensors: list[torch.Tensor], op: object) -> dist.Work:
            return Never()

    manager: Any = Sums()
    row = row_of(manager, monkeypatch)
    other: Any = Inside()
    row.start(manager, torch.ones(2), group=other)
    manager.attempt += 1
    row.start(manager, torch.ones(3))
    row.end()
    assert manager.sizes == [3]


@pytest.mark.parametrize("kwargs", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("where", ["first", "last"])
def test_after_a_pass_that_raised_the_next_step_is_like_every_other(where: str, kwargs: dict[str, Any]) -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no room")

    manager, model, module = made(**kwargs)
    failing = module.a.weight if where == "first" else module.b.weight
    seen = []
    for _ in range(3):
        manager.sizes.clear()
        model(torch.ones(2, 300)).sum().backward()
        seen.append(list(manager.sizes))
        assert module.a.bias.grad is not None
        assert module.a.bias.grad.tolist() == [4.0] * 300
        manager.attempt, manager.step = manager.attempt + 1, manager.step + 1
        model.zero_grad()
        handle = failing.register_hook(fail)
        with pytest.raises(MemoryError):
            model(torch.ones(2, 300)).sum().backward()
        handle.remove()
        manager.attempt += 1
        model.zero_grad()
    assert seen == [seen[0]] * 3


def test_a_parameter_that_was_not_used_in_a_step_that_counted_is_named_by_torch() -> None:
    manager, model, module = made()
    model(torch.ones(2, 300)).sum().backward()
    module.forward = lambda x: module.a(x)  # type: ignore[method-assign]
    for _ in range(2):
        manager.attempt, manager.step = manager.attempt + 1, manager.step + 1
        if manager.attempt == 3:
            with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
                model(torch.ones(2, 300))
        else:
            model(torch.ones(2, 300)).sum().backward()


def test_a_backward_pass_after_the_vote_is_refused() -> None:
    manager, model, _ = made()
    manager.verdict = True
    with pytest.raises(UsageError, match=r"after the vote on step 7; call zero_grad\(\) before"):
        model(torch.ones(1, 300)).sum().backward()


def test_reductions_overlap_the_backward_pass() -> None:
    """By the order of events: buckets are handed over before the gradients of what was used first are there."""
    torch.manual_seed(0)
    manager = Sums()
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    model = DistributedDataParallel(manager, module, bucket_cap_mb=0.015)  # type: ignore[arg-type]
    handed_over: list[int] = []
    for parameter in module.parameters():
        parameter.register_hook(lambda _: handed_over.append(len(manager.sizes)))
    for _ in range(2):
        manager.sizes.clear()
        handed_over.clear()
        model(torch.ones(1, 64)).sum().backward()
        assert len(manager.sizes) == 4
        assert handed_over[-1] == 3  # when the last gradient came, three buckets were on their way


@pytest.mark.parametrize("kwargs", [{}, {"gradient_as_bucket_view": False}])
def test_a_reentrant_pass_that_fills_the_last_bucket_has_waited_too(kwargs: dict[str, Any]) -> None:
    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=True)
            result: torch.Tensor = self.second(y)
            return result

    manager, module = Sums(), Checkpointed()
    alone = Checkpointed()
    alone.load_state_dict(module.state_dict())
    model = DistributedDataParallel(manager, module, bucket_cap_mb=0.00005, **kwargs)  # type: ignore[arg-type]
    for _ in range(2):
        for each in (model, alone):
            each.zero_grad()
            each(torch.ones(1, 4, requires_grad=True)).sum().backward()
        for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, 2 * theirs.grad)


def test_mixed_dtypes_have_buckets_of_their_own_and_the_same_in_every_step() -> None:
    manager = Sums()
    module = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    module[1].bfloat16()
    module[2].bfloat16()

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = module[0](x).bfloat16()
        result: torch.Tensor = module[3](module[2](module[1](x)).float())
        return result

    module.forward = forward  # type: ignore[method-assign]
    model = DistributedDataParallel(manager, module, bucket_cap_mb=0.003)  # type: ignore[arg-type]
    seen = []
    for _ in range(3):
        manager.sizes.clear()
        model(torch.ones(1, 32)).sum().backward()
        seen.append(list(manager.sizes))
        model.zero_grad()
    assert seen == [seen[0]] * 3
    assert len(seen[0]) >= 3


def test_autocast_reduces_in_the_dtype_of_the_parameters() -> None:
    manager, model, module = made()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(1, 300)).sum()
    loss.backward()
    assert manager.sizes
    assert {parameter.grad.dtype for parameter in module.parameters() if parameter.grad is not None} == {torch.float32}


@pytest.mark.parametrize(
    "kwargs",
    [
        {"init_sync": False},
        {"forward_sync_buffers": False},
        {"forward_sync_buffers": True},
        {"batched_grad_copy": True},
        {"bucket_cap_mb_list": [0.4, 0.4, 0.4]},
        {"dim": 0, "device_ids": None, "output_device": None},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "batched_grad_copy": True},
    ],
)
def test_the_other_arguments_of_torchs_class_work(kwargs: dict[str, Any]) -> None:
    if lacks := kwargs.keys() - inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters.keys():
        pytest.skip(f"torch {torch.__version__} has no {', '.join(lacks)}")
    torch.manual_seed(0)
    manager, module, alone = Sums(), OtherOrder(), OtherOrder()
    alone.load_state_dict(module.state_dict())
    if "bucket_cap_mb_list" not in kwargs:
        kwargs |= {"bucket_cap_mb": 0.5}
    model = DistributedDataParallel(manager, module, **kwargs)  # type: ignore[arg-type]
    seen = []
    for _ in range(3):
        manager.sizes.clear()
        for each in (model, alone):
            each.zero_grad()
            each(torch.ones(2, 300)).square().mean().backward()
        for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, 2 * theirs.grad)
        seen.append(list(manager.sizes))
    assert len(seen[0]) > 1
    assert seen == [seen[0]] * 3


def test_buffers_stay_those_of_the_replica_group() -> None:
    manager = Sums()
    norm = torch.nn.BatchNorm1d(4)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), norm)
    model = DistributedDataParallel(manager, module)  # type: ignore[arg-type]
    model(torch.randn(8, 4)).sum().backward()
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 1
    assert sum(manager.sizes) == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("what", ["the wrapper", "the module"])
def test_it_is_compiled(what: str) -> None:
    torch.manual_seed(0)
    manager, module = Sums(), OtherOrder()
    alone = OtherOrder()
    alone.load_state_dict(module.state_dict())
    inner: Any = torch.compile(module, backend="aot_eager") if what == "the module" else module
    model: Any = DistributedDataParallel(manager, inner, bucket_cap_mb=1)  # type: ignore[arg-type]
    if what == "the wrapper":
        model = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        manager.sizes.clear()
        model.zero_grad()
        alone.zero_grad()
        model(torch.ones(2, 300)).square().mean().backward()
        alone(torch.ones(2, 300)).square().mean().backward()
        assert sum(manager.sizes) == sum(parameter.numel() for parameter in module.parameters())
        for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad, 2 * theirs.grad)
    torch._dynamo.reset()


# --- failures ---------------------------------------------------------------------------------------------------------


def two_replicas(rigs: Any) -> Any:
    """A Manager of two replicas, of which the other gives zeros and uses nothing; a step has begun."""
    rig = rigs(plan_of(7, size=2), others=0)
    rig.manager.start_quorum()
    return rig


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=["a bucket", "the map of used parameters"])
@pytest.mark.parametrize("failing", ["failing_call", "failing_wait"])
def test_a_reduction_that_fails_ends_in_a_no(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, failing: str
) -> None:
    rig = two_replicas(rigs)
    working = rig.group.allreduce

    def allreduce(tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        if tensors[0].dtype == dtype:
            setattr(rig.group, failing, RuntimeError("Connection closed by peer"))
        work: dist.Work = working(tensors, opts)
        return work

    monkeypatch.setattr(rig.group, "allreduce", allreduce)
    module = OtherOrder()
    model = DistributedDataParallel(rig.manager, module, find_unused_parameters=True)
    model(torch.ones(1, 300)).sum().backward()
    assert "Connection closed by peer" in str(rig.manager.errored())
    assert not rig.manager.should_commit()


def test_an_error_before_the_first_bucket_ends_in_a_no(rigs: Any) -> None:
    rig = two_replicas(rigs)
    model = DistributedDataParallel(rig.manager, OtherOrder(), find_unused_parameters=True)
    rig.manager.report_error(RuntimeError("lost"))
    model(torch.ones(1, 300)).sum().backward()
    assert rig.group.calls == []
    assert not rig.manager.should_commit()


def test_after_a_pass_that_raised_the_others_need_not_wait_for_what_it_left_out(rigs: Any) -> None:
    rig = rigs(plan_of(7, size=2), plan_of(8, size=2), others=0)
    rig.manager.start_quorum()
    rig.manager.report_error(MemoryError("no room"))
    assert not rig.manager.should_commit()
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    assert [request.needs_configure for request in rig.coordinator.requests] == [False, True]


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_a_pass_that_raised_and_was_not_reported_is_never_stepped_on_and_the_others_are_told(
    rigs: Any, wrapper: Any
) -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no room")

    rig = rigs(plan_of(7, size=2), plan_of(8, size=2), others=0)
    first = torch.nn.Linear(4, 4)
    module = torch.nn.Sequential(first, torch.nn.Linear(4, 1))
    model = wrapper(rig.manager, module)
    optimizer = Optimizer(rig.manager, torch.optim.SGD(module.parameters(), lr=0.1))
    optimizer.zero_grad()
    handle = first.weight.register_hook(fail)
    with pytest.raises(MemoryError):
        model(torch.ones(1, 4)).sum().backward()
    handle.remove()
    with pytest.raises(UsageError, match=r"did not reduce all gradients.*Manager.report_error"):
        optimizer.step()
    assert rig.coordinator.votes == []
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    assert optimizer.step()
    assert [request.needs_configure for request in rig.coordinator.requests] == [False, True]


def test_a_parameter_that_was_not_used_is_named_before_the_step_counts(rigs: Any) -> None:
    rig = two_replicas(rigs)
    module = OtherOrder()
    model = DistributedDataParallel(rig.manager, module)
    optimizer = Optimizer(rig.manager, torch.optim.SGD(module.parameters(), lr=0.1))
    optimizer.zero_grad()
    module.forward = lambda x: module.a(x)  # type: ignore[method-assign]
    model(torch.ones(1, 300)).sum().backward()
    with pytest.raises(UsageError, match="find_unused_parameters=True"):
        optimizer.step()
    assert rig.coordinator.votes == []


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_a_batch_that_is_thrown_away_before_its_backward_pass_costs_no_step(rigs: Any, wrapper: Any) -> None:
    rig = rigs(plan_of(7, size=2), others=0)
    module = torch.nn.Linear(4, 1)
    model = wrapper(rig.manager, module)
    optimizer = Optimizer(rig.manager, torch.optim.SGD(module.parameters(), lr=0.1))
    for value in (float("nan"), float("nan"), 1.0):
        optimizer.zero_grad()
        loss = model(torch.full((1, 4), value)).sum()
        if not torch.isfinite(loss):
            continue
        loss.backward()
        assert optimizer.step()
    assert (len(rig.coordinator.requests), rig.manager.strategy.attempt) == (1, 1)


@pytest.mark.parametrize("why", ["reduced", "reported", "lost"])
def test_a_step_that_is_no_longer_as_it_was_begun_is_not_gone_on_with(rigs: Any, why: str) -> None:
    rig = rigs(plan_of(7, size=2), plan_of(8, size=2), others=0)
    optimizer = Optimizer(rig.manager, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    optimizer.zero_grad()
    rig.manager.wait_quorum()
    if why == "reduced":
        rig.manager.allreduce(torch.ones(1)).wait()
    elif why == "reported":
        rig.manager.report_error(RuntimeError("no"))
    else:
        rig.coordinator.listener(LossNotice(key=QuorumKey(7, 7), replica_id="replica_1", session=1, reason="gone"))
    optimizer.zero_grad()
    rig.manager.wait_quorum()
    assert len(rig.coordinator.requests) == 2


def test_gradients_are_those_that_clipping_sees(rigs: Any) -> None:
    rig = two_replicas(rigs)
    module = torch.nn.Linear(4, 1, bias=False)
    model = DistributedDataParallel(rig.manager, module)
    model(torch.full((1, 4), 4.0)).sum().backward()
    assert torch.nn.utils.clip_grad_norm_(module.parameters(), 100.0).item() == 4.0  # of [2, 2, 2, 2]


# --- what does not exist ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"static_graph": True, "gradient_as_bucket_view": False}, "static_graph needs gradient_as_bucket_view"),
        ({"mixed_precision": object()}, "mixed_precision is not supported: .* use torch.autocast"),
        ({"delay_all_reduce_named_params": [], "param_to_hook_all_reduce": None}, "would not be reduced across"),
        ({"skip_all_reduce_unused_params": True}, "a bucket that only some replicas skip"),
        ({"device_mesh": object()}, "give the mesh's own group as process_group"),
    ],
)
def test_what_can_not_work_is_refused_with_a_sentence(kwargs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=sentence):
        made(**kwargs)


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_sparse_gradients_are_refused(wrapper: Any) -> None:
    with pytest.raises(UnsupportedFeatureError, match="make the Embedding with sparse=False"):
        wrapper(Sums(), torch.nn.Sequential(torch.nn.Embedding(4, 4, sparse=True)))


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_what_is_no_model_of_a_manager_is_refused(wrapper: Any) -> None:
    for manager, module, given in (
        (torch.nn.Linear(1, 1), Sums(), "a Linear and a Sums"),
        (Sums(), 3, "a Sums and a int"),
        (None, torch.nn.Linear(1, 1), "a NoneType and a Linear"),
    ):
        with pytest.raises(ConfigError, match=f"{wrapper.__name__} was given {given}; give a Manager, and the module"):
            wrapper(manager, module)
    with torch.device("meta"):
        without_values = torch.nn.Sequential(torch.nn.Linear(1, 1))
    with pytest.raises(
        ConfigError, match=r"parameter 0\.weight is on the meta device .* materialize the module before"
    ):
        wrapper(Sums(), without_values)


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_a_parameter_that_was_unfrozen_later_is_named_before_the_states_part(wrapper: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[0].requires_grad_(False)
    model = wrapper(Sums(), module)
    model(torch.ones(1, 2)).sum().backward()
    module[0].requires_grad_(True)
    with pytest.raises(UsageError, match=r"parameter 0\.weight was unfrozen after .* so its gradient is not reduced"):
        model(torch.ones(1, 2))
    with torch.no_grad():
        model(torch.ones(1, 2))
    module[0].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()


def test_what_torch_is_told_to_ignore_may_be_unfrozen() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[0].requires_grad_(False)
    names = ["0.weight", "0.bias"]
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    model = DistributedDataParallel(Sums(), module)  # type: ignore[arg-type]
    module[0].requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()


def test_a_static_graph_is_learned_outside_no_sync() -> None:
    manager, model, _ = made(static_graph=True)
    with model.no_sync(), pytest.raises(UsageError, match=r"do the first step of this process without no_sync\(\)"):
        model(torch.ones(1, 300))
    with model.no_sync(), torch.no_grad():
        model(torch.ones(1, 300))
    model(torch.ones(1, 300)).sum().backward()
    manager.attempt += 1
    before = len(manager.sizes)
    with model.no_sync():
        model(torch.ones(1, 300)).sum().backward()
    assert len(manager.sizes) == before
    model(torch.ones(1, 300)).sum().backward()
    assert len(manager.sizes) == 2 * before


def test_torchs_reducer_in_python_is_refused() -> None:
    with (
        torch._dynamo.config.patch(optimize_ddp="python_reducer"),
        pytest.raises(UnsupportedFeatureError, match="another mode than 'python_reducer'"),
    ):
        made()


def test_a_module_without_anything_to_train_is_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
        DistributedDataParallel(Sums(), torch.nn.Linear(1, 1).requires_grad_(False))  # type: ignore[arg-type]


def test_other_hooks_than_the_managers_are_refused() -> None:
    _, model, module = made()
    with pytest.raises(UnsupportedFeatureError, match="so powerSGD_hook can't be registered"):
        model.register_comm_hook(None, powerSGD_hook.powerSGD_hook)
    with pytest.raises(UnsupportedFeatureError, match="so fp16_compress_hook can't be registered"):
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(UnsupportedFeatureError, match="FP16_COMPRESS can't be registered"):
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedFeatureError, match="SGD would step in the backward pass, before the vote"):
        model._register_fused_optim(torch.optim.SGD, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own import
        from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    with pytest.raises(UnsupportedFeatureError, match="they would step before the vote"):
        model(torch.ones(1, 300))


def test_join_and_copies_are_refused() -> None:
    _, model, _ = made()
    with pytest.raises(UnsupportedFeatureError, match=r"shut the Manager down .*, and the others continue"):
        model.join()
    with pytest.raises(UnsupportedFeatureError, match="join is not supported"), Join([model]):
        pass
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"save the module's state_dict\(\)"):
            copied(model)


@pytest.mark.parametrize("others_commit", [0, 3])
def test_a_pass_that_raised_in_one_model_stops_no_other_one(others_commit: int) -> None:
    """As with the two networks of a GAN, each with an optimizer of its own."""

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no room")

    torch.manual_seed(0)
    manager, first, second = Sums(), OtherOrder(), torch.nn.Linear(4, 1)
    model = DistributedDataParallel(manager, first, bucket_cap_mb=0.5)  # type: ignore[arg-type]
    other = DistributedDataParallel(manager, second)  # type: ignore[arg-type]
    handle = first.a.weight.register_hook(fail)
    with pytest.raises(MemoryError):
        model(torch.ones(2, 300)).sum().backward()
    handle.remove()
    assert reductions_of(manager).pass_has_raised()  # type: ignore[arg-type]
    for _ in range(others_commit):
        manager.attempt += 1
        other(torch.ones(1, 4)).sum().backward()
        assert not reductions_of(manager).pass_has_raised()  # type: ignore[arg-type]
        manager.step += 1
    manager.attempt += 1
    model(torch.ones(2, 300)).sum().backward()
    assert not reductions_of(manager).pass_has_raised()  # type: ignore[arg-type]


@pytest.mark.parametrize("bucket_cap_mb", [0.5, 25])
def test_after_a_backward_pass_that_came_too_late_the_next_step_is_like_every_other(bucket_cap_mb: float) -> None:
    torch.manual_seed(0)
    manager, module = Sums(), OtherOrder()
    model = DistributedDataParallel(manager, module, bucket_cap_mb=bucket_cap_mb)  # type: ignore[arg-type]
    model(torch.ones(2, 300)).sum().backward()
    manager.verdict, manager.step = True, manager.step + 1
    for _ in range(2):
        with pytest.raises(UsageError, match="after the vote on step"):
            model(torch.ones(2, 300)).sum().backward()
    manager.verdict, manager.attempt = None, manager.attempt + 1
    manager.sizes.clear()
    model(torch.ones(2, 300)).sum().backward()
    assert sum(manager.sizes) == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_a_step_in_which_nothing_was_reduced_is_not_committed_alone(rigs: Any, wrapper: Any) -> None:
    rig = rigs(plan_of(7, size=2), others=0)
    module = torch.nn.Linear(4, 1)
    model = wrapper(rig.manager, module)
    optimizer = Optimizer(rig.manager, torch.optim.SGD(module.parameters(), lr=0.1))
    optimizer.zero_grad()
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(
        UsageError, match=r"no gradient was reduced, so this replica would commit an update that no other"
    ):
        optimizer.step()
    assert rig.coordinator.votes == []
    model(torch.ones(1, 4)).sum().backward()
    assert optimizer.step()


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_a_module_that_is_sharded_is_refused(wrapper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients come elsewhere, so each replica would go its own way, and all would commit."""

    class Sharded(torch.nn.Linear):
        pass

    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", SimpleNamespace(FSDPModule=Sharded))
    with pytest.raises(ConfigError, match=r"sharded by fully_shard.*call reduce_across\(manager, module\)"):
        wrapper(Sums(), torch.nn.Sequential(Sharded(2, 2)))
