"""The cost of ProcessGroupGloo above torch's Gloo: two processes on loopback, four floats, one operation at a time.

python -m benchmarks.pg_overhead             nine turns of a thousand operations
python -m benchmarks.pg_overhead --short     three turns of three hundred, for a quick look

The two groups take turns within one run, because machines are shared and noisy. The figure of a turn is the median
operation at rank 0. The figure of a group is the median of its turns. `python` is the part that noise does not hide:
the same call with an inner group whose operations end before they begin, minus that group alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from tft_pg import ProcessGroupGloo, format_store_addr
from tft_pg.backends.live import LiveGroup
from tft_pg.work import DummyWork

TIMEOUT = timedelta(seconds=60)
JOIN_S = 30
LAYOUT = "{:<28} {:>10} {:>10} {:>10}"


def allreduce(group: dist.ProcessGroup, rank: int, tensor: torch.Tensor) -> None:
    group.allreduce([tensor]).wait()


def allreduce_through_future(group: dist.ProcessGroup, rank: int, tensor: torch.Tensor) -> None:
    group.allreduce([tensor]).get_future().wait()


def ping_pong(group: dist.ProcessGroup, rank: int, tensor: torch.Tensor) -> None:
    if rank == 0:
        group.send([tensor], 1, 0).wait()
        group.recv([tensor], 1, 0).wait()
    else:
        group.recv([tensor], 0, 0).wait()
        group.send([tensor], 0, 0).wait()


def reduce_scatter(group: dist.ProcessGroup, rank: int, tensor: torch.Tensor) -> None:
    group._reduce_scatter_base(tensor[:2], tensor, dist.ReduceScatterOptions()).wait()


OPERATIONS: Mapping[str, Callable[[dist.ProcessGroup, int, torch.Tensor], None]] = {
    "allreduce": allreduce,
    "allreduce, by its future": allreduce_through_future,
    "send and recv, there and back": ping_pong,
    "reduce_scatter": reduce_scatter,
}


def groups_of(port: int, rank: int) -> tuple[dist.ProcessGroup, ProcessGroupGloo]:
    """Return a bare Gloo group and a ProcessGroupGloo of tft-pg."""
    store = PrefixStore("bare", TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    options._timeout = TIMEOUT
    backend = gloo(store, rank, 2, options)
    bare = dist.ProcessGroup(store, rank, 2)
    bare._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    bare._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    ours = ProcessGroupGloo(TIMEOUT)
    ours.configure(format_store_addr("127.0.0.1", port, "ours"), rank, 2)
    return bare, ours


def run(port: int, rank: int, turns: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Return the microseconds of each operation, for the bare group and for tft-pg."""
    torch.set_num_threads(1)
    bare, ours = groups_of(port, rank)
    found = {}
    for name, operation in OPERATIONS.items():
        figures: tuple[list[float], list[float]] = ([], [])
        for _ in range(turns):
            for group, medians in zip((bare, ours), figures, strict=True):
                medians.append(_median_us(partial(operation, group, rank, torch.zeros(4)), repeats))
        found[name] = (statistics.median(figures[0]), statistics.median(figures[1]))
    ours.shutdown()
    return found


def _median_us(operate: Callable[[], object], repeats: int) -> float:
    took_us = []
    for _ in range(repeats):
        begun_ns = time.perf_counter_ns()
        operate()
        took_us.append((time.perf_counter_ns() - begun_ns) / 1000)
    return statistics.median(took_us)


class _Ended:
    """A replacement for the torch group whose operations have all ended before they begin."""

    def __init__(self) -> None:
        self._work = DummyWork([])

    def allreduce(self, *_: object, **__: object) -> dist.Work:
        return self._work


def python_us(repeats: int) -> float:
    """Return the time of the Python code between a caller and the torch group, for an allreduce and its wait."""
    group = ProcessGroupGloo(TIMEOUT)
    ended = _Ended()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group.configure(format_store_addr("127.0.0.1", store.port, "python"), 0, 1)
    live = group._live
    assert isinstance(live, LiveGroup)
    kept, live._torch_group = live._torch_group, ended  # type: ignore[assignment]
    tensor = torch.zeros(4)
    with_us = _median_us(lambda: group.allreduce([tensor]).wait(), repeats)
    without_us = _median_us(lambda: ended.allreduce([tensor]).wait(), repeats)
    live._torch_group = kept
    group.shutdown()
    return with_us - without_us


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pg_overhead", description="see the file's head")
    parser.add_argument("--short", action="store_true", help="few turns, for a quick look")
    short = parser.parse_args().short
    turns, repeats = (3, 300) if short else (9, 1000)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = multiprocessing.get_context("spawn").Process(target=run, args=(store.port, 1, turns, repeats))
    other.start()
    print(LAYOUT.format("p50 in us", "bare", "tft-pg", "more"))
    for name, (bare, ours) in run(store.port, 0, turns, repeats).items():
        print(LAYOUT.format(name, f"{bare:.1f}", f"{ours:.1f}", f"{ours - bare:+.1f}"), flush=True)
    other.join(JOIN_S)
    print(LAYOUT.format("allreduce, python", "", "", f"{python_us(20 * repeats):+.1f}"))
    return other.exitcode or 0


if __name__ == "__main__":
    sys.exit(main())
