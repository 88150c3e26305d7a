"""LocalSGD: replicas train on their own for some steps, then all take the mean of their parameters.

Law of this file: what LocalSGD sends and takes. The rest is in `outer_loop`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, final

import torch

from tft_algos.errors import ConfigError
from tft_algos.local_sgd.outer_loop import OuterLoop
from tft_algos.local_sgd.outer_update import OuterFragment, OuterUpdate
from tft_algos.manager import Manager

STATE_KEY = "LocalSGD"


@final
class LocalSGD:
    """A context manager in which a model's parameters are averaged every `sync_every` steps of its optimizer.

        with LocalSGD(manager, model, optimizer, sync_every=32):
            for batch in batches:
                optimizer.zero_grad()
                loss(model(batch)).backward()
                optimizer.step()

    On entry, a quorum is requested, so that all replicas begin with the same weights. A replica that joins later takes
    the weights of the last sync. A sync that fails resets every replica to the weights of the last successful sync, and
    discards the steps since then. The state of the optimizer (its moments, for example) stays each replica's own.

    A step of the given optimizer object counts. A step that a GradScaler skips does not count. If another optimizer
    trains the parameters instead, its step raises UsageError when a sync would have been due.

    Leaving the context, also by an exception or Ctrl-C, keeps the weights that this replica has trained. If it
    interrupts a sync, the weights are those of the last sync. Entering again continues from there. `state_dict()`
    returns the weights of the last sync meanwhile.

    This class registers the state that a newcomer fetches at the Manager. Register more state there if it should be
    healed, such as buffers of the model. Pass `compared=False` for state that differs between replicas.

    Args:
        manager: the syncs are its steps. `current_step()` counts the committed syncs and the opening.
        model: the model whose trainable parameters are averaged.
        optimizer: trains the model. A torch optimizer, or a `tft_algos.Optimizer` on another Manager.
        sync_every: steps of the optimizer from one sync to the next.
    Raises: ConfigError: an argument is invalid.
    Source: arXiv 1805.09767.
    """

    def __init__(
        self, manager: Manager, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync_every: int
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model is a {type(model).__name__}; give a module")
        self._loop = OuterLoop(manager, [model], optimizer, ParameterMean(), sync_every, use_bucketization=False)

    def sync(self) -> None:
        """Synchronize now. The next sync is `sync_every` steps later. All replicas call this after the same step."""
        self._loop.sync()

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the last sync by name, for a durable checkpoint. Nothing is copied."""
        return dict(self._loop.state_dict()[STATE_KEY])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the weights of such a state.

        Every replica loads the same state. A load on one replica only makes it differ until `check_state_every` finds
        that.

        Raises: UserStateError: the state belongs to another model. Nothing has changed then.
        """
        self._loop.load_state_dict({STATE_KEY: state_dict})

    def __enter__(self) -> LocalSGD:
        self._loop.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.__exit__(kind, error, trace)


@final
class ParameterMean(OuterUpdate):
    """The outer update of LocalSGD: it takes the mean of the parameters."""

    @property
    def name(self) -> str:
        return "LocalSGD"

    def state_key(self, index: int) -> str:
        return STATE_KEY

    def capture(self, index: int, fragment: OuterFragment) -> None:
        fragment.capture_parameters()

    def apply(self, index: int, fragment: OuterFragment) -> None:
        fragment.adopt()
