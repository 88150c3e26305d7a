"""One member of the benchmark of child-process groups: it reduces in the requested group, on request.

The first order is a JSON line with a store address and a rank. Every later one names a group, a size and a number of
operations. The answer is one line: the median operation, in milliseconds.

Law of this file: started as a module. Orders from standard input, answers to standard output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tft_pg import ProcessGroupBabyGloo, ProcessGroupGloo

TIMEOUT = timedelta(seconds=60)
WARM_UPS = 2


def answer(message: dict[str, object]) -> None:
    """Print a message."""
    json.dump(message, sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()


def main() -> None:
    """Perform orders until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["tft"], required=True)
    parser.parse_args()
    torch.set_num_threads(1)
    groups = {"plain": ProcessGroupGloo(TIMEOUT), "child": ProcessGroupBabyGloo(TIMEOUT)}
    first = json.loads(sys.stdin.readline())
    for name, group in groups.items():
        group.configure(f"{first['address']}/{name}", first["rank"], 2)
    answer({})
    for line in sys.stdin:
        order = json.loads(line)
        group = groups[order["kind"]]
        tensor = torch.zeros(order["bytes"] // 4)
        took_s = []
        for _ in range(WARM_UPS + order["times"]):
            group.barrier(dist.BarrierOptions()).wait()
            began_s = time.perf_counter()
            group.allreduce([tensor]).wait()
            took_s.append(time.perf_counter() - began_s)
        answer({"median_ms": statistics.median(took_s[WARM_UPS:]) * 1e3})
    for group in groups.values():
        group.shutdown()


if __name__ == "__main__":
    main()
