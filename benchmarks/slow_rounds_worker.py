"""One island of the benchmark of DiLoCo rounds: it trains so many rounds on request, and says how long they took.

An order is a JSON line, and so is its answer.

Law of this file: one process and its computation. The parent owns the link and the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta
from typing import Final

import torch
from torch import nn

from benchmarks.step_worker import SECRET, report
from tft_algos.local_sgd.quantization import SyncCodec
from tft_algos.quantization import ErrorFeedback, TopK
from tft_suite import DiLoCo, Manager, ProcessGroupGloo

ISLANDS: Final = 2
SYNC_EVERY: Final = 2
SEQUENCES: Final = 4
LIMIT: Final = timedelta(seconds=120)


def codec_of(kind: str, manager: Manager) -> SyncCodec:
    """Return how DiLoCo quantizes."""
    if kind == "float32":
        return False
    return ErrorFeedback(manager, TopK() if kind == "top k" else None)


def train(arguments: argparse.Namespace) -> None:
    """Perform orders until standard input ends."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(arguments.width, arguments.width, bias=False) for _ in range(arguments.layers)])
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Manager(
        ProcessGroupGloo(timeout=LIMIT),
        replica_id=f"island_{arguments.island}",
        lighthouse_addr=arguments.lighthouse,
        hostname=arguments.hostname,
        token=SECRET,
        min_replica_size=ISLANDS,
        timeout=LIMIT,
    ) as manager:
        chosen = codec_of(arguments.kind, manager)
        with DiLoCo(manager, [model], inner, outer, SYNC_EVERY, use_bucketization=True, should_quantize=chosen):
            report(step=manager.current_step())
            for line in sys.stdin:
                last = manager.current_step() + json.loads(line)["rounds"]
                begun_s, used_s = time.perf_counter(), time.process_time()
                while manager.current_step() < last:
                    inner.zero_grad(set_to_none=False)
                    model(torch.randn(SEQUENCES, arguments.width)).square().mean().backward()
                    inner.step()
                report(seconds=time.perf_counter() - begun_s, cpu_seconds=time.process_time() - used_s)


def main() -> None:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["tft"], required=True)
    for flag in ("island", "layers", "width"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    for flag in ("kind", "hostname", "lighthouse"):
        parser.add_argument(f"--{flag}", required=True)
    torch.set_num_threads(1)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
