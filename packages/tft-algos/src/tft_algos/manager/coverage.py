"""Which tensors that are trained here stand in no registered state.

A replica that joins gets the registered state and nothing else. A tensor that is missing there keeps what the newcomer
made of it, and no error tells. So the tensors of the wrapped models and optimizers are compared with those of the
state: by the memory that they lie in, and where the state holds copies, by their shapes.

Law of this file: functions of values. When they are compared, and what becomes of the answer, is `audit`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from tft_algos.dtensors import is_dtensor
from tft_algos.manager.divergence import as_tensor, leaves
from tft_algos.manager.fingerprint import uncompiled
from tft_ckpt import LocalShard

MOST_NAMES: Final = 5

Memory: TypeAlias = tuple[torch.device, int]


class Held(NamedTuple):
    """A tensor that a wrapped model or optimizer holds, and its name: `Linear.weight`."""

    name: str
    tensor: torch.Tensor


def held_by_models(models: Iterable[torch.nn.Module]) -> list[Held]:
    """Return the parameters and persistent buffers of some models.

    Buffers that are not persistent stand in no state dict by torch's design, so they are left out. So is what a lazy
    module has not made yet.
    """
    found = []
    for model in models:
        kind = type(model).__name__
        found += [Held(f"{kind}.{uncompiled(name)}", tensor) for name, tensor in model.named_parameters()]
        for prefix, module in model.named_modules():
            fleeting: set[str] = getattr(module, "_non_persistent_buffers_set", set())
            for name, tensor in module.named_buffers(prefix, recurse=False):
                if name.rpartition(".")[2] not in fleeting:
                    found.append(Held(f"{kind}.{uncompiled(name)}", tensor))
    return [held for held in found if not torch.nn.parameter.is_lazy(held.tensor)]


def held_by_optimizers(optimizers: Iterable[torch.optim.Optimizer], models: Iterable[Held]) -> list[Held]:
    """Return the parameters of some optimizers that no model has, and the tensors of their states.

    Args:
        models: what the models hold, by which parameters are named.
    """
    names = {id(held.tensor): held.name for held in models}
    found = []
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            if id(parameter) not in names:
                names[id(parameter)] = f"{kind}.params[{index}]"
                found.append(Held(names[id(parameter)], parameter))
            entries = optimizer.state.get(parameter, {})  # `state` is a defaultdict, which indexing would change
            for key, value in entries.items() if isinstance(entries, Mapping) else ():
                if isinstance(value, torch.Tensor):
                    found.append(Held(f"{kind}.{key} of {names[id(parameter)]}", value))
    return found


def uncovered(held: Iterable[Held], state: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that a state lacks.

    A tensor is there if a leaf lies in the same memory. For the others as many leaves of the same shape are enough, if
    these lie in memory that nothing else here has: a state may hold copies. A long vector, or bytes, may hold all of
    them. So a copy is never taken for a fault, and an averaged copy may hide a forgotten original.

    Raises: tft_algos.errors.StateUnavailable: the state is nested too deep.
    """
    registered = [as_tensor(leaf) for _, leaf in leaves(state)]
    covered = {memory for leaf in registered for memory in _memory(leaf)}
    held = list(held)
    known = {memory for one in held for memory in _memory(one.tensor)}
    missing = [one for one in held if not covered.issuperset(_memory(one.tensor))]
    if not missing:
        return []
    copies = [leaf for leaf in registered if not known.intersection(_memory(leaf))]
    shapes = Counter(shape for leaf in copies for shape in _shape(leaf))
    rest = []
    for one in missing:
        shape = tuple(one.tensor.shape)
        if shapes[shape]:
            shapes[shape] -= 1
        else:
            rest.append(one)
    needed = sum(one.tensor.numel() for one in rest)
    if any(_flat_length(leaf) >= needed for leaf in copies):
        return []
    return [one.name for one in rest]


def shortened(names: list[str]) -> str:
    """Some names as text: the first five, and how many more there are."""
    more = len(names) - MOST_NAMES
    return f"{', '.join(names[:MOST_NAMES])}{f' and {more} more' if more > 0 else ''}"


def _memory(value: object) -> Iterator[Memory]:
    """Where a tensor's elements lie; nothing if it has none here, or no plain memory that could be compared."""
    if isinstance(value, LocalShard):
        value = value.local
    if not isinstance(value, torch.Tensor):
        return
    part = value.detach()
    if is_dtensor(part):
        part = part.to_local()
    try:
        address = part.untyped_storage().data_ptr() if part.numel() else 0
    except (NotImplementedError, RuntimeError):  # sparse tensors, subclasses that wrap others
        return
    if address:
        yield part.device, address


def _shape(leaf: object) -> Iterator[tuple[int, ...]]:
    if isinstance(leaf, LocalShard):
        yield tuple(leaf.sharding.shape)
    elif isinstance(leaf, torch.Tensor):
        yield tuple(leaf.shape)


def _flat_length(leaf: object) -> int:
    """How many elements a leaf may hold of other tensors."""
    if isinstance(leaf, torch.Tensor):
        return leaf.numel() if leaf.dim() == 1 else 0
    return len(leaf) if isinstance(leaf, bytes) else 0
