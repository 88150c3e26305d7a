"""The duration of a round's word: eight integers, in groups of 2, 4, 8 and 16 processes on loopback.

python -m benchmarks.word_exchange             seven turns
python -m benchmarks.word_exchange --short     three turns, for a quick look

Four ways are compared: `exchange_word` of a Gloo group with its own choice; the same with direct messages between all
ranks; the same by recursive doubling; an allreduce of eight 64-bit integers of the same group.

They take turns within one run, because machines are shared and noisy. The figure of a turn is the median at rank 0. The
figure of a way is the median of its turns. All processes share the cores of one machine, so in a large group the number
of messages dominates. Over a network the way with fewer messages also has more of them one after the other.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch.distributed import ReduceOp, TCPStore  # type: ignore[attr-defined]

from tft_pg import ProcessGroupGloo, format_store_addr
from tft_pg.backends.live import LiveGroup
from tft_pg.backends.word_line import WordLine

TIMEOUT = timedelta(seconds=60)
JOIN_S = 60
SIZES = (2, 4, 8, 16)
WORDS = tuple(range(8))
WAYS = ("chosen", "direct", "doubling", "allreduce")
WARM_UPS = 20
LAYOUT = "{:>9} {:>11} {:>11} {:>11} {:>11} {:>9}"


def rounds_of(group: ProcessGroupGloo) -> dict[str, Callable[[int], None]]:
    """Return a function for each way that runs one round, by its number."""
    live = group._live
    assert isinstance(live, LiveGroup)
    chosen = live.words
    assert chosen is not None
    lines = {"direct": 1 << 20, "doubling": 1}
    ways = {
        name: WordLine(chosen.lifeline, chosen.where, direct_most=direct_most) for name, direct_most in lines.items()
    }
    tensor = torch.zeros(len(WORDS), dtype=torch.int64)

    def by_line(line: WordLine) -> Callable[[int], None]:
        def exchange(number: int) -> None:
            line.start(WORDS, round_number=number, timeout=TIMEOUT, fail=lambda error: error).wait()

        return exchange

    def allreduce(number: int) -> None:
        group.allreduce([tensor.zero_()], ReduceOp.SUM).wait()

    def exchange_word(number: int) -> None:
        group.exchange_word(WORDS, round_number=number, timeout=TIMEOUT).wait()

    return {"chosen": exchange_word, **{name: by_line(line) for name, line in ways.items()}, "allreduce": allreduce}


def run(port: int, rank: int, size: int, turns: int, results: Connection | None) -> dict[str, float]:
    """Return the milliseconds of each way."""
    torch.set_num_threads(1)
    group = ProcessGroupGloo(TIMEOUT)
    group.configure(format_store_addr("127.0.0.1", port, f"size/{size}"), rank, size)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    number = 0
    for _ in range(turns):
        for name, one_round in rounds_of(group).items():
            repeats = max(400 // size, 30) if name == "allreduce" else max(4000 // size, 100)
            took_ms = []
            for repeat in range(repeats + WARM_UPS):
                number += 1
                began_ns = time.perf_counter_ns()
                one_round(number)
                if repeat >= WARM_UPS:
                    took_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
            found[name].append(statistics.median(took_ms))
    group.linger()
    group.shutdown()
    figures = {name: statistics.median(medians) for name, medians in found.items()}
    if results is not None:
        results.send(figures)
    return figures


def measure(size: int, turns: int) -> dict[str, float]:
    """Return the milliseconds of each way, at rank 0."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    members = [
        context.Process(target=run, args=(store.port, rank, size, turns, None if rank else theirs))
        for rank in range(size)
    ]
    for member in members:
        member.start()
    assert ours.poll(JOIN_S * size), "a process of the benchmark does not answer"
    figures: dict[str, float] = ours.recv()
    for member in members:
        member.join(JOIN_S)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.word_exchange", description="see the file's head")
    parser.add_argument("--short", action="store_true", help="few turns, for a quick look")
    turns = 3 if parser.parse_args(arguments).short else 7
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    print(LAYOUT.format("p50 in ms", "exchange", "direct", "doubling", "allreduce", "ratio"))
    for size in SIZES:
        found = measure(size, turns)
        texts = [f"{found[name]:.4f}" for name in WAYS]
        print(LAYOUT.format(size, *texts, f"{found['chosen'] / found['allreduce']:.3f}"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
