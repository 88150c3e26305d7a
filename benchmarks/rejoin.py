"""P4 and P5: the cost for survivors and newcomer when a killed replica starts again, beside torchft.

Replicas train, and one is killed with SIGKILL. When the others have trained without it for a while, it is started
again. P4, with three replicas, covers the time from that start until the newcomer has committed a few steps. It is the
longest time between two commits of a survivor in that time.

P5 is the newcomer's time from its construction to its first commit, and from the start of its process to its
construction. P5 has two replicas, so that the newcomer does not share a core with the others, which use more of it the
faster they train. The systems take turns, and so do the killed replicas.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from benchmarks import peer, servers
from benchmarks.row import Row
from benchmarks.worker import PATIENCE_S, Worker

REPLICAS_OF_P4: Final = 3
REPLICAS_OF_P5: Final = 2
HIDDEN: Final = 1024
STEADY_STEPS: Final = 20
STEPS_TOGETHER: Final = 5
MAX_STEPS: Final = 2.0


@dataclass(frozen=True)
class Turn:
    """The times of one rejoin, in seconds.

    Args:
        gap_s: longest time between two commits of a survivor.
        step_s: a survivor's median step before the newcomer came.
        first_commit_s: newcomer's time from its construction to its first commit.
        construct_s: newcomer's time from the start of its process to its construction.
    """

    gap_s: float
    step_s: float
    first_commit_s: float
    construct_s: float


def measure_survivors(turns: int) -> Row:
    """Measure P4. A turn is one rejoin in each system."""
    ours, theirs = _measure(turns, REPLICAS_OF_P4)
    in_steps = ours.gap_s / ours.step_s
    return Row(
        name="P4",
        what="rejoin: survivors' longest gap",
        ours=f"{ours.gap_s:.3f} s",
        peer=f"{theirs.gap_s:.3f} s",
        other=f"{in_steps:.1f} steps of {ours.step_s:.3f} s",
        ratio=ours.gap_s / theirs.gap_s,
        bar=f"<= torchft, <= {MAX_STEPS:g} steps",
        met=ours.gap_s <= theirs.gap_s and in_steps <= MAX_STEPS,
    )


def measure_newcomer(turns: int) -> Row:
    """Measure P5. A turn is one rejoin in each system."""
    ours, theirs = _measure(turns, REPLICAS_OF_P5)
    return Row(
        name="P5",
        what="made to commit; started to made",
        ours=f"{ours.first_commit_s:.2f}; {ours.construct_s:.2f} s",
        peer=f"{theirs.first_commit_s:.2f}; {theirs.construct_s:.2f} s",
        other="the ratio is the worst",
        ratio=max(ours.first_commit_s / theirs.first_commit_s, ours.construct_s / theirs.construct_s),
        bar="both <= torchft",
        met=ours.first_commit_s <= theirs.first_commit_s and ours.construct_s <= theirs.construct_s,
    )


def _measure(turns: int, replicas: int) -> tuple[Turn, Turn]:
    """Return the medians of tft and of the peer. The order alternates, because a machine's speed drifts."""
    found: dict[str, list[Turn]] = {"torchft": [], "tft": []}
    for turn in range(turns):
        for system in sorted(found, reverse=turn % 2 == 0):
            found[system].append(_turn(system, replicas, victim=turn // 2 % replicas))
    return _medians(found["tft"]), _medians(found["torchft"])


def _medians(turns: list[Turn]) -> Turn:
    return Turn(
        gap_s=statistics.median(turn.gap_s for turn in turns),
        step_s=statistics.median(turn.step_s for turn in turns),
        first_commit_s=statistics.median(turn.first_commit_s for turn in turns),
        construct_s=statistics.median(turn.construct_s for turn in turns),
    )


@final
class _Replica:
    """A worker, and its commits as far as they were reported."""

    def __init__(self, system: str, rank: int, min_replicas: int, port: int) -> None:
        shape = ["--min-replicas", str(min_replicas), "--hidden", str(HIDDEN)]
        place = ["--rank", str(rank), "--lighthouse", f"http://127.0.0.1:{port}"]
        self.started_s = time.time()
        self.worker = Worker(system, "benchmarks.rejoin_worker", [*shape, *place])
        self.constructed_s = 0.0
        self.commits: list[dict[str, Any]] = []

    def wait_for(self, participants: int, times: int) -> None:
        """Wait until its last `times` commits had that many participants. Raises: RuntimeError: they did not in
        time."""
        deadline_s = time.monotonic() + PATIENCE_S
        while [each["participants"] for each in self.commits[-times:]] != [participants] * times:
            report = self.worker.receive(deadline_s - time.monotonic())
            if report["kind"] == "commit":
                self.commits.append(report)
            else:
                self.constructed_s = report["at_s"]

    def gaps_s(self, after_s: float, until_s: float) -> list[float]:
        """Return the times between its commits in that interval, the commit before it included."""
        times_s = [each["at_s"] for each in self.commits]
        return [
            later - earlier for earlier, later in itertools.pairwise(times_s) if after_s <= later and earlier <= until_s
        ]


def _turn(system: str, together: int, victim: int) -> Turn:
    command = Path(sys.executable).parent / "tft-lighthouse" if system == "tft" else peer.lighthouse_command()
    replicas: list[_Replica] = []
    with servers.lighthouse(command, min_replicas=together - 1) as started:
        try:
            for rank in range(together):
                replicas.append(_Replica(system, rank, together - 1, started.port))
            for replica in replicas:
                replica.wait_for(together, STEADY_STEPS)
            replicas[victim].worker.process.kill()
            survivors = [replica for rank, replica in enumerate(replicas) if rank != victim]
            for survivor in survivors:
                survivor.wait_for(together - 1, STEADY_STEPS)
            newcomer = _Replica(system, victim, together - 1, started.port)
            replicas.append(newcomer)
            newcomer.wait_for(together, STEPS_TOGETHER)
            until_s = time.time()
            for survivor in survivors:
                survivor.wait_for(together, STEPS_TOGETHER)
            return Turn(
                gap_s=max(max(survivor.gaps_s(newcomer.started_s, until_s)) for survivor in survivors),
                step_s=statistics.median(survivors[0].gaps_s(0.0, newcomer.started_s)),
                first_commit_s=newcomer.commits[0]["at_s"] - newcomer.constructed_s,
                construct_s=newcomer.constructed_s - newcomer.started_s,
            )
        finally:
            for replica in replicas:
                replica.worker.end()
