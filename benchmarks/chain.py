"""Several sources, and several newcomers: the speed of a state transfer when each source is capped.

`two`: one newcomer reads a state from one capped source, and from two. `chain`: eight newcomers read it at once from
one capped source, and share what they have. Every source and newcomer is a separate process. The first turn pays for
fresh memory everywhere and is not counted.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.row import Row
from tft_ckpt import HTTPTransport

STATE_BYTES = 256 << 20
NUM_TENSORS = 16
CAP_BYTES_PER_S = 200e6
NUM_NEWCOMERS = 8
BOUND = timedelta(seconds=120)
TWO_AT_LEAST = 1.6
CHAIN_AT_MOST = 3.0


def measure_two(*, turns: int) -> Row:
    """Measure one newcomer with two sources, against one newcomer with one source."""
    ratios, rates = [], []
    with _processes(_source, 2) as sources, _processes(_newcomer, 1) as newcomers:
        urls = [each.recv() for each in sources]
        for step in range(turns + 1):
            one = _receive(sources, newcomers, 2 * step, urls[:1])
            two = _receive(sources, newcomers, 2 * step + 1, urls)
            if step == 0:
                continue
            ratios.append(one.wall_s / two.wall_s)
            rates.append((STATE_BYTES / one.wall_s / 1e6, STATE_BYTES / two.wall_s / 1e6))
    ratio = statistics.median(ratios)
    one_rate, two_rate = (statistics.median(each) for each in zip(*rates, strict=True))
    return Row(
        name="two",
        what="2 sources of 200 MB/s, MB/s",
        ours=f"{two_rate:.0f}",
        peer="",
        other=f"1 source: {one_rate:.0f}",
        ratio=ratio,
        bar=f"2 sources at least {TWO_AT_LEAST} x as fast as 1",
        met=ratio >= TWO_AT_LEAST,
    )


def measure_chain(*, turns: int) -> Row:
    """Measure eight newcomers at once with one source, against one newcomer alone."""
    ratios, times, sent = [], [], []
    with _processes(_source, 1) as sources, _processes(_newcomer, NUM_NEWCOMERS) as newcomers:
        urls = [each.recv() for each in sources]
        for step in range(turns + 1):
            one = _receive(sources, newcomers[:1], 2 * step, urls)
            all_of_them = _receive(sources, newcomers, 2 * step + 1, urls)
            if step == 0:
                continue
            ratios.append(all_of_them.wall_s / one.wall_s)
            times.append((one.wall_s, all_of_them.wall_s))
            sent.append(all_of_them.from_sources_bytes / STATE_BYTES)
    ratio = statistics.median(ratios)
    one_s, all_s = (statistics.median(each) for each in zip(*times, strict=True))
    return Row(
        name="chain",
        what=f"{NUM_NEWCOMERS} newcomers from 1 source, s",
        ours=f"{all_s:.2f}",
        peer="",
        other=f"1 newcomer: {one_s:.2f}, sent {statistics.median(sent):.1f} x",
        ratio=ratio,
        bar=f"at most {CHAIN_AT_MOST} x the time of 1",
        met=ratio <= CHAIN_AT_MOST,
    )


@dataclass(frozen=True)
class _Outcome:
    """The result of newcomers that began together: time until the last had the state, and bytes read from sources."""

    wall_s: float
    from_sources_bytes: int


def _receive(
    sources: Sequence[Connection], newcomers: Sequence[Connection], step: int, urls: Sequence[str]
) -> _Outcome:
    for source in sources:
        source.send(step)
    for source in sources:
        source.recv()
    began_s = time.perf_counter()
    for newcomer in newcomers:
        newcomer.send((step, list(urls)))
    by_source = [newcomer.recv() for newcomer in newcomers]
    wall_s = time.perf_counter() - began_s
    return _Outcome(wall_s, sum(count for each in by_source for url, count in each.items() if url in urls))


@contextmanager
def _processes(run: Any, count: int) -> Iterator[list[Connection]]:
    """Run that many processes of a function with one end of a pipe. A None on the pipe ends each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tft_ckpt"])
    pipes: list[Connection] = []
    processes = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            pipes.append(ours)
            processes.append(context.Process(target=run, args=(theirs,), daemon=True))
            processes[-1].start()
            theirs.close()
        yield pipes
    finally:
        for pipe in pipes:
            pipe.send(None)
            pipe.close()
        for process in processes:
            process.join()


def _source(pipe: Connection) -> None:
    state = {f"w{index}": torch.full((STATE_BYTES // NUM_TENSORS // 4,), float(index)) for index in range(NUM_TENSORS)}
    with HTTPTransport[Any](bind="127.0.0.1", token="benchmark", send_bytes_per_s=CAP_BYTES_PER_S) as transport:
        pipe.send(transport.metadata())
        while (step := pipe.recv()) is not None:
            transport.send_checkpoint([1], step, state, BOUND)
            pipe.send(step)


def _newcomer(pipe: Connection) -> None:
    with HTTPTransport[Any](bind="127.0.0.1", token="benchmark", reuse_buffers=True) as transport:
        while (asked := pipe.recv()) is not None:
            step, urls = asked
            transport.recv_checkpoint(0, urls[0], step, BOUND, sources=urls[1:])
            assert transport.last_receive is not None
            pipe.send(dict(transport.last_receive.by_source))
