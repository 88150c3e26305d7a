"""P17 and P18: a steady step of a standing quorum needs nothing of the lighthouse.

P17 counts the lighthouse's received messages by type in a thousand steps of three replicas. Each replica sends one beat
a second as a sign of life, and answers the lighthouse's probes. Any other message would be a message for a step.

P18 kills the lighthouse under four replicas and starts it again at the same address. A step is lost if its replica did
not commit it. A step is late if it took over twice the longest step of an equally long time before. The factor is
needed because the longest steps of two equal times differ on a busy machine. A replica that waits for a lighthouse
would wait for a second at least. torchft's replicas ask in every step, so neither row has a peer.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import servers
from benchmarks.row import Row
from benchmarks.worker import PATIENCE_S, Worker
from tft_coord.core import events

REPLICAS_OF_P17: Final = 3
REPLICAS_OF_P18: Final = 4
HIDDEN: Final = 512
STEADY_STEPS: Final = 50
LOOK_S: Final = 0.2
AFTER_S: Final = 5.0  # the lighthouse is back, and learns again which replicas exist
LATE: Final = 2.0  # times the longest step before
BEATS: Final = frozenset((events.BeatReceived.__name__, events.ProbeAnswered.__name__))

Steps = list[tuple[float, int]]
"""When each step ended, in seconds since 1970, and how many were committed then."""


@dataclass(frozen=True)
class Heard:
    """The messages that the lighthouse received in some steady steps.

    Args:
        steps: minimum over the replicas.
        seconds: duration of the steps.
        kinds: number of messages by type.
    """

    steps: int
    seconds: float
    kinds: Counter[str]


@dataclass(frozen=True)
class Away:
    """The steps of all replicas before the lighthouse was killed, and while it was away and shortly after.

    Args:
        before_ms, away_ms: durations of these steps.
        lost: steps that were not committed, in both times.
    """

    before_ms: list[float]
    away_ms: list[float]
    lost: int

    @property
    def late(self) -> int:
        """Return the number of steps that took far longer than any before."""
        return sum(1 for step_ms in self.away_ms if step_ms > LATE * max(self.before_ms))


def count_messages(steps: int) -> Heard:
    """Count the lighthouse's messages in that many steady steps of each of three replicas."""
    lighthouse = Worker("tft", "benchmarks.counting_lighthouse", ["--min-replicas", str(REPLICAS_OF_P17)])
    try:
        with _replicas(REPLICAS_OF_P17, lighthouse.receive()["address"]) as replicas:
            before, heard_before, began_s = _committed(replicas), _heard(lighthouse), time.perf_counter()
            while (done := _committed(replicas) - before) < steps:
                time.sleep(LOOK_S)
            heard = _heard(lighthouse) - heard_before
            return Heard(done, time.perf_counter() - began_s, heard)
    finally:
        lighthouse.end()


def take_away(seconds: float) -> Away:
    """Kill the lighthouse under four replicas for that time, and return their steps."""
    command = Path(sys.executable).parent / "tft-lighthouse"
    port = servers.free_port()
    with contextlib.ExitStack() as stack:
        with servers.lighthouse(command, min_replicas=REPLICAS_OF_P18, port=port):
            replicas = stack.enter_context(_replicas(REPLICAS_OF_P18, f"http://127.0.0.1:{port}"))
            began_s = time.time()
            time.sleep(seconds)
            killed_s = time.time()
        time.sleep(seconds)
        with servers.lighthouse(command, min_replicas=REPLICAS_OF_P18, port=port):
            time.sleep(AFTER_S)
            ended_s = time.time()
            steps = [_asked(replica) for replica in replicas]
    before = [_between(each, began_s, killed_s) for each in steps]
    away = [_between(each, killed_s, ended_s) for each in steps]
    return Away(_times_ms(before), _times_ms(away), sum(_lost(each) for each in (*before, *away)))


@contextlib.contextmanager
def _replicas(number: int, lighthouse: str) -> Iterator[list[Worker]]:
    """Yield that many replicas that train together in a standing quorum, while the block lasts."""
    replicas: list[Worker] = []
    try:
        for rank in range(number):
            shape = ["--replicas", str(number), "--hidden", str(HIDDEN)]
            place = ["--rank", str(rank), "--lighthouse", lighthouse]
            replicas.append(Worker("tft", "benchmarks.steady_worker", [*shape, *place]))
        give_up_s = time.monotonic() + 2 * PATIENCE_S
        while _committed(replicas) < STEADY_STEPS:
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"{number} replicas do not train together; run benchmarks.steady_worker by hand")
            time.sleep(LOOK_S)
        yield replicas
    finally:
        for replica in replicas:
            replica.end()


def _asked(replica: Worker) -> Steps:
    replica.send({})
    return [(at_s, committed) for at_s, committed in replica.receive(2 * PATIENCE_S)["steps"]]


def _committed(replicas: Sequence[Worker]) -> int:
    """Return the number of committed steps of the slowest replica. Steps need all replicas."""
    return min(steps[-1][1] if steps else 0 for steps in [_asked(replica) for replica in replicas])


def _heard(lighthouse: Worker) -> Counter[str]:
    lighthouse.send({})
    return Counter(lighthouse.receive()["heard"])


def _between(steps: Steps, from_s: float, to_s: float) -> Steps:
    return [(at_s, committed) for at_s, committed in steps if from_s <= at_s < to_s]


def _times_ms(replicas: Sequence[Steps]) -> list[float]:
    return [(after[0] - before[0]) * 1e3 for steps in replicas for before, after in itertools.pairwise(steps)]


def _lost(steps: Steps) -> int:
    return sum(after[1] == before[1] for before, after in itertools.pairwise(steps))


def measure_messages(steps: int) -> Row:
    """Measure P17."""
    found = count_messages(steps)
    more = found.kinds.total() - sum(found.kinds[kind] for kind in BEATS)
    kinds = ", ".join(f"{number} {kind}" for kind, number in found.kinds.most_common())
    return Row(
        name="P17",
        what=f"messages in {found.steps} steps of {REPLICAS_OF_P17}",
        ours=f"{more} but beats",
        peer="-",
        other=f"in {found.seconds:.1f} s {kinds}",
        ratio=more / found.steps,
        bar="beats only",
        met=not more,
    )


def measure_away(seconds: float) -> Row:
    """Measure P18."""
    found = take_away(seconds)
    before, away = (f"{max(each):.0f}, {_p99(each):.1f} ms" for each in (found.before_ms, found.away_ms))
    return Row(
        name="P18",
        what=f"lighthouse away {seconds:.0f} s, max, p99",
        ours=away,
        peer="-",
        other=f"before {before}",
        ratio=_p99(found.away_ms) / _p99(found.before_ms),
        bar=f"{found.lost} steps lost, {found.late} late, of {len(found.away_ms)}",
        met=not (found.lost or found.late),
    )


def _p99(times_ms: Sequence[float]) -> float:
    return statistics.quantiles(times_ms, n=100)[98]
