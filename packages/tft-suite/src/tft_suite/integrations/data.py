"""An endless data set, for trainers that would count its epochs.

Law of this file: samples and their order. It imports torch and no trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, final

import torch
from torch.utils.data import IterableDataset, get_worker_info

from tft_algos import ConfigError


class MapDataset(Protocol):
    """A data set with a length."""

    def __getitem__(self, index: int, /) -> Any: ...

    def __len__(self) -> int: ...


@final
class _Endless(IterableDataset[Any]):
    def __init__(self, dataset: MapDataset, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            for index in torch.randperm(len(self._dataset), generator=generator)[first::workers].tolist():
                yield self._dataset[index]


def endless(dataset: MapDataset, *, seed: int | None = None) -> IterableDataset[Any]:
    """Repeat a data set for ever, in a new random order each time.

    The Trainer runs a fixed number of epochs over a data set with a length, so each discarded step would shorten the
    training. Without a length it trains until `max_steps`.

    Args:
        dataset: this replica's share of the data. Workers of a DataLoader divide it among themselves.
        seed: of the order. None: another order in each start of the process.
    Raises: ConfigError: the data set is empty.
    """
    if len(dataset) == 0:
        raise ConfigError("the data set is empty; give this replica at least one sample")
    return _Endless(dataset, torch.Generator().seed() if seed is None else seed)
