"""Time one transfer over HTTP on this machine. Law of this file: one measurement."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from torchft.checkpointing.http_transport import HTTPTransport

__all__ = ["main"]

_WITHIN = timedelta(seconds=600)


def main(argv: Sequence[str]) -> None:
    """Send a state from one transport to another, and print the time.

    Args:
        argv: the words after the command.
    """
    parser = argparse.ArgumentParser(prog="http_transport_bench")
    parser.add_argument("--num-chunks", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--chunk-size", type=int, default=3_000_000, help="bytes of a tensor")
    parser.add_argument("--total-size", type=int, default=12_000_000_000, help="bytes of the state")
    settings = parser.parse_args(argv)
    state = state_of(settings.chunk_size, settings.total_size, settings.device)
    source: HTTPTransport[Any] = HTTPTransport(_WITHIN, settings.num_chunks)
    receiver: HTTPTransport[Any] = HTTPTransport(_WITHIN, settings.num_chunks)
    try:
        began_s = time.perf_counter()
        source.send_checkpoint([1], 1, state, _WITHIN)
        sent_s = time.perf_counter()
        receiver.recv_checkpoint(0, source.metadata(), 1, _WITHIN)
        print(f"send {sent_s - began_s:.3f} s, receive {time.perf_counter() - sent_s:.3f} s", flush=True)
    finally:
        receiver.shutdown()
        source.shutdown()


def state_of(chunk_bytes: int, total_bytes: int, device: str) -> dict[str, torch.Tensor]:
    """Return a state of that many bytes, in tensors of that many bytes."""
    return {
        f"chunk_{begin}": torch.zeros(min(chunk_bytes, total_bytes - begin), dtype=torch.uint8, device=device)
        for begin in range(0, total_bytes, chunk_bytes)
    }


if __name__ == "__main__":
    main(sys.argv[1:])
