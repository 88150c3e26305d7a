"""One line of the table: ours, the peer's, the ratio, the bar."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A measured bar of docs/performance.

    Args:
        name: P1 to P19, or a word for a bar of the project's own.
        what: is measured, with unit.
        ours, peer, other: figures as text; `other` is a reference besides torchft.
        ratio: ours over the peer's.
        bar: in words, with its figure in this run.
        met: whether ours is within it.
    """

    name: str
    what: str
    ours: str
    peer: str
    other: str
    ratio: float
    bar: str
    met: bool
