"""LocalSGD and DiLoCo, under torchft's names.

In tft, a strategy requests its first quorum when it is entered. Code for torchft may register state after that, so the
strategies here wait for the first inner step.

Law of this file: names, arguments and the time of the opening. The strategies are tft_algos's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

import tft_algos
from tft_algos import ConfigError, extract_local_tensor
from torchft._errors import asserted
from torchft._surface import for_strategies

__all__ = ["USE_BUCKETIZATION_ENV", "DiLoCo", "LocalSGD", "extract_local_tensor"]

_Self = TypeVar("_Self", bound="_OpensLate")

USE_BUCKETIZATION_ENV: Final = "TORCHFT_USE_BUCKETIZATION"


class _OpensLate:
    """A strategy that is entered at the first inner step.

    Args:
        strategy: of tft_algos.
        optimizer: whose steps are the inner steps.
    """

    def __init__(self, strategy: Any, optimizer: torch.optim.Optimizer) -> None:
        self._strategy = strategy
        self._optimizer = optimizer
        self._first: RemovableHandle | None = None  # None: the strategy is entered, or is not in use

    def __enter__(self: _Self) -> _Self:
        self._first = self._optimizer.register_step_pre_hook(lambda *_: self._open())
        return self

    def _open(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            first.remove()
            self._strategy.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        first, self._first = self._first, None
        if first is not None:
            first.remove()
        else:
            self._strategy.__exit__(kind, error, trace)

    def state_dict(self) -> dict[str, Any]:
        """Return the global weights, for a durable checkpoint. Nothing is copied."""
        state: dict[str, Any] = self._strategy.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the global weights of such a state."""
        self._strategy.load_state_dict(state_dict)


class LocalSGD(_OpensLate):
    """A context in which parameters are averaged every `sync_every` steps of an optimizer.

    Args:
        manager: its steps are the syncs. An object with torchft's methods of a Manager is enough.
        model: the model.
        optimizer: trains the model.
        sync_every: steps from one sync to the next.
    Raises: AssertionError, ValueError: an argument is wrong.
    """

    def __init__(self, manager: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync_every: int) -> None:
        with asserted(ConfigError):
            super().__init__(tft_algos.LocalSGD(for_strategies(manager), model, optimizer, sync_every), optimizer)

    def sync(self) -> None:
        """Synchronize now. All replicas call this after the same step."""
        self._open()
        self._strategy.sync()


class DiLoCo(_OpensLate):
    """A context in which a model is synchronized as in (Streaming) DiLoCo.

    Args:
        manager: its steps are the syncs. An object with torchft's methods of a Manager is enough.
        model_fragments: modules, in the order of their syncs.
        inner_optimizer: trains the modules.
        outer_optimizer: steps with the pseudogradients. One for all fragments, or one for each.
        sync_every: inner steps in which every fragment is synchronized once.
        backup_device, pin_memory: of the global weights.
        use_bucketization, bucket_cap_mb: reduce slices of that many MiB. Env TORCHFT_USE_BUCKETIZATION.
        should_quantize: send 8-bit codes.
        fragment_sync_delay: inner steps from the start of a sync to its end.
        fragment_update_alpha: the share of the live parameters that stays at the end of a sync.
    Raises: AssertionError, ValueError: an argument is wrong.
    """

    def __init__(
        self,
        manager: Any,
        model_fragments: list[torch.nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        sync_every: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        use_bucketization: bool = False,
        bucket_cap_mb: int | None = None,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        with asserted(ConfigError):
            strategy = tft_algos.DiLoCo(
                for_strategies(manager),
                model_fragments,
                inner_optimizer,
                outer_optimizer,
                sync_every,
                backup_device,
                pin_memory,
                use_bucketization or os.environ.get(USE_BUCKETIZATION_ENV) == "True",
                bucket_cap_mb,
                should_quantize,
                fragment_sync_delay,
                fragment_update_alpha,
            )
        super().__init__(strategy, inner_optimizer)
