"""Sample states, and the comparison of a received state with the original.

Law of this file: two states are the same if no user can distinguish them, to the bit; `allclose` has no place here.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from typing import Any, Final

import torch

from tft_ckpt.state.sharding import LocalShard, Placement, Sharding, part_of
from tft_ckpt.state.tree import tensor_subclass_of

__all__ = ["assert_same_state", "sample_state"]

# By size: integer types with the same bits as the elements of any dtype.
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sample_state(*, seed: int = 0, num_bytes: int = 1 << 20) -> dict[Any, Any]:
    """Return a state with a leaf of every transferable kind, and some bulk data.

    Args:
        seed: of the bulk data.
        num_bytes: approximate size of the bulk data.
    """
    # Knuth's multiplier makes all chunks different at little cost.
    bulk = torch.arange(max(1, num_bytes // 4), dtype=torch.int32).mul_(-1640531535).add_(seed)
    shared = torch.arange(24, dtype=torch.int64)
    optimizer_state: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    optimizer_state[0] = {"step": torch.tensor(7.0), "exp_avg": torch.ones(2, 3)}
    return {
        "bulk": bulk,
        "tied": {"whole": shared, "rows": shared.view(4, 6)[1:3], "columns": shared.view(4, 6)[:, ::2]},
        "dtypes": [torch.ones(5).to(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64)],
        "scalar": torch.tensor(3, dtype=torch.int32),
        "empty": torch.empty(0, 4),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "sharded": sample_shard(torch.arange(12.0).view(3, 4)),
        "optimizer": {"state": optimizer_state, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0]}]},
        "scheduler": OrderedDict(milestones=Counter([3, 3, 5]), best=float("inf")),
        "plain": [None, True, -1, 2**100, 0.1, -0.0, float("nan"), 1 + 2j, "text \u00e9 \ud800", b"\x00\xff"],
        "types": (torch.Size([2, 3]), torch.float16, torch.device("cpu")),
        7: {(1, "a", 2.5): "tuple key", True: "bool key", 0.5: "float key"},
    }


def sample_shard(local: torch.Tensor) -> LocalShard:
    """Return the second process's part of a tensor with twice its rows, sharded over two processes."""
    rows, *sizes = local.shape
    return LocalShard(
        local,
        Sharding(
            shape=(2 * rows, *sizes),
            stride=tuple(local.stride()),
            placements=(Placement(), Placement(0)),
            mesh_shape=(1, 2),
            mesh_dim_names=("dp", "shard"),
            coordinate=(0, 1),
        ),
    )


def assert_same_state(actual: object, expected: object, path: str = "state") -> None:
    """Raise AssertionError with the leaf unless the two states are bit-identical, sharing included.

    A DTensor equals a LocalShard of the same part, on either side.
    """
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
    _compare(actual, expected, path, tensors)
    for index, (first, first_expected) in enumerate(tensors):
        for second, second_expected in tensors[:index]:
            shared = _storage(first) == _storage(second)
            assert shared == (_storage(first_expected) == _storage(second_expected)), "the sharing of storages differs"


def _compare(actual: object, expected: object, path: str, tensors: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    expected_part = part_of(expected, path)
    if expected_part is not None:
        part = part_of(actual, path)
        assert part is not None, f"{path}: {type(actual)} is no part of a sharded tensor"
        assert part.sharding == expected_part.sharding, f"{path}: {part.sharding} is not {expected_part.sharding}"
        actual, expected = part.local, expected_part.local
    subclass = tensor_subclass_of(expected)
    if subclass is not None:
        assert type(actual) is type(expected), f"{path}: {type(actual)} is not {type(expected)}"
        _compare(subclass.parts(actual, path), subclass.parts(expected, path), f"{path}.parts", tensors)
        return
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), path
        _compare_tensors(actual, expected, path)
        if expected.numel():
            tensors.append((actual, expected))
        return
    assert type(actual) is type(expected), f"{path}: {type(actual)} is not {type(expected)}"
    if isinstance(expected, dict):
        assert isinstance(actual, dict)
        assert [_exact(key) for key in actual] == [_exact(key) for key in expected], f"{path}: keys differ"
        assert getattr(actual, "default_factory", None) is getattr(expected, "default_factory", None), path
        for mine, theirs in zip(actual, expected, strict=True):
            _compare(actual[mine], expected[theirs], f"{path}[{theirs!r}]", tensors)
    elif isinstance(expected, list | tuple):
        assert isinstance(actual, list | tuple)
        assert len(actual) == len(expected), f"{path}: lengths differ"
        for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            _compare(mine, theirs, f"{path}[{index}]", tensors)
    else:
        assert _exact(actual) == _exact(expected), f"{path}: {actual!r} is not {expected!r}"


def _compare_tensors(actual: torch.Tensor, expected: torch.Tensor, path: str) -> None:
    assert actual.dtype == expected.dtype, f"{path}: {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{path}: {actual.shape} is not {expected.shape}"
    assert actual.stride() == expected.stride(), f"{path}: stride {actual.stride()} is not {expected.stride()}"
    assert _bits(actual).equal(_bits(expected)), f"{path}: bits differ"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype.itemsize in _WORDS:  # some dtypes support views but no copies
        tensor = tensor.view(_WORDS[tensor.dtype.itemsize])
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _exact(value: object) -> object:
    """Return a value that is equal only for indistinguishable values."""
    if isinstance(value, float):
        return ("float", struct.pack(">d", value))
    if isinstance(value, complex):
        return ("complex", struct.pack(">dd", value.real, value.imag))
    if isinstance(value, tuple):
        return tuple(_exact(part) for part in value)
    return (type(value).__name__, value)
