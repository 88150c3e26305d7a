"""P1 and P2: the cost of a committed step above torch's own DistributedDataParallel, and beside torchft.

The systems take turns within one run, because machines are shared and noisy. The figure of a turn is the median step of
the slower replica. The figure of a system is the median of its turns. The judged figures are compared within each turn,
and the bar applies to the median of these. A machine that slows down for a minute slows all three systems of a turn.
The order changes with each turn, so that no system always runs behind the same other.

P1 with TLS: the same of tft alone, with certificates on all connections and without. Gloo's traffic is not encrypted.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import trustme

from benchmarks import peer, servers
from benchmarks.row import Row
from integration_tests import certificates

WORKER = Path(__file__).resolve().parent / "step_worker.py"
SYSTEMS = ("ddp", "torchft", "tft")
REPLICAS = 2
ABOVE_DDP_MS, BELOW_TORCHFT_MS = 0.7, 0.6
TLS_TO_PLAIN = 1.05
TURN_TIMEOUT_S = 180


def measure_small(turns: int, steps: int) -> Row:
    """Measure P1: 4 x Linear(64), where all of the step is overhead."""
    found = _measure(hidden=64, turns=turns, steps=steps, warmup=30)
    times, ratio = _medians(found), _median_of_turns(found, lambda turn: turn["tft"] / turn["torchft"])
    above_ms = _median_of_turns(found, lambda turn: turn["tft"] - turn["ddp"])
    below_ms = _median_of_turns(found, lambda turn: turn["torchft"] - turn["tft"])
    return Row(
        name="P1",
        what="step, 4 x Linear(64), p50",
        ours=f"{times['tft']:.2f} ms",
        peer=f"{times['torchft']:.2f} ms",
        other=f"torch DDP {times['ddp']:.2f} ms",
        ratio=ratio,
        bar=(
            f"<= DDP + {ABOVE_DDP_MS} ms: + {above_ms:.2f} ms, <= torchft - {BELOW_TORCHFT_MS} ms: - {below_ms:.2f} ms"
        ),
        met=above_ms <= ABOVE_DDP_MS and below_ms >= BELOW_TORCHFT_MS,
    )


def measure_large(turns: int, steps: int) -> Row:
    """Measure P2: 4 x Linear(2048), 67 MB of gradients, where all of the step is bandwidth."""
    found = _measure(hidden=2048, turns=turns, steps=steps, warmup=5)
    times, ratio = _medians(found), _median_of_turns(found, lambda turn: turn["tft"] / turn["torchft"])
    of_ddp = _median_of_turns(found, lambda turn: turn["tft"] / turn["ddp"])
    return Row(
        name="P2",
        what="step, 4 x Linear(2048), p50",
        ours=f"{times['tft']:.1f} ms",
        peer=f"{times['torchft']:.1f} ms",
        other=f"torch DDP {times['ddp']:.1f} ms",
        ratio=ratio,
        bar=f"<= torchft, <= 1.05 x DDP: {of_ddp:.2f} x",
        met=ratio <= 1.0 and of_ddp <= 1.05,
    )


def measure_tls(turns: int, steps: int) -> Row:
    """Measure P1 of tft with TLS on all its connections, each side with a certificate, and without, in turn."""
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        certificates.write(Path(folder) / "here", trustme.CA(), "localhost", "127.0.0.1")
        surroundings = {"plain": {}, "tls": certificates.environment(Path(folder) / "here", check_client=True)}
        for turn in range(turns):
            order = sorted(surroundings, reverse=turn % 2 == 0)
            times = {
                name: _turn("tft", hidden=64, steps=steps, warmup=30, environment=surroundings[name]) for name in order
            }
            found.append(times)
    tls_ms, plain_ms = (statistics.median(turn[name] for turn in found) for name in ("tls", "plain"))
    ratio = _median_of_turns(found, lambda turn: turn["tls"] / turn["plain"])
    return Row(
        name="P1t",
        what="the same with TLS",
        ours=f"{tls_ms:.2f} ms",
        peer="no TLS",
        other=f"without TLS {plain_ms:.2f} ms",
        ratio=ratio,
        bar=f"<= {TLS_TO_PLAIN:g} x without",
        met=ratio <= TLS_TO_PLAIN,
    )


def _measure(*, hidden: int, turns: int, steps: int, warmup: int) -> list[dict[str, float]]:
    """Return each system's median step in ms, for each turn."""
    found = []
    for turn in range(turns):
        order = SYSTEMS[turn % len(SYSTEMS) :] + SYSTEMS[: turn % len(SYSTEMS)]
        found.append({system: _turn(system, hidden=hidden, steps=steps, warmup=warmup) for system in order})
    return found


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {system: statistics.median(turn[system] for turn in found) for system in SYSTEMS}


def _median_of_turns(found: list[dict[str, float]], figure: Callable[[dict[str, float]], float]) -> float:
    return statistics.median(figure(turn) for turn in found)


def _turn(
    system: str, *, hidden: int, steps: int, warmup: int, environment: Mapping[str, str] = MappingProxyType({})
) -> float:
    shape = ["--replicas", str(REPLICAS), "--hidden", str(hidden), "--steps", str(steps), "--warmup", str(warmup)]
    with _surroundings(system, environment) as (interpreter, extra):
        workers = [
            subprocess.Popen(
                [interpreter, str(WORKER), "--system", system, "--rank", str(rank), *shape, *extra],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "error", **environment},
            )
            for rank in range(REPLICAS)
        ]
        try:
            return _slower(system, workers, warmup + steps)
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()


def _slower(system: str, workers: list[subprocess.Popen[str]], least_committed: int) -> float:
    lines = []
    for worker in workers:
        assert worker.stdout is not None
        lines.append(worker.stdout.readline())
    for worker, line in zip(workers, lines, strict=True):
        if not line:
            error = worker.communicate(timeout=TURN_TIMEOUT_S)[1]
            raise RuntimeError(f"a {system} replica ended without a result: {error[-2000:]}")
    results = [json.loads(line) for line in lines]
    for worker in workers:
        assert worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write("\n")
            worker.stdin.flush()
    for worker in workers:
        worker.wait(timeout=TURN_TIMEOUT_S)
    lost = [least_committed - int(result["committed"]) for result in results]
    if max(lost) > least_committed // 20:
        raise RuntimeError(f"{system} committed {lost} steps too few; the figure would not be of committed steps")
    medians: list[float] = [statistics.median(result["times_ms"]) for result in results]
    return max(medians)


@contextlib.contextmanager
def _surroundings(system: str, environment: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the interpreter of a system, and the flags that name its server."""
    if system == "ddp":
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield sys.executable, ["--store", f"127.0.0.1:{store.port}"]
        return
    ours = Path(sys.executable).parent / "tft-lighthouse"
    command = ours if system == "tft" else peer.lighthouse_command()
    interpreter = sys.executable if system == "tft" else str(peer.python())
    with servers.lighthouse(command, min_replicas=REPLICAS, environment=environment) as started:
        yield interpreter, ["--lighthouse", f"http://127.0.0.1:{started.port}"]
