"""A world as a value and as a copy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tft_coord.core.types import QuorumKey
from tft_coord.testing import copied, frozen


@dataclass(slots=True)
class Shelf:
    number: int
    books: list[Any] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)


class Room:
    def __init__(self, **things: Any) -> None:
        self.things = things
        self.tidy = self._tidy
        self.itself = self

    def _tidy(self) -> int:
        return len(self.things)


class Cell:
    def __init__(self) -> None:
        self.only = [1]


def test_equal_worlds_are_equal_in_whatever_order_they_came_to_be() -> None:
    one, other = Room(a=Shelf(1), b={2, 1, 3}), Room(b={3, 2, 1}, a=Shelf(1))
    assert frozen(one) == frozen(other)
    assert hash(frozen(one)) == hash(frozen(other))
    other.things["a"].labels.add("poetry")
    assert frozen(one) != frozen(other)


def test_what_is_shared_differs_from_what_is_there_twice() -> None:
    shelf = Shelf(1)
    assert frozen([shelf, shelf]) != frozen([Shelf(1), Shelf(1)])
    one, two = copied([shelf, shelf])
    assert one is two is not shelf


def test_a_copy_shares_only_what_never_changes() -> None:
    key = QuorumKey(3, 4)
    room = Room(a=Shelf(1, [key, [5]], {"poetry"}), empty={}, cell=Cell())
    copy = copied(room)
    assert frozen(copy) == frozen(room)
    assert copy.itself is copy
    assert copy.things["a"].books[0] is key
    room.things["a"].books[1].append(6)
    del room.things["empty"]
    room.things["a"].labels.add("prose")
    room.things["cell"].only.append(2)
    assert (copy.tidy(), room.tidy()) == (3, 2)
    assert copy.things["a"].books == [key, [5]]
    assert copy.things["a"].labels == {"poetry"}
    assert copy.things["cell"].only == [1]


@pytest.mark.parametrize("what", [iter("ab"), len, (lambda held: lambda: held)(1)])
def test_what_can_not_be_taken_apart_is_named(what: Any) -> None:
    with pytest.raises(TypeError, match="can't be copied into another world"):
        copied([what])
