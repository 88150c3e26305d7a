"""Which tensors that are trained here, and which of torch's schedulers, stand in no registered state.

A replica that joins gets the registered state and nothing else. A tensor that is missing there keeps what the newcomer
made of it, and no error tells. So the tensors of the wrapped models and optimizers are compared with those of the
state: by the memory that they lie in, and where the state holds copies, by their shapes. No optimizer knows its
schedulers, so they are looked for among all objects; their states are told by the keys.

Law of this file: functions of values. When they are compared, and what becomes of the answer, is `audit`'s.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler

from tft_algos.dtensors import is_dtensor
from tft_algos.manager.divergence import as_tensor, leaves
from tft_algos.manager.fingerprint import uncompiled
from tft_ckpt import LocalShard

MOST_NAMES: Final = 5
_OF_A_SCHEDULER: Final = ("last_epoch", "_last_lr")  # each state dict of torch's schedulers has one of these

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


def forgotten_schedulers(optimizers: Iterable[torch.optim.Optimizer], state: Mapping[str, Any]) -> list[str]:
    """Return the names of torch's schedulers of some optimizers that a state lacks: `StepLR of AdamW`.

    A scheduler is there if a dict has the keys of its state dict. For the others as many dicts with a key that only
    schedulers have are enough. Bytes, and what has "sched" in its name, may hold all of them, so that another form is
    never taken for a fault.
    """
    groups = {id(optimizer.param_groups): type(optimizer).__name__ for optimizer in optimizers}
    if len(list(_schedulers_of(groups))) <= len(registered := list(_registered_keys(state))) or None in registered:
        return []
    gc.collect()  # a scheduler that is used no more may have lived on
    unclaimed = Counter(registered)
    missing = []
    for scheduler in _schedulers_of(groups):
        keys = frozenset(scheduler.state_dict())
        if unclaimed[keys]:
            unclaimed[keys] -= 1
        else:
            missing.append(f"{type(scheduler).__name__} of {groups[id(scheduler.optimizer.param_groups)]}")
    return missing[unclaimed.total() :]


def _schedulers_of(groups: Collection[int]) -> Iterator[LRScheduler]:
    """The schedulers of the optimizers that have these lists of groups, without those inside another one."""
    kinds = set(_kinds(LRScheduler))
    living = [each for each in gc.get_objects() if type(each) in kinds]
    inside = {id(part) for each in living for part in vars(each).get("_schedulers", ())}
    for each in living:
        optimizer = vars(each).get("optimizer")
        if id(each) not in inside and id(getattr(optimizer, "param_groups", None)) in groups:
            yield each


def _kinds(kind: type[LRScheduler]) -> Iterator[type]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _registered_keys(value: object, name: str = "") -> Iterator[frozenset[Any] | None]:
    """The keys of each dict that looks like a scheduler's state; None for what may hold any."""
    if isinstance(value, Mapping) and any(key in value for key in _OF_A_SCHEDULER):
        yield frozenset(value)
    elif isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _registered_keys(part, f"{name}.{key}")
    elif isinstance(value, list | tuple) and value:
        for part in value:
            yield from _registered_keys(part, name)
    elif isinstance(value, bytes) or "sched" in name.lower():
        yield None


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
