"""Islands over a slow link: the share of the compute time without synchronization that Streaming DiLoCo keeps.

There are two islands, each on its own host with a slow cable, and the lighthouse is on a third host. The three ways to
train are alone, torch's own DistributedDataParallel, and Streaming DiLoCo. They take turns in the same two processes,
so that other load of the machine affects all alike.

The cable is so slow that a gradient takes SLOWDOWN steps to send. The resulting bit rate depends on the machine, and is
measured first. The loss of DistributedDataParallel does not depend on the cable, so most of its steps run over an
unlimited one, untimed.
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
TIMED: Final = 4  # steps of a slice that DistributedDataParallel does over the slow link
WITHIN_S: Final = 120.0
KEPT: Final = 0.9
KEPT_BY_DDP: Final = 0.2
LOSS: Final = 0.02


@dataclass(frozen=True)
class Measured:
    """The result of one run.

    Args:
        kept: by name of the way, the share of the time of training alone that is kept. Median of the turns.
        losses: by name of the way, final loss on text that is never trained on. Mean of the islands.
        mbit_per_s: rate of the cables.
        step_ms: duration of a step alone.
    """

    kept: dict[str, float]
    losses: dict[str, float]
    mbit_per_s: float
    step_ms: float


class Islands:
    """Two workers with equal work, each on its own host."""

    def __init__(self, cluster: Hosts, workers: list[Worker]) -> None:
        self._cluster = cluster
        self._workers = workers
        ready = [worker.receive(WITHIN_S) for worker in workers]
        self.gradient_bytes: int = ready[0]["gradient_bytes"]

    def train(self, way: str, steps: int) -> float:
        """Train that many more steps. Returns: seconds of the slower worker."""
        return max(self._all({"way": way, "steps": steps}))

    def loss(self, way: str) -> float:
        """Return the mean loss of the workers on text that is never trained on."""
        return statistics.mean(self._all({"way": way}))

    def _all(self, order: dict[str, Any]) -> list[float]:
        for worker in self._workers:
            worker.send(order)
        return [worker.receive(WITHIN_S)["answer"] for worker in self._workers]

    @contextmanager
    def limited(self, mbit_per_s: float) -> Iterator[None]:
        """Limit the cables while the block lasts."""
        for name in NAMES:
            self._cluster.limit(name, mbit_per_s)
        yield
        for name in NAMES:
            self._cluster.unlimit(name)


def start_on(cluster: Hosts, stack: ExitStack, host: str, module: str, **flags: Any) -> Worker:
    """Start a worker on a host. It ends with the stack."""
    words = [word for flag, value in flags.items() for word in (f"--{flag.replace('_', '-')}", str(value))]
    words += ["--hostname", cluster.address(host)]
    prefix = ["ip", "netns", "exec", cluster.namespace(host).name]
    worker = Worker("tft", f"benchmarks.{module}", words, prefix=prefix)
    stack.callback(worker.end)
    return worker


@contextmanager
def islands(steps: int) -> Iterator[Islands]:
    """Yield the islands with hosts, a lighthouse and workers that are ready."""
    with hosts(LIGHTHOUSE, *NAMES) as cluster, ExitStack() as stack:
        lighthouse = start_on(cluster, stack, LIGHTHOUSE, "lighthouse_worker", min_replicas=len(NAMES))
        address = lighthouse.receive(WITHIN_S)["address"]
        shape = {"steps": steps, "fragments": FRAGMENTS, "sync_every": SYNC_EVERY, "delay": DELAY}
        workers: list[Worker] = []
        port = 0
        for island, name in enumerate(NAMES):
            place = {"island": island, "lighthouse": address, "store": cluster.address(NAMES[0]), "port": port}
            workers.append(start_on(cluster, stack, name, "slow_link_worker", **shape, **place))
            port = port or workers[0].receive(WITHIN_S)["port"]
        yield Islands(cluster, workers)


def run(turns: int, rounds: int) -> Measured:
    """Run one slice of each way first, then the turns.

    Args:
        turns: number of turns. Each way has one slice in each.
        rounds: DiLoCo rounds in a slice. At their end nothing is in flight.
    Raises: RuntimeError: this machine can't limit cables.
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
            taken: dict[str, float] = {}  # duration of a step, in seconds
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
    """Return the row."""
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
