"""P15: how long a Gloo group takes to be configured, and again after a member's death, beside torchft.

P15N: the same for torch's own group that reconfigures (torch 2.14 and later), in tft's adapter, beside tft's group.

The groups have 2, 4 and 8 processes. In each turn a group is configured repeatedly, each time under a fresh prefix of a
store of this process. The figure of one configure is its slowest member's. Then the last member is killed with SIGKILL
and the others are configured without it. This happens once a turn, because a member dies only once. The systems take
turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from benchmarks.row import Row
from benchmarks.worker import Worker

SIZES = (2, 4, 8)
WARM_UPS = 3
HAS_NATIVE = hasattr(dist.ProcessGroup, "reconfigure")


def measure(turns: int, configures: int) -> Row:
    """Return the row of tft beside torchft. Each size runs in each system, `turns` times."""
    ours, theirs = _medians(("tft", "torchft"), turns, configures)
    worst = max(mine / other for mine, other in zip(ours, theirs, strict=True))
    return Row(
        name="P15",
        what="configure 2/4/8, after a death",
        ours=_figures(ours),
        peer=_figures(theirs),
        other="ms; the ratio is the worst",
        ratio=worst,
        bar="each <= torchft",
        met=worst <= 1.0,
    )


def measure_native(turns: int, configures: int) -> Row:
    """Return the row of torch's own group that reconfigures, in tft's adapter, beside tft's group over Gloo."""
    native, gloo = _medians(("torch", "tft"), turns, configures)
    worst = max(mine / other for mine, other in zip(native, gloo, strict=True))
    return Row(
        name="P15N",
        what="native configure, after a death",
        ours=_figures(native),
        peer="",
        other=f"Gloo {_figures(gloo)} ms",
        ratio=worst,
        bar="each <= 2 x tft's Gloo",
        met=worst <= 2.0,
    )


def _medians(systems: Sequence[str], turns: int, configures: int) -> list[list[float]]:
    """Return, for each system, the medians of a configure of each size, and then those after a death, in ms."""
    configure_ms: dict[tuple[str, int], list[float]] = {(system, size): [] for system in systems for size in SIZES}
    after_death_ms: dict[tuple[str, int], list[float]] = {(system, size): [] for system in systems for size in SIZES}
    for _ in range(turns):
        for size in SIZES:
            for system in systems:
                times_ms, death_ms = _turn(system, size, configures)
                configure_ms[system, size].append(statistics.median(times_ms))
                after_death_ms[system, size].append(death_ms)
    return [
        [statistics.median(found[system, size]) for found in (configure_ms, after_death_ms) for size in SIZES]
        for system in systems
    ]


def _figures(times_ms: Sequence[float]) -> str:
    """Format the times of the three sizes, and after the semicolon those after a death."""
    texts = [f"{time_ms:.1f}" for time_ms in times_ms]
    return f"{'/'.join(texts[: len(SIZES)])}; {'/'.join(texts[len(SIZES) :])}"


def _order(member: Worker, address: str, rank: int, world_size: int) -> None:
    member.send({"address": address, "rank": rank, "world_size": world_size})


def _turn(system: str, size: int, configures: int) -> tuple[list[float], float]:
    """Return the times of a whole group, and the time after a death, in milliseconds."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members: list[Worker] = []

    def configure(number: int, together: Sequence[Worker]) -> float:
        for rank, member in enumerate(together):
            _order(member, f"127.0.0.1:{store.port}/quorum/{number}", rank, len(together))
        return max(float(member.receive()["took_ms"]) for member in together)

    try:
        members += [Worker(system, "benchmarks.reconfigure_worker") for _ in range(size)]
        times_ms = [configure(number, members) for number in range(WARM_UPS + configures)][WARM_UPS:]
        members[-1].process.kill()
        members[-1].process.wait()
        return times_ms, configure(WARM_UPS + configures, members[:-1])
    finally:
        for member in members:
            member.end()
