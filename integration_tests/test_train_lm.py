"""The language model as users start it: shells and torchrun, one killed and started again, and the loss falls."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import psutil
import pytest

from examples.train_lm import Settings, main
from integration_tests.conftest import ROOT, Kill, Launch
from tft_algos import SettingError
from tft_lighthouse import LighthouseServer

EXAMPLE: Final = ROOT / "examples" / "train_lm.py"
SMALL: Final = ("--width=32", "--layers=1", "--context=32", "--batch=12", "--characters=100000", "--print_every=10")
TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=3")
SECONDS_TO_END: Final = 120

pytestmark = pytest.mark.timeout(180)  # eight interpreters import torch, on a machine that may be busy


@pytest.fixture
def lighthouse(request: pytest.FixtureRequest) -> Iterator[LighthouseServer]:
    """With the test's smallest quorum."""
    with LighthouseServer("127.0.0.1:0", min_replicas=request.param, join_timeout_ms=5_000) as server:
        yield server


def shell(replica: int, lighthouse: LighthouseServer) -> dict[str, str]:
    return {"TFT_LIGHTHOUSE": str(lighthouse.address), "REPLICA_GROUP_ID": str(replica), "NUM_REPLICA_GROUPS": "2"}


def wait_for(pattern: str, process: subprocess.Popen[str]) -> re.Match[str]:
    """Read lines until one matches; the test's time-out bounds it."""
    assert process.stdout is not None
    read: list[str] = []
    for line in process.stdout:
        read.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"no line matches {pattern!r}: {''.join(read)}")


def test_it_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 224


@pytest.mark.parametrize("lighthouse", [1], indirect=True)
def test_a_shell_that_is_killed_and_started_again_heals_and_the_loss_falls(
    launch: Launch, kill: Kill, lighthouse: LighthouseServer
) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps=1000000", *SMALL]
    first = launch(command, env=shell(0, lighthouse))
    at_first = float(wait_for(r"step 10 participants 1 loss (\S+)", first)[1])
    for _ in range(2):
        second = launch(command, env=shell(1, lighthouse))
        wait_for(r"healed from replica_0:\S+ to step \d+", second)
        wait_for(r"participants 2 loss", second)
        wait_for(r"participants 2 loss", first)
        kill(second.pid)
        at_last = float(wait_for(r"participants 1 loss (\S+)", first)[1])
    assert at_last < at_first - 0.5


@pytest.mark.parametrize("lighthouse", [2], indirect=True)
def test_torchrun_starts_a_killed_process_again_and_both_groups_end_with_the_same_loss(
    launch: Launch, kill: Kill, lighthouse: LighthouseServer
) -> None:
    """Two replica groups at least, so that the one which is left waits for the other."""
    command = [sys.executable, *TORCHRUN, str(EXAMPLE), "--steps=60", *SMALL]
    shells = [launch(command, env=shell(replica, lighthouse)) for replica in range(2)]
    wait_for(r"step 20 participants 2 loss", shells[1])
    kill(psutil.Process(shells[1].pid).children()[1].pid)
    wait_for(r"healed from replica_0:\S+ to step [2-5]\d", shells[1])
    losses = set()
    for process in shells:
        output, _ = process.communicate(timeout=SECONDS_TO_END)
        assert process.returncode == 0, output
        found = re.findall(r"step 60 validation loss (\d+\.\d+)", output)  # two processes may share a line
        assert len(found) == 2, output
        losses |= {*found}
    assert len(losses) == 1
    assert 2 < float(losses.pop()) < 3.5


def test_what_is_wrong_is_said_in_one_sentence(launch: Launch) -> None:
    process = launch([sys.executable, str(EXAMPLE), "--replica_group_id=7"])
    output, _ = process.communicate(timeout=SECONDS_TO_END)
    assert process.returncode == 2
    assert output == "train_lm.py: REPLICA_GROUP_ID is 7 of NUM_REPLICA_GROUPS 2; it counts from 0\n"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"context": 0}, "context is 0; give more than 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; give more than 0"),
        ({"heads": 7}, "width is 96; give a multiple of 14, for 7 heads"),
        ({"characters": 600}, "600 characters are too few for sequences of 64"),
    ],
)
def test_flags_that_can_t_work_are_refused(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError, match=sentence):
        Settings(**flags)


def test_a_batch_that_not_everybody_gets_a_sequence_of_is_refused() -> None:
    with pytest.raises(SettingError, match="a batch of 1 is too small for 2 processes"):
        main(replica=0, replicas=2, settings=Settings(batch=1))
