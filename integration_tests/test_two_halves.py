"""Equal step numbers are not equal states: two halves of a job each commit step 1001, and one of them heals.

Both continue from the same checkpoint of step 1000, each on another lighthouse. Each commits step 1001 by itself, on
its own data. Then one lighthouse ends, and the halves meet on the other with equal step numbers and different weights.
"""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from integration_tests.conftest import Spawn
from integration_tests.training import Event, Job
from tft_algos import DistributedDataParallel, Manager, Optimizer
from tft_algos.testing import digest
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

pytestmark = pytest.mark.timeout(180)  # several lives of real processes, on a machine that may be busy

STEP = 1000
TOGETHER = 5


def train_half(name: str, lighthouses: str, connection: Connection) -> None:
    """Load the checkpoint, commit one step, wait for a message, and continue."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the checkpoint is the same
    module = torch.nn.Linear(8, 8)
    adam = torch.optim.AdamW(module.parameters(), lr=1e-2)

    def take() -> dict[str, Any]:
        return {"module": module.state_dict(), "optimizer": adam.state_dict()}

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["module"])
        adam.load_state_dict(state["optimizer"])
        connection.send(Event("healed", manager.current_step(), digest(take())))

    with Manager(
        ProcessGroupGloo(),
        load,
        take,
        replica_id=name,
        lighthouse_addr=lighthouses,
        hostname="localhost",
        timeout=timedelta(seconds=10),
    ) as manager:
        manager.load_state_dict({"step": STEP, "batches_committed": 2 * STEP, "lineage": "00000000000003e8"})
        ddp, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
        torch.manual_seed(sum(name.encode()))  # the data differs
        connection.send(Event("ready", digest=digest(take())))
        met = 0
        while met < TOGETHER:
            before = manager.current_step()
            optimizer.zero_grad()
            ddp(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            if manager.current_step() > before:
                met += manager.num_participants() == 2
                lineage = str(manager.state_dict()["lineage"])
                step, participants = manager.current_step(), manager.num_participants()
                connection.send(Event("commit", step, digest(take()), participants, lineage))
                if step == STEP + 1:
                    connection.recv()
    connection.send(Event("end"))


@pytest.mark.in_parts
def test_two_halves_that_each_commit_step_1001_end_with_one_state(spawn: Spawn) -> None:
    settings: dict[str, Any] = {"join_timeout_ms": 2_000, "cluster_id": "two-halves"}
    with LighthouseServer("localhost:0", **settings) as older, LighthouseServer("localhost:0", **settings) as newer:
        job = Job(spawn, newer)
        a = job.add("a", train_half, "a", f"{newer.address},{older.address}")
        b = job.add("b", train_half, "b", f"{older.address},{newer.address}")
        halves = (a, b)
        job.until(lambda: all(half.step == STEP + 1 for half in halves), "each half commits step 1001 by itself")
        first, second = (half.commits[STEP + 1] for half in halves)
        assert a.events[0].digest == b.events[0].digest, "they begin alike"
        assert (first.participants, second.participants) == (1, 1)
        assert first.digest != second.digest
        assert first.text != second.text, "their lineages tell the two steps 1001 apart"

        older.shutdown()
        for half in halves:
            half.connection.send("meet")
        job.until(lambda: all(half.ended for half in halves), "the halves meet, and train together")
    for half in halves:
        assert half.ended == Event("end"), job.history()
    healed = [half.name for half in halves if half.of_kind("healed")]
    assert len(healed) == 1, "one of them took the other's state"
    common = [step for step in a.commits.keys() & b.commits.keys() if a.commits[step].participants == 2]
    assert len(common) >= TOGETHER - 1
    for step in common:
        assert a.commits[step] == b.commits[step], "state and lineage are one from then on"
