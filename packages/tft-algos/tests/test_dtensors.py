"""Torch's DTensor is known where it is used, and costs nothing where it is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tft_algos import UnsupportedFeatureError
from tft_algos.dtensors import dtensor_of, is_dtensor, shard_like
from tft_algos.quantization.codecs import check_quantizable


def test_importing_the_package_imports_only_what_every_replica_needs() -> None:
    # A replica that starts again pays for each import; DTensor's takes longer than all of ours, and the servers' are
    # imported while the child process starts.
    program = (
        "import sys, torch.distributed, torch.nn.parallel\n"
        "before = set(sys.modules)\n"
        "import tft_algos\n"
        "print(*sorted({'torch.distributed.tensor', 'sympy', 'grpc', 'aiohttp'} & (set(sys.modules) - before)))\n"
        "print(tft_algos.manager.recovery.divergence.is_dtensor(torch.ones(1)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["", "False"]


@pytest.fixture
def group_of_two() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_two")
def test_a_tensor_is_cut_and_put_together_as_another() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(10.0).reshape(5, 2)
    for placement, part in ((Shard(0), whole[:3]), (Shard(1), whole[:, :1]), (Replicate(), whole)):
        like = distribute_tensor(torch.zeros(5, 2), mesh, [placement], src_data_rank=None)
        assert is_dtensor(like)
        assert not is_dtensor(like.to_local())
        cut = shard_like(whole, like)
        made = dtensor_of(part, like)
        for one in (cut, made):
            assert one.placements == like.placements
            assert one.shape == like.shape
            assert torch.equal(one.to_local(), part)
        assert made.to_local().data_ptr() == part.data_ptr()
        assert cut.to_local().untyped_storage().nbytes() == part.nbytes, "a part does not keep the whole in memory"


@pytest.mark.usefixtures("group_of_two")
def test_a_part_is_never_quantized_as_if_it_were_the_whole() -> None:
    like = distribute_tensor(torch.zeros(5, 2), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    with pytest.raises(UnsupportedFeatureError, match=r"give the part: tensor\.to_local\(\)"):
        check_quantizable(like)
    check_quantizable(like.to_local())
