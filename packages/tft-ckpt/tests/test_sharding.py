"""Parts of sharded tensors travel, and become DTensors again on a mesh of the same form; what can't be is refused.

One process plays one rank of several here: torch's fake process groups let collectives do nothing, and none is needed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from tft_ckpt import (
    ConfigError,
    HTTPTransport,
    Limits,
    LocalShard,
    Placement,
    Sharding,
    StateCorruptError,
    StateKey,
    StateUnsupportedError,
)
from tft_ckpt.state.buffers import Buffer
from tft_ckpt.state.manifest import HEADER_BYTES, MAGIC, VERSION, checksum, decode
from tft_ckpt.state.snapshot import Snapshot
from tft_ckpt.testing import assert_same_state

KEY = StateKey(quorum_id=1, nonce=2, step=3, lineage=4)
LIMITS = Limits()

quick = settings(derandomize=True, database=None, deadline=None, max_examples=100)


def snapshot_of(state: object) -> Snapshot:
    snapshot = Snapshot.take(state, key=KEY, chunk_bytes=4096, limits=LIMITS, allocate=Buffer)
    while not snapshot.checksum_next_chunk():
        pass
    return snapshot


def encoded(state: object) -> bytes:
    manifest = snapshot_of(state).manifest_bytes
    assert manifest is not None
    return manifest


def transferred(state: object) -> Any:
    """The state as a receiver builds it, from the manifest's bytes and the run's alone."""
    snapshot = snapshot_of(state)
    assert snapshot.manifest_bytes is not None
    layout = decode(snapshot.manifest_bytes, limits=LIMITS).layout
    received = Buffer(layout.data_bytes)
    received.view[: layout.data_bytes] = snapshot.data
    return layout.build(received.view)


def sealed(body: bytes) -> bytes:
    """A manifest whose every checksum is right: what a hostile source would send."""
    summed = struct.pack("<IQ", VERSION, len(body))
    return struct.pack("<8sIQQ", MAGIC, VERSION, len(body), checksum(summed + body)) + body


def try_to_use(body: bytes) -> None:
    """Decode, and build what is accepted: either works, or is refused by name."""
    try:
        layout = decode(sealed(body), limits=Limits(data_bytes=1 << 16)).layout
    except (StateCorruptError, StateUnsupportedError):
        return
    layout.build(Buffer(layout.data_bytes).view)


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Be one of several ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def over_http(state: object) -> Any:
    """The state as another process gets it."""
    limit = timedelta(seconds=20)
    sender = HTTPTransport[Any](limit, num_chunks=0, advertise_addr="localhost")
    receiver = HTTPTransport[Any](limit, num_chunks=0, advertise_addr="localhost")
    try:
        sender.send_checkpoint([1], KEY.step, state, limit, key=KEY)
        return receiver.recv_checkpoint(0, sender.metadata(), KEY.step, limit, key=KEY)
    finally:
        sender.shutdown()
        receiver.shutdown()


def dtensors_again(value: Any, like: Any) -> Any:
    """Each LocalShard as a DTensor on the mesh of its counterpart."""
    if isinstance(value, LocalShard):
        return value.to_dtensor(like.device_mesh)
    return {key: dtensors_again(item, like[key]) for key, item in value.items()} if isinstance(value, dict) else value


def assert_comes_back(state: dict[str, Any], got: Any) -> None:
    """What was received is what was sent, and DTensors of it are what was sent to torch too."""
    assert_same_state(got, state)
    again = dtensors_again(got, state)
    assert_same_state(again, state)
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            assert isinstance(again[name], DTensor)
            assert again[name]._spec == tensor._spec
            assert again[name].device_mesh == tensor.device_mesh


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_every_kind_of_dtensor_travels_over_http(rank: int) -> None:
    with rank_of(rank, 4):
        flat = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard"))
        unnamed = init_device_mesh("cpu", (4,))
        torch.manual_seed(rank)
        plain = torch.randn(3)
        state = {
            "even": distribute_tensor(torch.randn(8, 3), flat, [Shard(0)]),
            "uneven": distribute_tensor(torch.randn(9, 3), flat, [Shard(0)]),
            "empty here": distribute_tensor(torch.randn(2, 3), flat, [Shard(0)]),
            "empty everywhere": distribute_tensor(torch.randn(0, 3), flat, [Shard(0)]),
            "columns": distribute_tensor(torch.randn(3, 8), flat, [Shard(-1)]),
            "no dimension": distribute_tensor(torch.tensor(3.5), flat, [Replicate()]),
            "bf16": distribute_tensor(torch.randn(8, 2).bfloat16(), flat, [Shard(0)]),
            "whole numbers": distribute_tensor(torch.arange(8), flat, [Shard(0)]),
            "replicated": distribute_tensor(torch.randn(3, 3), square, [Replicate(), Replicate()]),
            "both": distribute_tensor(torch.randn(4, 4), square, [Shard(1), Shard(0)]),
            "twice": distribute_tensor(torch.randn(8, 4), square, [Shard(0), Shard(0)]),
            "no names": distribute_tensor(torch.randn(8), unnamed, [Shard(0)]),
            "of a mesh of one": distribute_tensor(torch.randn(8), square["dp"], [Replicate()]),
            "transposed": distribute_tensor(torch.randn(3, 8), flat, [Shard(1)]).t(),
            "parameter": nn.Parameter(distribute_tensor(torch.randn(8), flat, [Shard(0)])),
            "plain": plain,
            "the same": plain,
        }
        assert state["empty here"].to_local().numel() == (0 if rank > 1 else 3)
        got = over_http(state)
        assert not got["parameter"].local.requires_grad
        assert_comes_back(state, got)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("sizes", [(8, 8), (6, 10)], ids=["even", "uneven"])
def test_fsdp2_with_tensor_parallelism_and_its_optimizer_travel(rank: int, sizes: tuple[int, int]) -> None:
    with rank_of(rank, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        model = nn.Sequential(nn.Linear(8, sizes[0]), nn.ReLU(), nn.Linear(sizes[0], sizes[1]))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        state = dict(model.state_dict())
        kinds = {type(placement).__name__ for tensor in state.values() for placement in tensor.placements}
        assert "_StridedShard" in kinds, "FSDP2 marks what tensor parallelism has cut before"
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for number, moments in optimizer.state_dict()["state"].items():
            state |= {f"{name} of {number}": value for name, value in moments.items()}
        assert_comes_back(state, transferred(state))


def test_a_process_outside_of_the_mesh_has_nothing() -> None:
    with rank_of(2, 4):
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("shard",), _init_backend=False)
        tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], shape=torch.Size([4]), stride=(1,))
        got = transferred({"t": tensor})["t"]
        assert got.sharding.coordinate is None
        assert got.local.numel() == 0


def test_the_part_is_copied_once_and_no_more_of_it_than_there_is() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        tensor = distribute_tensor(torch.zeros(1 << 12), mesh, [Shard(0)])
        part = LocalShard.of(tensor)
        assert part.local.data_ptr() == tensor.to_local().data_ptr()
        manifest = decode(encoded({"t": tensor}), limits=LIMITS)
        assert manifest.layout.data_bytes == 4 << 11


def test_a_sum_that_was_not_reduced_is_refused_with_its_path() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        with pytest.raises(StateUnsupportedError, match="reduce it first") as caught:
            encoded({"grads": [tensor]})
        assert caught.value.path == "state['grads'][0]"


def test_a_mesh_of_another_form_is_refused() -> None:
    with rank_of(1, 4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        part = LocalShard.of(distribute_tensor(torch.ones(8), mesh, [Shard(0)]))
        for other in (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard")),
            init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)),
            DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("shard",)),
        ):
            with pytest.raises(ConfigError, match="this mesh has the form"):
                part.to_dtensor(other)


# ---- without any process group ----


GOOD: dict[str, Any] = {
    "shape": (4, 6),
    "stride": (6, 1),
    "placements": (Placement(), Placement(0), Placement(1, 2)),
    "mesh_shape": (1, 2, 2),
    "mesh_dim_names": ("dp", "shard", "tp"),
    "coordinate": (0, 1, 1),
}

BAD: dict[str, dict[str, Any]] = {
    "a placement too few": {"placements": (Placement(),)},
    "placements in a list": {"placements": [Placement()] * 3},
    "no placement": {"placements": (Placement(), Placement(), 0)},
    "a dimension that is not there": {"placements": (Placement(), Placement(), Placement(2))},
    "a dimension from behind": {"placements": (Placement(), Placement(), Placement(-1))},
    "a dimension that is a truth value": {"placements": (Placement(), Placement(), Placement(True))},
    "a dimension that is text": {"placements": (Placement(), Placement(), Placement("0"))},  # type: ignore[arg-type]
    "a split of what is not cut": {"placements": (Placement(), Placement(), Placement(None, 2))},
    "a split into none": {"placements": (Placement(), Placement(), Placement(0, 0))},
    "a huge split": {"placements": (Placement(), Placement(), Placement(0, 2**60))},
    "a size below zero": {"shape": (4, -6)},
    "a huge size": {"shape": (4, 2**50)},
    "too many elements": {"shape": (2**40, 2**40)},
    "too many dimensions": {"shape": (1,) * 65, "stride": (1,) * 65},
    "a stride too few": {"stride": (6,)},
    "a stride below zero": {"stride": (6, -1)},
    "a mesh of nobody": {"mesh_shape": (1, 0, 2)},
    "a huge mesh": {"mesh_shape": (2**30, 2**30, 2)},
    "a mesh of too many dimensions": {"mesh_shape": (1,) * 17, "placements": (Placement(),) * 17},
    "a mesh of fractions": {"mesh_shape": (1, 2.0, 2)},
    "a name too few": {"mesh_dim_names": ("dp",)},
    "a name that is a number": {"mesh_dim_names": ("dp", 1, "tp")},
    "a long name": {"mesh_dim_names": ("dp", "x" * 1000, "tp")},
    "a place outside": {"coordinate": (0, 2, 1)},
    "a place below zero": {"coordinate": (0, -1, 1)},
    "a place of too few numbers": {"coordinate": (0, 1)},
}


def node_of(fields: dict[str, Any], tensor: Any) -> list[Any]:
    """What a source that checks nothing would write."""

    def plain(value: Any) -> Any:
        if isinstance(value, Placement):
            return value.dim if value.split_factor is None else [value.dim, value.split_factor]
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value

    names = ("shape", "stride", "placements", "mesh_shape", "mesh_dim_names", "coordinate")
    return ["shard", *(plain(fields[name]) for name in names), tensor]


def tensor_node(*shape: int) -> list[Any]:
    return ["tensor", "float32", list(shape), None, 0, 0]


def with_node(node: Any) -> bytes:
    body = json.loads(encoded({"t": torch.ones(2, 3)})[HEADER_BYTES:])
    return sealed(json.dumps({**body, "state": node}).encode("ascii"))


PART = tensor_node(2, 3)


@pytest.mark.parametrize("kind", BAD)
def test_a_sharding_that_cannot_be_is_refused_on_both_sides(kind: str) -> None:
    with pytest.raises(ConfigError):
        Sharding(**{**GOOD, **BAD[kind]})
    assert decode(with_node(node_of(GOOD, PART)), limits=LIMITS)
    if kind != "placements in a list":
        with pytest.raises(StateCorruptError) as caught:
            decode(with_node(node_of({**GOOD, **BAD[kind]}, PART)), limits=LIMITS)
        assert len(str(caught.value)) < 1000


BAD_NODES = {
    "no parts": ["shard"],
    "a part too many": [*node_of(GOOD, PART), 1],
    "no tensor": node_of(GOOD, 1),
    "a list for a tensor": node_of(GOOD, ["list"]),
    "a shard for a tensor": node_of(GOOD, node_of(GOOD, PART)),
    "an empty list for a tensor": node_of(GOOD, []),
    "text for placements": node_of({**GOOD, "placements": "abc"}, PART),
    "a placement of three": node_of({**GOOD, "placements": (None, 0, [0, 1, 2])}, PART),
    "an empty placement of two": node_of({**GOOD, "placements": (None, 0, [None, None, None])}, PART),
    "placements without end": node_of({**GOOD, "placements": [0] * 100_000}, PART),
    "an object for a shape": node_of({**GOOD, "shape": {}}, PART),
    "a number for names": node_of({**GOOD, "mesh_dim_names": 3}, PART),
    "a part larger than the whole": node_of(GOOD, tensor_node(5, 1)),
    "a part of another number of dimensions": node_of(GOOD, tensor_node(2)),
    "a part cut where nothing is": node_of({**GOOD, "placements": (None, 0, 0)}, tensor_node(2, 2)),
    "a part of who is outside": node_of({**GOOD, "coordinate": None}, PART),
}


@pytest.mark.parametrize("kind", BAD_NODES)
def test_a_hostile_shard_is_refused(kind: str) -> None:
    with pytest.raises(StateCorruptError) as caught:
        decode(with_node(BAD_NODES[kind]), limits=LIMITS)
    assert len(str(caught.value)) < 1000


@st.composite
def shards(draw: st.DrawFn) -> LocalShard:
    """A part of any tensor on any small mesh."""
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    one_dimension = st.integers(0, max(len(shape) - 1, 0))
    placement = st.one_of(
        st.just(Placement()),
        *([one_dimension.map(Placement), st.builds(Placement, one_dimension, st.integers(1, 4))] if shape else []),
    )
    placements = tuple(draw(placement) for _ in mesh_shape)
    cut = {placement.dim for placement in placements}
    local = torch.randn([draw(st.integers(0, size)) if dim in cut else size for dim, size in enumerate(shape)])
    return LocalShard(
        local,
        Sharding(
            shape=shape,
            stride=tuple(draw(st.integers(0, 9)) for _ in shape),
            placements=placements,
            mesh_shape=mesh_shape,
            mesh_dim_names=draw(st.none() | st.just(tuple("abc"[: len(mesh_shape)]))),
            coordinate=tuple(draw(st.integers(0, size - 1)) for size in mesh_shape),
        ),
    )


@quick
@given(st.dictionaries(st.text(max_size=3), shards(), max_size=3))
def test_any_shard_comes_back(state: dict[str, LocalShard]) -> None:
    assert_same_state(transferred(state), state)


SHARD_BODY = encoded({"t": LocalShard(torch.ones(2, 3), Sharding(**GOOD))})[HEADER_BYTES:]
SHARD_STARTS_AT = SHARD_BODY.index(b'["shard"')


@quick
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 255)), min_size=1, max_size=3))
def test_bytes_of_a_shard_changed_under_a_right_checksum_do_no_harm(changes: list[tuple[int, int]]) -> None:
    body = bytearray(SHARD_BODY)
    for at, value in changes:
        body[min(SHARD_STARTS_AT + at, len(body) - 1)] = value
    try_to_use(bytes(body))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**65) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)


@quick
@given(st.integers(1, 7), json_values)
def test_any_JSON_in_place_of_a_field_of_a_shard_does_no_harm(field: int, value: Any) -> None:
    body = json.loads(SHARD_BODY)
    assert body["state"][2][0] == "shard"
    body["state"][2][field] = value
    try_to_use(json.dumps(body).encode("ascii"))
