"""Trainers of other libraries, and a plain training loop: one of two replicas is killed and restarted.

Each program is in a separate file and runs as its user would start it. docs/trainers.md shows shorter ones of the same
kinds, which test_readme.py runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from integration_tests.clients.data import STEPS
from integration_tests.conftest import ROOT, Kill, Launch
from integration_tests.scripts import wait_for
from tft_coord import LighthouseClient
from tft_lighthouse import LighthouseServer

TOGETHER: Final = r"^step (\d+) participants 2 loss"
ALONE: Final = r"^step (\d+) participants 1 loss"
LEARNT: Final = 0.2  # share of the loss of an untrained model
RESUMED_AT: Final = STEPS - 20  # programs write a checkpoint every 20 steps
SECONDS_TO_END: Final = 120
SLOW_S: Final = 0.1  # a batch has 8 samples
SLOWER_S: Final = 0.3  # pace while a replica starts

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000) as server:
        yield server


@pytest.fixture
def start(launch: Launch, lighthouse: LighthouseServer, tmp_path: Path) -> Start:
    """Return `start(program, replica, *flags)`, which starts a program as one replica."""

    def start_program(program: str, replica: int, *flags: str) -> subprocess.Popen[str]:
        environment = {
            "TFT_LIGHTHOUSE": str(lighthouse.address),
            "REPLICA_GROUP_ID": str(replica),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "huggingface"),
        }
        command = [sys.executable, "-m", f"integration_tests.clients.{program}", str(tmp_path), *flags]
        return launch(command, env=environment, cwd=tmp_path)

    return start_program


def set_pace(folder: Path, seconds: float) -> None:
    """Set the duration of every sample, so that the programs can't reach their last step before the test is ready."""
    (folder / "pace.new").write_text(str(seconds))
    (folder / "pace.new").replace(folder / "pace")


def ended(process: subprocess.Popen[str]) -> tuple[dict[int, str], dict[int, str], str]:
    """Return the losses printed since the last read by step, with two participants and alone, and the last line."""
    output, _ = process.communicate(timeout=SECONDS_TO_END)
    assert process.returncode == 0, output
    assert "fork_posix" not in output, "a forked worker is silent"
    together, alone = (
        {int(step): loss for step, loss in re.findall(rf"^step (\d+) participants {number} loss (\S+)$", output, re.M)}
        for number in (2, 1)
    )
    end = re.search(r"^end step .*$", output, re.M)
    assert end is not None, output
    return together, alone, end.group()


@pytest.mark.in_parts
@pytest.mark.timeout(300)  # on a busy machine, or some 15 s on an idle one
@pytest.mark.parametrize("program", ["huggingface_trainer", "accelerate_loop", "lightning_trainer", "plain_loop"])
def test_one_of_two_is_killed_started_again_and_goes_on_with_the_others_state(
    program: str, start: Start, kill: Kill, lighthouse: LighthouseServer, tmp_path: Path
) -> None:
    set_pace(tmp_path, SLOW_S)
    first, second = start(program, 0), start(program, 1)
    began = wait_for(r"^step \d+ participants \d loss (\S+)", first)
    wait_for(TOGETHER, first)
    wait_for(TOGETHER, second)
    kill(second.pid)
    killed_at = int(wait_for(ALONE, first)[1])
    set_pace(tmp_path, SLOWER_S)
    second = start(program, 1)
    joined = wait_for(rf"{TOGETHER} (\S+)", second)
    (tmp_path / "pace").unlink()

    of_second, alone, end_of_second = ended(second)
    of_first, _, end_of_first = ended(first)
    assert end_of_first == end_of_second
    assert end_of_first.startswith(f"end step {STEPS} digest ")
    assert int(joined[1]) > killed_at, "it continues at the step of the job"
    assert float(joined[2]) < float(began[1]), "it continues with the state of the job"
    assert not alone, "it never trains on its own"
    assert len(of_second) > 20
    assert {step: of_first.get(step) for step in of_second} == of_second, "equal steps are equal models"
    assert float(of_second[STEPS]) < LEARNT * float(began[1])
    if program in ("huggingface_trainer", "lightning_trainer"):
        shutil.rmtree(tmp_path / "checkpoints" / f"checkpoint-{STEPS}", ignore_errors=True)
        set_pace(tmp_path, SLOW_S)
        third = start(program, 0, "--resume")
        resumed = wait_for(rf"{ALONE} (\S+)", third)
        assert int(resumed[1]) == RESUMED_AT + 1
        assert float(resumed[2]) < LEARNT * float(began[1])
        LighthouseClient(str(lighthouse.address)).drain("default", "replica_0")
        _, _, end = ended(third)
        assert RESUMED_AT < int(end.split()[2]) < STEPS, "it ends after the step in which it was drained"
