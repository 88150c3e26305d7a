"""One walk visits every leaf of a state, and one rebuilds the state with other leaves."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from tft_ckpt import StateUnsupportedError
from tft_ckpt.state.walk import map_leaves, name_of, walk


class Pair(NamedTuple):
    left: Any
    right: Any


def test_every_leaf_has_its_path_and_an_empty_container_is_a_leaf() -> None:
    state = {"b": [1, (2, {})], 0: Pair(None, MappingProxyType({"x": "text"})), "a": ()}
    assert list(walk(state)) == [
        (("b", 0), 1),
        (("b", 1, 0), 2),
        (("b", 1, 1), {}),
        ((0, 0), None),
        ((0, 1, "x"), "text"),
        (("a",), ()),
    ]
    assert [path for path, _ in walk({"b": 1, 0: 2, "a": {10: 3, 9: 4}}, sort=True)] == [
        (0,),
        ("a", 10),
        ("a", 9),
        ("b",),
    ]
    assert list(walk(7)) == [((), 7)]


def test_new_leaves_come_into_copies_of_the_containers() -> None:
    ordered = OrderedDict(w=1)
    ordered.note = "kept"  # type: ignore[attr-defined]
    size = torch.Size([2])
    state = {"a": [1, (2, Pair(3, size))], "b": ordered}
    made = map_leaves(state, lambda path, leaf: (path, leaf))
    assert made == {
        "a": [(("a", 0), 1), ((("a", 1, 0), 2), Pair((("a", 1, 1, 0), 3), (("a", 1, 1, 1), size)))],
        "b": {"w": (("b", "w"), 1)},
    }
    assert type(made["a"][1][1]) is Pair
    assert type(made["b"]) is OrderedDict
    assert made["b"].note == "kept"
    assert state == {"a": [1, (2, Pair(3, size))], "b": {"w": 1}}


def test_in_place_an_old_leaf_is_free_before_the_next_comes() -> None:
    inner = [1, 2]
    state = {"a": inner, "b": 3}
    seen = []

    def new(_: object, leaf: int) -> int:
        seen.append((list(inner), leaf))
        return -leaf

    assert map_leaves(state, new, in_place=True) is state
    assert state == {"a": [-1, -2], "b": -3}
    assert state["a"] is inner
    assert seen == [([1, 2], 1), ([-1, 2], 2), ([-1, -2], 3)]


def test_a_state_that_contains_itself_is_refused_by_its_path() -> None:
    state: dict[str, Any] = {"a": 1}
    state["self"] = state
    for visit in (lambda: list(walk(state)), lambda: map_leaves(state, lambda _, leaf: leaf)):
        with pytest.raises(
            StateUnsupportedError, match=r"^state\['self'\]\['self'\].*\.\.\. is nested deeper than 200"
        ):
            visit()


def test_a_path_reads_like_the_code_that_gets_the_leaf() -> None:
    assert name_of(("model", 0, "w")) == "state['model'][0]['w']"
    assert name_of(()) == "state"
