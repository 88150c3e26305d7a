"""A world as a value and as a copy. A search takes both millions of times, so they are fast.

Objects that never change (numbers, strings, enums, frozen dataclasses) are shared and compared as they are. All others
are taken apart: dictionaries, sets, lists and tuples by their contents, objects by their attributes, each object once.

Law of this file: it works on any object that is made of these; the attributes of a class are those of its first object.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from operator import attrgetter, itemgetter
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, Final, TypeVar, cast

AnyValue = TypeVar("AnyValue")

_NEVER_CHANGES: Final[set[Any]] = {type(None), bool, int, float, str, bytes, frozenset}
_BOUND: Final[set[Any]] = {MethodType, BuiltinMethodType}
_SHAPES: Final[dict[Any, tuple[tuple[str, ...], Callable[[object], tuple[Any, ...]]]]] = {}
_key_of: Final = itemgetter(0)


def frozen(value: Any) -> object:
    """Return a value as nested tuples: equal for equal worlds, and hashable if all that never changes is.

    Dictionaries are sorted, and sets become frozensets. A repeated object becomes its number, so two worlds differ if
    one shares an object that the other has twice. Functions and bound methods are ignored.
    """
    return _frozen(value, {})


def copied(value: AnyValue) -> AnyValue:
    """Return an independent copy of a world: objects that never change are shared, all others are copied, each object
    once.

    Raises: TypeError: an object can't be copied, such as a function with a closure.
    """
    return cast("AnyValue", _copied(value, {}))


def _frozen(value: Any, known: dict[int, int]) -> Any:
    kind: Any = type(value)
    if kind in _NEVER_CHANGES:
        return value
    if kind is dict:
        held: dict[Any, Any] = value
        pairs = sorted(held.items(), key=_key_of) if len(held) > 1 else list(held.items())
        return tuple([(key, each if type(each) in _NEVER_CHANGES else _frozen(each, known)) for key, each in pairs])
    if kind is tuple:
        items: tuple[Any, ...] = value
        return tuple([each if type(each) in _NEVER_CHANGES else _frozen(each, known) for each in items])
    if kind is list:
        return _frozen(tuple(value), known)
    if kind is set:
        return frozenset(value)
    if kind in _BOUND or kind is FunctionType:
        return None
    number = known.get(id(value))
    if number is not None:
        return number
    if kind not in _SHAPES and _look_at(kind, value):
        return value
    known[id(value)] = len(known)
    values = _SHAPES[kind][1](value)
    return tuple([each if type(each) in _NEVER_CHANGES else _frozen(each, known) for each in values])


def _copied(value: Any, known: dict[int, Any]) -> Any:
    kind: Any = type(value)
    if kind in _NEVER_CHANGES:
        return value
    if kind is tuple:
        held: tuple[Any, ...] = value
        return tuple([each if type(each) in _NEVER_CHANGES else _copied(each, known) for each in held])
    there = known.get(id(value))
    if there is not None:
        return there
    if kind is dict:
        there_is: dict[Any, Any] = value
        pairs: dict[Any, Any] = {}
        known[id(value)] = pairs
        for key, each in there_is.items():
            pairs[key] = each if type(each) in _NEVER_CHANGES else _copied(each, known)
        return pairs
    if kind is set:  # its elements never change, because all others have no hash
        known[id(value)] = taken = value.copy()
        return taken
    if kind is list:
        items: list[Any] = []
        known[id(value)] = items
        for each in value:
            items.append(each if type(each) in _NEVER_CHANGES else _copied(each, known))
        return items
    if kind in _BOUND:
        return getattr(_copied(value.__self__, known), value.__name__)
    if kind not in _SHAPES and _look_at(kind, value):
        return value
    names, get = _SHAPES[kind]
    copy = known[id(value)] = kind.__new__(kind)
    values = get(value)
    for at, name in enumerate(names):  # compiled code is faster this way than with zip
        each = values[at]
        setattr(copy, name, each if type(each) in _NEVER_CHANGES else _copied(each, known))
    return copy


def _look_at(kind: Any, value: object) -> bool:
    """Register a class at its first object. Returns: whether this object is shared, not copied.

    Raises: TypeError: its contents are unknown.
    """
    if kind is FunctionType and getattr(value, "__closure__") is None:  # noqa: B009
        return True
    if kind is FunctionType or kind.__module__ == "builtins":
        raise TypeError(f"{value!r} can't be copied into another world")
    if issubclass(kind, enum.Enum) or (is_dataclass(kind) and getattr(kind, "__dataclass_params__").frozen):  # noqa: B009
        _NEVER_CHANGES.add(kind)
        return True
    names = tuple(each.name for each in fields(kind)) if is_dataclass(kind) else tuple(sorted(vars(value)))
    _SHAPES[kind] = names, _getter(names)
    return False


def _getter(names: tuple[str, ...]) -> Callable[[object], tuple[Any, ...]]:
    """Return a function that gets all attributes at once, always as a tuple."""
    if len(names) > 1:
        return cast("Callable[[object], tuple[Any, ...]]", attrgetter(*names))
    return lambda value: tuple([getattr(value, name) for name in names])
