"""P15: how long a Gloo group takes to be configured, and again after a member's death, beside torchft.

The groups have 2, 4 and 8 processes. In each turn a group is configured repeatedly, each time under a fresh prefix of a
store of this process. The figure of one configure is its slowest member's. Then the last member is killed with SIGKILL
and the others are configured without it. This happens once a turn, because a member dies only once. The systems take
turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from benchmarks.row import Row
from benchmarks.worker import Worker

SIZES = (2, 4, 8)
WARM_UPS = 3


def measure(turns: int, configures: int) -> Row:
    """Return the row. Each size runs in each system, `turns` times."""
    configure_ms: dict[str, dict[int, list[float]]] = {
        system: {size: [] for size in SIZES} for system in ("torchft", "tft")
    }
    reconfigure_ms: dict[str, dict[int, list[float]]] = {
        system: {size: [] for size in SIZES} for system in ("torchft", "tft")
    }
    for _ in range(turns):
        for size in SIZES:
            for system in configure_ms:
                times_ms, after_death_ms = _turn(system, size, configures)
                configure_ms[system][size].append(statistics.median(times_ms))
                reconfigure_ms[system][size].append(after_death_ms)
    ours = [statistics.median(found["tft"][size]) for found in (configure_ms, reconfigure_ms) for size in SIZES]
    theirs = [statistics.median(found["torchft"][size]) for found in (configure_ms, reconfigure_ms) for size in SIZES]
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
