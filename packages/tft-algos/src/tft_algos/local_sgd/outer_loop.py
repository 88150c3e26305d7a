"""A training loop in which replicas train on their own and synchronize periodically, by an outer update of any kind.

Law of this file: checks and construction, and the state that newcomers fetch. The `OuterUpdate` decides what is sent,
and what is made of the mean. `synchronizer` decides when a sync runs, and which members take part.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, final

import torch

from tft_algos.errors import ConfigError, UserStateError
from tft_algos.local_sgd.buckets import bucket_bytes
from tft_algos.local_sgd.checks import check_alpha, check_device, check_flags, check_inner_optimizer, check_manager
from tft_algos.local_sgd.fragment import Fragment, FragmentBuffers, parameters_of
from tft_algos.local_sgd.outer_update import OuterUpdate
from tft_algos.local_sgd.quantization import SyncCodec, sync_quantization_of
from tft_algos.local_sgd.rank0_sync import rank0_sync_of
from tft_algos.local_sgd.schedule import Schedule
from tft_algos.local_sgd.synchronizer import Synchronizer
from tft_algos.manager import Manager

WEIGHTS = "original_parameters"


@final
class OuterLoop:
    """A context manager in which a model is synchronized periodically by an outer update.

        with OuterLoop(manager, [model], inner, MyUpdate(), sync_every=100):
            for batch in batches:
                inner.zero_grad()
                loss(model(batch)).backward()
                inner.step()

    `LocalSGD` and `DiLoCo` are an OuterLoop with their own outer updates. Their descriptions of entering, leaving,
    inner steps, failures and newcomers also hold here.

    Args:
        manager: the syncs are its steps. `current_step()` counts the committed syncs and the opening.
        model_fragments: modules, in the order of their syncs. Together they hold everything that is trained. A
            parameter in several modules belongs to the first.
        inner_optimizer: trains the modules. A torch optimizer, or a `tft_algos.Optimizer` on another Manager.
        outer_update: decides what is sent, and what is made of the mean. The same class on every replica.
        sync_every: steps of the inner optimizer in which every fragment is synchronized once.
        fragment_sync_delay: inner steps from the start of a sync to its end.
        fragment_update_alpha: the share of the live parameters that stays at the end of a sync. 0: they become the
            global weights. 1: they stay unchanged.
        backup_device: the device of the global weights. None: the devices of the parameters.
        pin_memory: use page-locked memory, if the global weights are on the CPU and the parameters on an accelerator.
        use_bucketization: reduce slices of `bucket_cap_mb` instead of single tensors. None: the value of
            TFT_USE_BUCKETIZATION or TORCHFT_USE_BUCKETIZATION, otherwise False. The same on all replicas, like the cap.
        bucket_cap_mb: MiB. None: 1024.
        copy_pseudogradients_to_cpu: reduce on the CPU.
        should_quantize: True: send 8-bit codes. Or a codec of `tft_algos.quantization`, or an `ErrorFeedback` of this
            Manager. The same on all replicas, and only for updates that send changes of weights, as DiLoCo does.
    Raises: ConfigError: an argument is invalid. UnsupportedFeatureError: the process group can't quantize.
    """

    def __init__(
        self,
        manager: Manager,
        model_fragments: Sequence[torch.nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_update: OuterUpdate,
        sync_every: int,
        *,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        use_bucketization: bool | None = None,
        bucket_cap_mb: float | None = None,
        copy_pseudogradients_to_cpu: bool = False,
        should_quantize: SyncCodec = False,
    ) -> None:
        check_manager(manager)
        if not isinstance(outer_update, OuterUpdate):
            raise ConfigError(
                f"outer_update is a {type(outer_update).__name__}; give an object of a subclass of OuterUpdate"
            )
        own = type(outer_update)
        if (own.state_dict is OuterUpdate.state_dict) != (own.load_state_dict is OuterUpdate.load_state_dict):
            raise ConfigError(
                f"{outer_update.name} has only one of state_dict and load_state_dict, and a replica that heals needs "
                "both; define both, or neither"
            )
        modules = check_modules(model_fragments)
        schedule = Schedule(len(modules), sync_every, fragment_sync_delay)
        alpha = check_alpha(fragment_update_alpha)
        parameters = parameters_of(modules)
        check_inner_optimizer(inner_optimizer, manager, parameters)
        check_flags(pin_memory=pin_memory, copy_pseudogradients_to_cpu=copy_pseudogradients_to_cpu)
        if use_bucketization is not None:
            check_flags(use_bucketization=use_bucketization)
        device, cap_bytes = check_device(backup_device), bucket_bytes(use_bucketization, bucket_cap_mb, os.environ)
        rank0_sync = rank0_sync_of(manager)
        # Syncs in flight together need separate send buffers. The merge copies are used only for a moment, so they are
        # shared.
        shared = FragmentBuffers()
        self._fragments = [
            Fragment(
                own,
                what=f"fragment {index}" if len(modules) > 1 else "the model",
                backup_device=device,
                pin_memory=pin_memory,
                reduces_on_cpu=copy_pseudogradients_to_cpu,
                cap_bytes=cap_bytes,
                keeps_local=alpha > 0,
                buffers=FragmentBuffers(kept=shared.kept) if schedule.num_overlapping else shared,
                rank0_sync=rank0_sync,
            )
            for index, own in enumerate(parameters)
        ]
        codecs = sync_quantization_of(manager, should_quantize, self._fragments)
        strategy = manager.strategy
        strategy.attach(outer_update.name)
        self._states = {
            outer_update.state_key(index): _State(index, fragment, outer_update)
            for index, fragment in enumerate(self._fragments)
        }
        for key, state in self._states.items():
            manager.register_state_dict_fn(key, state.load, state.take)
        for module in modules:
            strategy.describe_parameters(module)
        parts = {
            "algorithm": outer_update.name,
            "fragments": f"{len(modules)}, {schedule.num_overlapping} begin before one ends",
            "reductions": "one a tensor" if cap_bytes is None else f"in slices of {cap_bytes} bytes",
            **({} if codecs is None else {"quantization": codecs.describe()}),
        }
        for name, value in (*parts.items(), *outer_update.fingerprint().items()):
            strategy.add_to_fingerprint(name, value)
        self._synchronizer = Synchronizer(
            manager, self._fragments, schedule, outer_update, inner_optimizer, modules, alpha=alpha, codecs=codecs
        )

    def sync(self) -> None:
        """Synchronize now. Only allowed while no sync is in flight. All replicas call this after the same step."""
        self._synchronizer.sync_now()

    def state_dict(self) -> dict[str, Any]:
        """Return the global weights and the outer update's state by fragment, for a durable checkpoint.

        Nothing is copied.
        """
        return {key: state.take() for key, state in self._states.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the global weights of such a state.

        Every replica loads the same state. A load on one replica only makes it differ until `check_state_every` finds
        that. Syncs in flight fail, because they began from other weights.

        Raises: UserStateError: the state belongs to another model, or to other fragments of it. Nothing has changed
            then.
        """
        if not isinstance(state_dict, Mapping) or set(state_dict) != set(self._states):
            found = sorted(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise UserStateError(
                f"the state has {found} and this strategy {sorted(self._states)}; split the same model in the same way"
            )
        for key, state in self._states.items():
            state.check(state_dict[key])
        for key, state in self._states.items():
            state.load(state_dict[key])
        self._synchronizer.state_loaded()

    def __enter__(self) -> OuterLoop:
        self._synchronizer.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._synchronizer.leave()


def check_modules(given: object) -> list[torch.nn.Module]:
    """Return the modules as a list, checked.

    Raises: ConfigError: `given` is not a list of modules.
    """
    modules = list(given) if isinstance(given, Sequence | torch.nn.ModuleList) else None
    if not modules or not all(isinstance(module, torch.nn.Module) for module in modules):
        raise ConfigError("model_fragments is not a list of modules; give a list of one or several modules: [model]")
    return modules


@final
class _State:
    """The state of a fragment that a newcomer fetches.

    Args:
        index: the index of the fragment.
        fragment: holds the global weights.
        update: the outer update, which may have state of its own.
    """

    def __init__(self, index: int, fragment: Fragment, update: OuterUpdate) -> None:
        self._index = index
        self._fragment = fragment
        self._update = update

    def take(self) -> dict[str, Any]:
        return {WEIGHTS: self._fragment.state_dict(), **self._update.state_dict(self._index)}

    def check(self, state: Mapping[str, Any]) -> None:
        """Check that a state fits this fragment and its outer update.

        Raises: UserStateError: the state belongs to another model or another outer update.
        """
        if not isinstance(state, Mapping) or WEIGHTS not in state:
            name = self._update.name
            raise UserStateError(f"this is not a state of {name}; give the result of {name}.state_dict()")
        self._update.check_state(self._index, self._own(state))
        self._fragment.check_state(state[WEIGHTS])

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state.

        Raises: UserStateError: as `check`. Nothing has changed then.
        """
        self.check(state)
        self._fragment.load_state_dict(state[WEIGHTS])
        self._update.load_state_dict(self._index, self._own(state))

    @staticmethod
    def _own(state: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in state.items() if key != WEIGHTS}
