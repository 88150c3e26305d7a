"""Data parallelism across replica groups, under torchft's names. Law of this file: names and forced arguments."""

from __future__ import annotations

from typing import Any

import torch

import tft_algos
from torchft._surface import for_strategies

__all__ = ["DistributedDataParallel", "PureDistributedDataParallel"]


class DistributedDataParallel(tft_algos.DistributedDataParallel):  # type: ignore[misc]  # final for all others
    """torch's DistributedDataParallel over the participants of a Manager. Parameters may be unused.

    Args:
        manager: averages over its participants. An object with torchft's methods of a Manager is enough.
        module: the module to train.
        kwargs: arguments of torch's class, except process_group and find_unused_parameters, which are set here.
    Raises: TypeError: one of these two was given. ValueError: an argument is wrong.
    """

    def __init__(self, manager: Any, module: torch.nn.Module, **kwargs: Any) -> None:
        for name in ("process_group", "find_unused_parameters"):
            if name in kwargs:
                raise TypeError(f"DistributedDataParallel sets {name} itself; leave it out")
        super().__init__(for_strategies(manager), module, find_unused_parameters=True, **kwargs)


class PureDistributedDataParallel(tft_algos.PureDistributedDataParallel):  # type: ignore[misc]  # as above
    """A module whose gradients are averages over the participants, one reduction for each parameter.

    Args:
        manager: averages over its participants. An object with torchft's methods of a Manager is enough.
        module: the module to train.
    Raises: ValueError: an argument is wrong.
    """

    def __init__(self, manager: Any, module: torch.nn.Module) -> None:
        super().__init__(for_strategies(manager), module)
