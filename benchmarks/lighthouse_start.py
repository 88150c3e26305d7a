"""P14: the time until a lighthouse's port answers, and the lighthouse's memory. P14 with TLS: the same of tft alone,
with certificates for both ports and without."""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import trustme

from benchmarks import peer, servers
from benchmarks.row import Row
from integration_tests import certificates

START_BAR_S = 0.7
WEIGHT_BAR_MB = 70.0
OURS = Path(sys.executable).parent / "tft-lighthouse"


def measure(turns: int) -> Row:
    """Measure tft and the peer in turn, and return the row of the medians."""
    commands = {"ours": OURS, "peer": peer.lighthouse_command()}
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


def measure_tls(turns: int) -> Row:
    """Measure tft with TLS, each side with a certificate, and without, in turn, and return the row of the medians."""
    starts: dict[str, list[float]] = {"plain": [], "tls": []}
    weights: dict[str, list[float]] = {"plain": [], "tls": []}
    with tempfile.TemporaryDirectory() as folder:
        certificates.write(Path(folder) / "here", trustme.CA(), "localhost", "127.0.0.1")
        surroundings = {"plain": {}, "tls": certificates.environment(Path(folder) / "here", check_client=True)}
        for _ in range(turns):
            for name, environment in surroundings.items():
                with servers.lighthouse(OURS, min_replicas=1, environment=environment) as started:
                    starts[name].append(started.start_s)
                    weights[name].append(started.resident_bytes / 1e6)
    start = {name: statistics.median(values) for name, values in starts.items()}
    weight = {name: statistics.median(values) for name, values in weights.items()}
    return Row(
        name="P14t",
        what="the same with TLS",
        ours=f"{start['tls']:.2f} s, {weight['tls']:.0f} MB",
        peer="no TLS",
        other=f"without TLS {start['plain']:.2f} s, {weight['plain']:.0f} MB",
        ratio=start["tls"] / start["plain"],
        bar=f"<= {START_BAR_S} s, <= {WEIGHT_BAR_MB:.0f} MB",
        met=start["tls"] <= START_BAR_S and weight["tls"] <= WEIGHT_BAR_MB,
    )
