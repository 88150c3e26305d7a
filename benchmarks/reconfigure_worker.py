"""One member of the reconfiguration benchmark: it configures its group of tft, of torch or of torchft on request.

An order is one JSON line (store address, rank, world size). The answer is one line: the time for building the group, in
milliseconds. Each group reduces once, outside the measured time, to show that it works.

Law of this file: started as a module under the interpreter that has the system installed. It imports no package of
either system before it knows the requested one.
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
    """Return a group of tft, and its configure function."""
    from tft_pg import ProcessGroupGloo

    group = ProcessGroupGloo(timeout=TIMEOUT)
    return group, lambda address, rank, world_size: group.configure(address, rank, world_size)


def of_torch() -> tuple[Any, Configure]:
    """Return torch's own group that reconfigures, in tft's adapter, and its configure function."""
    from tft_pg import ReconfigurableProcessGroup, parse_store_addr
    from tft_pg.testing import reconfigurable_gloo

    group = _Late()

    def configure(address: str, rank: int, world_size: int) -> None:
        if group.made is None:  # all groups share the store of the benchmark
            torchs = reconfigurable_gloo(parse_store_addr(address).port, stand_in=False)
            group.made = ReconfigurableProcessGroup(torchs, timeout=TIMEOUT)
        group.made.configure(address, rank, world_size)

    return group, configure


class _Late:
    """A group that is made with its first configure."""

    made: Any = None

    def allreduce(self, *args: object) -> Any:
        return self.made.allreduce(*args)


def of_torchft() -> tuple[Any, Configure]:
    """Return a group of the peer, configured through its public function for use without a Manager."""
    from torchft.process_group import ProcessGroupGloo, reconfigure_with_store

    group = ProcessGroupGloo(timeout=TIMEOUT)
    return group, lambda address, rank, world_size: reconfigure_with_store(group, address, rank, world_size, TIMEOUT)


SYSTEMS = {"tft": of_tft, "torch": of_torch, "torchft": of_torchft}


def main() -> None:
    """Perform orders until standard input ends."""
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
