"""A run is received in place: into the tensors that are there, whatever they look like, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tft_ckpt import Limits, LocalShard, Placement, Sharding, StateKey, StateLayoutError
from tft_ckpt.state.buffers import Buffer
from tft_ckpt.state.manifest import checksum
from tft_ckpt.state.snapshot import Snapshot
from tft_ckpt.state.target import IN_PLACE_BYTES_MIN, Target
from tft_ckpt.state.tree import DTYPES
from tft_ckpt.testing import assert_same_state, sample_state

KEY = StateKey(quorum_id=1, nonce=2, step=3, lineage=4)
BIG = IN_PLACE_BYTES_MIN // 4
"""Elements of a float32 tensor that is received in place."""


def snapshot_of(state: object, chunk_bytes: int = 4096) -> Snapshot:
    return Snapshot.take(state, key=KEY, chunk_bytes=chunk_bytes, limits=Limits(), allocate=Buffer)


class Memory:
    """Allocates, and counts."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def __call__(self, num_bytes: int) -> Buffer:
        self.taken.append(num_bytes)
        buffer = Buffer(num_bytes)
        buffer.tensor.fill_(0xA5)
        return buffer


def receive(target: Target, snapshot: Snapshot) -> Any:
    """Chunk by chunk, last first, checked as a transport checks it."""
    for chunk in reversed(range(target.layout.num_chunks)):
        start, end = target.layout.chunk_span(chunk)
        at = start
        for piece in target.views(start, end):
            assert not piece.readonly
            piece[:] = snapshot.data[at : at + len(piece)]
            at += len(piece)
        assert at == end
        assert target.checksum(start, end) == checksum(snapshot.data[start:end])
    return target.finish()


def received(state: object, into: object, memory: Memory | None = None) -> Any:
    snapshot = snapshot_of(state)
    return receive(Target.into(snapshot.layout, into, memory or Memory()), snapshot)


def big(value: float, *shape: int) -> torch.Tensor:
    return torch.arange(BIG * 2, dtype=torch.float32).add_(value).view(shape or (-1,))


# ---- fresh ----


@pytest.mark.parametrize("num_bytes", [64, 1 << 17])
def test_a_fresh_target_is_one_piece(num_bytes: int) -> None:
    state = sample_state(num_bytes=num_bytes)
    snapshot = snapshot_of(state)
    target = Target.fresh(snapshot.layout, Buffer(snapshot.layout.data_bytes))
    assert len(target.views(0, snapshot.layout.data_bytes)) == 1
    assert_same_state(receive(target, snapshot), state)


def test_a_state_without_tensors_has_no_pieces() -> None:
    snapshot = snapshot_of({"a": 1})
    for target in (Target.fresh(snapshot.layout, Buffer(0)), Target.into(snapshot.layout, {}, Memory())):
        assert target.views(0, 0) == []
        assert target.checksum(0, 0) == checksum(b"")
        assert target.finish() == {"a": 1}


# ---- in place ----


@pytest.mark.parametrize("num_bytes", [64, 1 << 17])
def test_a_state_with_every_kind_of_leaf_is_received_in_place(num_bytes: int) -> None:
    state, into = sample_state(seed=1, num_bytes=num_bytes), sample_state(seed=2, num_bytes=num_bytes)
    got = received(state, into)
    assert_same_state(got, state)
    assert got["bulk"] is into["bulk"]
    assert got["tied"]["rows"] is into["tied"]["rows"]
    assert got["sharded"] is into["sharded"]
    assert_same_state(into["tied"], state["tied"])


def test_large_tensors_are_written_to_directly_and_take_no_memory() -> None:
    state = {"a": big(1.0), "b": big(2.0).bfloat16(), "step": 7, "lr": 0.5}
    into: dict[str, Any] = {"a": big(3.0), "b": big(4.0).bfloat16(), "step": 1, "lr": 0.1}
    where = [into["a"].data_ptr(), into["b"].data_ptr()]
    memory = Memory()
    got = received(state, into, memory)
    assert_same_state(got, state)
    assert [got["a"].data_ptr(), got["b"].data_ptr()] == where
    assert memory.taken == [], "the tensors are multiples of 64 bytes long, and leave no padding"


def test_only_padding_takes_memory() -> None:
    memory = Memory()
    received([torch.ones(BIG + 1), torch.ones(BIG)], [torch.zeros(BIG + 1), torch.zeros(BIG)], memory)
    assert len(memory.taken) == 1
    assert memory.taken[0] <= 128


def test_parameters_stay_parameters_and_autograd_is_told() -> None:
    layer = torch.nn.Linear(BIG, 2)
    seen = layer.weight._version
    got = received({"w": torch.ones(2, BIG), "b": torch.ones(2)}, {"w": layer.weight, "b": layer.bias})
    assert got["w"] is layer.weight
    assert got["b"] is layer.bias
    assert layer.weight.requires_grad
    assert layer.weight._version > seen
    assert layer.bias.detach().equal(torch.ones(2))


def test_an_inference_tensor_is_received_into() -> None:
    with torch.inference_mode():
        into = {"large": torch.zeros(BIG), "small": torch.zeros(2)}
    assert_same_state(received({"large": torch.ones(BIG), "small": torch.ones(2)}, into), into)
    assert into["small"].tolist() == [1.0, 1.0]


def strided(value: float) -> dict[str, torch.Tensor]:
    square = big(value, 2, BIG).clone()
    return {
        "transposed": square.t(),
        "columns": big(value, 2, BIG)[:, ::2],
        "row of more": big(value, 2, BIG)[1],
        "expanded": torch.tensor([value]).expand(3),
        "large expanded": torch.full((BIG,), value).expand(2, BIG),
        "windows": torch.arange(BIG + 3.0).add_(value).as_strided((BIG, 4), (1, 1)),
    }


@pytest.mark.parametrize("kind", strided(0.0))
def test_strided_tensors_are_received_in_place_and_nothing_beside_them_changes(kind: str) -> None:
    state, into = strided(1.0)[kind], strided(2.0)[kind]
    beside = into.untyped_storage().tolist()
    got = received([state], [into])[0]
    assert got is into
    assert_same_state(got, state)
    mine = torch.zeros(len(beside), dtype=torch.uint8)
    if "expanded" in kind or kind == "windows":
        mine.fill_(255)
    else:
        bits = torch.empty(0, dtype=torch.int32)
        bits.set_(mine.untyped_storage(), into.storage_offset(), into.shape, into.stride()).fill_(-1)
    now = torch.tensor(into.untyped_storage().tolist(), dtype=torch.uint8)
    untouched = mine == 0
    assert now[untouched].equal(torch.tensor(beside, dtype=torch.uint8)[untouched])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("size", [8, IN_PLACE_BYTES_MIN])
def test_every_dtype_and_other_strides(name: str, size: int) -> None:
    dtype = DTYPES[name]
    raw = torch.arange(2 * size, dtype=torch.int64).mul_(0x9E3779B1).to(torch.uint8)
    if dtype is torch.bool:
        raw = raw & 1
    raw = raw.repeat(dtype.itemsize)
    there = torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (size, 2), (2, 1))
    zeros = torch.zeros_like(raw)
    here = torch.empty(0, dtype=dtype).set_(zeros.untyped_storage(), 0, (size, 2), (1, size))
    got = received([there], [here])[0]
    assert got is here
    assert got.stride() == (1, size)
    # Element (i, j) lies in element 2 i + j there, and i + size j here.
    expected = raw.view(size, 2, dtype.itemsize).transpose(0, 1).reshape(-1)
    assert zeros.equal(expected)


def test_a_view_that_negates_is_received_into() -> None:
    for lazily in (torch.zeros(BIG, dtype=torch.complex64).conj(), torch.zeros(BIG, dtype=torch.complex64).conj().imag):
        came = torch.full((BIG,), 1 + 2j) if lazily.is_complex() else torch.full((BIG,), 3.0)
        assert received([came], [lazily])[0] is lazily
        assert lazily.resolve_conj().resolve_neg().equal(came)


def test_what_is_not_there_yet_comes_in_memory_of_its_own() -> None:
    """An optimizer has no state before its first step."""
    model = torch.nn.Linear(BIG, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, BIG)).sum().backward()
    optimizer.step()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "step": 1}
    fresh = torch.nn.Linear(BIG, 2)
    empty = torch.optim.AdamW(fresh.parameters())
    got = received(state, {"model": dict(fresh.state_dict()), "optimizer": empty.state_dict(), "step": None})
    assert_same_state(got, state)
    assert fresh.weight.equal(model.weight)
    empty.load_state_dict(got["optimizer"])
    assert_same_state(empty.state_dict(), optimizer.state_dict())


def test_tied_there_and_apart_here_gets_a_copy_each() -> None:
    tied = big(1.0)
    into = {"a": big(2.0), "b": big(3.0)}
    received({"a": tied, "b": tied}, into)
    assert into["a"].equal(tied)
    assert into["b"].equal(tied)
    assert into["a"].data_ptr() != into["b"].data_ptr()


def test_a_piece_outlives_its_target_and_its_tensor() -> None:
    """A piece keeps the memory that it looks into, whatever becomes of the tensors."""
    snapshot = snapshot_of([big(1.0)])
    target = Target.into(snapshot.layout, [big(2.0)], Memory())
    (piece,) = target.views(0, 64)
    del target
    piece[:] = bytes(64)
    assert piece.tolist() == [0] * 64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_gpu_tensors_on_a_device_are_received_into() -> None:
    state = strided(1.0) | {"plain": big(1.0)}
    into = {name: tensor.cuda() for name, tensor in strided(2.0).items()} | {"plain": big(2.0).cuda()}
    into["large expanded"] = torch.full((BIG,), 2.0, device="cuda").expand(2, BIG)
    into["expanded"] = torch.full((1,), 2.0, device="cuda").expand(3)
    del state["windows"], into["windows"]
    got = received(state, into)
    for name, tensor in state.items():
        assert got[name] is into[name]
        assert into[name].cpu().equal(tensor)


# ---- sharded ----


def shard(local: torch.Tensor, rank: int = 0) -> LocalShard:
    return LocalShard(
        local,
        Sharding(
            shape=(2 * local.shape[0], *local.shape[1:]),
            stride=tuple(local.stride()),
            placements=(Placement(0),),
            mesh_shape=(2,),
            mesh_dim_names=None,
            coordinate=(rank,),
        ),
    )


@contextmanager
def group_of_two() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        torch.distributed.destroy_process_group()


def test_a_dtensor_is_received_into_and_stays_one() -> None:
    with group_of_two() as mesh:
        into = shard(big(2.0, 2, BIG)).to_dtensor(mesh)
        state = shard(big(1.0, 2, BIG)).to_dtensor(mesh)
        got = received({"w": state}, {"w": into})
        assert got["w"] is into
        assert_same_state(into, state)
        with pytest.raises(StateLayoutError, match="is a whole tensor at the source") as caught:
            received({"w": big(1.0, 2, BIG)}, {"w": into})
        assert caught.value.path == "state['w']"


# ---- what does not fit ----

TIED = big(0.0)
ITSELF: list[object] = []
ITSELF.append(ITSELF)

DIFFERENT: dict[str, tuple[object, object]] = {
    "shape": (torch.ones(3), torch.ones(4)),
    "dtype": (torch.ones(3), torch.ones(3).double()),
    "more here": (None, torch.ones(3)),
    "more in a container here": (3, [{"x": torch.ones(3)}]),
    "a shard here": (None, shard(torch.ones(2))),
    "whole there": (torch.ones(2, 3), shard(torch.ones(2, 3))),
    "part there": (shard(torch.ones(2, 3)), torch.ones(2, 3)),
    "another part": (shard(torch.ones(2, 3), 0), shard(torch.ones(2, 3), 1)),
    "expanded here only": (torch.ones(3), torch.ones(1).expand(3)),
    "overlapping here only": (torch.ones(3, 4), torch.ones(9).as_strided((3, 4), (2, 1))),
    "sparse here": (torch.eye(2), torch.eye(2).to_sparse()),
    "meta here": (torch.ones(2), torch.ones(2, device="meta")),
    "tied here only": ([big(1.0), big(2.0)], [TIED, TIED]),
    "a module here": ({"weight": torch.ones(2)}, torch.nn.Linear(2, 1)),
    "its own member here": (None, ITSELF),
    "shorter list there": ([torch.ones(1)], [torch.ones(1), torch.ones(1)]),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_what_does_not_fit_is_refused_with_its_path_before_anything_happens(kind: str) -> None:
    state, into = DIFFERENT[kind]
    memory = Memory()
    first = big(5.0)
    with pytest.raises(StateLayoutError) as caught:
        Target.into(snapshot_of({"a": big(4.0), "b": state}).layout, {"a": first, "b": into}, memory)
    assert caught.value.path.startswith("state['b']")
    assert caught.value.path[:200] in str(caught.value)
    assert memory.taken == []
    assert first.equal(big(5.0))


def test_freed_memory_is_refused() -> None:
    into = torch.ones(BIG)
    into.untyped_storage().resize_(0)
    with pytest.raises(StateLayoutError, match="freed"):
        received([torch.ones(BIG)], [into])


def test_different_tensors_that_overlap_here_are_refused() -> None:
    base = torch.zeros(BIG + 64)
    with pytest.raises(StateLayoutError, match="share memory in `into`"):
        received([torch.ones(BIG), torch.ones(BIG)], [base[:BIG], base[64:]])
    # The same tensor twice is one tensor, there and here, whatever its strides.
    there, here = torch.ones(BIG, 2), torch.zeros(2, BIG).t()
    assert received([there, there], [here, here])[1].equal(there)


# ---- any state, into any other one of the same form ----


@st.composite
def alike(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Views of a few storages, and tensors of the same shapes that lie as those do, or otherwise."""
    there: dict[str, torch.Tensor] = {}
    here: dict[str, torch.Tensor] = {}
    tables = [torch.arange(6000, dtype=torch.int32).mul_(7 + n) for n in range(2)]
    copies = [torch.zeros_like(table) for table in tables]
    for index in range(draw(st.integers(1, 4))):
        which = draw(st.integers(0, 1))
        rows, columns = draw(st.sampled_from([(1, 5), (60, 80), (2, 2500), (70, 70)]))
        offset = draw(st.integers(0, 6000 - rows * columns))
        step = draw(st.sampled_from([1, 2]))
        shape = (rows, columns // step)
        stride = (columns, step)
        name = f"t{index}"
        there[name] = tables[which].as_strided(shape, stride, offset)
        here[name] = (
            copies[which].as_strided(shape, stride, offset)
            if draw(st.booleans())
            else torch.zeros(shape[::-1], dtype=torch.int32).t()
        )
    return there, here


@settings(derandomize=True, database=None, deadline=None, max_examples=100)
@given(alike())
def test_any_state_is_received_into_another_of_its_form(
    pair: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
) -> None:
    state, into = pair
    got = received(state, into)
    for name, tensor in state.items():
        assert got[name] is into[name]
        assert into[name].equal(tensor), name
