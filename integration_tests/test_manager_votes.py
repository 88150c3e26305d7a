"""The votes of a group of two ranks, each in a separate process: a verdict belongs to its step."""

from __future__ import annotations

import multiprocessing.connection
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from integration_tests.conftest import Spawn
from tft_algos import Manager
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

PATIENCE_S: Final = 50.0
LATE_AT: Final = 2
STEPS: Final = 6


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1) as server:
        yield server


def vote(lighthouse: str, store_port: int, rank: int, votes_no_at: int | None, connection: Connection) -> None:
    """Run some steps of a rank. Before each vote the rank waits for the test, and then reports the verdict."""
    torch.set_num_threads(1)
    with Manager(
        ProcessGroupGloo(),
        replica_id="a",
        lighthouse_addr=lighthouse,
        hostname="localhost",
        rank=rank,
        world_size=2,
        store_addr="localhost",
        store_port=store_port,
        timeout=timedelta(seconds=20),
    ) as manager:
        while (limit_s := connection.recv()) is not None:
            manager.start_quorum()
            manager.wait_quorum()
            if manager.strategy.attempt - 1 == votes_no_at:
                manager.report_error(ValueError("the gradient is no number"))
            connection.send("ready")
            connection.recv()
            verdict = manager.should_commit(timedelta(seconds=limit_s))
            connection.send((verdict, manager.current_step()))


class Ranks:
    """Both ranks of the group, and the test's ends of their pipes."""

    def __init__(self, spawn: Spawn, lighthouse: LighthouseServer, votes_no_at: int | None = None) -> None:
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(2):
            ours, theirs = multiprocessing.connection.Pipe()
            no_at = votes_no_at if rank == 1 else None
            self.processes.append(spawn(vote, str(lighthouse.address), self.store.port, rank, no_at, theirs))
            theirs.close()
            self.pipes.append(ours)

    def begin(self, *limits_s: float) -> None:
        """Let both begin a step, and stop before its vote."""
        for pipe, limit_s in zip(self.pipes, limits_s, strict=True):
            pipe.send(limit_s)
        for pipe in self.pipes:
            assert self.hear(pipe) == "ready"

    def verdict(self, rank: int) -> tuple[bool, int]:
        """Let a rank vote, and return its verdict."""
        self.pipes[rank].send("vote")
        told: tuple[bool, int] = self.hear(self.pipes[rank])
        return told

    def verdicts(self) -> list[tuple[bool, int]]:
        """Let both vote at the same time, and return their verdicts."""
        for pipe in self.pipes:
            pipe.send("vote")
        return [self.hear(pipe) for pipe in self.pipes]

    def hear(self, pipe: Connection) -> Any:
        assert pipe.poll(PATIENCE_S), "a rank says nothing"
        return pipe.recv()

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(PATIENCE_S)
            assert process.exitcode == 0


@pytest.mark.in_parts
def test_fault_3_a_vote_that_timed_out_does_not_poison_the_next_one(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    ranks = Ranks(spawn, lighthouse)
    step = 0
    for number in range(STEPS):
        late = number == LATE_AT
        ranks.begin(0.3 if late else 20.0, 20.0)
        # Rank 1 comes only after rank 0 has received a no. It receives the same, and no rank has stepped.
        verdicts = [ranks.verdict(0), ranks.verdict(1)] if late else ranks.verdicts()
        step += not late
        assert verdicts == [(not late, step)] * 2, f"step {number}"
    ranks.end()


@pytest.mark.in_parts
def test_a_no_of_one_rank_is_that_of_both_and_of_one_step(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    ranks = Ranks(spawn, lighthouse, votes_no_at=1)
    told = []
    for _ in range(3):
        ranks.begin(20.0, 20.0)
        told.append(ranks.verdicts())
    ranks.end()
    assert told == [[(True, 1)] * 2, [(False, 1)] * 2, [(True, 2)] * 2]
