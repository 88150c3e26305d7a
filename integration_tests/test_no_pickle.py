"""Whole runs of the examples, in which nothing is unpickled: who reaches a port of the job runs no code by it.

torchrun's agent is torch's own program and is not looked at; its workers are, whose groups write and read checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration_tests.conftest import ROOT, Launch
from integration_tests.scripts import SECRET
from integration_tests.unpickles import FOUND
from tft_lighthouse import LighthouseServer

WATCH = str(ROOT / "integration_tests" / "unpickles.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
WITHIN_S = 170


@pytest.fixture
def job(tmp_path: Path) -> Iterator[dict[str, str]]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=5_000, token=SECRET) as lighthouse:
        (tmp_path / "token").write_text(SECRET + "\n")
        yield {"TFT_LIGHTHOUSE": str(lighthouse.address), "TFT_TOKEN_FILE": str(tmp_path / "token")}


def run(launch: Launch, folder: Path, job: dict[str, str], command: list[str]) -> None:
    """One replica group, to its end."""
    shell = launch(command, env={**job, "REPLICA_GROUP_ID": "0", "NUM_REPLICA_GROUPS": "1"}, cwd=folder)
    output, _ = shell.communicate(timeout=WITHIN_S)
    assert shell.returncode == 0, output[-5_000:]


@pytest.mark.timeout(2 * WITHIN_S + 10)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("words", ["train_ddp.py 30", "durable_checkpoint.py --every 3 6", "train_diloco.py 3"])
def test_no_example_unpickles(launch: Launch, job: dict[str, str], tmp_path: Path, words: str, ranks: int) -> None:
    script, *more = words.split()
    start = [sys.executable] if ranks == 1 else TORCHRUN
    command = [*start, WATCH, str(ROOT / "examples" / script), *more]
    run(launch, tmp_path, job, command)
    if script == "durable_checkpoint.py":  # again, from the disk
        run(launch, tmp_path, job, [*command[:-1], "9"])


def test_the_watch_sees_a_pickle(launch: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import pickle, fractions\npickle.loads(pickle.dumps(fractions.Fraction(1, 2)))\n")
    process = launch([sys.executable, WATCH, str(script)])
    output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == FOUND, output
    assert "unpickles" in output
