"""The table of what NCCL supports, and the calls that it gets in another form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tft_pg.backends.nccl_calls import fit, lacks
from tft_pg.ops import collective
from tft_pg.testing.cases import PREMUL_FACTOR

PREMUL: Any = dist._make_nccl_premul_sum(PREMUL_FACTOR)  # type: ignore[attr-defined]


def reduction(name: str, op: Any) -> Any:
    opts: Any = dist.ReduceScatterOptions() if "scatter" in name else dist.AllreduceOptions()
    opts.reduceOp = op
    return opts


@pytest.mark.parametrize(
    ("dtype", "op", "world_size", "expected"),
    [
        (torch.float32, ReduceOp.AVG, 2, ""),
        (torch.bfloat16, ReduceOp.SUM, 2, ""),
        (torch.bfloat16, PREMUL, 2, "NCCL does not support PREMUL_SUM of bfloat16; use SUM and multiply the result"),
        (torch.float16, PREMUL, 1, ""),
        (torch.float8_e4m3fn, ReduceOp.AVG, 2, ""),
        # NCCL's own error ends the communicator, and in a call for several tensors the process.
        (torch.float8_e4m3fn, ReduceOp.AVG, 1, "NCCL does not support AVG of float8_e4m3fn; use SUM and multiply"),
        (torch.int64, ReduceOp.MAX, 2, ""),
        (torch.int64, ReduceOp.AVG, 2, "NCCL does not support AVG of int64; use SUM and multiply the result"),
        (torch.int64, ReduceOp.BAND, 2, "NCCL does not support BAND of int64; use MIN or MAX of whole numbers"),
        (torch.int16, ReduceOp.SUM, 2, "NCCL does not support int16; use another dtype, or view it as one of"),
        (torch.complex64, ReduceOp.SUM, 2, ""),
        (torch.complex64, ReduceOp.MAX, 2, "NCCL does not support MAX of complex64"),
    ],
)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_an_allreduce_is_refused_by_its_dtype_and_reduction(
    dtype: torch.dtype, op: Any, world_size: int, expected: str, by_keyword: bool
) -> None:
    tensors, opts = [torch.ones(3).to(dtype)], reduction("allreduce", op)
    args, kwargs = ((), {"tensors": tensors, "opts": opts}) if by_keyword else ((tensors, opts), {})
    found = lacks(collective("allreduce"), args, kwargs, world_size)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


@pytest.mark.parametrize("name", ["reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"])
def test_each_reduction_is_looked_up(name: str) -> None:
    tensor = torch.ones(2, dtype=torch.int64)
    assert "AVG of int64" in lacks(collective(name), ([tensor], [[tensor]], reduction(name, ReduceOp.AVG)), {}, 2)
    assert lacks(collective(name), ([tensor], [[tensor]], reduction(name, ReduceOp.MIN)), {}, 2) == ""
    half, opts = tensor.half(), reduction(name, PREMUL)
    assert "PREMUL_SUM of float16" in lacks(collective(name), ([half], [[half]], opts), {}, 1)
    assert lacks(collective(name), ([half], [[half]], opts), {}, 2) == ""


def test_what_only_moves_bytes_needs_no_reduction() -> None:
    tensor = torch.ones(2, dtype=torch.bool)
    assert lacks(collective("broadcast"), ([tensor], 0), {}, 2) == ""
    assert "complex64" in lacks(collective("allgather"), ([[torch.ones(2)]], [tensor.to(torch.complex64)]), {}, 2)
    assert lacks(collective("barrier"), (), {}, 2) == ""


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.zeros(4), torch.ones(4), [], [], "opts"), {}),
        ((torch.zeros(4), torch.ones(4)), {}),
        ((), {"output": torch.zeros(4), "input": torch.ones(4)}),
        ((torch.zeros(4),), {"input_tensor": torch.ones(4), "input_split_sizes": []}),
    ],
)
def test_an_all_to_all_of_equal_parts_gets_their_sizes(args: Any, kwargs: Any) -> None:
    fitted, names = fit(collective("alltoall_base"), args, kwargs, 2)
    assert [each.tolist() for each in fitted[:2]] == [[0.0] * 4, [1.0] * 4]
    assert list(fitted[2:4]) == [[2, 2], [2, 2]]
    assert fitted[4:] == args[4:]
    assert names == {}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("alltoall_base", (torch.zeros(4), torch.ones(4), [1, 3], [3, 1])),
        ("alltoall_base", (torch.zeros(3), torch.ones(3), [], [])),
        ("allreduce", ([torch.zeros(3)],)),
    ],
)
def test_other_calls_stay_as_they_are(name: str, args: Any) -> None:
    assert fit(collective(name), args, {}, 2) == (args, {})
