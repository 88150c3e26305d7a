"""Coverage marks: names of places that a test exists to reach.

A random test that never reaches the case it was written for passes for ever. So the simulator counts what it comes
by, and a test asks for each name.

Law of this file: counting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Marks:
    """How often each named place was reached."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def hit(self, name: str) -> None:
        """It was reached once more."""
        self._counts[name] += 1

    def add(self, other: Marks) -> None:
        """Take over another's counts."""
        self._counts.update(other._counts)

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def missing(self, names: Iterable[str]) -> list[str]:
        """Which of these were never reached, in order."""
        return [name for name in names if not self._counts[name]]

    def __str__(self) -> str:
        return "\n".join(f"{count:8d}  {name}" for name, count in sorted(self._counts.items()))
