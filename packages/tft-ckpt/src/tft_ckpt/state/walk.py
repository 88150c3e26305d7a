"""The walk over a state: its leaves with their paths, and the same containers with other leaves.

Law of this file: containers and paths. The meaning of a leaf is known elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from tft_ckpt.errors import StateUnsupportedError
from tft_ckpt.state.target import DEPTH_MAX

__all__ = ["CONTAINERS", "Path", "map_leaves", "name_of", "walk"]

Path: TypeAlias = tuple[Any, ...]
"""Keys and indices from the root."""

CONTAINERS: Final = (dict, list, tuple, Mapping)  # Mapping last, because a check against it takes longest
"""What a walk enters."""

NAME_LENGTH_MAX: Final = 200
"""In characters, of a path in a message."""


def walk(state: Any, path: Path = (), *, sort: bool = False) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf of a state with its path, depth first.

    A leaf is any value but a mapping, list or tuple. An empty container is a leaf too.

    Args:
        state: any value.
        path: the path of `state` itself.
        sort: visit mappings in the order of their keys' text, so the order of insertion has no effect.
    Raises: StateUnsupportedError: the state is nested too deep, for example because it contains itself.
    """
    if not isinstance(state, CONTAINERS) or not state:
        yield path, state
        return
    if len(path) >= DEPTH_MAX:
        raise _too_deep(path)
    pairs: Iterable[tuple[Any, Any]]
    if not isinstance(state, Mapping):
        pairs = enumerate(state)
    elif sort:
        pairs = sorted(state.items(), key=_text_of_key)
    else:
        pairs = state.items()
    for key, value in pairs:
        if isinstance(value, CONTAINERS):
            yield from walk(value, (*path, key), sort=sort)
        else:
            yield (*path, key), value


def map_leaves(state: Any, new_leaf: Callable[[Path, Any], Any], path: Path = (), *, in_place: bool = False) -> Any:
    """Return a state with the same dicts, lists and tuples, and with other leaves.

    Args:
        state: any value.
        new_leaf: called with path and value of each leaf, depth first, and returns its replacement. Here a leaf is any
            value but a dict, list, tuple or named tuple.
        path: the path of `state` itself.
        in_place: change the dicts and lists of `state`, so each old leaf can be freed at once. False: copy them.
    Raises: StateUnsupportedError: the state is nested too deep, for example because it contains itself.
    """

    def new(key: Any, value: Any) -> Any:
        return map_leaves(value, new_leaf, (*path, key), in_place=in_place)

    if not isinstance(state, dict | list | tuple):
        return new_leaf(path, state)
    if len(path) >= DEPTH_MAX:
        raise _too_deep(path)
    if isinstance(state, dict):
        made = state if in_place else copy.copy(state)
        for key, value in state.items():
            made[key] = new(key, value)
        return made
    if isinstance(state, list):
        items = state if in_place else list(state)
        for index, value in enumerate(state):
            items[index] = new(index, value)
        return items
    if type(state) is tuple:
        return tuple([new(index, value) for index, value in enumerate(state)])
    if hasattr(state, "_make"):
        return state._make([new(index, value) for index, value in enumerate(state)])
    return new_leaf(path, state)


def name_of(path: Path) -> str:
    """Return a path as text, for messages: `state['optim'][0]`. Long keys are cut."""
    return "state" + "".join(f"[{str(key)[:100]!r}]" if isinstance(key, str) else f"[{key!r:.100}]" for key in path)


def _text_of_key(pair: tuple[Any, Any]) -> str:
    return str(pair[0])


def _too_deep(path: Path) -> StateUnsupportedError:
    name = name_of(path)[:NAME_LENGTH_MAX]
    return StateUnsupportedError(f"{name}... is nested deeper than {DEPTH_MAX} levels, or contains itself", path=name)
