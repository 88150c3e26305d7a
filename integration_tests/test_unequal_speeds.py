"""Two islands, one of which computes half as fast: with half its `sync_every` it costs the other next to nothing.

A step computes by sleeping, so that the speeds are the test's on any machine. The cost of a sync is the time between
the end of the inner optimizer's own step and the end of the hook behind it. All of a sync happens there: waiting for
the others, sending and the outer step.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import pytest
import torch

from integration_tests.conftest import Spawn
from integration_tests.syncs import WIDTHS, make_fragments
from integration_tests.training import Event, Job, Trainer
from tft_algos import DiLoCo, Manager
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

STEP_S: Final = 0.02
FRAGMENTS: Final = 2
STEPS: Final = 48  # of the fast island, from one sync of a fragment to its next
DELAY: Final = 8
SYNCS: Final = 7
MOST: Final = 0.05  # of a round


@dataclass(frozen=True)
class Island:
    """The settings of one island.

    Args:
        lighthouse: address.
        name: of the replica group.
        step_s: duration of its step.
        sync_every, delay: its own.
    """

    lighthouse: str
    name: str
    step_s: float
    sync_every: int
    delay: int


def train(island: Island, connection: Connection) -> None:
    """Report each commit. Its text is the share of the time since the commit before that the syncs took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, fragments = make_fragments(FRAGMENTS)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = [torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True) for each in fragments]
    last: int | None = None
    stepped_s = 0.0

    def stepped(*_: object) -> None:
        nonlocal stepped_s
        stepped_s = time.perf_counter()

    inner.register_step_post_hook(stepped)  # registered before the hook of the syncs, so it runs first
    with (
        Manager(
            ProcessGroupGloo(),
            replica_id=island.name,
            lighthouse_addr=island.lighthouse,
            hostname="localhost",
            min_replica_size=2,
        ) as manager,
        DiLoCo(
            manager,
            fragments,
            inner,
            outer,
            sync_every=island.sync_every,
            fragment_sync_delay=island.delay,
            use_bucketization=True,
        ),
    ):
        step, since_s, taken_s = manager.current_step(), time.perf_counter(), 0.0
        connection.send(Event("ready"))
        while last is None or manager.current_step() < last:
            while connection.poll():
                last = connection.recv()
            inner.zero_grad()
            model(torch.randn(4, WIDTHS[0])).square().mean().backward()
            time.sleep(island.step_s)
            inner.step()
            now_s = time.perf_counter()
            taken_s += now_s - stepped_s
            if manager.current_step() > step:
                step = manager.current_step()
                part = taken_s / (now_s - since_s)
                connection.send(Event("commit", step, participants=manager.num_participants(), text=f"{part:.4f}"))
                since_s, taken_s = now_s, 0.0
    connection.send(Event("end"))


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=2) as lighthouse:
        yield lighthouse


def cost(spawn: Spawn, lighthouse: LighthouseServer, *, syncs: int, share: int) -> float:
    """Train a fast island with a slow one. Returns: the median share of the fast one's time that syncs take.

    Args:
        spawn: the fixture.
        lighthouse: of the job.
        syncs: number of syncs.
        share: the slow one's sync_every and delay are the fast one's divided by this.
    """
    job, address = Job(spawn, lighthouse), str(lighthouse.address)
    fast = job.add("fast", train, Island(address, "fast", STEP_S, STEPS, DELAY))
    slow = job.add("slow", train, Island(address, "slow", 2 * STEP_S, STEPS // share, DELAY // share))
    both = (fast, slow)
    job.until(lambda: all(len(each.of_kind("commit")) > syncs for each in both), "both sync together")
    end(job, both)
    parts = [float(event.text) for event in fast.of_kind("commit")]
    return statistics.median(itertools.islice(parts, 1, None))  # the islands start before the first


def end(job: Job, trainers: tuple[Trainer, ...]) -> None:
    """Stop all at one sync."""
    last = max(trainer.step for trainer in trainers) + 2
    for trainer in trainers:
        trainer.connection.send(last)
    job.until(lambda: all(trainer.ended for trainer in trainers), "both end")
    assert [trainer.step for trainer in trainers] == [last] * len(trainers), job.history()
    for trainer in trainers:
        trainer.process.join(10)


@pytest.mark.in_parts
@pytest.mark.timeout(90)
def test_with_half_the_steps_it_costs_the_other_next_to_nothing(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    taken = cost(spawn, lighthouse, syncs=SYNCS, share=2)
    assert taken < MOST, f"{taken:.1%} of a round"


@pytest.mark.in_parts
@pytest.mark.timeout(90)
def test_with_as_many_steps_it_costs_the_other_half_of_its_time(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    taken = cost(spawn, lighthouse, syncs=3, share=1)
    assert 0.3 < taken < 0.6, f"{taken:.1%} of a round"
