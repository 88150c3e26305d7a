"""LocalSGD: replicas train on their own for some steps, then all take the mean of their parameters.

Law of this file: what LocalSGD sends and takes; the rest is `outer_loop`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, final

import torch

from tft_algos.errors import SettingError
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

    Entering it asks for a quorum, so that all begin with the same weights; a replica that comes later takes those of
    the last sync. A sync that fails leaves every replica with the weights of the last one that succeeded: the steps
    since then are discarded. What the optimizer keeps, its moments say, stays each replica's own.

    What counts is a step that the given optimizer makes: one that a GradScaler skips does not. The optimizer that
    trains has to be this object; another one in its place raises UsageError when a sync would have been due.

    Leaving the context, by an exception or Ctrl-C too, leaves the weights as this replica has trained them (where it
    broke off a sync, as the last one left them), and entering again goes on from there; `state_dict()` has the weights
    of the last sync meanwhile.

    The state that a newcomer fetches is registered at the Manager here. Do register more of it there if you want it
    healed, as buffers of the model, but with `compared=False` if replicas differ in it.

    Args:
        manager: whose steps the syncs are; `current_step()` counts those that were committed, and the opening.
        model: whose parameters are averaged, those that require a gradient.
        optimizer: that trains them; a torch optimizer, or a `tft_algos.Optimizer` on another Manager.
        sync_every: steps of the optimizer from one sync to the next.
    Raises: SettingError: one of these can't be.
    Source: arXiv 1805.09767.
    """

    def __init__(
        self, manager: Manager, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync_every: int
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise SettingError(f"model is a {type(model).__name__}; give a module")
        self._loop = OuterLoop(manager, [model], optimizer, ParameterMean(), sync_every, use_bucketization=False)

    def sync(self) -> None:
        """Synchronize now; the next time is `sync_every` steps from here. All replicas call it after the same step."""
        self._loop.sync()

    def state_dict(self) -> dict[str, Any]:
        """For a durable checkpoint: the weights of the last sync, by name, not copied."""
        return dict(self._loop.state_dict()[STATE_KEY])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from the weights of such a state. Every replica loads the same: what is loaded on one alone stays
        different there, until `check_state_every` tells.

        Raises: StateUnavailable: it is that of another model; nothing has changed then.
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
    """Takes the mean of the parameters."""

    @property
    def name(self) -> str:
        return "LocalSGD"

    def state_key(self, index: int) -> str:
        return STATE_KEY

    def capture(self, index: int, fragment: OuterFragment) -> None:
        fragment.capture_parameters()

    def apply(self, index: int, fragment: OuterFragment) -> None:
        fragment.adopt()
