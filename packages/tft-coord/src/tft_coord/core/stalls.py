"""What a trainer's time went to: its report, which travels with its beats. No decision depends on it.

A stall is the time of a replica between its last commit before an incident and its first one after it, in parts that
sum to it. The first stall of a replica begins with its Manager.

Law of this file: the reported values, which are whole milliseconds and never negative.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

STALLS_MOST: Final = 4  # in one report: the newest ones, because a beat may be lost with its stream
LONGEST_MS: Final = 100 * 365 * 24 * 3_600_000  # a longer time is nonsense


class Spent(enum.Enum):
    """What time went to. The value is the name in logs, metrics and JSON."""

    COMMIT = "commit"  # steps that committed, without their waits below
    DETECT = "detect"  # in a round that failed, until this replica knew
    ABORT = "abort"  # from then on, until it asked for another quorum
    QUORUM = "quorum"  # waiting for the next quorum
    RECONFIGURE = "reconfigure"  # building the process group of that quorum
    HEAL = "heal"  # receiving the live state
    SERVE = "serve"  # giving it
    REDO = "redo"  # own work in rounds that failed
    WAIT = "wait"  # for other replicas, in rounds that committed
    START = "start"  # until the first commit of this process, without `HEAL`


@dataclass(frozen=True, slots=True)
class Stall:
    """One stall.

    Args:
        number: of the replica's stalls, rising from 1.
        quorum_before: id of the quorum of the last commit before; None: there was none.
        quorum_after: id of the quorum that committed again.
        step: the committed steps at its end.
        failed_rounds: rounds in it that did not commit: the lost steps.
        spent_ms: its parts, without those of 0 ms.
    """

    number: int
    quorum_before: int | None
    quorum_after: int
    step: int
    failed_rounds: int
    spent_ms: Mapping[Spent, int]

    @property
    def lasted_ms(self) -> int:
        """Return the sum of its parts."""
        return sum(self.spent_ms.values())


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """The report of a trainer.

    Args:
        total_ms: what all its time since its start went to, up to the end of its last round; never falling.
        stalls: the newest ones, at most `STALLS_MOST`, the oldest first.
    """

    total_ms: Mapping[Spent, int] = field(default_factory=dict)
    stalls: tuple[Stall, ...] = ()

    @property
    def newest(self) -> int:
        """Return the number of the newest stall; 0: there is none."""
        return self.stalls[-1].number if self.stalls else 0
