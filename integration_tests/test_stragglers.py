"""A replica becomes slow while it trains with two others: the effects of the lighthouse's policy.

Its own part of a step is a sleep, so that the paces are the test's on any machine.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import pytest
import torch

from integration_tests.conftest import Spawn
from integration_tests.training import Event, Job, Trainer
from tft_algos import DistributedDataParallel, Manager, Optimizer
from tft_coord import StragglerAction, StragglerNotice, StragglerPolicy
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

STEP_S: Final = 0.05
SLOW_S: Final = 1.0
LONG_S: Final = 12.0  # one step that ends before the test's patience does
PATIENCE_MS: Final = 2_000
PAUSE_MS: Final = 2_000
STEPS_LOOKED_AT: Final = 10

Start = Callable[[StragglerAction], Job]


@dataclass(frozen=True)
class Spec:
    """The settings of one trainer.

    Args:
        lighthouse: address.
        name: of the replica group.
    """

    lighthouse: str
    name: str


def train(spec: Spec, connection: Connection) -> None:
    """Train until the last step arrives. A received float is the duration of its own part of a step from then on.

    The trainer reports each commit, with its share as text, and each change of its pace.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    own_s, last = STEP_S, -1
    telling = threading.Lock()

    def tell(event: Event) -> None:
        with telling:
            connection.send(event)

    def heard(news: StragglerNotice) -> None:
        tell(Event("pace", text=news.kind.name))

    module = torch.nn.Linear(8, 8)
    with Manager(
        ProcessGroupGloo(),
        replica_id=spec.name,
        lighthouse_addr=spec.lighthouse,
        hostname="localhost",
        on_straggler=heard,
    ) as manager:
        model = DistributedDataParallel(manager, module)
        optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        manager.register_state_dict_fn("model", module.load_state_dict, module.state_dict)
        manager.register_state_dict_fn("optimizer", optimizer.load_state_dict, optimizer.state_dict)
        tell(Event("ready"))
        while last < 0 or manager.current_step() < last:
            while connection.poll():
                told = connection.recv()
                own_s, last = (told, last) if isinstance(told, float) else (own_s, told)
            step = manager.current_step()
            optimizer.zero_grad()
            time.sleep(own_s * manager.status().share)
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            if manager.current_step() > step:
                tell(
                    Event(
                        "commit",
                        manager.current_step(),
                        participants=manager.num_participants(),
                        text=f"{manager.status().share:g}",
                    )
                )
    tell(Event("end"))


@pytest.fixture
def start(spawn: Spawn) -> Iterator[Start]:
    lighthouses: list[LighthouseServer] = []

    def start(action: StragglerAction) -> Job:
        policy = StragglerPolicy(
            action=action, patience_ms=PATIENCE_MS, first_pause_ms=PAUSE_MS, longest_pause_ms=2 * PAUSE_MS
        )
        lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=2, stragglers=policy)
        lighthouses.append(lighthouse)
        job = Job(spawn, lighthouse)
        for name in "abc":
            job.add(name, train, Spec(str(lighthouse.address), name))
        job.until(lambda: len(together(job.trainers[0], 3)) > STEPS_LOOKED_AT, "all three train together")
        return job

    yield start
    for lighthouse in lighthouses:
        lighthouse.shutdown()


def together(trainer: Trainer, participants: int, *, since_s: float = 0.0) -> list[Event]:
    """Return its commits with that many participants."""
    return [each for each in trainer.of_kind("commit") if each.participants == participants and each.at_s > since_s]


def pace_s(commits: list[Event]) -> float:
    """Return the median time of the last few steps."""
    times = [after.at_s - before.at_s for before, after in itertools.pairwise(commits)]
    return statistics.median(times[-STEPS_LOOKED_AT:])


def paces(trainer: Trainer) -> list[str]:
    """Return the reports on its pace."""
    return [event.text for event in trainer.of_kind("pace")]


def end(job: Job) -> None:
    """Stop all at one step."""
    last = max(trainer.step for trainer in job.trainers) + 60
    for trainer in job.trainers:
        trainer.connection.send(last)
    job.until(lambda: all(trainer.ended for trainer in job.trainers), "all end")
    for trainer in job.trainers:
        trainer.process.join(10)


@pytest.mark.in_parts
@pytest.mark.timeout(180)
def test_the_others_train_on_at_their_own_pace_and_it_is_back_when_it_keeps_up(start: Start) -> None:
    job = start(StragglerAction.LEAVE_OUT)
    a, b, c = job.trainers
    c.connection.send(SLOW_S)
    began_s = time.time()
    job.until(lambda: len(together(a, 2)) > 2 * STEPS_LOOKED_AT, "the two others go on without it")
    slow = together(a, 3, since_s=began_s)
    assert len(slow) <= 20, "a few slow steps are enough to know a straggler, also on a busy machine"
    assert pace_s(together(a, 2)) < SLOW_S / 2, job.history()
    assert paces(c)[0] == "LEFT_OUT"
    assert paces(a) == paces(b) == []
    job.until(lambda: "LET_BACK" in paces(c), "it is tried again")
    c.connection.send(STEP_S)
    job.until(lambda: paces(c)[-1] == "KEEPS_UP", "it keeps up again")
    back = c.of_kind("pace")[-1].at_s
    job.until(lambda: len(together(a, 3, since_s=back)) > STEPS_LOOKED_AT, "all three train together again")
    assert pace_s(together(a, 3, since_s=back)) < SLOW_S / 2, job.history()
    end(job)


@pytest.mark.in_parts
@pytest.mark.timeout(180)
def test_a_step_that_takes_far_too_long_is_not_waited_for(start: Start) -> None:
    job = start(StragglerAction.LEAVE_OUT)
    a, _, c = job.trainers
    c.connection.send(LONG_S)
    began_s = time.time()
    job.until(lambda: len(together(a, 2)) > STEPS_LOOKED_AT, "the two others go on without it")
    first = together(a, 2)[0]
    assert first.at_s - began_s < LONG_S - 2, job.history()
    c.connection.send(STEP_S)
    job.until(lambda: "KEEPS_UP" in paces(c), "it keeps up again")
    end(job)


@pytest.mark.in_parts
@pytest.mark.timeout(180)
def test_it_takes_a_smaller_share_and_the_whole_again(start: Start) -> None:
    job = start(StragglerAction.SHRINK)
    a, _, c = job.trainers
    c.connection.send(SLOW_S)
    job.until(lambda: "SHARE" in paces(c), "it is told a share")
    told_s = c.of_kind("pace")[-1].at_s
    job.until(lambda: len(together(a, 3, since_s=told_s)) > 2 * STEPS_LOOKED_AT, "all train on together")
    assert pace_s(together(a, 3, since_s=told_s)) < SLOW_S / 2, job.history()
    assert float(c.of_kind("commit")[-1].text) < 0.5
    c.connection.send(STEP_S)
    job.until(lambda: c.of_kind("commit")[-1].text == "1", "it takes its whole batch again")
    end(job)


@pytest.mark.in_parts
@pytest.mark.timeout(180)
def test_by_default_it_is_warned_of(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    job = start(StragglerAction.WARN)
    a, _, c = job.trainers
    c.connection.send(SLOW_S)
    began_s = time.time()
    job.until(lambda: "SLOW" in paces(c), "it is warned of")
    c.connection.send(STEP_S)
    job.until(lambda: "KEEPS_UP" in paces(c), "it keeps up again")
    assert paces(c) == ["SLOW", "KEEPS_UP"]
    assert not together(a, 2, since_s=began_s)
    end(job)
    said = [record.getMessage() for record in caplog.records if "is a straggler" in record.getMessage()]
    assert len(said) == 1
    assert "its own part of a step takes 1." in said[0]
