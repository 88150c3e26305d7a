"""One member of the reconfiguration benchmark, of ours or of the peer: configures its group when it is told to.

It reads a JSON line an order (store address, rank, world size) and answers with one: the time that building the group
took, in milliseconds. Each group reduces once, outside the clock, so that it is known to work.

Law of this file: started as a module under the interpreter that has the system installed; imports nothing of ours or
the peer's before it knows which is asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=30)
Configure = Callable[[str, int, int], None]


def of_tft() -> tuple[Any, Configure]:
    """Ours."""
    from tft_pg import ProcessGroupGloo

    group = ProcessGroupGloo(timeout=TIMEOUT)
    return group, lambda address, rank, world_size: group.configure(address, rank, world_size)


def of_torchft() -> tuple[Any, Configure]:
    """The peer's, through its public function for use without a Manager."""
    from torchft.process_group import ProcessGroupGloo, reconfigure_with_store

    group = ProcessGroupGloo(timeout=TIMEOUT)
    return group, lambda address, rank, world_size: reconfigure_with_store(group, address, rank, world_size, TIMEOUT)


SYSTEMS = {"tft": of_tft, "torchft": of_torchft}


def main() -> None:
    """Obey until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=sorted(SYSTEMS), required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    group, configure = SYSTEMS[arguments.system]()
    for line in sys.stdin:
        order = json.loads(line)
        began_s = time.perf_counter()
        configure(order["address"], order["rank"], order["world_size"])
        took_ms = (time.perf_counter() - began_s) * 1e3
        tensor = torch.ones(1)
        options = dist.AllreduceOptions()
        group.allreduce([tensor], options).wait()
        assert tensor.item() == order["world_size"], tensor
        json.dump({"took_ms": took_ms}, sys.stdout)
        sys.stdout.write("\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
