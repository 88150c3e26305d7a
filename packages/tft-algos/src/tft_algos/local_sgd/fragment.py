"""One fragment of a model: its live parameters, the global weights, and the data to send.

Between two syncs, the live parameters of each replica diverge. The global weights are the result of the last sync of
this fragment, and are the same on every replica. A sync sends an update that all replicas agree to add to them. A sync
that fails restores them.

Law of this file: one fragment's memory, and moving numbers between its parts, in place, in persistent buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from tft_algos.dtensors import dtensor_of, is_dtensor
from tft_algos.errors import ConfigError, UserStateError
from tft_algos.local_sgd.buckets import FlatBuffers, SharedBuffer
from tft_algos.local_sgd.rank0_sync import Rank0Sync
from tft_algos.manager.quorum.fingerprint import uncompiled


def extract_local_tensor(t: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor without gradient. For a DTensor, copy the part on this rank."""
    return local_part(t).clone()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor on this rank. The result shares its memory."""
    part = tensor.detach()
    return part.to_local() if is_dtensor(part) else part


@final
@dataclass(frozen=True, slots=True)
class FragmentBuffers:
    """Memory shared by fragments that are not in flight together.

    Args:
        sent: memory of the data to send.
        whole: memory of what rank 0 of an island reduces.
        kept: memory of what `Fragment.keep_local` keeps.
    """

    sent: SharedBuffer = field(default_factory=SharedBuffer)
    whole: SharedBuffer = field(default_factory=SharedBuffer)
    kept: SharedBuffer = field(default_factory=SharedBuffer)


@final
class Fragment:
    """Parameters that are synchronized together.

    Args:
        parameters: by name. Parameters that require a gradient are synchronized. Frozen ones are only part of the state
            that a newcomer fetches.
        what: the fragment's name, for messages.
        backup_device: the device of the global weights. None: the devices of the parameters.
        pin_memory: use page-locked memory, if the global weights are on the CPU and the parameters are not.
        reduces_on_cpu: reduce on the CPU.
        cap_bytes: maximum size of one reduction. None: one reduction for each tensor.
        keeps_local: have memory for a copy of the live parameters, see `keep_local`.
        buffers: memory of the buffers that only a sync in flight uses. None: the fragment's own.
        rank0_sync: the island whose rank 0 reduces for all its ranks. None: each rank reduces its own part.
    Raises: ConfigError: there is nothing to synchronize, or a parameter has no memory yet.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        what: str,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        reduces_on_cpu: bool = False,
        cap_bytes: int | None = None,
        keeps_local: bool = False,
        buffers: FragmentBuffers | None = None,
        rank0_sync: Rank0Sync | None = None,
    ) -> None:
        for name, parameter in parameters.items():
            if isinstance(parameter, torch.nn.parameter.UninitializedParameter) or parameter.is_meta:
                raise ConfigError(f"{name} of {what} has no memory yet; initialize the model first")
        self._names = [name for name, parameter in parameters.items() if parameter.requires_grad]
        self._frozen = {name: one for name, one in parameters.items() if not one.requires_grad}
        self.parameters = [parameters[name] for name in self._names]
        if not self.parameters:
            raise ConfigError(f"{what} has no trainable parameters of its own; leave it out")
        self._what = what
        local = self.local()
        on_cpu = torch.device("cpu") if reduces_on_cpu else None
        self._global = FlatBuffers(local, device=backup_device, pin_memory=pin_memory)
        self._rank0_sync = rank0_sync
        self._whole: FlatBuffers | None = None  # the memory that rank 0 of an island reduces
        buffers = buffers or FragmentBuffers()
        self._cap_bytes = cap_bytes
        if rank0_sync is not None:
            self._sent = FlatBuffers(local, room=buffers.sent)
            if rank0_sync.is_first:
                self._whole = FlatBuffers(self.parameters, device=on_cpu, pin_memory=pin_memory, room=buffers.whole)
        else:
            self._sent = FlatBuffers(local, device=on_cpu, pin_memory=pin_memory, room=buffers.sent)
        self._kept = FlatBuffers(local, room=buffers.kept) if keeps_local else None
        self.save()

    @functools.cached_property
    def slices(self) -> list[torch.Tensor]:
        """Return the slices for one reduction each. Empty: another rank reduces for this one."""
        if self._rank0_sync is None:
            return self._sent.slices(self._cap_bytes)
        return self._whole.slices(self._cap_bytes) if self._whole is not None else []

    def local(self) -> list[torch.Tensor]:
        """Return the live parameters. For a DTensor, this is the part on this rank."""
        return [local_part(parameter) for parameter in self.parameters]

    def check_parameters(self) -> None:
        """Check that the parameters still have the dtypes and shapes of this fragment's buffers.

        Raises: ConfigError: a parameter has another dtype or shape.
        """
        for name, own, whole in zip(self._names, self.local(), self._global.views, strict=True):
            if (own.dtype, own.shape) != (whole.dtype, whole.shape):
                now, then = (f"{one.dtype} of shape {tuple(one.shape)}" for one in (own, whole))
                raise ConfigError(
                    f"{name} of {self._what} is {now}, and was {then} when this strategy was made; convert the model "
                    "before making the strategy"
                )

    @property
    def global_weights(self) -> list[torch.Tensor]:
        """Return the result of the last sync, in the order and the local shapes of the parameters."""
        return self._global.views

    @property
    def sent(self) -> list[torch.Tensor]:
        """Return the data to reduce, or the result, in the order and the local shapes of the parameters."""
        return self._sent.views

    # --- the data to send ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def capture_difference(self) -> None:
        """Fill `sent` with the pseudogradient: global weights minus live parameters."""
        local, sent = self.local(), self._sent.views
        if any(one.device != to.device for one, to in zip(local, sent, strict=True)):
            for own, whole, to in zip(local, self._global.views, sent, strict=True):
                to.copy_(whole.to(own.device) - own)
        elif all(to.is_cpu and whole.is_cpu for whole, to in zip(self._global.views, sent, strict=True)):
            for own, whole, to in zip(local, self._global.views, sent, strict=True):
                torch.sub(whole, own, out=to)  # one pass over the memory
        else:
            torch._foreach_copy_(sent, self._global.views, non_blocking=True)
            torch._foreach_sub_(sent, local)

    @torch.no_grad()
    def capture_parameters(self) -> None:
        """Fill `sent` with the live parameters."""
        torch._foreach_copy_(self._sent.views, self.local())

    @torch.no_grad()
    def give(self) -> None:
        """Hand over what `sent` holds. On an island every rank calls this, so that rank 0 reduces everything."""
        if self._rank0_sync is not None:
            self._rank0_sync.gather(self._sharded_as_sent(), self._whole.views if self._whole is not None else None)

    def take_result(self) -> None:
        """Fill `sent` with the result. On an island every rank calls this to get its part from rank 0."""
        if self._rank0_sync is not None:
            self._rank0_sync.scatter(self._whole.views if self._whole is not None else None, self._sharded_as_sent())

    def _sharded_as_sent(self) -> list[torch.Tensor]:
        """Return `sent`, with DTensors for parameters that are DTensors."""
        return [_like(parameter, to) for parameter, to in zip(self.parameters, self._sent.views, strict=True)]

    # --- between live and global -----------------------------------------------------------------------------------

    @torch.no_grad()
    def save(self) -> None:
        """Save the live parameters as the global weights."""
        torch._foreach_copy_(self._global.views, self.local())

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the live parameters from the global weights, bit for bit."""
        torch._foreach_copy_(self.local(), self._global.views, non_blocking=True)

    @torch.no_grad()
    def adopt(self) -> None:
        """Set the live parameters to the result of the reduction."""
        torch._foreach_copy_(self.local(), self._sent.views, non_blocking=True)

    @torch.no_grad()
    def keep_local(self) -> None:
        """Keep a copy of the live parameters for `merge`."""
        assert self._kept is not None, "a fragment without room for its live parameters"
        torch._foreach_copy_(self._kept.views, self.local())

    @torch.no_grad()
    def merge(self, alpha: float) -> None:
        """Move the live parameters towards the copy that `keep_local` kept.

        Args:
            alpha: 0: the parameters stay unchanged. 1: they become the copy.
        """
        assert self._kept is not None, "a fragment without room for its live parameters"
        torch._foreach_lerp_(self.local(), self._kept.views, alpha)

    def gradients(self) -> list[torch.Tensor]:
        """Return the result of the reduction as gradients of the parameters, with DTensors for DTensors.

        The gradients share the memory of `sent`, if that memory is on the device of the parameters.
        """
        return [
            _like(parameter, to.to(own.device, non_blocking=True))
            for parameter, own, to in zip(self.parameters, self.local(), self._sent.views, strict=True)
        ]

    # --- the state that newcomers fetch ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the global weights by name, including frozen parameters. Nothing is copied."""
        views = zip(self._names, self.parameters, self._global.views, strict=True)
        state = {name: _like(parameter, view) for name, parameter, view in views}
        return state | {name: parameter.detach() for name, parameter in self._frozen.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load global weights, and set the live parameters to them.

        Raises: UserStateError: the state belongs to other parameters. Nothing has changed then.
        """
        self.check_state(state)
        into = self._loaded_into()
        for name, tensor in state.items():
            into[name].copy_(local_part(tensor))
        self.restore()

    def _loaded_into(self) -> dict[str, torch.Tensor]:
        into = dict(zip(self._names, self._global.views, strict=True))
        return into | {name: local_part(parameter) for name, parameter in self._frozen.items()}

    def check_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Check that a state belongs to these parameters.

        Raises: UserStateError: the state belongs to other parameters.
        """
        into = self._loaded_into()
        if not isinstance(state, Mapping) or set(state) != set(into):
            known = sorted(state) if isinstance(state, Mapping) else type(state).__name__
            raise UserStateError(
                f"the state of {self._what} has the parameters {known} and this replica {sorted(into)}; split the "
                "same model in the same way on every replica"
            )
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor):
                raise UserStateError(
                    f"{name} of {self._what} is a {type(tensor).__name__} in the state; give what state_dict() returned"
                )
            part = local_part(tensor)
            if part.shape != into[name].shape:
                raise UserStateError(
                    f"{name} of {self._what} has the shape {tuple(part.shape)} in the state and "
                    f"{tuple(into[name].shape)} here; use the same model on every replica"
                )


def _like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a tensor that is sharded as `parameter` is."""
    return dtensor_of(part, parameter) if is_dtensor(parameter) else part


def parameters_of(fragments: Sequence[torch.nn.Module]) -> list[dict[str, torch.nn.Parameter]]:
    """Return the parameters of each fragment, by their names in an uncompiled model.

    A parameter that is in several fragments belongs to the first of them.
    """
    seen: set[torch.nn.Parameter] = set()
    found: list[dict[str, torch.nn.Parameter]] = []
    for fragment in fragments:
        own = {uncompiled(name): one for name, one in fragment.named_parameters() if one not in seen}
        seen.update(own.values())
        found.append(own)
    return found
