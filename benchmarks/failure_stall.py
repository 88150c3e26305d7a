"""P3: how long the survivors stall when a replica is killed, beside torchft.

Three replicas train, and one is killed with SIGKILL. The figure is the time from the kill to the slower survivor's
first commit with two participants. The systems take turns, and so do the killed replicas. The heartbeat timeout is 5 s
in both systems, so it does not shorten the stall.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from pathlib import Path

from benchmarks import peer, servers
from benchmarks.row import Row
from benchmarks.worker import PATIENCE_S, Worker

REPLICAS = 3
HIDDEN = 512
HEARTBEAT_TIMEOUT_MS = 5_000
BAR_S = 0.6


def measure(turns: int) -> Row:
    """Return the row. A turn is one kill in each system."""
    stalls: dict[str, list[float]] = {"torchft": [], "tft": []}
    for turn in range(turns):
        for system, found in stalls.items():
            found.append(_turn(system, victim=turn % REPLICAS))
    ours, theirs = statistics.median(stalls["tft"]), statistics.median(stalls["torchft"])
    return Row(
        name="P3",
        what="kill to first commit of 2, p50",
        ours=f"{ours:.3f} s",
        peer=f"{theirs:.3f} s",
        other=f"ours {min(stalls['tft']):.2f} to {max(stalls['tft']):.2f} s",
        ratio=ours / theirs,
        bar=f"<= {BAR_S} s",
        met=ours <= BAR_S,
    )


def _replica(system: str, rank: int, port: int) -> Worker:
    shape = ["--members", str(REPLICAS), "--min-replicas", str(REPLICAS - 1), "--hidden", str(HIDDEN)]
    place = ["--rank", str(rank), "--lighthouse", f"http://127.0.0.1:{port}"]
    return Worker(system, "benchmarks.failure_worker", [*shape, *place])


def _wait_for(replica: Worker, participants: int, *, steady: bool, after_s: float = 0.0) -> float:
    """Return the time of the replica's first matching report, in seconds since 1970.

    Args:
        replica: the worker.
        participants, steady: facts of the report.
        after_s: earlier reports do not count.
    Raises: RuntimeError: no such report in time.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        report = replica.receive(deadline_s - time.monotonic())
        if report["at_s"] >= after_s and (report["participants"], report["steady"]) == (participants, steady):
            return float(report["at_s"])


def _turn(system: str, victim: int) -> float:
    """Return the stall of one kill, in seconds."""
    command = Path(sys.executable).parent / "tft-lighthouse" if system == "tft" else peer.lighthouse_command()
    flags = ["--heartbeat_timeout_ms", str(HEARTBEAT_TIMEOUT_MS)]
    replicas: list[Worker] = []
    with servers.lighthouse(command, min_replicas=REPLICAS - 1, flags=flags) as started:
        try:
            for rank in range(REPLICAS):
                replicas.append(_replica(system, rank, started.port))
            for replica in replicas:
                _wait_for(replica, REPLICAS, steady=True)
            killed_s = time.time()
            os.kill(replicas[victim].process.pid, signal.SIGKILL)
            survivors = [replica for rank, replica in enumerate(replicas) if rank != victim]
            committed_s = [_wait_for(replica, REPLICAS - 1, steady=False, after_s=killed_s) for replica in survivors]
            return max(committed_s) - killed_s
        finally:
            for replica in replicas:
                replica.end()
