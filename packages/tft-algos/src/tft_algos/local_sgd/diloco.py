"""DiLoCo and Streaming DiLoCo: replicas train on their own, and an outer optimizer learns from how far they got.

The difference between the global weights and a replica's own is a gradient of a kind, the pseudogradient. Its mean over
the replicas is what the outer optimizer steps with. Streaming means that a model is synchronized in fragments, one
after the other, and that training goes on while a fragment is on its way.

Law of this file: what DiLoCo sends and does with the mean; the rest is `outer_loop`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, final

import torch

from tft_algos.errors import StateUnavailable, Unsupported
from tft_algos.local_sgd.checks import check_inner_optimizer, check_manager, check_outer_optimizers, trained_by
from tft_algos.local_sgd.fragment import parameters_of
from tft_algos.local_sgd.outer_loop import OuterLoop, check_modules
from tft_algos.local_sgd.outer_update import OuterFragment, OuterUpdate
from tft_algos.manager import Manager

STATE_KEY = "StreamingDiLoCoFragment_{}"


@final
class DiLoCo:
    """A context manager in which a model is synchronized as in DiLoCo, in fragments if there are several.

        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with DiLoCo(manager, [model], inner, outer, sync_every=100):
            for batch in batches:
                inner.zero_grad()
                loss(model(batch)).backward()
                inner.step()

    Each fragment is synchronized once in `sync_every` steps of the inner optimizer, one in each period of
    `sync_every / fragments` steps. Entering asks for a quorum, so that all begin with the same weights; a replica that
    comes later begins with the global weights of the sync that runs then, and adopts its result with the others. A sync
    that fails leaves its fragment with its last global weights on every replica. What the inner optimizer keeps stays
    each replica's own.

    An inner step is a step that the given optimizer makes: one that a GradScaler skips is none, and the next one counts
    in its stead. The optimizer that trains has to be this object; another one in its place raises UsageError when a
    sync would have been due. A learning rate may be scheduled, gradients clipped, and the model compiled.

    Leaving the context, by an exception or Ctrl-C too, fails what is in flight: those fragments have their last global
    weights at once. All other weights stay as this replica has trained them, and whatever you do with them, entering
    again goes on from there; `state_dict()` has the global ones meanwhile.

    With `fragment_sync_delay` the reductions of a fragment have so many inner steps of time; at more than a period,
    several fragments are in flight. A change of the quorum, or one sync that fails, fails all
    that are in flight; a replica that leaves loses those that have not ended.

    `sync_every` and the delay may differ between replicas, as where one is half as fast, if each has as many syncs in
    flight; so may `fragment_update_alpha`.

    The state that a newcomer fetches, global weights and outer optimizers, is registered at the Manager here. What you
    register there yourself is healed too; say `compared=False` for what rightly differs, as the inner optimizer does.

    Args:
        manager: whose steps the syncs are; `current_step()` counts those that were committed, and the opening.
        model_fragments: modules, in the order in which they are synchronized, together everything that is trained. A
            parameter that is in several belongs to the first.
        inner_optimizer: that trains them; a torch optimizer, or a `tft_algos.Optimizer` on another Manager.
        outer_optimizer: that steps with the pseudogradients; one for all fragments, or one for each.
        sync_every: steps of the inner optimizer in which every fragment is synchronized once.
        backup_device: where the global weights are; None: where the parameters are.
        pin_memory: page-locked, if they are on the CPU and the parameters on an accelerator.
        use_bucketization: reduce slices of `bucket_cap_mb` in place of single tensors; None: as
            TFT_USE_BUCKETIZATION or TORCHFT_USE_BUCKETIZATION says, else not. All replicas alike, as the cap.
        bucket_cap_mb: MiB; None: 1024.
        should_quantize: refused; there is no quantized reduction here.
        fragment_sync_delay: inner steps from a sync's start to its end; tau in the paper.
        fragment_update_alpha: how much of the live parameters stays at a sync's end; 0: they become the global weights,
            1: they stay as they are.
        copy_pseudogradients_to_cpu: what is reduced lies on the CPU.
    Raises: SettingError: one of these can't be. Unsupported: should_quantize.
    Source: arXiv 2311.08105, arXiv 2501.18512.
    """

    def __init__(
        self,
        manager: Manager,
        model_fragments: Sequence[torch.nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        sync_every: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        use_bucketization: bool | None = None,
        bucket_cap_mb: float | None = None,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        *,
        copy_pseudogradients_to_cpu: bool = False,
    ) -> None:
        check_manager(manager)
        if should_quantize:
            raise Unsupported(
                "quantized reductions do not exist here, and nothing is sent unquantized in their place; leave "
                "should_quantize out"
            )
        modules = check_modules(model_fragments)
        parameters = parameters_of(modules)
        check_inner_optimizer(inner_optimizer, manager, parameters)
        outer = check_outer_optimizers(outer_optimizer, parameters, inner_optimizer)
        self._loop = OuterLoop(
            manager,
            modules,
            inner_optimizer,
            OuterOptimizerStep(outer),
            sync_every,
            fragment_sync_delay=fragment_sync_delay,
            fragment_update_alpha=fragment_update_alpha,
            backup_device=backup_device,
            pin_memory=pin_memory,
            use_bucketization=use_bucketization,
            bucket_cap_mb=bucket_cap_mb,
            copy_pseudogradients_to_cpu=copy_pseudogradients_to_cpu,
        )

    def state_dict(self) -> dict[str, Any]:
        """For a durable checkpoint: global weights and outer optimizers, by fragment, not copied."""
        return self._loop.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from the global weights of such a state.

        Every replica loads the same: what is loaded on one alone stays different there until `check_state_every` tells.
        Syncs in flight began from other weights: they fail.

        Raises: StateUnavailable: it is that of another model, or of other fragments of it; nothing has changed then.
        """
        self._loop.load_state_dict(state_dict)

    def __enter__(self) -> DiLoCo:
        self._loop.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.__exit__(kind, error, trace)


@final
class OuterOptimizerStep(OuterUpdate):
    """Sends the pseudogradient, and steps an outer optimizer with its mean.

    Args:
        optimizers: one for all fragments, or one for each.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    @property
    def name(self) -> str:
        return "DiLoCo"

    def fingerprint(self) -> Mapping[str, str]:
        return {"outer optimizers": ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)}

    def state_key(self, index: int) -> str:
        return STATE_KEY.format(index)

    def capture(self, index: int, fragment: OuterFragment) -> None:
        fragment.capture_difference()

    def apply(self, index: int, fragment: OuterFragment) -> None:
        """Step the outer optimizer from the global weights, with the mean as the gradient.

        The user's gradients are put aside meanwhile. This includes the gradients of other fragments, so the optimizer
        leaves those fragments alone.
        """
        optimizer = self._optimizers[index if len(self._optimizers) > 1 else 0]
        fragment.restore()
        owned = trained_by(optimizer)
        aside = [parameter.grad for parameter in owned]
        try:
            for parameter in owned:
                parameter.grad = None
            for parameter, gradient in zip(fragment.parameters, fragment.gradients(), strict=True):
                parameter.grad = gradient
            optimizer.step()
        finally:
            for parameter, own in zip(owned, aside, strict=True):
                parameter.grad = own

    # Where one optimizer is for all fragments, its state goes with the first one.

    def state_dict(self, index: int) -> dict[str, Any]:
        return {"outer_optimizer": self._optimizers[index].state_dict()} if index < len(self._optimizers) else {}

    def check_state(self, index: int, state: Mapping[str, Any]) -> None:
        if ("outer_optimizer" in state) != (index < len(self._optimizers)):
            raise StateUnavailable(
                "the state has an outer optimizer for each fragment where here is one for all, or the other way "
                "round; give as many on every replica"
            )
        if "outer_optimizer" in state:
            _check_outer_state(self._optimizers[index], state["outer_optimizer"])

    def load_state_dict(self, index: int, state: Mapping[str, Any]) -> None:
        if "outer_optimizer" in state:
            _load_exactly(self._optimizers[index], state["outer_optimizer"])


def _check_outer_state(optimizer: torch.optim.Optimizer, state: object) -> None:
    """Check that a state fits an outer optimizer.

    Raises: StateUnavailable: `state` is not an optimizer state, or belongs to other parameters.
    """
    state = state if isinstance(state, Mapping) else {}
    groups, kept = state.get("param_groups"), state.get("state")
    found = None
    if isinstance(groups, Sequence) and isinstance(kept, Mapping) and all(map(_is_mapping, (*groups, *kept.values()))):
        found = [len(group["params"]) if isinstance(group.get("params"), Sequence) else None for group in groups]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if found != here:
        raise StateUnavailable(
            f"the state of an outer optimizer is not that of a {type(optimizer).__name__} whose groups have {here} "
            "parameters; use the same outer optimizer on every replica"
        )


def _load_exactly(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer's state, with the dtypes that it has: torch casts moments to the dtype of their parameter."""
    optimizer.load_state_dict(dict(state))
    names = [name for group in state["param_groups"] for name in group["params"]]
    for name, parameter in zip(names, trained_by(optimizer), strict=True):
        here = optimizer.state.get(parameter, {})
        for key, value in state["state"].get(name, {}).items():
            if isinstance(value, torch.Tensor) and value.dtype != here[key].dtype:
                here[key] = value.detach().to(here[key].device, copy=True)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)
