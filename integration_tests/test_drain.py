"""`tft drain` ends every documented training loop with exit code 0, whether or not the loop checks `manager.left`.

The loops are copied from the documentation and the examples. Only the number of steps and the replica id differ,
because the printed loops end before a drain.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest

from integration_tests.conftest import ROOT, Launch, Spawn
from integration_tests.pages import blocks
from integration_tests.scripts import WATCHED, wait_for
from integration_tests.unpickles import watch
from tft_coord import LighthouseClient
from tft_lighthouse import LighthouseServer

pytestmark = pytest.mark.timeout(180)

SOON: Final = timedelta(seconds=20)
WITHIN_S: Final = 60.0  # scripts start and heal, on a machine that may be busy
COUNTS: Final = re.compile(r"while manager\.current_step\(\) < \w+")
# The loop of tft-suite's README is the same, and starts its own lighthouse.
DOCUMENTS: Final = ("README.md", "docs/hsdp.md", "docs/slow-links.md", "packages/tft-algos/README.md")
TORCHRUN: Final = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
SMALL: Final = ("--width=32", "--layers=1", "--context=32", "--batch=12", "--characters=100000")
FT: Final = "--fault_tolerance."
EXAMPLES: Final = {
    "train_ddp": ["train_ddp.py", "1000000"],
    "train_diloco": ["train_diloco.py", "1000000"],
    "streaming": ["train_diloco.py", "1000000", "--use_streaming", "True"],
    "train_lm": ["train_lm.py", "--steps=1000000", *SMALL],
    "train_lm in LocalSGD": [
        "train_lm.py",
        "--steps=1000000",
        *SMALL,
        f"{FT}semi_sync_method=local_sgd",
        f"{FT}sync_steps=4",
        f"{FT}num_fragments=1",
        f"{FT}fragment_sync_delay=0",
        f"{FT}fragment_update_alpha=0",
    ],
    "durable_checkpoint": ["durable_checkpoint.py", "1000000"],
}


def documented() -> list[tuple[str, int]]:
    return [
        (name, index)
        for name in DOCUMENTS
        for index, block in enumerate(blocks(ROOT / name, "python"))
        if COUNTS.search(block)
    ]


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=30_000) as lighthouse:
        yield lighthouse


def run(script: Path, words: list[str], environment: dict[str, str], output: Path) -> None:
    """Run a script in a separate process, as `python script words`."""
    os.chdir(output.parent)
    os.environ.update(environment)
    with open(output, "w", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [str(script), *words]
    watch()
    runpy.run_path(str(script), run_name="__main__")


class Pair:
    """Two replicas of one script, in a separate job."""

    def __init__(self, spawn: Spawn, lighthouse: LighthouseServer, folder: Path, job: str) -> None:
        self._spawn, self._lighthouse, self._folder, self._job = spawn, lighthouse, folder, job
        self._environment = {"TFT_LIGHTHOUSE": lighthouse.address, "TFT_JOB_ID": job, "NUM_REPLICA_GROUPS": "2"}

    def drained(self, script: Callable[[int], Path], words: list[str]) -> None:
        """Drain one replica, and then the other, which has trained on. Both end with exit code 0, and no traceback."""
        outputs = [self._folder / f"output_{replica}" for replica in range(2)]
        processes = [
            self._spawn(run, script(replica), words, {**self._environment, "REPLICA_GROUP_ID": str(replica)}, output)
            for replica, output in enumerate(outputs)
        ]
        with LighthouseClient(self._lighthouse.address, SOON) as operator:
            for replica, process in enumerate(processes):
                self._until_it_has(operator, 2 - replica)
                operator.drain(self._job, f"replica_{replica}", reason="its host goes down")
                process.join(WITHIN_S)
                written = outputs[replica].read_text(encoding="utf-8")
                assert process.exitcode == 0, written
                assert "Traceback" not in written
                assert "received a request to leave the job: its host goes down" in written

    def _until_it_has(self, operator: LighthouseClient, num_members: int) -> None:
        """Wait until the newest quorum has that many members."""
        give_up_at = time.monotonic() + WITHIN_S
        while True:
            jobs = operator.describe().jobs
            if any(job.name == self._job and job.num_members == num_members for job in jobs):
                return
            assert time.monotonic() < give_up_at, [each.read_text("utf-8") for each in self._folder.glob("output_*")]
            time.sleep(0.05)


@pytest.mark.in_parts
@pytest.mark.parametrize(("name", "index"), documented())
def test_a_drained_loop_of_the_documentation_ends_with_exit_code_0(
    name: str, index: int, spawn: Spawn, lighthouse: LighthouseServer, tmp_path: Path
) -> None:
    endless, loops = COUNTS.subn("while manager.current_step() < 1_000_000", blocks(ROOT / name, "python")[index])
    assert loops >= 1

    def script(replica: int) -> Path:
        path = tmp_path / f"replica_{replica}.py"
        # The block on injected faults has one replica. The others take their names from the environment.
        path.write_text(endless.replace('replica_id="a"', f'replica_id="replica_{replica}"'), encoding="utf-8")
        return path

    Pair(spawn, lighthouse, tmp_path, re.sub(r"\W", "_", f"{name}{index}")).drained(script, [])


@pytest.mark.in_parts(always=["train_ddp"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_drained_example_ends_with_exit_code_0(
    name: str, spawn: Spawn, lighthouse: LighthouseServer, tmp_path: Path
) -> None:
    script, *words = EXAMPLES[name]
    Pair(spawn, lighthouse, tmp_path, name.replace(" ", "_")).drained(lambda _: ROOT / "examples" / script, words)


@pytest.mark.in_parts
def test_torchrun_starts_a_drained_group_no_more(launch: Launch, lighthouse: LighthouseServer, tmp_path: Path) -> None:
    environment = {"TFT_LIGHTHOUSE": lighthouse.address, "TFT_JOB_ID": "torchrun", "REPLICA_GROUP_ID": "0"}
    command = [*TORCHRUN, "--max_restarts=3", WATCHED, ROOT / "examples/train_ddp.py", "1000000"]
    group = launch(command, env=environment, cwd=tmp_path)
    wait_for(r"step \d+ participants 1 loss", group)
    with LighthouseClient(lighthouse.address, SOON) as operator:
        operator.drain("torchrun", "replica_0", reason="its host goes down")
    written, _ = group.communicate(timeout=WITHIN_S)
    assert group.returncode == 0, written
    assert "Traceback" not in written
