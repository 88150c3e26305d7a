"""DistributedSampler: every process has a share of its own, and torchft's users know the arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, Dataset

from tft_algos import ConfigError, DistributedSampler


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def group_of_two() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def shares(size: int, groups: int, ranks: int, **kwargs: Any) -> list[list[int]]:
    """The shares of all processes, by global rank."""
    found: dict[int, list[int]] = {}
    for replica in range(groups):
        for rank in range(ranks):
            sampler = DistributedSampler(Numbers(size), replica, groups, rank, ranks, **kwargs)
            assert sampler.global_world_size == groups * ranks
            found[sampler.global_rank] = list(sampler)
            assert len(found[sampler.global_rank]) == len(sampler)
    assert sorted(found) == list(range(groups * ranks))
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_shares_of_all_processes_are_the_dataset(shuffle: bool) -> None:
    found = shares(24, groups=3, ranks=2, shuffle=shuffle)
    assert sorted(index for share in found for index in share) == list(range(24))
    assert all(len(share) == 4 for share in found)


def test_the_global_rank_counts_the_processes_of_the_groups_before() -> None:
    sampler = DistributedSampler(Numbers(10), replica_rank=1, num_replica_groups=3, group_rank=1, num_replicas=4)
    assert (sampler.global_rank, sampler.global_world_size) == (5, 12)


def test_shares_are_of_one_length_by_padding_or_by_dropping() -> None:
    assert [len(share) for share in shares(10, groups=2, ranks=2)] == [3] * 4
    assert [len(share) for share in shares(10, groups=2, ranks=2, drop_last=True)] == [2] * 4


def test_the_epoch_and_the_seed_decide_the_order() -> None:
    sampler = DistributedSampler(Numbers(100), 0, 2)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second
    again = DistributedSampler(Numbers(100), 0, 2)
    again.set_epoch(1)
    assert list(again) == second, "a newcomer of this epoch has the same order"
    assert list(DistributedSampler(Numbers(100), 0, 2, seed=1)) != first


def test_without_a_default_group_this_process_is_the_replica_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    sampler = DistributedSampler(Numbers(10), 1, 2)
    assert (sampler.global_rank, sampler.global_world_size) == (1, 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 processes .* call init_group first, or pass group_rank"):
        DistributedSampler(Numbers(10), 1, 2)


@pytest.mark.usefixtures("group_of_two")
def test_the_place_in_the_replica_group_is_that_in_torchs_default_group() -> None:
    sampler = DistributedSampler(Numbers(10), 1, 2)
    assert (sampler.global_rank, sampler.global_world_size) == (3, 4)


@pytest.mark.parametrize(("replica", "rank"), [(2, 0), (-1, 0), (0, 2), (0, -1)])
def test_a_rank_that_cannot_be_is_named(replica: int, rank: int) -> None:
    with pytest.raises(ConfigError, match=r"(replica|group)_rank is -?\d; give a rank from 0 to 1"):
        DistributedSampler(Numbers(10), replica, 2, rank, 2)


def test_a_loader_takes_it() -> None:
    loader = DataLoader(Numbers(8), batch_size=2, sampler=DistributedSampler(Numbers(8), 1, 2, shuffle=False))
    assert [batch.tolist() for batch in loader] == [[1, 3], [5, 7]]
    assert isinstance(loader.sampler, torch.utils.data.DistributedSampler)
