"""The example that users copy: lighthouse in one shell, replica groups in others, under python and under torchrun."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from integration_tests.conftest import ROOT, Launch, Spawn
from integration_tests.scripts import SECRET, WATCHED, Script, Shells
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
def test_both_shells_show_reconfiguration_and_live_recovery(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    first = Script(spawn, EXAMPLE, ["1000000"], shell(0, lighthouse))
    first.wait_for(r"step 100 participants 1 loss \d")
    second = Script(spawn, EXAMPLE, ["1000000"], shell(1, lighthouse, "TORCHFT_LIGHTHOUSE"))
    second.wait_for(r"\[replica_1:\S+/0 - step 0\] healing from replica_0:\S+ to step \d+")
    second.wait_for(r"healed from replica_0:\S+ to step \d+: \d+ bytes")
    second.wait_for(r"participants 2 loss")
    first.wait_for(r"serving step \d+ to \['replica_1:")
    first.wait_for(r"participants 2 loss")
    second.kill()
    first.wait_for(r"reconfigured: quorum \S+, rank 0 of 1, 1 participants")
    first.wait_for(r"participants 1 loss")
    first.kill()


@pytest.mark.parametrize("lighthouse", [2], indirect=True)
def test_under_torchrun_gradients_are_averaged_inside_the_group_and_across(
    launch: Launch, spawn: Spawn, lighthouse: LighthouseServer, tmp_path: Path
) -> None:
    torchrun = launch([*TORCHRUN, WATCHED, str(EXAMPLE), "200"], env=shell(0, lighthouse), cwd=tmp_path)
    with Shells(spawn, EXAMPLE, shell(1, lighthouse)) as shells:  # with the environment that torchrun gives them
        outputs = [script.ended() for script in shells.start(1, ["200"], ranks=2)]
        output, _ = torchrun.communicate(timeout=55)
    assert torchrun.returncode == 0, output
    assert output.count("step 200 participants 2") == 2, output
    assert ["step 200 participants 2" in each for each in outputs] == [True, True], outputs
