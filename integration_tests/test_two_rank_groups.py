"""Replica groups of two processes: they average inside first, heal whole, and are lost whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration_tests.conftest import Kill, Spawn
from integration_tests.training import Job, Launcher
from tft_lighthouse import LighthouseServer


@pytest.fixture
def job(spawn: Spawn) -> Iterator[Job]:
    with LighthouseServer("127.0.0.1:0", join_timeout_ms=5_000, heartbeat_timeout_ms=3_000) as lighthouse:
        yield Job(spawn, lighthouse)


@pytest.mark.in_parts
def test_a_group_of_two_joins_heals_whole_dies_and_comes_back_to_the_same_store(job: Job, kill: Kill) -> None:
    launchers = [Launcher(job, name) for name in ("a", "b")]
    first = launchers[0].start()
    job.until(lambda: all(trainer.step >= 20 for trainer in first), "the first group trains alone")
    second = launchers[1].start()
    job.until(lambda: all(trainer.committed_with(2) for trainer in first + second), "both groups commit together")
    assert [len(trainer.of_kind("healed")) for trainer in first + second] == [0, 0, 1, 1]
    # One rank dies. Its group is lost, and the other rank ends with an error that reports it.
    kill(second[0].process.pid or 0)
    job.until(lambda: second[1].ended is not None, "the other rank ends")
    assert "ReplicaGroupLostError" in second[1].events[-1].text
    job.until(lambda: all(trainer.committed_with(1) for trainer in first), "the first group goes on alone")
    # The store still holds the entries of the lost start of the group.
    again = launchers[1].start()
    job.until(lambda: all(trainer.committed_with(2) for trainer in first + again), "both groups commit together again")
    job.finish(first + again)
    assert [len(trainer.of_kind("healed")) for trainer in again] == [1, 1]


@pytest.mark.in_parts
def test_a_group_of_two_whose_manager_server_died_is_lost_and_says_so(job: Job) -> None:
    launcher = Launcher(job, "a")
    ranks = launcher.start()
    job.until(lambda: all(trainer.step >= 5 for trainer in ranks), "the group trains")
    ranks[0].manager_server().kill()
    job.until(lambda: all(trainer.ended for trainer in ranks), "both ranks end")
    for trainer in ranks:
        assert "ReplicaGroupLostError: the manager server of replica a:" in trainer.events[-1].text
