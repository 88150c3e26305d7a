"""The faults of `tft chaos`, and what they cost: decided without a clock and without processes.

Law of this file: numbers in, a plan or a report out. The same seed gives the same plan.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

from tft_suite.errors import ConfigError


class FaultKind(Enum):
    """What happens to a replica's process."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP, and SIGCONT after a time
    SLOW = "slow"  # stopped for a part of each tenth of a second, for a time
    CUT = "cut"  # its packets are dropped for a time


@final
@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a plan.

    Args:
        at_s: seconds after the plan's start.
        pick: chooses the replica, 0 to 1.
    """

    at_s: float
    kind: FaultKind
    pick: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """The settings of `tft chaos`.

    Args:
        kinds: faults to draw from.
        rate: faults in a minute, on average.
        duration_s: seconds with faults.
        baseline_s: seconds before the first fault, in which the rate of steps without faults is measured.
        lasts_s: seconds that a stop, a slowness or a cut lasts.
        slowness: part of the time that a slow process stands still, 0.05 to 0.95.
        spare: replicas that train undisturbed at any time.
        seed: of the plan.
    Raises: ConfigError: a value is out of its range.
    """

    kinds: tuple[FaultKind, ...] = (FaultKind.KILL, FaultKind.STOP, FaultKind.SLOW)
    rate: float = 6.0
    duration_s: float = 60.0
    baseline_s: float = 10.0
    lasts_s: float = 5.0
    slowness: float = 0.5
    spare: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.kinds:
            raise ConfigError("--kinds names no fault; give some of kill, stop, slow and cut, separated by commas")
        for flag, value, least, most in (
            ("--rate", self.rate, 0.01, 6_000.0),
            ("--duration", self.duration_s, 1.0, 604_800.0),
            ("--baseline", self.baseline_s, 1.0, 3_600.0),
            ("--lasts", self.lasts_s, 0.1, 3_600.0),
            ("--slowness", self.slowness, 0.05, 0.95),
            ("--spare", self.spare, 0, 1_000_000),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{flag} is {value:g}; give {least:g} to {most:g}")


def kinds_of(text: str) -> tuple[FaultKind, ...]:
    """Return the faults that a text names, separated by commas. Raises: ConfigError: it names another one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {kind.value: kind for kind in FaultKind}
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ConfigError(f"--kinds: {wrong[0]!r} is no fault; give some of {', '.join(known)}, separated by commas")
    return tuple(dict.fromkeys(known[name] for name in names))


def draw_faults(settings: ChaosSettings) -> list[Fault]:
    """Return the plan: faults at random times with this rate on average, in their order."""
    dice = random.Random(settings.seed)
    faults, at_s = [], 0.0
    while (at_s := at_s + dice.expovariate(settings.rate / 60)) < settings.duration_s:
        faults.append(Fault(at_s, dice.choice(settings.kinds), dice.random()))
    return faults


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a job over a time.

    Args:
        steps: committed.
        batches: the sum of the members of the quorum over those steps, because each gives a batch to each step.
    """

    steps: int
    batches: int
    seconds: float

    @property
    def batches_per_s(self) -> float:
        """Return the batches that were trained in a second, or 0 for no time."""
        return self.batches / self.seconds if self.seconds > 0 else 0.0

    def describe(self) -> str:
        """Return it in words."""
        return (
            f"{self.steps} steps and {self.batches} batches of replicas in {self.seconds:.0f} s "
            f"({self.batches_per_s:.2f} batches/s)"
        )


def goodput_text(before: Progress, during: Progress) -> str:
    """Return one line: how much was trained with faults, as a part of what was trained without them."""
    if not before.batches:
        return f"goodput unknown, because no step was committed before the faults; with faults: {during.describe()}"
    percent = 100 * during.batches_per_s / before.batches_per_s
    return f"goodput {percent:.1f} %; with faults: {during.describe()}; before: {before.describe()}"


def pick_victim(fault: Fault, names: Sequence[str], disturbed: Sequence[str], spare: int) -> str | None:
    """Return the replica that a fault hits; None: too few replicas train undisturbed.

    Args:
        names: of the replicas that train.
        disturbed: those of them that a fault still affects.
    """
    free = sorted(set(names) - set(disturbed))
    if len(free) <= spare:
        return None
    return free[min(int(fault.pick * len(free)), len(free) - 1)]
