"""Between a verdict and the next quorum: the loss and the tokens of the past step, reduced by all that can."""

from __future__ import annotations

import multiprocessing.connection
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from integration_tests.conftest import Spawn
from integration_tests.training import Event, Job, Trainer
from tft_algos import Manager
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

LOSS: Final = {"a": 1.5, "b": 4.0}
TOKENS: Final = {"a": 2**40, "b": 3}  # more than a float can count exactly
FAILS_AT: Final = 3  # number of the failing step, among those with two participants
DIES_AT: Final = 5
LAST: Final = 8


@dataclass(frozen=True)
class Told:
    """The reductions of a replica after a verdict.

    Args:
        number: of the step, among those with two participants. 0: it had one.
        committed: the verdict.
        worked: whether each reduction succeeded.
        results: sum of the losses, greatest loss, sum of the tokens, greatest number of tokens, mean of the losses.
        kind: the kind for `Trainer.of_kind`.
    """

    number: int
    committed: bool
    worked: tuple[bool, ...]
    results: tuple[float, ...]
    kind: str = "told"


def train(lighthouse: str, name: str, dies: bool, connection: Connection) -> None:
    torch.set_num_threads(1)
    weights = torch.zeros(4)
    with Manager(
        ProcessGroupGloo(),
        lambda state: weights.copy_(state["weights"]),
        lambda: {"weights": weights},
        replica_id=name,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        timeout=timedelta(seconds=20),
    ) as manager:
        together, alone_since = 0, 0
        while together < LAST and alone_since < 3:
            manager.start_quorum()
            gradient = torch.ones(4)
            manager.allreduce(gradient).wait()
            is_shared = manager.num_participants() == 2
            together += is_shared
            alone_since = 0 if is_shared or together < DIES_AT else alone_since + 1
            if name == "b" and is_shared and together == FAILS_AT:
                manager.report_error(ValueError("the gradient is no number"))
            committed = manager.should_commit()
            if committed:
                weights += gradient
            if dies and is_shared and together == DIES_AT:
                os._exit(0)
            tensors = (
                torch.tensor([LOSS[name]]),
                torch.tensor([LOSS[name]]),
                torch.tensor([TOKENS[name]]),
                torch.tensor([TOKENS[name]]),
                torch.tensor([LOSS[name]]),
            )
            reduce_op = dist.ReduceOp
            ops = (reduce_op.SUM, reduce_op.MAX, reduce_op.SUM, reduce_op.MAX, reduce_op.AVG)
            works = [manager.allreduce(tensor, reduce_op=op) for tensor, op in zip(tensors, ops, strict=True)]
            worked = tuple(work.wait() for work in works)
            results = tuple(tensor.item() for tensor in tensors)
            connection.send(Told(together if is_shared else 0, committed, worked, results))
    connection.send(Event("end"))


def start(job: Job, spawn: Spawn, lighthouse: LighthouseServer, name: str, dies: bool = False) -> Trainer:
    ours, theirs = multiprocessing.connection.Pipe()
    trainer = Trainer(name, spawn(train, str(lighthouse.address), name, dies, theirs), ours)
    theirs.close()
    job.trainers.append(trainer)
    return trainer


def told_by(trainer: Trainer) -> list[Any]:
    return list(trainer.of_kind("told"))


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=5_000, heartbeat_timeout_ms=3_000) as server:
        yield server


def both(loss: float, greatest: float, tokens: int, most: int, mean: float) -> tuple[float, ...]:
    return (loss, greatest, tokens, most, mean)


OF_BOTH: Final = both(5.5, 4.0, 2**40 + 3, 2**40, 2.75)
OF_A: Final = both(1.5, 1.5, 2**40, 2**40, 1.5)


@pytest.mark.in_parts
def test_one_has_an_error_so_nobody_commits_and_both_reduce_nothing(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    job = Job(spawn, lighthouse)
    a, b = start(job, spawn, lighthouse, "a"), start(job, spawn, lighthouse, "b")
    job.until(lambda: a.ended is not None and b.ended is not None, "both end")
    told = {trainer.name: {each.number: each for each in told_by(trainer) if each.number} for trainer in (a, b)}
    # Each tells the other of its error, so neither commits the step. Sums are over replicas that have committed.
    for of_one in told.values():
        assert [number for number, each in of_one.items() if not each.committed] == [FAILS_AT]
        assert of_one[FAILS_AT].results[:4] == (0.0, -float("inf"), 0, torch.iinfo(torch.int64).min)
        assert of_one[FAILS_AT].worked == (True, True, True, True, False), "a mean of nothing is none"
        assert {each.results for number, each in of_one.items() if number != FAILS_AT} == {OF_BOTH}
    assert all(all(each.worked) for each in told_by(a) + told_by(b) if each.number != FAILS_AT)


@pytest.mark.in_parts
def test_who_dies_after_the_verdict_costs_the_others_no_step(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    job = Job(spawn, lighthouse)
    a, _ = start(job, spawn, lighthouse, "a"), start(job, spawn, lighthouse, "b", dies=True)
    job.until(lambda: a.ended is not None, "the survivor ends")
    (failure,) = [told for told in told_by(a) if not any(told.worked)]
    assert (failure.number, failure.committed, any(failure.worked)) == (DIES_AT, True, False)
    assert [told.committed for told in told_by(a)[-3:]] == [True, True, True]
    assert told_by(a)[-1].results == OF_A
