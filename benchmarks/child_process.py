"""P16: an allreduce of 64 MB in a child-process Gloo group over one in a plain group; the latency of 4 KB beside it.

Two processes on loopback have both groups. The groups take turns within one run, because machines are shared and noisy.
The figure of a turn is the median operation at rank 0, and the figure of a group is the median of its turns. The peer
has a child-process group for devices only, so that part of the bar has no figure.
"""

from __future__ import annotations

import statistics

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from benchmarks.row import Row
from benchmarks.worker import Worker

LARGE = 64 << 20
SMALL = 4 << 10
KINDS = ("plain", "child")
BAR = 1.3


def measure(turns: int, large: int, small: int) -> Row:
    """Return the row.

    Args:
        turns: of each group.
        large, small: operations of each size in a turn.
    """
    took_ms: dict[tuple[str, int], list[float]] = {(kind, size): [] for kind in KINDS for size in (LARGE, SMALL)}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members: list[Worker] = []
    try:
        members += [Worker("tft", "benchmarks.child_process_worker") for _ in range(2)]
        for rank, member in enumerate(members):
            member.send({"address": f"127.0.0.1:{store.port}", "rank": rank})
        for member in members:
            member.receive()
        for _ in range(turns):
            for size, times in ((LARGE, large), (SMALL, small)):
                for kind in KINDS:
                    for member in members:
                        member.send({"kind": kind, "bytes": size, "times": times})
                    answers = [member.receive() for member in members]
                    took_ms[kind, size].append(float(answers[0]["median_ms"]))
    finally:
        for member in members:
            member.end()
    found = {key: statistics.median(times) for key, times in took_ms.items()}
    ratio = found["child", LARGE] / found["plain", LARGE]
    return Row(
        name="P16",
        what="child Gloo 64 MB ms; 4 KB us",
        ours=f"{found['child', LARGE]:.1f}; {found['child', SMALL] * 1e3:.0f}",
        peer="no Gloo child",
        other=f"plain: {found['plain', LARGE]:.1f}; {found['plain', SMALL] * 1e3:.0f}",
        ratio=ratio,
        bar=f"64 MB <= {BAR} x plain",
        met=ratio <= BAR,
    )
