"""A replica that leaves on purpose costs the others no step and no wait. A replica that is killed by order ends."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import pytest

from integration_tests.conftest import Spawn
from integration_tests.training import Event, Job, Launcher, Trainer
from tft_coord import LighthouseClient, ManagerClient, RefusedError
from tft_lighthouse import LighthouseServer

pytestmark = pytest.mark.timeout(180)  # several lives of real processes, on a machine that may be busy

# Waits for a replica that has left, and losses by silence alone, would take this long.
JOIN_TIMEOUT_MS: Final = 30_000
WAITED_S: Final = 10.0
SOON: Final = timedelta(seconds=20)
OPTIONS: Final[dict[str, Any]] = {"leaves": True, "batch_s": 0.02, "timeout": timedelta(seconds=30)}


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", join_timeout_ms=JOIN_TIMEOUT_MS, heartbeat_timeout_ms=20_000) as lighthouse:
        yield lighthouse


@pytest.fixture
def job(spawn: Spawn, lighthouse: LighthouseServer) -> Job:
    return Job(spawn, lighthouse)


def train_together(job: Job, trainers: Sequence[Trainer], participants: int) -> None:
    job.until(lambda: all(each.committed_with(participants) for each in trainers), "all commit together")


def ends_well(job: Job, leavers: Iterable[Trainer]) -> int:
    """Check that these left after the same step and that their processes ended well. Return that step."""
    leavers = list(leavers)
    job.until(lambda: all(each.ended for each in leavers), "those that leave end")
    for each in leavers:
        assert each.ended == Event("end"), job.history()
        each.process.join(SOON.total_seconds())
        assert each.process.exitcode == 0
    (last,) = {each.step for each in leavers}
    return last


def lost_nothing(job: Job, survivors: Sequence[Trainer], last: int, before: int, after: int) -> None:
    """Check that each step since they trained together was committed, and that no wait took long."""
    job.until(lambda: all(each.step >= last + 10 for each in survivors), "the others go on")
    for each in survivors:
        began = next(index for index, event in enumerate(each.events) if event.participants == before)
        since = each.events[began:]
        assert [event for event in since if event.kind != "commit"] == [], job.history()
        steps = [event.step for event in since]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
        with_all = [event.step for event in since if event.participants == before]
        assert with_all[-1] == last
        assert {event.participants for event in since if event.step > last} == {after}
        waited_s = max(later.at_s - earlier.at_s for earlier, later in itertools.pairwise(since))
        assert waited_s < WAITED_S


def test_sigterm_to_one_of_three_costs_the_others_no_step_and_no_waiting(job: Job) -> None:
    trainers = [job.start(name, **OPTIONS) for name in ("a", "b", "c")]
    train_together(job, trainers, 3)
    os.kill(trainers[2].process.pid or 0, signal.SIGTERM)
    last = ends_well(job, trainers[2:])
    lost_nothing(job, trainers[:2], last, 3, 2)
    job.finish(trainers[:2])


@pytest.mark.in_parts
def test_a_group_of_two_leaves_whole_when_one_rank_hears_of_it(job: Job) -> None:
    launchers = [Launcher(job, name) for name in ("a", "b")]
    first, second = (launcher.start(**OPTIONS) for launcher in launchers)
    train_together(job, first + second, 2)
    os.kill(second[1].process.pid or 0, signal.SIGTERM)
    last = ends_well(job, second)
    lost_nothing(job, first, last, 2, 1)
    job.finish(first)


@pytest.mark.in_parts
def test_a_drained_replica_leaves_and_says_who_asked(job: Job, lighthouse: LighthouseServer) -> None:
    trainers = [job.start(name, **OPTIONS) for name in ("a", "b")]
    train_together(job, trainers, 2)
    with LighthouseClient(str(lighthouse.address), SOON) as operator:
        with pytest.raises(RefusedError, match="has no running replica 'z'; running replicas: a:"):
            operator.drain("default", "z")
        operator.drain("default", "b", reason="its host goes down")
    last = ends_well(job, trainers[1:])
    lost_nothing(job, trainers[:1], last, 2, 1)
    job.finish(trainers[:1])


@pytest.mark.in_parts
def test_the_only_source_leaves_when_the_newcomer_has_its_state(job: Job) -> None:
    source = job.start("a", **OPTIONS)
    job.until(lambda: source.step >= 20, "the first trains alone")
    newcomer = job.start("b", **OPTIONS)
    job.until(lambda: newcomer.of_kind("ready") != [], "another one joins")
    job.until(lambda: any(event.participants == 2 for event in source.events), "they are in one quorum")
    os.kill(source.process.pid or 0, signal.SIGTERM)
    last = ends_well(job, [source])
    job.until(lambda: newcomer.step >= last + 5, "the newcomer goes on from its state")
    assert newcomer.of_kind("healed") != []
    job.finish([newcomer])


@pytest.mark.in_parts
def test_a_kill_ends_every_process_of_the_group_with_exit_code_one(job: Job) -> None:
    launcher = Launcher(job, "a")
    ranks = launcher.start(**OPTIONS)
    job.until(lambda: all(rank.step >= 3 for rank in ranks), "the group trains")
    server = ranks[0].manager_server()
    (port,) = {each.laddr.port for each in server.net_connections(kind="tcp") if each.status == "LISTEN"}
    with ManagerClient(f"127.0.0.1:{port}", SOON) as operator:
        operator.kill("it is wedged", SOON)
    for rank in ranks:
        rank.process.join(SOON.total_seconds())
        assert rank.process.exitcode == 1
    server.wait(SOON.total_seconds())


@pytest.mark.in_parts
def test_while_the_lighthouse_is_away_who_leaves_waits_no_longer_than_its_deadline(
    job: Job, lighthouse: LighthouseServer
) -> None:
    trainer = job.start("a", **{**OPTIONS, "heal_timeout": timedelta(seconds=2)})  # the deadline, too
    job.until(lambda: trainer.step >= 3, "it trains")
    lighthouse.shutdown()
    os.kill(trainer.process.pid or 0, signal.SIGTERM)
    ends_well(job, [trainer])  # long before its quorum_timeout
