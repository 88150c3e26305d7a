"""What is refused before anything is sent: every tensor of a call is looked at, not the first alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tft_pg import OperationRefusedError, ProcessGroup, ProcessGroupGloo
from tft_pg.backends.gloo_table import lacks
from tft_pg.checks import fault_of, is_plain
from tft_pg.ops import collective
from tft_pg.testing import Bench


def _options(op: ReduceOp.RedOpType) -> dist.ReduceScatterOptions:
    options = dist.ReduceScatterOptions()
    options.reduceOp = op  # type: ignore[assignment]
    return options


def _gaps() -> torch.Tensor:
    return torch.ones(8)[::2]


def _conjugate() -> torch.Tensor:
    return torch.ones(4, dtype=torch.complex64).conj()


def _negated() -> torch.Tensor:
    return _conjugate().imag


def _first_and(*rest: torch.Tensor) -> list[torch.Tensor]:
    return [torch.ones(4), *rest]


_whole, _two = torch.ones(4, dtype=torch.int32), torch.ones(2)
_truth = torch.ones(4, dtype=torch.bool)

# Of each: the collective, its arguments, and what the refusal says.
SECOND_TENSORS: dict[str, tuple[str, tuple[object, ...], str]] = {
    "two to allreduce": (
        "allreduce",
        (_first_and(torch.ones(4)),),
        "a call takes one tensor, but got 2.*allreduce_coalesced",
    ),
    "two to broadcast": ("broadcast", (_first_and(torch.ones(4)), dist.BroadcastOptions()), "a call takes one tensor"),
    "two to reduce": ("reduce", (_first_and(torch.ones(4)), dist.ReduceOptions()), "a call takes one tensor"),
    "a sum of bools": (
        "reduce_scatter_tensor_coalesced",
        ([_two, _truth[:2]], _first_and(_truth)),
        "SUM of bool",
    ),
    "a mean of integers": (
        "reduce_scatter_tensor_coalesced",
        ([_two, _whole[:2]], _first_and(_whole), _options(ReduceOp.AVG)),
        "support AVG of int32",
    ),
    "bits of floats": (
        "reduce_scatter_tensor_coalesced",
        ([_whole[:2], _two], [_whole, torch.ones(4)], _options(ReduceOp.BAND)),
        "does not support BAND of float32",
    ),
    "int16": (
        "reduce_scatter_tensor_coalesced",
        ([_two, _two.to(torch.int16)], _first_and(torch.ones(4, dtype=torch.int16))),
        "does not support int16",
    ),
    "one element for many": ("allreduce_coalesced", (_first_and(torch.ones(1).expand(4)),), "share memory"),
    "elsewhere": ("allreduce_coalesced", (_first_and(torch.ones(4, device="meta")),), "on meta"),
    "a conjugate view": ("allreduce_coalesced", (_first_and(_conjugate()),), "resolve_conj"),
    "a negated view": ("allreduce_coalesced", (_first_and(_negated()),), "resolve_neg"),
}

VIEWS: dict[str, tuple[str, tuple[object, ...]]] = {
    "allreduce": ("allreduce", ([_negated()],)),
    "allreduce of complex": ("allreduce", ([_conjugate()],)),
    "broadcast": ("broadcast", ([_negated()], dist.BroadcastOptions())),
    "recv": ("recv", ([_negated()], 1, 0)),
    "send": ("send", ([_conjugate()], 1, 0)),
    "allgather": ("allgather", ([[torch.ones(4), torch.ones(4)]], [_negated()])),
    "_reduce_scatter_base": ("_reduce_scatter_base", (_negated()[:2], torch.ones(4))),
    "reduce_scatter": ("reduce_scatter", ([torch.ones(4)], [[torch.ones(4), _negated()]])),
}


@pytest.fixture(scope="module")
def groups() -> Iterator[list[ProcessGroup]]:
    with Bench(ProcessGroupGloo) as bench:
        yield bench.configured(2)


def _still_works(groups: list[ProcessGroup]) -> None:
    tensors = [torch.ones(2) for _ in groups]
    for work in [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]:
        work.wait()
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0]] * 2
    assert [group.errored() for group in groups] == [None, None]


@pytest.mark.parametrize("name", SECOND_TENSORS)
def test_a_second_tensor_is_looked_at_before_the_first_is_sent(groups: list[ProcessGroup], name: str) -> None:
    row, args, words = SECOND_TENSORS[name]
    for group in groups:
        with pytest.raises(OperationRefusedError, match=words):
            getattr(group, row)(*args)
    _still_works(groups)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_whose_memory_holds_something_else_is_refused(groups: list[ProcessGroup], name: str) -> None:
    row, args = VIEWS[name]
    with pytest.raises(OperationRefusedError, match=r"is a (conjugate|negated) view; pass its resolve_(conj|neg)\(\)"):
        getattr(groups[0], row)(*args)
    _still_works(groups)


def test_lists_of_several_dtypes_and_layouts_that_gloo_has_are_not_refused(groups: list[ProcessGroup]) -> None:
    def scatter(group: ProcessGroup) -> tuple[list[torch.Tensor], dist.Work]:
        outputs = [torch.zeros(2), torch.zeros(2, dtype=torch.int32)]
        return outputs, group.reduce_scatter_tensor_coalesced(outputs, _first_and(_whole))

    def reduce(group: ProcessGroup) -> tuple[list[torch.Tensor], dist.Work]:
        tensors = _first_and(_gaps(), torch.ones(2, 2).t())
        return tensors, group.allreduce_coalesced(tensors)

    for start in (scatter, reduce):
        for tensors, work in [start(group) for group in groups]:
            work.wait()
            assert all(bool((tensor == 2).all()) for tensor in tensors)


_Make = Callable[[], torch.Tensor]


@pytest.mark.parametrize("make", [_gaps, _negated, partial(torch.ones, 4, device="meta"), _whole.clone])
def test_what_may_be_refused_is_not_plain(make: _Make) -> None:
    row = collective("allreduce")
    assert not is_plain(row, ([make()],))
    assert not is_plain(row, (_first_and(torch.ones(4)),))
    assert is_plain(row, ([torch.ones(4)],))


@pytest.mark.parametrize("row", ["allreduce", "broadcast", "reduce"])
def test_one_tensor_in_any_form_is_right(row: str) -> None:
    for args in (([torch.ones(4)],), ((torch.ones(4),),), (torch.ones(4),)):
        assert fault_of(collective(row), args, {}, rank=0, world_size=2) == ""
        assert lacks(collective(row), args, {}) == ""
