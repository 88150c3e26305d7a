"""The example that users copy: lighthouse in one shell, replica groups in others, under python and under torchrun."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from integration_tests.conftest import ROOT, Kill, Launch
from integration_tests.scripts import SECRET, wait_for
from tft_lighthouse import LighthouseServer

EXAMPLE: Final = ROOT / "examples" / "train_ddp.py"
TORCHRUN: Final = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.fixture(params=[1, 2], ids=["min_replicas=1", "min_replicas=2"])
def lighthouse(request: pytest.FixtureRequest) -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=request.param, join_timeout_ms=5_000, token=SECRET) as server:
        yield server


def shell(replica: int, lighthouse: LighthouseServer, name: str = "TFT_LIGHTHOUSE") -> dict[str, str]:
    job = {name: str(lighthouse.address), "TFT_TOKEN": SECRET, "NUM_REPLICA_GROUPS": "2"}
    return {**job, "REPLICA_GROUP_ID": str(replica)}


def test_it_is_short_enough_to_copy() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 62


@pytest.mark.parametrize("lighthouse", [1], indirect=True)
def test_both_shells_show_reconfiguration_and_live_recovery(
    launch: Launch, kill: Kill, lighthouse: LighthouseServer, tmp_path: Path
) -> None:
    command = [sys.executable, str(EXAMPLE), "1000000"]
    first = launch(command, env=shell(0, lighthouse), cwd=tmp_path)
    wait_for(r"step 100 participants 1 loss \d", first)
    second = launch(command, env=shell(1, lighthouse, "TORCHFT_LIGHTHOUSE"), cwd=tmp_path)
    wait_for(r"\[replica_1:\S+/0 - step 0\] healing from replica_0:\S+ to step \d+", second)
    wait_for(r"healed from replica_0:\S+ to step \d+: \d+ bytes", second)
    wait_for(r"participants 2 loss", second)
    wait_for(r"serving step \d+ to \['replica_1:", first)
    wait_for(r"participants 2 loss", first)
    kill(second.pid)
    wait_for(r"reconfigured: quorum \S+, rank 0 of 1, 1 participants", first)
    wait_for(r"participants 1 loss", first)


@pytest.mark.parametrize("lighthouse", [2], indirect=True)
def test_under_torchrun_gradients_are_averaged_inside_the_group_and_across(
    launch: Launch, lighthouse: LighthouseServer, tmp_path: Path
) -> None:
    shells = [
        launch([*TORCHRUN, str(EXAMPLE), "200"], env=shell(replica, lighthouse), cwd=tmp_path) for replica in range(2)
    ]
    for process in shells:
        output, _ = process.communicate(timeout=55)
        assert process.returncode == 0, output
        assert output.count("step 200 participants 2") == 2, output
