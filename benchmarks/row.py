"""One line of the table: tft's figure, the peer's, the ratio, the bar."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A measured bar of docs/performance.

    Args:
        name: P1 to P19, or a word for a bar of the project's own.
        what: the measured quantity, with its unit.
        ours, peer, other: figures as text. `other` is a reference besides torchft.
        ratio: tft's figure over the peer's.
        bar: in words, with its figure in this run.
        met: whether tft's figure is within the bar.
    """

    name: str
    what: str
    ours: str
    peer: str
    other: str
    ratio: float
    bar: str
    met: bool
