"""Trained tensors, and torch's schedulers, that are missing in the registered state.

A replica that joins gets only the registered state. A tensor that is missing there keeps the newcomer's own value,
without an error. So the tensors of the wrapped models and optimizers are compared with those of the state. They are
compared by memory, or by shape if the state holds copies. An optimizer does not know its schedulers, so they are found
among all objects. The state of a scheduler is recognized by its keys and its number of steps.

Law of this file: functions of values. `audit` decides when they are compared, and what follows.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler

from tft_algos.dtensors import is_dtensor
from tft_algos.manager.quorum.fingerprint import uncompiled
from tft_algos.manager.recovery.divergence import as_tensor, leaves
from tft_ckpt import LocalShard

MOST_NAMES: Final = 5
_COUNTERS: Final = ("step", "epoch", "iter", "iteration")  # endings of the names of step counts, in the singular

# Each state dict of torch's schedulers has at least two of these.
_OF_A_SCHEDULER: Final = frozenset({"last_epoch", "_last_lr", "base_lrs", "_step_count", "_schedulers"})

Memory: TypeAlias = tuple[torch.device, int]
_Registered: TypeAlias = "Mapping[Any, Any] | int | None"
_IsOf: TypeAlias = "Callable[[Mapping[Any, Any], Mapping[Any, Any]], bool]"


class NamedTensor(NamedTuple):
    """A tensor of a wrapped model or optimizer, its name (`Linear.weight`), and whether training changes it."""

    name: str
    tensor: torch.Tensor
    changes: bool = True


class Schedulers(NamedTuple):
    """The result of a search for torch's schedulers.

    Attributes:
        forgotten: the names of schedulers that the state lacks: `StepLR of AdamW`.
        unreadable: the names of schedulers whose `state_dict` raises, with the error.
    """

    forgotten: list[str]
    unreadable: list[str]


def tensors_of_models(models: Iterable[torch.nn.Module]) -> list[NamedTensor]:
    """Return the parameters and persistent buffers of some models.

    Buffers that are not persistent are left out, because torch keeps them out of state dicts. Parameters and buffers
    that a lazy module has not made yet are left out, too. Training does not change a parameter that requires no
    gradient. It also does not change a buffer of a module whose parameters are all frozen, except running statistics.
    """
    found = []
    for model in models:
        kind = type(model).__name__
        for name, parameter in model.named_parameters():
            found.append(NamedTensor(f"{kind}.{uncompiled(name)}", parameter, parameter.requires_grad))
        for prefix, module in model.named_modules():
            fleeting: set[str] = getattr(module, "_non_persistent_buffers_set", set())
            for name, tensor in module.named_buffers(prefix, recurse=False):
                if name.rpartition(".")[2] not in fleeting:
                    found.append(NamedTensor(f"{kind}.{uncompiled(name)}", tensor, not _is_frozen(module)))
    return [tensors for tensors in found if not torch.nn.parameter.is_lazy(tensors.tensor)]


def _is_frozen(module: torch.nn.Module) -> bool:
    parameters = list(module.parameters(recurse=False))
    keeps_statistics = hasattr(module, "running_mean") and module.training  # as torch's normalization layers do
    return bool(parameters) and not any(each.requires_grad for each in parameters) and not keeps_statistics


def tensors_of_optimizers(
    optimizers: Iterable[torch.optim.Optimizer], models: Iterable[NamedTensor]
) -> list[NamedTensor]:
    """Return the parameters of some optimizers that no model has, and the tensors of their states.

    Args:
        models: the tensors of the models, which give the parameters their names.
    """
    names = {id(tensors.tensor): tensors.name for tensors in models}
    found = []
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            if id(parameter) not in names:
                names[id(parameter)] = f"{kind}.params[{index}]"
                found.append(NamedTensor(names[id(parameter)], parameter, parameter.requires_grad))
            entries = optimizer.state.get(parameter, {})  # `state` is a defaultdict, which indexing would change
            for key, value in entries.items() if isinstance(entries, Mapping) else ():
                if isinstance(value, torch.Tensor):
                    found.append(NamedTensor(f"{kind}.{key} of {names[id(parameter)]}", value))
    return found


def uncovered(tensors: Iterable[NamedTensor], state: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that training changes and a state lacks.

    A tensor is covered if a leaf uses the same memory. A state may hold copies. So a leaf of the same shape also covers
    a tensor, if no model or optimizer here uses the leaf's memory. A long vector, or bytes, may hold all missing
    tensors. So a copy never causes a false warning, but an averaged copy may hide a forgotten original.

    Raises: UserStateError: the state is nested too deep.
    """
    registered = [as_tensor(leaf) for _, leaf in leaves(state)]
    covered = {memory for leaf in registered for memory in _memory(leaf)}
    tensors = list(tensors)
    known = {memory for one in tensors for memory in _memory(one.tensor)}
    missing = [one for one in tensors if one.changes and not covered.issuperset(_memory(one.tensor))]
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


def forgotten_schedulers(optimizers: Iterable[torch.optim.Optimizer], state: Mapping[str, Any]) -> Schedulers:
    """Return which of torch's schedulers of some optimizers a state lacks.

    A scheduler is covered by a dict with the keys of its state dict. A dict with some of these keys and the same last
    epoch or learning rate also covers it. So does a registered step count, from which the script may rebuild the
    scheduler. Bytes, and values with "sched" in their name, may hold all schedulers. So another form never causes a
    false warning.
    """
    groups = {id(optimizer.param_groups): type(optimizer).__name__ for optimizer in optimizers}
    registered = list(_registered(state))
    if None in registered:
        return Schedulers([], [])
    found = _search(groups, registered)
    if found.forgotten:
        gc.collect()  # an unused scheduler may not have been collected yet
        found = _search(groups, registered)
    return found


def _search(groups: Mapping[int, str], registered: Iterable[_Registered]) -> Schedulers:
    numbers = {each for each in registered if isinstance(each, int)}
    dicts = [each for each in registered if isinstance(each, Mapping)]
    missing: list[tuple[str, Mapping[Any, Any]]] = []
    unreadable = []
    for scheduler in _schedulers_of(groups):
        name = f"{type(scheduler).__name__} of {groups[id(scheduler.optimizer.param_groups)]}"
        try:
            if vars(scheduler).get("last_epoch") not in numbers:
                missing.append((name, dict(scheduler.state_dict())))
        except Exception as error:  # an error of a user's class, which is only read here
            unreadable.append(f"{name}: {error!r}")
    for is_of in (_is_whole, _is_part):  # a dict is the state of one scheduler, so the best match is taken first
        missing = [(name, own) for name, own in missing if not _remove_match(dicts, own, is_of)]
    return Schedulers([name for name, _ in missing], unreadable)


def _remove_match(dicts: list[Mapping[Any, Any]], own: Mapping[Any, Any], is_of: _IsOf) -> bool:
    for index, each in enumerate(dicts):
        if is_of(each, own):
            del dicts[index]
            return True
    return False


def _is_whole(registered: Mapping[Any, Any], own: Mapping[Any, Any]) -> bool:
    return registered.keys() == own.keys()


def _is_part(registered: Mapping[Any, Any], own: Mapping[Any, Any]) -> bool:
    shared = registered.keys() & own.keys()
    return len(shared) > 1 and any(
        key in shared and bool(registered[key] == own[key]) for key in ("last_epoch", "_last_lr")
    )


def _schedulers_of(groups: Collection[int]) -> Iterator[LRScheduler]:
    """Yield the schedulers of the optimizers with these lists of groups, except those inside another scheduler."""
    # An object refers to its class, so the collector finds the instances in one pass, without running code of the
    # objects. A check of the class of every object takes twice the time, and not every class has a hash.
    kinds = list(_kinds(LRScheduler))
    schedulers = [each for each in gc.get_referrers(*kinds) if any(type(each) is kind for kind in kinds)]
    parts = [vars(each).get("_schedulers") for each in schedulers]
    inside = {id(part) for several in parts if isinstance(several, list | tuple) for part in several}
    for each in schedulers:
        optimizer = vars(each).get("optimizer")
        if id(each) not in inside and id(getattr(optimizer, "param_groups", None)) in groups:
            yield each


def _kinds(kind: type[LRScheduler]) -> Iterator[type]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _registered(value: object, name: str = "") -> Iterator[_Registered]:
    """Yield dicts that may be the state of a scheduler, and step counts; None for a value that may hold any scheduler.

    The state of an optimizer is left out, because each of its parameters may have a step count.
    """
    if isinstance(value, Mapping) and value:
        if "param_groups" in value:
            return
        yield value
        if len(_OF_A_SCHEDULER & value.keys()) < 2:  # otherwise its numbers belong to that scheduler
            for key, part in value.items():
                yield from _registered(part, f"{name}.{key}")
    elif isinstance(value, list | tuple) and value:
        for part in value:
            yield from _registered(part, name)
    elif isinstance(value, bytes) or "sched" in name.lower():
        yield None
    elif type(value) is int and name.lower().rstrip("s").endswith(_COUNTERS):
        yield value


def shortened(names: list[str]) -> str:
    """Return names as text: the first five, and the number of the others."""
    more = len(names) - MOST_NAMES
    return f"{', '.join(names[:MOST_NAMES])}{f' and {more} more' if more > 0 else ''}"


def _memory(value: object) -> Iterator[Memory]:
    """Yield where a tensor's elements are in memory. Nothing: no elements are here, or no plain memory."""
    if isinstance(value, LocalShard):
        value = value.local
    if not isinstance(value, torch.Tensor):
        return
    part = value.detach()
    if is_dtensor(part):
        part = part.to_local()
    try:
        address = part.untyped_storage().data_ptr() if part.numel() else 0
    except (NotImplementedError, RuntimeError):  # sparse tensors, and subclasses that wrap others
        return
    if address:
        yield part.device, address


def _shape(leaf: object) -> Iterator[tuple[int, ...]]:
    if isinstance(leaf, LocalShard):
        yield tuple(leaf.sharding.shape)
    elif isinstance(leaf, torch.Tensor):
        yield tuple(leaf.shape)


def _flat_length(leaf: object) -> int:
    """Return how many elements of other tensors a leaf may hold."""
    if isinstance(leaf, torch.Tensor):
        return leaf.numel() if leaf.dim() == 1 else 0
    return len(leaf) if isinstance(leaf, bytes) else 0
