"""A tft job on torchft's own lighthouse, with the command of its wheel and default settings.

The job trains, loses a replica, takes it back and heals it. It goes on when that lighthouse is killed and counts from 1
again (scenario 15).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from integration_tests.conftest import Kill, Spawn
from integration_tests.lighthouse_program import LighthouseProgram
from integration_tests.torchft_peer import OF_A_SHELL, torchft_lighthouse
from integration_tests.training import Job, Trainer
from tft_lighthouse import LighthouseServer


@pytest.fixture
def lighthouse(torchft_python: Path, tmp_path: Path) -> Iterator[LighthouseProgram]:
    settings = {"min_replicas": 1, "join_timeout_ms": 3_000, "heartbeat_timeout_ms": 2_000, "quorum_tick_ms": 20}
    command: list[str | Path] = [
        torchft_lighthouse(torchft_python),
        *(f"--{name}={value}" for name, value in settings.items()),
    ]
    program = LighthouseProgram(command, tmp_path / "lighthouse.log", environment={**OF_A_SHELL, "RUST_LOG": "info"})
    program.start()
    yield program
    program.end()


def together(*trainers: Trainer) -> Callable[[], bool]:
    return lambda: all(trainer.committed_with(len(trainers)) for trainer in trainers)


@pytest.mark.in_parts
@pytest.mark.timeout(180)
def test_a_job_of_ours_trains_heals_and_outlives_a_restart_on_torchfts_lighthouse(
    lighthouse: LighthouseProgram, spawn: Spawn, kill: Kill
) -> None:
    job = Job(spawn, cast(LighthouseServer, lighthouse))
    a, b = job.start("a"), job.start("b")
    job.until(together(a, b), "both commit together")

    kill(b.process.pid or 0)
    job.until(lambda: a.committed_with(1), "the survivor goes on alone")
    b = job.start("b")
    job.until(together(a, b), "both commit together again")
    assert len(b.of_kind("healed")) == 1

    lighthouse.kill()
    lighthouse.start()
    step = max(a.step, b.step)
    job.until(lambda: min(a.step, b.step) > step + 10 and together(a, b)(), "both commit together on the new one")
    assert a.ended is None
    assert b.ended is None
    job.finish([a, b])
    assert job.check_digests() > 10
