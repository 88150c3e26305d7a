"""A mean overflows only where its result does, and meets the same elements of all replicas, however they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tft_algos import (
    DiLoCo,
    DistributedDataParallel,
    LocalSGD,
    PureDistributedDataParallel,
    UnsupportedFeatureError,
    extend_mesh,
    reduce_across,
)
from tft_algos.testing import plan_of
from tft_coord.core.types import QuorumKey
from tft_pg.work import PendingWork

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


class Wire:
    """The reductions of several members, each of which ends when all have come to it: a sum in their own dtype.

    It adds up memory, not elements, as backends do.
    """

    def __init__(self, rigs: Sequence[Any]) -> None:
        self._rows: list[list[tuple[PendingWork, torch.Tensor]]] = [[] for _ in rigs]
        for row, rig in zip(self._rows, rigs, strict=True):
            rig.group.allreduce = lambda tensors, _op, row=row: self._give(row, tensors[0])

    def _give(self, row: list[tuple[PendingWork, torch.Tensor]], tensor: torch.Tensor) -> PendingWork:
        work = PendingWork(on_timeout=lambda limit: TimeoutError(str(limit)), limit=timedelta(seconds=10))
        row.append((work, tensor))
        if all(len(each) >= len(row) for each in self._rows):
            place = len(row) - 1
            memories = [in_memory(each[place][1]) for each in self._rows]
            total = memories[0].clone()
            for memory in memories[1:]:
                total += memory
            for memory, each in zip(memories, self._rows, strict=True):
                memory.copy_(total)
                each[place][0].finish([each[place][1]])
        return work


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def members(rigs: Any, number: int, **plan: Any) -> list[Any]:
    found = [rigs(plan_of(7, size=number, rank=rank, **plan)) for rank in range(number)]
    for rig in found:
        rig.manager.start_quorum()
    Wire(found)
    return found


def reduced(
    rigs: Any,
    tensors: Sequence[torch.Tensor],
    *,
    op: Any = AVG,
    weights: Sequence[float] | None = None,
    own_weight: bool = False,
    **plan: Any,
) -> list[torch.Tensor]:
    """Return the tensors, reduced in place over as many members."""
    found = members(rigs, len(tensors), **plan)
    works = []
    for index, (rig, tensor) in enumerate(zip(found, tensors, strict=True)):
        weight = None if weights is None else weights[index]
        if weight is not None and not own_weight:
            rig.manager.set_weight(weight)
        works.append(rig.manager.allreduce(tensor, reduce_op=op, weight=weight if own_weight else None))
    assert [work.wait() for work in works] == [True] * len(works)
    assert [rig.manager.status().errors for rig in found] == [()] * len(works)
    return list(tensors)


def close_to(result: torch.Tensor, wanted: torch.Tensor, number: int) -> None:
    """Equal up to the rounding of as many additions."""
    rtol = number * torch.finfo(result.dtype).eps
    torch.testing.assert_close(result.double(), wanted, rtol=rtol, atol=torch.finfo(result.dtype).smallest_normal)


# --- range ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("number", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("weights", [None, "equal", "unequal"])
@pytest.mark.parametrize("part", [1e-2, 0.95], ids=["small", "large"])
def test_a_mean_is_torchs_to_rounding_over_the_whole_range(
    rigs: Any, dtype: torch.dtype, number: int, weights: str | None, part: float
) -> None:
    generator = torch.Generator().manual_seed(number)
    most = part * torch.finfo(dtype).max
    data = [(torch.rand(64, generator=generator, dtype=torch.float64) * most).to(dtype) for _ in range(number)]
    # Tokens: float64 has no scale that keeps a product of these in range.
    counts = {None: None, "equal": [7.0] * number, "unequal": [1.0 + 1e6 * index for index in range(number)]}[weights]
    if counts is not None and dtype is torch.float64 and part > 0.5:
        data = [tensor / 2.0**40 for tensor in data]
    share = [1 / number] * number if counts is None else [count / sum(counts) for count in counts]
    wanted = sum(tensor.double() * each for tensor, each in zip(data, share, strict=True))
    for result in reduced(rigs, data, weights=counts):
        close_to(result, wanted, number)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_a_mean_reaches_the_greatest_number(rigs: Any, dtype: torch.dtype, number: int) -> None:
    greatest = torch.finfo(dtype).max
    values = torch.tensor([greatest, -greatest, 40_000.0], dtype=dtype)
    for result in reduced(rigs, [values.clone() for _ in range(number)]):
        close_to(result, values.double(), number)


@pytest.mark.parametrize("number", [2, 3, 4, 7])
def test_a_mean_of_the_smallest_float16_numbers_is_rounded_once(rigs: Any, number: int) -> None:
    """Thirds of them would be zero, each."""
    data = [torch.arange(64, dtype=torch.float16) * 2.0**-24 * (1 + index) for index in range(number)]
    wanted = (sum(tensor.double() for tensor in data) / number).half()
    for result in reduced(rigs, data):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("number", [2, 3, 4, 5, 7])
def test_a_mean_is_bit_for_bit_that_of_a_sum_divided_afterwards(rigs: Any, dtype: torch.dtype, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    data = [torch.randn(64, generator=generator).to(dtype) for _ in range(number)]
    total = data[0].clone()
    for tensor in data[1:]:
        total += tensor
    for result in reduced(rigs, data):
        assert torch.equal(result, total / number)


def test_a_sum_stays_a_sum(rigs: Any) -> None:
    (first, _) = reduced(rigs, [torch.tensor([40_000.0, 3.0], dtype=torch.float16) for _ in range(2)], op=SUM)
    assert first.tolist() == [float("inf"), 6.0]


@pytest.mark.parametrize("weights", [None, [7.0, 7.0, 7.0]])
def test_who_heals_counts_nowhere_in_the_scale(rigs: Any, weights: list[float] | None) -> None:
    tensors = [torch.full((2,), 60_000.0, dtype=torch.float16) for _ in range(3)]
    for result in reduced(rigs, tensors, weights=weights, healing=[2], step=5):
        assert result.tolist() == [60_000.0] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own_weight", [True, False])
def test_after_the_verdict_a_mean_does_not_overflow_either(rigs: Any, dtype: torch.dtype, own_weight: bool) -> None:
    found = members(rigs, 2)
    for rig in found:
        assert rig.manager.should_commit()
    large = 0.9 * torch.finfo(dtype).max
    tensors = [torch.full((2,), large, dtype=dtype) for _ in found]
    weight = 5.0 if own_weight else None
    works = [rig.manager.allreduce(each, weight=weight) for rig, each in zip(found, tensors, strict=True)]
    assert all(work.wait() for work in works)
    torch.testing.assert_close(tensors[0], torch.full((2,), large, dtype=dtype))


class Wide(torch.nn.Module):
    """Its gradient is its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def twins(rigs: Any, number: int, *answers: QuorumKey) -> Any:
    """A rig of whose job all other members hold the same."""
    rig = rigs(plan_of(7, size=number), *answers, others=0)
    reduce = rig.group.allreduce

    def allreduce(tensors: list[torch.Tensor], op: Any) -> Any:
        own = tensors[0].clone()
        for _ in range(number - 1):
            tensors[0].add_(own)
        return reduce(tensors, op)

    rig.group.allreduce = allreduce
    return rig


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("weight", [None, 7.0])
@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_the_gradients_of_a_wrapped_model_are_finite_where_torchs_are(
    rigs: Any, dtype: torch.dtype, number: int, weight: float | None, wrapper: Any
) -> None:
    rig, net = twins(rigs, number), Wide(dtype)
    model = wrapper(rig.manager, net)
    large = torch.full((4,), 0.7 * torch.finfo(dtype).max, dtype=dtype)
    rig.manager.start_quorum()
    if weight is not None:
        rig.manager.set_weight(weight)
    model(large).backward(torch.ones((), dtype=dtype))
    assert rig.manager.should_commit()
    assert net.weight.grad is not None
    close_to(net.weight.grad, large.double(), number)


@pytest.fixture
def world() -> Iterator[None]:
    """Torch's default group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("weight", [None, 7.0])
@pytest.mark.parametrize("extended", [True, False], ids=["extended mesh", "hook"])
def test_the_gradients_of_a_sharded_model_are_finite_where_torchs_are(
    rigs: Any, dtype: torch.dtype, number: int, weight: float | None, extended: bool
) -> None:
    rig, net = twins(rigs, number), torch.nn.Linear(4, 1, bias=False, dtype=dtype)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    if extended:
        mesh = extend_mesh(rig.manager, mesh)["dp", "shard"]
    fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    if not extended:
        reduce_across(rig.manager, net)
    rig.manager.start_quorum()
    if weight is not None:
        rig.manager.set_weight(weight)
    # FSDP2 itself sums over an extended mesh in float16, and divides by the root of the participants before.
    part = 0.4 if extended else 0.7
    large = torch.full((1, 4), part * torch.finfo(dtype).max, dtype=dtype)
    net(large).backward(torch.ones((1, 1), dtype=dtype))
    assert rig.manager.should_commit()
    gradient: Any = net.weight.grad
    close_to(gradient.to_local(), large.double(), number)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", ["local_sgd", "diloco"])
def test_parameters_and_pseudogradients_are_averaged_over_the_whole_range(
    rigs: Any, dtype: torch.dtype, strategy: str
) -> None:
    rig = twins(rigs, 3, QuorumKey(7, 7))
    model = torch.nn.Linear(4, 1, bias=False).to(dtype)
    large = 0.7 * torch.finfo(dtype).max
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.nn.init.zeros_(model.weight)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    made: Any = (
        LocalSGD(rig.manager, model, inner, 1)
        if strategy == "local_sgd"
        else DiLoCo(rig.manager, [model], inner, outer, 1)
    )
    with made:
        model.weight.grad = torch.full_like(model.weight, -large)
        inner.step()
        assert rig.manager.current_step() == 2
        close_to(model.weight.detach(), torch.full((1, 4), large, dtype=torch.float64), 3)


# --- layout -----------------------------------------------------------------------------------------------------------

SHAPE = (2, 3, 4, 5)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 3).contiguous().transpose(0, 3)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    part = whole[..., ::2]
    part.copy_(tensor)
    return part


LAYOUTS = [transposed, channels_last, with_gaps]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "weights"), [(AVG, None), (AVG, [1.0, 3.0]), (SUM, None)])
def test_elements_meet_whatever_their_strides(
    rigs: Any, layout: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, op: Any, weights: list[float] | None
) -> None:
    plain = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2)]
    strided = [plain[0].clone(), layout(plain[1].clone())]
    strides = strided[1].stride()
    assert strides != strided[0].stride()
    wanted = reduced(rigs, plain, op=op, weights=weights)
    for result in reduced(rigs, strided, op=op, weights=weights):
        assert torch.equal(result, wanted[0])
    assert strided[1].stride() == strides


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("make", [lambda: torch.ones(3).expand(2, 3), lambda: torch.arange(6.0).unfold(0, 4, 1)])
def test_elements_that_share_memory_fail_the_step_by_name(
    rigs: Any, number: int, make: Callable[[], torch.Tensor]
) -> None:
    rig = rigs(plan_of(7, size=number))
    rig.manager.start_quorum()
    assert not rig.manager.allreduce(make()).wait()
    (error,) = rig.manager.status().errors
    assert isinstance(error, UnsupportedFeatureError)
    assert "several of its elements share memory; reduce tensor.contiguous()" in str(error)
    assert not rig.manager.should_commit()


@pytest.mark.parametrize("op", [AVG, SUM])
def test_what_lies_in_order_is_not_copied(rigs: Any, op: Any) -> None:
    rig = rigs(plan_of(7, size=2))
    rig.manager.start_quorum()
    given: list[int] = []
    reduce = rig.group.allreduce
    rig.group.allreduce = lambda tensors, op: given.append(tensors[0].data_ptr()) or reduce(tensors, op)
    # A dimension of one may have any stride.
    tensors = [torch.ones(2, 3), torch.ones(4, 1, 3).as_strided((4, 1, 3), (3, 99, 1))]
    for tensor in tensors:
        assert rig.manager.allreduce(tensor, reduce_op=op).wait()
    assert given == [tensor.data_ptr() for tensor in tensors]


def convolution(memory_format: torch.memory_format) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Conv2d(3, 4, 3).to(memory_format=memory_format)  # type: ignore[call-overload, no-any-return]


FORMATS = (torch.contiguous_format, torch.channels_last)


def test_a_model_without_buckets_gives_the_same_memory_in_every_layout(rigs: Any) -> None:
    """Its gradients have the strides of its parameters."""
    given = []
    for memory_format in FORMATS:
        rig, net = rigs(plan_of(7, size=2), others=0), convolution(memory_format)
        rig.manager.start_quorum()
        PureDistributedDataParallel(rig.manager, net)(torch.ones(1, 3, 5, 5)).square().sum().backward()
        assert rig.manager.should_commit()
        given.append([in_memory(call) for call in rig.group.calls])
    for one, other in zip(*given, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco"])
def test_a_synchronization_sends_the_same_memory_in_every_layout(rigs: Any, strategy: str) -> None:
    given, results = [], []
    for memory_format in FORMATS:
        rig, net = rigs(plan_of(7, size=2), QuorumKey(7, 7), others=0), convolution(memory_format)
        inner, outer = (torch.optim.SGD(net.parameters(), lr=0.5) for _ in range(2))
        made: Any = (
            LocalSGD(rig.manager, net, inner, 1)
            if strategy == "local_sgd"
            else DiLoCo(rig.manager, [net], inner, outer, 1)
        )
        with made:
            net(torch.ones(1, 3, 5, 5)).square().sum().backward()
            inner.step()
            results.append([parameter.detach().clone() for parameter in net.parameters()])
        given.append([in_memory(call) for call in rig.group.calls])
    assert given[0]
    for found in (given, results):
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)
