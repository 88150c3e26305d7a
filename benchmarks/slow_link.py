"""Islands over a slow link: how much of the compute time of no synchronization at all Streaming DiLoCo keeps there.

Two islands, each a host of its own with a cable that carries little; the lighthouse on a third. All three ways to train
(alone, torch's own DistributedDataParallel, Streaming DiLoCo) take turns in the same two processes, so that what the
machine does besides harms all alike. The cable is so slow that a gradient takes SLOWDOWN steps to send; how many bits
that is depends on the machine, and is measured first. The loss of DistributedDataParallel does not depend on the cable,
so most of its steps are done over an unlimited one, untimed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.row import Row
from benchmarks.worker import Worker
from integration_tests.hosts import Hosts, hosts, why_not

NAMES: Final = ("a", "b")
LIGHTHOUSE: Final = "lighthouse"
WAYS: Final = ("alone", "ddp", "diloco")
SLOWDOWN: Final = 5.0
FRAGMENTS: Final = 4
SYNC_EVERY: Final = 16
DELAY: Final = 3
TIMED: Final = 4  # of these, how many DistributedDataParallel does over the slow link
WITHIN_S: Final = 120.0
KEPT: Final = 0.9
KEPT_BY_DDP: Final = 0.2
LOSS: Final = 0.02


@dataclass(frozen=True)
class Measured:
    """What one run found.

    Args:
        kept: by name of the way, the part of the time of training alone that is not lost; the median of the turns.
        losses: by name of the way, at the end, of text that is never trained on; the islands' mean.
        mbit_per_s: of the cables.
        step_ms: a step alone.
    """

    kept: dict[str, float]
    losses: dict[str, float]
    mbit_per_s: float
    step_ms: float


class Islands:
    """Two workers that do the same, each on its host."""

    def __init__(self, cluster: Hosts, workers: list[Worker]) -> None:
        self._cluster = cluster
        self._workers = workers
        ready = [worker.told(WITHIN_S) for worker in workers]
        self.gradient_bytes: int = ready[0]["gradient_bytes"]

    def train(self, way: str, steps: int) -> float:
        """So many steps more. Returns: seconds, of the slower one."""
        return max(self._all({"way": way, "steps": steps}))

    def loss(self, way: str) -> float:
        """Of text that is never trained on; their mean."""
        return statistics.mean(self._all({"way": way}))

    def _all(self, order: dict[str, Any]) -> list[float]:
        for worker in self._workers:
            worker.tell(order)
        return [worker.told(WITHIN_S)["answer"] for worker in self._workers]

    @contextmanager
    def limited(self, mbit_per_s: float) -> Iterator[None]:
        """Slow cables while the block lasts."""
        for name in NAMES:
            self._cluster.limit(name, mbit_per_s)
        yield
        for name in NAMES:
            self._cluster.unlimit(name)


@contextmanager
def islands(steps: int) -> Iterator[Islands]:
    """Hosts, a lighthouse and workers that are ready."""
    with hosts(LIGHTHOUSE, *NAMES) as cluster, ExitStack() as stack:

        def start(host: str, module: str, **flags: Any) -> Worker:
            words = [word for flag, value in flags.items() for word in (f"--{flag.replace('_', '-')}", str(value))]
            words += ["--hostname", cluster.address(host)]
            prefix = ["ip", "netns", "exec", cluster.namespace(host).name]
            worker = Worker("tft", f"benchmarks.{module}", words, prefix=prefix)
            stack.callback(worker.end)
            return worker

        address = start(LIGHTHOUSE, "lighthouse_worker", min_replicas=len(NAMES)).told(WITHIN_S)["address"]
        shape = {"steps": steps, "fragments": FRAGMENTS, "sync_every": SYNC_EVERY, "delay": DELAY}
        workers: list[Worker] = []
        port = 0
        for island, name in enumerate(NAMES):
            place = {"island": island, "lighthouse": address, "store": cluster.address(NAMES[0]), "port": port}
            workers.append(start(name, "slow_link_worker", **shape, **place))
            port = port or workers[0].told(WITHIN_S)["port"]
        yield Islands(cluster, workers)


def run(turns: int, rounds: int) -> Measured:
    """One slice of each way to begin with, then so many turns.

    Args:
        turns: each way has its slice in each.
        rounds: of DiLoCo in a slice, at whose end nothing is in flight.
    Raises: RuntimeError: there can be no slow cables here.
    """
    reason = why_not(limited=True)
    if reason is not None:
        raise RuntimeError(reason)
    size = rounds * SYNC_EVERY
    with islands(steps=(turns + 1) * size) as pair:
        pair.train("alone", size // 2)
        step_s = pair.train("alone", size // 2) / (size // 2)
        mbit_per_s = 8e-6 * pair.gradient_bytes / (SLOWDOWN * step_s)
        pair.train("ddp", size)
        with pair.limited(mbit_per_s):
            pair.train("diloco", size)
        kept: dict[str, list[float]] = {"ddp": [], "diloco": []}
        alone: list[float] = []
        for turn in range(turns):
            taken: dict[str, float] = {}  # a step, in seconds
            for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
                timed = TIMED if way == "ddp" else size
                with pair.limited(mbit_per_s):
                    taken[way] = pair.train(way, timed) / timed
                pair.train(way, size - timed)
            alone.append(taken["alone"])
            for way, found in kept.items():
                found.append(taken["alone"] / taken[way])
        return Measured(
            kept={way: statistics.median(found) for way, found in kept.items()},
            losses={way: pair.loss(way) for way in WAYS},
            mbit_per_s=mbit_per_s,
            step_ms=1_000 * statistics.median(alone),
        )


def measure(turns: int) -> Row:
    """The row."""
    found = run(turns, rounds=4)
    ours, ddp = found.kept["diloco"], found.kept["ddp"]
    above = found.losses["diloco"] / found.losses["ddp"] - 1
    return Row(
        name="SLOW",
        what=f"time kept at {found.mbit_per_s:.1f} Mbit/s, p50",
        ours=f"{ours:.1%}",
        peer="-",
        other=f"torch DDP {ddp:.1%}",
        ratio=ours / ddp,
        bar=(
            f">= {KEPT:.0%}, DDP <= {KEPT_BY_DDP:.0%}, loss {found.losses['diloco']:.4f} within {LOSS:.0%} of DDP's "
            f"{found.losses['ddp']:.4f}: {above:+.2%} (alone {found.losses['alone']:.4f})"
        ),
        met=ours >= KEPT and ddp <= KEPT_BY_DDP and above <= LOSS,
    )
