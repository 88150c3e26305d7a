"""P14: the time until a lighthouse's port answers, and the lighthouse's memory."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from benchmarks import peer, servers
from benchmarks.row import Row

START_BAR_S = 0.7
WEIGHT_BAR_MB = 70.0


def measure(turns: int) -> Row:
    """Measure tft and the peer in turn, and return the row of the medians."""
    commands = {"ours": Path(sys.executable).parent / "tft-lighthouse", "peer": peer.lighthouse_command()}
    starts: dict[str, list[float]] = {"ours": [], "peer": []}
    weights: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(turns):
        for name, command in commands.items():
            with servers.lighthouse(command, min_replicas=1) as started:
                starts[name].append(started.start_s)
                weights[name].append(started.resident_bytes / 1e6)
    start = {name: statistics.median(values) for name, values in starts.items()}
    weight = {name: statistics.median(values) for name, values in weights.items()}
    return Row(
        name="P14",
        what="lighthouse start, weight",
        ours=f"{start['ours']:.2f} s, {weight['ours']:.0f} MB",
        peer=f"{start['peer']:.2f} s, {weight['peer']:.0f} MB",
        other="",
        ratio=start["ours"] / start["peer"],
        bar=f"<= {START_BAR_S} s, <= {WEIGHT_BAR_MB:.0f} MB",
        met=start["ours"] <= START_BAR_S and weight["ours"] <= WEIGHT_BAR_MB,
    )
