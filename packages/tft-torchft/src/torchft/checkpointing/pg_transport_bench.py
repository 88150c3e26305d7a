"""Time one transfer over a process group on this machine. Law of this file: one measurement."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torchft.checkpointing.http_transport_bench import state_of
from torchft.checkpointing.pg_transport import PGTransport
from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

__all__ = ["main"]

_WITHIN = timedelta(seconds=600)


def main(argv: Sequence[str]) -> None:
    """Send a state from one rank to another, two threads of this process, and print the time.

    Args:
        argv: the words after the command.
    """
    parser = argparse.ArgumentParser(prog="pg_transport_bench")
    parser.add_argument("--inplace", action="store_true", help="receive into tensors that exist")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--chunk-size", type=int, default=3_000_000, help="bytes of a tensor")
    parser.add_argument("--total-size", type=int, default=12_000_000_000, help="bytes of the state")
    settings = parser.parse_args(argv)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> float:
        """Send as rank 0, or receive as rank 1. Return the seconds that it took."""
        device = torch.device(settings.device if settings.device == "cpu" else f"{settings.device}:{rank}")
        state = state_of(settings.chunk_size, settings.total_size, str(device))
        group: ProcessGroup = ProcessGroupGloo(_WITHIN) if device.type == "cpu" else ProcessGroupNCCL(_WITHIN)
        group.configure(f"localhost:{store.port}/bench", f"replica_{rank}", rank, 2)
        transport: PGTransport[Any] = PGTransport(group, _WITHIN, device, (lambda: state) if settings.inplace else None)
        began_s = time.perf_counter()
        if rank == 0:
            transport.send_checkpoint([1], 1, state, _WITHIN)
        else:
            transport.recv_checkpoint(0, transport.metadata(), 1, _WITHIN)
        took_s = time.perf_counter() - began_s
        transport.shutdown()
        group.shutdown()
        return took_s

    with ThreadPoolExecutor(2) as executor:
        sent_s, received_s = executor.map(run, (0, 1))
    print(f"send {sent_s:.3f} s, receive {received_s:.3f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
