"""The scheduled kills: which replica is killed, and at which commit.

The kills are drawn before the run, so that the same seed gives the same faults.

Law of this file: a function of its arguments. The caller gives the seed of the only random numbers.
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
    """A kill of `replica` when it reports the commit of `step`, or the first later commit that allows a kill."""

    replica: int
    step: int


def kill_window(steps: int) -> range:
    """Return the steps at which a replica may be killed: 15 % to 50 % of `steps`, both included, never step 0."""
    first = -(-steps * FIRST_PERCENT // 100)
    return range(max(first, 1), steps * LAST_PERCENT // 100 + 1)


def draw_kills(*, replicas: int, steps: int, kills: int, seed: int) -> tuple[Kill, ...]:
    """Draw `kills` kills in the order of their steps. All steps are different, and each kill is of any replica.

    Raises: ValueError: there are more kills than steps in the window (DemoSettings refuses this before).
    """
    rng = random.Random(f"tft demo {seed}")
    at = sorted(rng.sample(kill_window(steps), kills))
    return tuple(Kill(replica=rng.randrange(replicas), step=step) for step in at)
