"""DiLoCo and Streaming DiLoCo: replicas train on their own, and an outer optimizer steps with their mean progress.

The difference between the global weights and a replica's own weights is used as a gradient, the pseudogradient. The
outer optimizer steps with its mean over the replicas. In Streaming DiLoCo, a model is synchronized in fragments, one
after the other, and training continues while a fragment is being reduced.

Law of this file: what DiLoCo sends and does with the mean. The rest is in `outer_loop`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, final

import torch

from tft_algos.errors import UserStateError
from tft_algos.local_sgd.checks import check_inner_optimizer, check_manager, check_outer_optimizers, trained_by
from tft_algos.local_sgd.fragment import parameters_of
from tft_algos.local_sgd.outer_loop import OuterLoop, check_modules
from tft_algos.local_sgd.outer_update import OuterFragment, OuterUpdate
from tft_algos.local_sgd.quantization import SyncCodec
from tft_algos.manager import Manager

STATE_KEY = "StreamingDiLoCoFragment_{}"


@final
class DiLoCo:
    """A context manager in which a model is synchronized as in DiLoCo, in one or several fragments.

        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with DiLoCo(manager, [model], inner, outer, sync_every=100):
            for batch in batches:
                inner.zero_grad()
                loss(model(batch)).backward()
                inner.step()

    Each fragment is synchronized once in `sync_every` steps of the inner optimizer. One fragment is synchronized in
    each period of `sync_every / fragments` steps. On entry, a quorum is requested, so that all replicas begin with the
    same weights. A replica that joins later begins with the global weights of the running sync, and adopts its result
    with the others. A sync that fails resets its fragment to the last global weights on every replica. The state of the
    inner optimizer stays each replica's own.

    An inner step is a step of the given optimizer object. A step that a GradScaler skips does not count, and the next
    one counts in its place. If another optimizer trains the parameters instead, its step raises UsageError when a sync
    would have been due. A learning rate may be scheduled, gradients clipped, and the model compiled.

    Leaving the context, also by an exception or Ctrl-C, fails the syncs in flight. Their fragments return to their last
    global weights at once. All other weights stay as this replica has trained them. You may change the weights then,
    and entering again continues from them. `state_dict()` returns the global weights meanwhile.

    With `fragment_sync_delay`, the reductions of a fragment have that many inner steps to complete. If the delay is
    longer than a period, several fragments are in flight. A change of the quorum, or one failed sync, fails all syncs
    in flight. A replica that leaves loses the syncs that have not ended.

    `sync_every` and the delay may differ between replicas (for example, if one is half as fast), if all have the same
    number of syncs in flight. `fragment_update_alpha` may also differ.

    This class registers the state that a newcomer fetches, global weights and outer optimizers, at the Manager. State
    that you register there yourself is healed too. Pass `compared=False` for state that may differ between replicas,
    such as the inner optimizer's.

    Args:
        manager: the syncs are its steps. `current_step()` counts the committed syncs and the opening.
        model_fragments: modules, in the order of their syncs. Together they hold everything that is trained. A
            parameter in several modules belongs to the first.
        inner_optimizer: trains the modules. A torch optimizer, or a `tft_algos.Optimizer` on another Manager.
        outer_optimizer: steps with the pseudogradients. One for all fragments, or one for each.
        sync_every: steps of the inner optimizer in which every fragment is synchronized once.
        backup_device: the device of the global weights. None: the devices of the parameters.
        pin_memory: use page-locked memory, if the global weights are on the CPU and the parameters on an accelerator.
        use_bucketization: reduce slices of `bucket_cap_mb` instead of single tensors. None: the value of
            TFT_USE_BUCKETIZATION or TORCHFT_USE_BUCKETIZATION, otherwise False. The same on all replicas, like the cap.
        bucket_cap_mb: MiB. None: 1024.
        should_quantize: True: send pseudogradients as 8-bit codes. Or a codec of `tft_algos.quantization`, or an
            `ErrorFeedback` of this Manager. The same on all replicas.
        fragment_sync_delay: inner steps from the start of a sync to its end. This is tau in the paper.
        fragment_update_alpha: the share of the live parameters that stays at the end of a sync. 0: they become the
            global weights. 1: they stay unchanged.
        copy_pseudogradients_to_cpu: reduce on the CPU.
    Raises: ConfigError: an argument is invalid. UnsupportedFeatureError: the process group can't quantize.
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
        should_quantize: SyncCodec = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        *,
        copy_pseudogradients_to_cpu: bool = False,
    ) -> None:
        check_manager(manager)
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
            should_quantize=should_quantize,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return global weights and outer optimizers by fragment, for a durable checkpoint. Nothing is copied."""
        return self._loop.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the global weights of such a state.

        Every replica loads the same state. A load on one replica only makes it differ until `check_state_every` finds
        that. Syncs in flight fail, because they began from other weights.

        Raises: UserStateError: the state belongs to another model, or to other fragments of it. Nothing has changed
            then.
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
    """The outer update of DiLoCo: it sends the pseudogradient, and steps an outer optimizer with the mean.

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

    # If one optimizer serves all fragments, its state goes with the first one.

    def state_dict(self, index: int) -> dict[str, Any]:
        return {"outer_optimizer": self._optimizers[index].state_dict()} if index < len(self._optimizers) else {}

    def check_state(self, index: int, state: Mapping[str, Any]) -> None:
        if ("outer_optimizer" in state) != (index < len(self._optimizers)):
            raise UserStateError(
                "the state and this replica differ in their outer optimizers (one for each fragment, or one for all); "
                "give the same number on every replica"
            )
        if "outer_optimizer" in state:
            _check_outer_state(self._optimizers[index], state["outer_optimizer"])

    def load_state_dict(self, index: int, state: Mapping[str, Any]) -> None:
        if "outer_optimizer" in state:
            _load_exactly(self._optimizers[index], state["outer_optimizer"])


def _check_outer_state(optimizer: torch.optim.Optimizer, state: object) -> None:
    """Check that a state fits an outer optimizer.

    Raises: UserStateError: `state` is not an optimizer state, or belongs to other parameters.
    """
    state = state if isinstance(state, Mapping) else {}
    groups, kept = state.get("param_groups"), state.get("state")
    found = None
    if isinstance(groups, Sequence) and isinstance(kept, Mapping) and all(map(_is_mapping, (*groups, *kept.values()))):
        found = [len(group["params"]) if isinstance(group.get("params"), Sequence) else None for group in groups]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if found != here:
        raise UserStateError(
            f"the state of an outer optimizer is not that of a {type(optimizer).__name__} whose groups have {here} "
            "parameters; use the same outer optimizer on every replica"
        )


def _load_exactly(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer's state with its own dtypes, because torch casts moments to the dtype of their parameter."""
    optimizer.load_state_dict(dict(state))
    names = [name for group in state["param_groups"] for name in group["params"]]
    for name, parameter in zip(names, trained_by(optimizer), strict=True):
        here = optimizer.state.get(parameter, {})
        for key, value in state["state"].get(name, {}).items():
            if isinstance(value, torch.Tensor) and value.dtype != here[key].dtype:
                here[key] = value.detach().to(here[key].device, copy=True)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)
