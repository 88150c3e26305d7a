"""Rounds of DiLoCo over a link of 50 Mbit/s: how many a minute with float32, with 4 bits, and with the largest numbers.

There are two islands, each on its own host with a slow cable, and the lighthouse is on a third host. The inner steps
are few and cheap, so that a round of float32 consists of its sync, as on islands with fast accelerators.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from benchmarks.row import Row
from benchmarks.slow_link import LIGHTHOUSE, NAMES, start_on
from integration_tests.hosts import hosts, why_not

KINDS: Final = {"float32": 1.0, "int4": 3.0, "top k": 10.0}  # with the least rounds, relative to float32
MBIT_PER_S: Final = 50.0
LAYERS: Final = 8
WIDTH: Final = 1024
WITHIN_S: Final = 300.0


@dataclass(frozen=True)
class Rounds:
    """The result of one kind.

    Args:
        a_minute: rounds a minute of the slower island.
        cpu_s: seconds of a core that an island uses for a round. On a busy machine, this limits the rounds.
    """

    a_minute: float
    cpu_s: float


def run(kind: str, rounds: int, layers: int = LAYERS) -> Rounds:
    """Run a warm-up round, and then the timed ones.

    Args:
        kind: how the pseudogradients are sent.
        rounds: number of timed rounds.
        layers: of the model, each with a million parameters.
    Raises: RuntimeError: this machine can't limit cables.
    """
    reason = why_not(limited=True)
    if reason is not None:
        raise RuntimeError(reason)
    with hosts(LIGHTHOUSE, *NAMES) as cluster, ExitStack() as stack:
        lighthouse = start_on(cluster, stack, LIGHTHOUSE, "lighthouse_worker", min_replicas=len(NAMES))
        address = lighthouse.receive(WITHIN_S)["address"]
        shape = {"kind": kind, "lighthouse": address, "layers": layers, "width": WIDTH}
        workers = [
            start_on(cluster, stack, name, "slow_rounds_worker", island=island, **shape)
            for island, name in enumerate(NAMES)
        ]
        for worker in workers:
            worker.receive(WITHIN_S)
        for name in NAMES:
            cluster.limit(name, MBIT_PER_S)
        answers: list[dict[str, float]] = []
        for number in (1, rounds):
            for worker in workers:
                worker.send({"rounds": number})
            answers = [worker.receive(WITHIN_S) for worker in workers]
        return Rounds(
            a_minute=60.0 * rounds / max(answer["seconds"] for answer in answers),
            cpu_s=max(answer["cpu_seconds"] for answer in answers) / rounds,
        )


def measure(rounds: dict[str, int]) -> Row:
    """Return the row. `rounds`: timed rounds of each kind."""
    found = {kind: run(kind, rounds[kind]) for kind in KINDS}
    ratios = {kind: found[kind].a_minute / found["float32"].a_minute for kind in KINDS}
    cpu_s = ", ".join(f"{found[kind].cpu_s:.2f}" for kind in KINDS)
    return Row(
        name="ROUNDS",
        what=f"DiLoCo rounds a minute, {MBIT_PER_S:g} Mbit/s",
        ours=f"{found['top k'].a_minute:.1f} top k",
        peer="-",
        other=f"{found['float32'].a_minute:.1f} float32",
        ratio=ratios["top k"],
        bar=(
            f"top k >= {KINDS['top k']:g} x float32's, int4 ({found['int4'].a_minute:.1f}) >= {KINDS['int4']:g} x: "
            f"{ratios['int4']:.1f} x; seconds of a core in a round: {cpu_s}"
        ),
        met=all(ratios[kind] >= least for kind, least in KINDS.items()),
    )
