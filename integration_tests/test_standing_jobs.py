"""Jobs of several processes with a standing quorum, while the lighthouse is killed or stopped."""

from __future__ import annotations

import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, cast

import pytest

from integration_tests.conftest import Kill, Spawn
from integration_tests.lighthouse_program import LighthouseProgram
from integration_tests.training import Job, Spec, Trainer, train
from tft_lighthouse import LighthouseServer

pytestmark = pytest.mark.timeout(180)

NAMES: Final = "abcd"
OF_A_TRAINER: Final = "trainer: "  # prefix of each of its lines, but not of those of its manager server
STEADY_STEPS: Final = 40
DEFAULT_LEASE_S: Final = 60.0
QUORUM_TIMEOUT_S: Final = 70.0  # the default
LAST_ROUND_S: Final = 1.5  # for the current round at the end of the lease, on a busy machine
# Longer than any random delay of a step here, and shorter than any wait for an absent lighthouse.
LATE_S: Final = 1.0


def train_with_a_log(spec: Spec, log: Path, connection: Connection) -> None:
    """Run `train`, with the output of this process and of its manager server in a file."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=f"{OF_A_TRAINER}%(message)s", force=True)
    train(spec, connection)


class StandingJob:
    """Trainers of several processes, and their lighthouse, which is a program.

    Args:
        spawn: the fixture.
        folder: for their output.
        names: of the trainers.
        settings: for their Managers.
    """

    def __init__(self, spawn: Spawn, folder: Path, names: str = NAMES, **settings: Any) -> None:
        self._folder = folder
        self._settings = settings
        command: list[str | Path] = [Path(sys.executable).parent / "tft-lighthouse"]
        limits = ["--min_replicas=1", "--join_timeout_ms=10000", "--heartbeat_timeout_ms=3000"]
        self.lighthouse = LighthouseProgram([*command, *limits], folder / "lighthouse")
        self.lighthouse.start()
        self.job = Job(spawn, cast(LighthouseServer, self.lighthouse))
        self.trainers = [self.start(name) for name in names]
        self.train_together(STEADY_STEPS)

    def start(self, name: str) -> Trainer:
        spec = Spec(self.lighthouse.address, name, batch_s=0.02, settings=self._settings)
        return self.job.add(name, train_with_a_log, spec, self._folder / name)

    def train_together(self, steps: int) -> None:
        """Wait until all have committed that many further steps, the last ones together."""
        last = max((each.step for each in self.trainers), default=0) + steps
        self.job.until(
            lambda: all(each.step >= last and each.committed_with(len(self.trainers)) for each in self.trainers),
            f"all have committed step {last} together",
        )

    def listen(self, until: Callable[[], bool]) -> None:
        """Receive events, if any, until the condition holds."""
        while not until():
            self.job.take_in(0.1)

    def listen_for(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        self.listen(lambda: time.monotonic() >= until_s)

    def said(self, name: str) -> tuple[list[str], list[str]]:
        """Return the lines of a trainer and those of its manager server so far."""
        lines = (self._folder / name).read_text(errors="replace").splitlines()
        own = [line for line in lines if line.startswith(OF_A_TRAINER)]
        return own, [line for line in lines if not line.startswith(OF_A_TRAINER)]

    @property
    def num_failed(self) -> list[int]:
        return [len(each.of_kind("failed")) for each in self.trainers]

    @property
    def last_commit_s(self) -> float:
        return max(each.of_kind("commit")[-1].at_s for each in self.trainers)

    def check_all_live(self) -> None:
        assert all(each.ended is None and each.process.exitcode is None for each in self.trainers), self.job.history()


NewJob = Callable[..., StandingJob]


@pytest.fixture
def new_job(spawn: Spawn, tmp_path: Path) -> Iterator[NewJob]:
    """Return `new_job(**settings)`, which creates a job that trains in a standing quorum."""
    made: list[StandingJob] = []

    def make(**settings: Any) -> StandingJob:
        made.append(StandingJob(spawn, tmp_path, **settings))
        return made[-1]

    yield make
    for each in made:
        each.lighthouse.end()


def gaps_of(trainer: Trainer, from_s: float, to_s: float) -> list[float]:
    """Return the times from one commit to the next, in order."""
    at_s = [each.at_s for each in trainer.of_kind("commit") if from_s <= each.at_s <= to_s]
    return [later - earlier for earlier, later in pairwise(at_s)]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)))]


SOAK: Final = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.mark.in_parts
@pytest.mark.parametrize("away_s", [5.0, pytest.param(30.0, marks=SOAK)])
def test_a_lighthouse_that_is_killed_costs_four_replicas_no_step(new_job: NewJob, away_s: float) -> None:
    it = new_job()
    it.listen_for(away_s)  # for comparison
    failed, quorums = it.num_failed, it.lighthouse.log_text.count("new quorum")
    said = {name: it.said(name) for name in NAMES}
    killed_s = time.time()
    it.lighthouse.kill()
    it.listen_for(away_s)
    back_s = time.time()
    it.lighthouse.start()
    it.train_together(2 * STEADY_STEPS)
    assert it.num_failed == failed, it.job.history()
    assert it.lighthouse.log_text.count("new quorum") == quorums, "nobody has asked the new one"
    for each in it.trainers:
        before, away = gaps_of(each, killed_s - away_s, killed_s), gaps_of(each, killed_s, back_s)
        spread = {
            what: [f"{1000 * value:.0f} ms" for value in spread_of(gaps)]
            for what, gaps in [("before", before), ("away", away)]
        }
        print(f"{each.name}: {len(before)} and {len(away)} steps; median, 99 %, longest: {spread}")
        assert statistics.median(away) < 2 * statistics.median(before), spread
        assert max(away) < max(before) + LATE_S, spread
    for name in NAMES:
        for new, old in zip(it.said(name), said[name], strict=True):
            print(f"{name} has said: {new[len(old) :]}")
            since = [line for line in new[len(old) :] if "answers again, after" not in line]
            assert len(since) <= 1, since
    it.job.finish()


def spread_of(gaps: list[float]) -> tuple[float, float, float]:
    return statistics.median(gaps), percentile(gaps, 0.99), max(gaps)


@pytest.mark.in_parts
@pytest.mark.parametrize(("lease_s", "away_s"), [(4.0, 7.0), pytest.param(DEFAULT_LEASE_S, 300.0, marks=SOAK)])
def test_rounds_end_with_the_lease_and_go_on_with_the_lighthouse(
    new_job: NewJob, lease_s: float, away_s: float
) -> None:
    it = new_job(lease=timedelta(seconds=lease_s))
    failed = it.num_failed
    killed_s = time.time()
    it.lighthouse.kill()
    it.listen_for(away_s)
    it.check_all_live()
    assert len({each.step for each in it.trainers}) == 1, f"all end after the same round; {it.job.history()}"
    went_on_s = it.last_commit_s - killed_s
    print(f"rounds for {went_on_s:.1f} s, {it.trainers[0].step} steps")
    # The time starts at the last answered beat, which is a beat old at most. All ask at a third of the lease.
    assert lease_s / 4 < went_on_s < lease_s + LAST_ROUND_S
    if away_s < QUORUM_TIMEOUT_S:
        assert it.num_failed == failed, "who asks waits for the lighthouse"
    began_s = time.time()
    it.lighthouse.start()
    it.train_together(STEADY_STEPS)
    commits = [min(event.at_s for event in each.of_kind("commit") if event.at_s > began_s) for each in it.trainers]
    print(f"on again {max(commits) - began_s:.2f} s after it was; failed steps: {it.num_failed}")
    it.job.finish()


@pytest.mark.in_parts
def test_a_replica_dies_and_another_joins_while_the_lighthouse_is_stopped(new_job: NewJob, kill: Kill) -> None:
    it = new_job(names="abc")
    failed = it.num_failed
    it.lighthouse.stop()
    newcomer = it.start("d")
    it.train_together(STEADY_STEPS)
    it.job.until(lambda: bool(newcomer.events), "the newcomer has its manager server")
    it.train_together(STEADY_STEPS)
    assert it.num_failed == failed, "nobody knows of the newcomer, who waits"
    assert newcomer.step == 0

    *survivors, dead = it.trainers
    kill(dead.process.pid or 0)
    it.trainers = survivors
    it.job.until(
        lambda: [len(each.of_kind("failed")) for each in survivors] == [number + 1 for number in failed[:2]],
        "the survivors lose a round",
    )
    steps = [each.step for each in survivors]
    it.listen_for(2.0)
    assert [each.step for each in survivors] == steps, "without a lighthouse there is no other quorum"
    it.check_all_live()

    it.lighthouse.go_on()
    it.trainers = [*survivors, newcomer]
    it.train_together(STEADY_STEPS)
    assert [len(each.of_kind("failed")) for each in survivors] == [number + 1 for number in failed[:2]]
    it.job.finish(it.trainers)
