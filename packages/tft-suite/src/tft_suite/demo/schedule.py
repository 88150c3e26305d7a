"""Who is killed, and at which commit.

Intuition: the dice are thrown before the run, so that the same seed asks for the same faults.

Law of this file: a function of its arguments; the only dice are seeded by the caller.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import final

FIRST_PERCENT = 15
LAST_PERCENT = 50


@final
@dataclass(frozen=True, slots=True)
class Kill:
    """`replica` is to be killed when it reports the commit of `step`, or the first later one at which it may be."""

    replica: int
    step: int


def kill_window(steps: int) -> range:
    """Return the steps at which a replica may be killed: 15 % to 50 % of `steps`, both included, never step 0."""
    first = -(-steps * FIRST_PERCENT // 100)
    return range(max(first, 1), steps * LAST_PERCENT // 100 + 1)


def draw_kills(*, replicas: int, steps: int, kills: int, seed: int) -> tuple[Kill, ...]:
    """Throw the dice: `kills` kills in the order of their steps, no two at one step, each of any replica.

    Raises: ValueError: more kills than steps in the window (DemoSettings refuses that before).
    """
    dice = random.Random(f"tft demo {seed}")
    at = sorted(dice.sample(kill_window(steps), kills))
    return tuple(Kill(replica=dice.randrange(replicas), step=step) for step in at)
