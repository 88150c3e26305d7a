"""The lighthouse knows the end of a job, and tells it to a replica that comes too late."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from integration_tests.conftest import ROOT, Spawn
from integration_tests.scripts import Script, Shells
from tft_lighthouse import LighthouseServer

pytestmark = pytest.mark.timeout(90)

HEARD_WITHIN_S: Final = 5.0

# This number of replicas train until they commit together, and then 20 steps more, in several runs one after the other.
# After 5 common steps b evaluates, until there is a file named "go". At the end of each run c saves its result, until a
# has ended.
SCRIPT: Final = """
import os, sys, time, torch
from tft_suite import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

name, replicas, runs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
evaluates = name == "b"


def train(run):
    global evaluates
    net = torch.nn.Linear(8, 1)
    inner = torch.optim.AdamW(net.parameters())
    manager = Manager(ProcessGroupGloo(), min_replica_size=1, replica_id=name)
    manager.register_state_dict_fn("net", net.load_state_dict, net.state_dict)
    manager.register_state_dict_fn("inner", inner.load_state_dict, inner.state_dict)
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, inner)
    together, last = 0, 1_000_000
    while manager.current_step() < last:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        time.sleep(0.02)
        if optimizer.step():
            together += manager.num_participants() == replicas
            print("step", manager.current_step(), "of", manager.num_participants(), flush=True)
            if together == 1:
                last = min(last, manager.current_step() + 20)
        if evaluates and together >= 5:
            print("evaluates", flush=True)
            while not os.path.exists("go"):
                time.sleep(0.02)
            evaluates = False
    while name == "c" and not os.path.exists(f"a has ended run {run}"):
        time.sleep(0.02)
    manager.shutdown()
    if name == "a":
        open(f"a has ended run {run}", "w").close()
    print("run ended", flush=True)


for run in range(runs):
    train(run)
"""


class Job:
    """Replicas of one script, and the lighthouse's log of them."""

    def __init__(self, spawn: Spawn, lighthouse: LighthouseServer, folder: Path, log: pytest.LogCaptureFixture) -> None:
        self._spawn, self._lighthouse, self._folder, self._log = spawn, lighthouse, folder, log
        self.folder = folder

    def start(self, name: str, replicas: int, runs: int = 1) -> Script:
        path = self._folder / "script.py"
        path.write_text(SCRIPT, encoding="utf-8")
        environment = {"TFT_LIGHTHOUSE": self._lighthouse.address, "TFT_JOB_ID": self._folder.name}
        return Script(self._spawn, path, [name, str(replicas), str(runs)], environment)

    def log(self) -> list[str]:
        return [record.getMessage() for record in self._log.records if record.name == "tft_lighthouse"]

    def ended(self) -> str:
        """Return the line that reports the end."""
        give_up_at = time.monotonic() + HEARD_WITHIN_S
        while not (lines := [line for line in self.log() if " ended at step " in line]):
            assert time.monotonic() < give_up_at, self.log()
            time.sleep(0.02)
        (line,) = lines
        return line


@pytest.fixture
def job(
    spawn: Spawn, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Job]:
    monkeypatch.chdir(tmp_path)  # the working directory of the forkserver's processes
    with (
        caplog.at_level(logging.INFO, "tft_lighthouse"),
        LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=500) as lighthouse,
    ):
        yield Job(spawn, lighthouse, tmp_path, caplog)


def last_step(written: str) -> int:
    return int([line for line in written.splitlines() if line.startswith("step")][-1].split()[1])


@pytest.mark.in_parts
def test_a_late_evaluator_learns_that_the_job_is_over_and_trains_no_second_end(job: Job) -> None:
    late, *finishers = (job.start(name, replicas=3) for name in ("b", "a", "c"))
    late.wait_for("evaluates")
    last, other_last = (last_step(finisher.ended()) for finisher in finishers)
    assert last == other_last
    assert job.ended().startswith(f"job {job.folder.name} ended at step {last}: finished by a:")
    (job.folder / "go").touch()
    written = late.ended(exitcode=1)
    after = written.split("evaluates")[1]
    assert "step" not in [line.split()[0] for line in after.splitlines() if line]
    assert (
        f"JobOverError: rank 0's quorum for step {last_step(written)}: job {job.folder.name} ended at step {last}"
        in after
    )
    assert "or restart the whole job for a new run" in after
    assert not any("lost replica a:" in line for line in job.log())

    again, other = (
        job.start(name, replicas=2) for name in ("a", "c")
    )  # a new run of the same job, on the same lighthouse
    assert "step 1 of 1" in again.ended() + other.ended()


@pytest.mark.in_parts
def test_a_replica_that_was_killed_and_is_started_after_the_end_trains_no_second_one(job: Job) -> None:
    killed, *finishers = (job.start(name, replicas=3) for name in ("b", "a", "c"))
    killed.wait_for("evaluates")
    killed.kill()
    last = max(last_step(finisher.ended()) for finisher in finishers)
    job.ended()
    written = job.start("b", replicas=1).ended(exitcode=1)
    assert f"JobOverError: rank 0's quorum for step 0: job {job.folder.name} ended at step {last}" in written
    assert "step 1 of" not in written


def test_replicas_that_finish_together_are_not_lost(job: Job) -> None:
    scripts = [job.start(name, replicas=2) for name in ("a", "c")]
    last = max(last_step(script.ended()) for script in scripts)
    line = job.ended()
    assert f"ended at step {last}: finished by " in line
    assert not any("lost replica" in each for each in job.log())


@pytest.mark.in_parts
def test_the_next_manager_of_the_same_script_begins_a_new_run(job: Job) -> None:
    """A sweep does this, or finetuning after pretraining. The first replica waits for no replica that still saves."""
    scripts = [job.start(name, replicas=2, runs=3) for name in ("a", "c")]
    for script in scripts:
        assert script.ended().count("run ended") == 3


@pytest.mark.in_parts
def test_groups_of_two_ranks_finish_without_a_word(
    spawn: Spawn, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with (
        caplog.at_level(logging.INFO, "tft_lighthouse"),
        LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=5_000) as lighthouse,
        Shells(
            spawn, ROOT / "examples/train_ddp.py", {"TFT_LIGHTHOUSE": lighthouse.address, "NUM_REPLICA_GROUPS": "2"}
        ) as shells,
    ):
        scripts = [script for replica in range(2) for script in shells.start(replica, ["20"], ranks=2)]
        for script in scripts:
            written = script.ended()
            assert "could not notify the manager server" not in written
            assert "Traceback" not in written
        lines = [record.getMessage() for record in caplog.records if record.name == "tft_lighthouse"]
        assert [line for line in lines if "lost replica" in line] == []
        assert sum("has finished: finished at step 20" in line for line in lines) == 2
        assert sum("job default ended at step 20: finished by replica_0:" in line for line in lines) == 1
