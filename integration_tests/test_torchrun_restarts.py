"""A replica group of two ranks that torchrun restarts: the ranks find each other again, heal and train on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil
import pytest

from integration_tests.conftest import ROOT, Kill, Launch
from integration_tests.scripts import wait_for
from tft_lighthouse import LighthouseServer

EXAMPLE: Final = ROOT / "examples" / "train_ddp.py"
TORCHRUN: Final = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
END_S: Final = 20.0
# After a restart rank 0 is late, so that rank 1 is the first to read what torchrun's store has kept of rank 0.
LATE: Final = """
import os, runpy, sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" and os.environ["RANK"] == "0":
    time.sleep(2)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def pid_of_rank(rank: int, torchrun: subprocess.Popen[str]) -> int:
    (found,) = (
        child.pid
        for child in psutil.Process(torchrun.pid).children()
        if child.environ().get("RANK") == str(rank) and child.environ().get("LOCAL_RANK") == str(rank)
    )
    return found


@contextmanager
def ended(groups: list[subprocess.Popen[str]]) -> Iterator[None]:
    """Terminate each torchrun at the end, because a killed one leaves its processes behind."""
    try:
        yield
    finally:
        for group in groups:
            group.terminate()
        for group in groups:
            group.communicate(timeout=END_S)


@pytest.mark.in_parts
@pytest.mark.timeout(120)
def test_a_restarted_group_of_two_ranks_heals_and_trains_on(launch: Launch, kill: Kill, tmp_path: Path) -> None:
    late = tmp_path / "late.py"
    late.write_text(LATE, encoding="utf-8")
    command = [*TORCHRUN, "--max-restarts=2", str(late), str(EXAMPLE), "1000000"]
    with LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=5_000) as lighthouse:
        of_all = {"TFT_LIGHTHOUSE": str(lighthouse.address), "NUM_REPLICA_GROUPS": "2"}
        groups = [launch(command, env=of_all | {"REPLICA_GROUP_ID": str(each)}, cwd=tmp_path) for each in range(2)]
        with ended(groups):
            for group in groups:
                wait_for(r"participants 2 loss", group)
            kill(pid_of_rank(1, groups[1]))
            wait_for(r"reconfigured: quorum \S+, rank 0 of 1, 1 participants", groups[0])
            wait_for(r"healed from replica_0:\S+ to step [1-9]\d*", groups[1])
            wait_for(r"participants 2 loss", groups[1])
            wait_for(r"participants 2 loss", groups[0])
