"""P3: how long the survivors stand still when a replica is killed, beside torchft.

Three replicas train; one is killed with SIGKILL; the figure is the time from the kill to the slower survivor's first
commit with two participants. The systems take turns, and so do the replicas that are killed. The heartbeat time-out is
5 s in both, so it is no help to either.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks import peer, servers
from benchmarks.row import Row

ROOT = Path(__file__).resolve().parent.parent
REPLICAS = 3
HIDDEN = 512
HEARTBEAT_TIMEOUT_MS = 5_000
BAR_S = 0.6
PATIENCE_S = 60


def measure(turns: int) -> Row:
    """The row; a turn is one kill in each system."""
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


class _Replica:
    """A worker, and what it told."""

    def __init__(self, system: str, rank: int, port: int) -> None:
        interpreter = sys.executable if system == "tft" else str(peer.python())
        self.process = subprocess.Popen(
            [
                *(interpreter, "-m", "benchmarks.failure_worker", "--system", system, "--rank", str(rank)),
                *("--members", str(REPLICAS), "--min-replicas", str(REPLICAS - 1), "--hidden", str(HIDDEN)),
                *("--lighthouse", f"http://127.0.0.1:{port}"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="benchmark-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def wait_for(self, participants: int, *, steady: bool, after_s: float = 0.0) -> float:
        """When it first told so after a moment, in seconds since 1970. Raises: RuntimeError: not in time."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                told = json.loads(self._lines.get(timeout=max(deadline_s - time.monotonic(), 0.001)))
            except queue.Empty:
                raise RuntimeError(
                    f"a replica did not commit with {participants} within {PATIENCE_S} s; "
                    "run benchmarks.failure_worker by hand to see why"
                ) from None
            if told["at_s"] >= after_s and (told["participants"], told["steady"]) == (participants, steady):
                return float(told["at_s"])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


def _turn(system: str, victim: int) -> float:
    """The stall of one kill, in seconds."""
    command = Path(sys.executable).parent / "tft-lighthouse" if system == "tft" else peer.lighthouse_command()
    flags = ["--heartbeat_timeout_ms", str(HEARTBEAT_TIMEOUT_MS)]
    replicas: list[_Replica] = []
    with servers.lighthouse(command, min_replicas=REPLICAS - 1, flags=flags) as started:
        try:
            for rank in range(REPLICAS):
                replicas.append(_Replica(system, rank, started.port))
            for replica in replicas:
                replica.wait_for(REPLICAS, steady=True)
            killed_s = time.time()
            os.kill(replicas[victim].process.pid, signal.SIGKILL)
            survivors = [replica for rank, replica in enumerate(replicas) if rank != victim]
            committed_s = [replica.wait_for(REPLICAS - 1, steady=False, after_s=killed_s) for replica in survivors]
            return max(committed_s) - killed_s
        finally:
            for replica in replicas:
                replica.end()
