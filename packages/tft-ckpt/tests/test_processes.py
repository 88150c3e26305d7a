"""Between real processes: a source that is killed with signal 9 on the way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

from tft_ckpt import HTTPTransport
from tft_ckpt.testing import assert_same_state, sample_state

BOUND = timedelta(seconds=20)
TOKEN = "of this job"
NUM_BYTES = 48 << 20


def serve(pipe: Connection) -> None:
    """A trainer that offers one state when it is told to, until it is killed or told to end."""
    torch.set_num_threads(1)
    with HTTPTransport[Any](bind="127.0.0.1", token=TOKEN) as transport:
        pipe.send(transport.metadata())
        while pipe.recv() == "offer":
            transport.send_checkpoint([1], 1, sample_state(num_bytes=NUM_BYTES), BOUND)
            pipe.send("offered")


def test_a_source_killed_on_the_way_is_replaced_by_another() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    pipes = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=serve, args=(child,), daemon=True) for _, child in pipes]
    try:
        for process in processes:
            process.start()
        first, second = (parent.recv() for parent, _ in pipes)
        killed = threading.Event()

        def offer(place: int) -> None:
            pipes[place][0].send("offer")
            assert pipes[place][0].recv() == "offered"

        def kill_half_way(done: int, total: int) -> None:
            if done * 2 >= total and not killed.is_set():
                killed.set()
                assert processes[0].pid is not None
                os.kill(processes[0].pid, signal.SIGKILL)
                processes[0].join()
                offer(1)  # not sooner: all that is here came from the first

        offer(0)
        with HTTPTransport[Any](bind="127.0.0.1", token=TOKEN) as receiver:
            got = receiver.recv_checkpoint(0, first, 1, BOUND, sources=[second], progress=kill_half_way)
            report = receiver.last_receive
        assert_same_state(got, sample_state(num_bytes=NUM_BYTES))
        assert killed.is_set()
        assert report is not None
        assert set(report.by_source) == {first, second}
        assert sum(report.by_source.values()) == report.state_bytes
        assert 2 * report.by_source[first] >= report.state_bytes
        assert report.fetched_bytes < 1.1 * report.state_bytes
        pipes[1][0].send("end")
        processes[1].join(BOUND.total_seconds())
        assert processes[1].exitcode == 0
    finally:
        for process in processes:
            if process.is_alive():  # else its number may be another's by now: it is the forkserver's child
                process.kill()
            process.join()
        for parent, child in pipes:
            parent.close()
            child.close()
