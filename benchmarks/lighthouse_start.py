"""P14: the time until a lighthouse's port answers, and the lighthouse's memory. P14 with TLS: the same of tft alone,
with certificates for both ports and without."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping
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
    start, weight = _in_turn(turns, {"ours": (OURS, {}), "peer": (peer.lighthouse_command(), {})})
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
    with tempfile.TemporaryDirectory() as folder:
        certificates.write(Path(folder) / "here", trustme.CA(), "localhost", "127.0.0.1")
        environment = certificates.environment(Path(folder) / "here", check_client=True)
        start, weight = _in_turn(turns, {"plain": (OURS, {}), "tls": (OURS, environment)})
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


def _in_turn(
    turns: int, sides: Mapping[str, tuple[Path, Mapping[str, str]]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Start the command of each side in turn. Return the medians of seconds and of megabytes, by side."""
    starts: dict[str, list[float]] = {name: [] for name in sides}
    weights: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, (command, environment) in sides.items():
            with servers.lighthouse(command, min_replicas=1, environment=environment) as started:
                starts[name].append(started.start_s)
                weights[name].append(started.resident_bytes / 1e6)
    return (
        {name: statistics.median(values) for name, values in starts.items()},
        {name: statistics.median(values) for name, values in weights.items()},
    )
