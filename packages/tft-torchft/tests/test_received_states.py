"""Transports that a program calls itself: DTensors arrive as DTensors, and errors as urllib's, as in torchft."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tft_ckpt import LocalShard, Placement, Sharding
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing._dtensors import as_dtensors
from torchft.checkpointing._serialization import _streaming_load, _streaming_save

LIMIT = timedelta(seconds=30)


@pytest.fixture
def default_group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def rank_1_of_2() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def part(mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> LocalShard:
    sharding = Sharding(
        shape=(4,),
        stride=(1,),
        placements=(Placement(0),) * len(mesh_shape),
        mesh_shape=mesh_shape,
        mesh_dim_names=None,
        coordinate=coordinate,
    )
    return LocalShard(torch.ones(4), sharding)


def test_a_dtensor_arrives_as_a_dtensor_that_can_be_loaded(default_group: None) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    sent = {"weight": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]), "list": [1, torch.ones(2)]}
    source: HTTPTransport[Any] = HTTPTransport(LIMIT, 0)
    receiver: HTTPTransport[Any] = HTTPTransport(LIMIT, 0)
    try:
        source.send_checkpoint([1], 3, sent, LIMIT)
        got = receiver.recv_checkpoint(0, source.metadata(), 3, LIMIT)
    finally:
        source.shutdown()
        receiver.shutdown()
    weight = got["weight"]
    assert isinstance(weight, DTensor)
    assert weight._spec == sent["weight"]._spec  # type: ignore[attr-defined]
    own = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    own.copy_(weight)
    assert torch.equal(own.to_local(), torch.arange(4.0))
    assert got["list"][0] == 1


def test_a_part_of_another_mesh_stays_a_part(rank_1_of_2: None) -> None:
    own = as_dtensors([part((2,), (1,)), part((1, 2), (0, 1))])
    assert [type(each) for each in own] == [DTensor, DTensor]
    assert own[0].device_mesh == init_device_mesh("cpu", (2,))
    others = as_dtensors([part((2,), (0,)), part((4,), (1,)), part((2, 1), (0, 0))])
    assert [type(each) for each in others] == [LocalShard] * 3


def test_without_a_default_group_a_part_stays_a_part() -> None:
    assert isinstance(as_dtensors([part((1,), (0,))])[0], LocalShard)


def test_another_step_is_refused_with_both_numbers() -> None:
    transport: HTTPTransport[Any] = HTTPTransport(LIMIT, 0)
    try:
        for step in (1234, 2345):
            transport.send_checkpoint([], step, {"step": step}, LIMIT)
        with pytest.raises(urllib.error.HTTPError, match=r"Error 400.*serving 2345 but got step=1234"):
            transport.recv_checkpoint(0, transport.metadata(), 1234, LIMIT)
    finally:
        transport.shutdown()


def test_the_streams_are_torchs_own() -> None:
    from torch.distributed import _serialization

    assert _streaming_save is _serialization._streaming_save
    assert _streaming_load is _serialization._streaming_load
