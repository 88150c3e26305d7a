"""The split of a model into the fragments that (Streaming) DiLoCo synchronizes one after the other.

A decoder is a stack of layers with something before it (embeddings) and something after it (a norm, a head). So a cut
is between two layers. Parameters before the first layer go with that layer, and parameters after the last layer with
that one. The number of layers in a fragment follows from their sizes. The largest fragment is as small as possible,
because a slow link carries a whole fragment at once.

A fragment is a module whose tree is a part of the model's tree. It refers to the model's own modules and parameters
under their own names. The model does not refer to it.

Law of this file: decisions from names, shapes and the order of registration, so that every replica splits alike. No
parameter is computed with, copied or changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, final

from torch import nn

from tft_algos.errors import ConfigError, UsageError

SHOWN_NAMES = 3


@final
class ModelFragment(nn.Module):
    """A part of a model's tree: the model's own modules and parameters, under the names that they have there."""

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        raise UsageError("a fragment only groups parameters and can't be called; call the model itself")


def fragment_model(model: nn.Module, num_fragments: int | Sequence[str | Sequence[str]]) -> list[nn.Module]:
    """Split a model into fragments for DiLoCo, without modifying it.

    The fragments hold the model's own parameters, each in exactly one fragment. A shared parameter belongs to the
    first. A call after `fully_shard` has the same result as a call before it.

    Args:
        model: any module, also sharded, compiled or wrapped.
        num_fragments: the number of fragments, or names.
            A number: the model is cut between the layers of its stack. A stack is the children of a ModuleList, or a
                row of children of one class. If there are several stacks, as in an encoder and a decoder, all stacks of
                at least half the size of the largest one count. Parameters registered before the first layer go to the
                first fragment, and parameters after the last layer to the last one.
            Names: for each fragment the name of a module or parameter, or a sequence of such names, as in
                `named_modules` and `named_parameters`. A part that is named twice, or lies inside another named module,
                belongs to the first fragment that names it.
    Returns: modules for DiLoCo, in this order. They can't be called.
    Raises: ConfigError: there are fewer layers than fragments, or no layers; a name is unknown in the model; a
        fragment has no trainable parameter; or a trainable parameter is in no fragment.
    Source: Streaming DiLoCo, arXiv 2501.18512, section 2.2.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"fragment_model was given a {type(model).__name__}; give a module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"no parameter of this {type(model).__name__} is trainable, so there is nothing to split")
    if isinstance(num_fragments, int) and not isinstance(num_fragments, bool):
        count, owners = num_fragments, _owners_by_layer(model, num_fragments)
    else:
        names = _checked_names(num_fragments)
        count, owners = len(names), _owners_by_name(model, names)
    return [_part_of(model, index, owners) for index in range(count)]


# --- the fragment of each parameter: a dictionary from the id of a parameter to the index of a fragment --------------


@dataclass(frozen=True)
class _Stack:
    """Layers that follow each other.

    Args:
        layers: their names in the model.
        size: the size of all layers, in trainable elements.
    """

    layers: tuple[str, ...]
    size: int


def _owners_by_layer(model: nn.Module, num_fragments: int) -> dict[int, int]:
    what = type(model).__name__
    if num_fragments < 1:
        raise ConfigError(f"num_fragments is {num_fragments}; give at least 1, or the names of modules")
    stacks = _stacks(model) or _children_as_layers(model)
    largest = max((stack.size for stack in stacks), default=0)
    names = [name for stack in stacks if 2 * stack.size >= largest for name in stack.layers]
    layer_of: dict[int, int] = {}  # the layer of each parameter, by the id of the parameter
    sizes: list[int] = []  # the size of each layer, including the parameters that go with it
    current = 0
    for name, parameter in model.named_parameters():
        inside = next((index for index, layer in enumerate(names) if name.startswith(f"{layer}.")), None)
        current = current if inside is None else max(current, inside)
        layer_of[id(parameter)] = current
        sizes += [0] * (current + 1 - len(sizes))
        sizes[current] += parameter.numel() if parameter.requires_grad else 0
    # A layer without trainable parameters of its own does not count as a layer. It goes with the one before it.
    own = [index for index, size in enumerate(sizes) if size]
    if num_fragments > max(len(own), 1):
        found = f"{len(own)} layers" if len(own) > 1 else "no stack of layers"
        raise ConfigError(
            f"num_fragments is {num_fragments} and this {what} has {found} with parameters to train; give fewer "
            "fragments, or the names of the modules in each"
        )
    ends = _cuts([sizes[index] for index in own], num_fragments)
    fragment_of = {layer: sum(place >= end for end in ends[:-1]) for place, layer in enumerate(own)}
    return {
        identity: fragment_of[max((each for each in own if each <= layer), default=own[0])]
        for identity, layer in layer_of.items()
    }


def _cuts(sizes: Sequence[int], parts: int) -> tuple[int, ...]:
    """Return the ends of contiguous parts whose largest is smallest. Ties prefer equal sizes, then early cuts."""
    starts = list(itertools.accumulate(sizes, initial=0))
    # The best division of each prefix of `sizes` into `part` parts.
    best: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    for part in range(parts):
        options: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for begin, (largest, squares, ends) in enumerate(best, start=part):
            for end in range(begin + 1, len(sizes) - (parts - part - 1) + 1):
                size = starts[end] - starts[begin]
                option = (max(largest, size), squares + size * size, (*ends, end))
                options[end] = min(options.get(end, option), option)
        best = [options[end] for end in sorted(options)]
    return best[-1][2]


def _stacks(module: nn.Module, prefix: str = "") -> list[_Stack]:
    """Return the stacks of a module and everything in it, outermost first. A stack inside a layer does not count."""
    inner = {name: _stacks(child, f"{prefix}{name}.") for name, child in module.named_children()}
    found = [stack for stacks in inner.values() for stack in stacks]
    own = _row(module, prefix)
    if own is None:
        return found
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        layers = {layer.removeprefix(prefix) for layer in own.layers}
        beside = [stack for name, stacks in inner.items() if name not in layers for stack in stacks]
        return found if any(stack.size > own.size for stack in beside) else [own, *beside]
    # Children of one class in a user's module may be layers, or towers that contain layers.
    return found if 2 * sum(stack.size for stack in found) >= own.size else [own]


def _row(module: nn.Module, prefix: str) -> _Stack | None:
    """Find the largest row of children that may be layers."""
    children = [(name, child, _size(child)) for name, child in module.named_children()]
    children = [each for each in children if each[2] and not isinstance(each[1], nn.Embedding)]
    if isinstance(module, nn.ModuleList):
        rows = [children]
    else:
        rows = [list(row) for _, row in itertools.groupby(children, key=lambda each: type(each[1]))]
    stacks = [
        _Stack(tuple(prefix + name for name, _, _ in row), sum(size for _, _, size in row))
        for row in rows
        if len(row) > 1
    ]
    return max(stacks, key=lambda stack: stack.size, default=None)


def _children_as_layers(model: nn.Module) -> list[_Stack]:
    """Return the parts of the first module that has several, for a model without a stack."""
    for prefix, module in model.named_modules():
        names = [name for name, child in module.named_children() if _size(child)]
        if len(names) > 1:
            return [_Stack(tuple(f"{prefix}.{name}".lstrip(".") for name in names), _size(module))]
    return []


def _size(module: nn.Module) -> int:
    """Return the number of trainable elements, over all shards."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _checked_names(names: object) -> list[tuple[str, ...]]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"num_fragments is {names!r}; give a whole number, or a list with names for each fragment")
    if not names:
        raise ConfigError("num_fragments is an empty list; give a whole number, or names for each fragment")
    checked = []
    for index, each in enumerate(names):
        group = (each,) if isinstance(each, str) else tuple(each) if isinstance(each, Sequence) else (each,)
        if not group or not all(isinstance(name, str) and name for name in group):
            raise ConfigError(f"fragment {index} is {each!r}; give the name of a module or parameter, or several")
        checked.append(group)
    return checked


def _owners_by_name(model: nn.Module, names: Sequence[tuple[str, ...]]) -> dict[int, int]:
    what = type(model).__name__
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    owners: dict[int, int] = {}
    for index, group in enumerate(names):
        owned = False
        for name in group:
            if name not in parameters and name not in modules:
                raise ConfigError(
                    f"fragment {index} names {name!r}, and this {what} has no module or parameter of that name; its "
                    f"children are {_shown([name for name, _ in model.named_children()])}"
                )
            for parameter in [parameters[name]] if name in parameters else modules[name].parameters():
                owned |= owners.setdefault(id(parameter), index) == index and parameter.requires_grad
        if not owned:
            raise ConfigError(
                f"fragment {index}, {_shown(group)}, has no trainable parameter that is not in an earlier fragment; "
                "leave it out, or give it names of other modules"
            )
    if left := [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in owners]:
        raise ConfigError(
            f"{_shown(left)} of this {what} {'is' if len(left) == 1 else 'are'} in no fragment, so replicas would "
            "drift apart in them; name them, or freeze them with requires_grad_(False)"
        )
    return owners


def _shown(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")


# --- the tree of a fragment ------------------------------------------------------------------------------------------


def _part_of(model: nn.Module, index: int, owners: dict[int, int]) -> ModelFragment:
    held: set[int] = set()  # parameters; a shared one is only kept at its first place

    def fill(part: ModelFragment, module: nn.Module) -> ModelFragment:
        for name, parameter in module.named_parameters(recurse=False):
            if owners.get(id(parameter)) == index and id(parameter) not in held:
                held.add(id(parameter))
                part.register_parameter(name, parameter)
        for name, child in module.named_children():
            inside = {id(parameter) for parameter in child.parameters()}
            if not any(owners.get(each) == index for each in inside - held):
                continue
            if all(owners.get(each) == index for each in inside):
                held.update(inside)
                part.register_module(name, child)
            else:
                part.register_module(name, fill(ModelFragment(), child))
        return part

    return fill(ModelFragment(), model)
