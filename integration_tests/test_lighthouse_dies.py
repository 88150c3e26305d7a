"""The lighthouse is killed repeatedly with kill -9, and comes back with an empty memory: no trainer ends by it.

Replicas that wait for a quorum wait on (I8). Ids keep rising (I1), so no key names two quorums. A step is lost only to
the death of a trainer. With a second lighthouse of the same cluster no replica waits for the first to come back.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from integration_tests.conftest import Kill, Spawn
from integration_tests.lighthouse_program import LighthouseProgram
from integration_tests.training import Job, Trainer
from tft_lighthouse import LighthouseServer

pytestmark = pytest.mark.timeout(180)  # several lives of real processes, on a machine that may be busy

NEW_QUORUM = re.compile(r"new quorum (\d+), job default")
STEPS_BETWEEN = 10

NewLighthouse = Callable[..., LighthouseProgram]


@pytest.fixture
def new_lighthouse(tmp_path: Path) -> Iterator[NewLighthouse]:
    """Return `new_lighthouse("first")`, which starts a lighthouse. `cluster_id=...` makes it one of several."""
    programs: list[LighthouseProgram] = []

    def start(name: str, **settings: str) -> LighthouseProgram:
        chosen = {"min_replicas": 1, "join_timeout_ms": 3_000, "heartbeat_timeout_ms": 3_000, **settings}
        command: list[str | Path] = [Path(sys.executable).parent / "tft-lighthouse"]
        programs.append(
            LighthouseProgram([*command, *(f"--{key}={value}" for key, value in chosen.items())], tmp_path / name)
        )
        programs[-1].start()
        return programs[-1]

    yield start
    for program in programs:
        program.end()


def together(*trainers: Trainer) -> Callable[[], bool]:
    return lambda: all(trainer.committed_with(len(trainers)) for trainer in trainers)


def go_on(job: Job, *trainers: Trainer) -> None:
    """Wait until all have committed many more steps, together."""
    last = max(trainer.step for trainer in trainers)
    job.until(
        lambda: min(trainer.step for trainer in trainers) > last + STEPS_BETWEEN and together(*trainers)(),
        "all go on together",
    )


@pytest.mark.in_parts
@pytest.mark.parametrize("num_kills", [5, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(1_200)])])
def test_a_lighthouse_that_is_killed_again_and_again_ends_no_trainer(
    new_lighthouse: NewLighthouse, spawn: Spawn, kill: Kill, num_kills: int
) -> None:
    lighthouse = new_lighthouse("lighthouse")
    job = Job(spawn, cast(LighthouseServer, lighthouse))
    trainers = [job.start(name) for name in ("a", "b", "c")]
    job.until(together(*trainers), "all commit together")
    for number in range(num_kills):
        lighthouse.kill()
        if number == num_kills // 2:
            # A trainer dies while no lighthouse can be told, and another life of it comes.
            kill(trainers[2].process.pid or 0)
            trainers[2] = job.start("c")
        lighthouse.start()
        go_on(job, *trainers)
    job.finish(trainers)
    ids = [int(number) for number in NEW_QUORUM.findall(lighthouse.log_text)]
    assert ids == sorted(set(ids)), "ids rise, whoever gives them"
    # The survivors lose a step to the death of a trainer, and none to that of a lighthouse.
    failed = [len(trainer.of_kind("failed")) for trainer in trainers[:2]]
    assert max(failed) <= 3, job.history()


def test_a_second_lighthouse_of_the_cluster_takes_over_at_once(new_lighthouse: NewLighthouse, spawn: Spawn) -> None:
    first, second, stranger = (
        new_lighthouse(name, cluster_id=cluster) for name, cluster in [("1", "ours"), ("2", "ours"), ("3", "other")]
    )
    job = Job(spawn, cast(LighthouseServer, Addresses(first, stranger, second)))
    trainers = [job.start(name) for name in ("a", "b")]
    job.until(together(*trainers), "both commit together")
    assert NEW_QUORUM.findall(second.log_text) == []
    first.kill()
    go_on(job, *trainers)
    # The lighthouse that was started at the first address meanwhile is newer, and is not needed.
    first.start()
    second.kill()
    go_on(job, *trainers)
    job.finish()
    assert all(trainer.of_kind("failed") == [] for trainer in trainers), job.history()
    assert NEW_QUORUM.findall(stranger.log_text) == []


@pytest.mark.in_parts
def test_one_that_was_started_first_stands_in_when_the_newer_one_is_gone(
    new_lighthouse: NewLighthouse, spawn: Spawn
) -> None:
    """The older lighthouse sends the job to the newer one, until that is known to be gone."""
    older, newer = (new_lighthouse(name, cluster_id="ours") for name in ("older", "newer"))
    job = Job(spawn, cast(LighthouseServer, Addresses(newer, older)))
    trainers = [job.start(name) for name in ("a", "b")]
    job.until(together(*trainers), "both commit together")
    newer.kill()
    go_on(job, *trainers)
    job.finish()
    assert all(trainer.of_kind("failed") == [] for trainer in trainers), job.history()


@pytest.mark.in_parts
def test_halves_of_a_job_on_two_lighthouses_of_the_cluster_come_together_on_the_newer(
    new_lighthouse: NewLighthouse, spawn: Spawn
) -> None:
    """Each half has reached another lighthouse first. Alone neither half is enough."""
    older, newer = (new_lighthouse(name, cluster_id="ours", min_replicas="2") for name in ("older", "newer"))
    addresses = Addresses(older, newer)
    job = Job(spawn, cast(LighthouseServer, addresses))
    a = job.start("a")
    job.until(lambda: bool(a.of_kind("ready")), "the first has begun")
    addresses.address = Addresses(newer, older).address
    b = job.start("b")
    job.until(together(a, b), "both commit together")
    job.finish()
    assert NEW_QUORUM.findall(older.log_text) == []


class Addresses:
    """The part of a lighthouse that a Job needs: several addresses."""

    def __init__(self, *lighthouses: LighthouseProgram) -> None:
        self.address = ",".join(each.address for each in lighthouses)
