"""The optimizer wrapper, under torchft's name. Law of this file: names. The wrapper is tft_algos's."""

from __future__ import annotations

from typing import Any

import torch

import tft_algos
from torchft._errors import asserted
from torchft._surface import ManagerView, for_strategies

__all__ = ["OptimizerWrapper"]


class OptimizerWrapper(tft_algos.Optimizer):  # type: ignore[misc]  # final for all others
    """An optimizer whose `zero_grad` begins a step of a Manager, and whose `step` ends it.

    Args:
        manager: decides whether a step counts. An object with torchft's methods of a Manager is enough.
        optim: performs the step.
    Raises: ValueError: an argument is wrong.
    """

    def __init__(self, manager: Any, optim: torch.optim.Optimizer) -> None:
        super().__init__(for_strategies(manager), optim)

    def step(self, closure: Any = None) -> bool:  # type: ignore[override]
        """End a step. The wrapped optimizer steps if the group commits. Returns: whether it did.

        Raises: AssertionError: a closure was given.
        """
        if closure is not None:
            with asserted(tft_algos.UsageError):
                return super().step(closure)
        manager: Any = self.manager
        if isinstance(manager, ManagerView):
            self._has_stepped = False  # such an object votes anew in each step
        return super().step()

    def __repr__(self) -> str:
        return f"OptimizerWrapper({self.optim!r})"
