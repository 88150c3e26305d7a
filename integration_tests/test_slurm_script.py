"""The Slurm script of the examples, under a stand-in for Slurm that runs the script's own lines.

It has run under real Slurm by hand: a killed launcher, a drain by signal, and `scancel`. The stand-in answers as that
one did.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

from integration_tests.conftest import ROOT, Launch
from integration_tests.test_launch import TFT, TRAINS
from tft_lighthouse import LighthouseServer

SCRIPT: Final = ROOT / "examples" / "slurm" / "replicas.sh"
TIMEOUT_S: Final = 300.0


class Slurm:
    """A stand-in: `scontrol` and `squeue` on PATH, and the variables and restarts of an array's task.

    Args:
        folder: of the programs, the logs and the job.
        launch: the fixture.
        tft: the program `tft`, as a shell script.
    """

    def __init__(self, folder: Path, launch: Launch, tft: str) -> None:
        self._folder = folder
        self._launch = launch
        self._bin = folder / "bin"
        self._bin.mkdir()
        self.state = folder / "state"
        self.state.write_text("RUNNING\n", encoding="utf-8")
        self.program("tft", tft)
        self.program("scontrol", f'echo "$@" >> {folder}/requeued\n')
        self.program("squeue", f"cat {self.state}\n")
        self.outputs: dict[int, str] = {}
        self.codes: dict[int, int] = {}

    def program(self, name: str, text: str) -> None:
        path = self._bin / name
        path.write_text(f"#!/bin/bash\n{text}", encoding="utf-8")
        path.chmod(0o755)

    def start(self, task: int, tasks: int, attempt: int, words: list[str], **more: str) -> subprocess.Popen[str]:
        variables = {
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_JOB_ID": str(8 + task),
            "SLURM_ARRAY_TASK_ID": str(task),
            "SLURM_ARRAY_TASK_MAX": str(tasks - 1),
        }
        if attempt > 1:
            variables["SLURM_RESTART_COUNT"] = str(attempt - 1)
        return self._launch(["bash", str(SCRIPT), *words], env=variables | more, cwd=self._folder)

    def run(self, task: int, tasks: int, words: list[str], **more: str) -> None:
        """Run a task, and again whenever it asks for it, until it ends for good."""
        self.outputs[task] = ""
        attempt = 1
        while True:
            process = self.start(task, tasks, attempt, words, **more)
            output, _ = process.communicate(timeout=TIMEOUT_S)
            self.outputs[task] += output
            self.codes[task] = process.returncode
            if not self.take_requeue(task):
                return
            attempt += 1

    def take_requeue(self, task: int) -> bool:
        asked = self._folder / "requeued"
        lines = asked.read_text(encoding="utf-8").splitlines() if asked.exists() else []
        wanted = f"requeue 7_{task}"
        asked.write_text("".join(f"{line}\n" for line in lines if line != wanted), encoding="utf-8")
        return wanted in lines


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, http_bind="127.0.0.1:0") as server:
        yield server


@pytest.mark.parametrize(
    ("exits", "code", "attempts"),
    [([0], 0, 1), ([3], 3, 1), ([2], 2, 1), ([1, 137, 0], 0, 3), ([1, 1, 1, 1], 1, 3)],
)
def test_a_task_is_requeued_unless_it_is_done_or_can_not_be_helped(
    launch: Launch, tmp_path: Path, exits: list[int], code: int, attempts: int
) -> None:
    (tmp_path / "exits").write_text("".join(f"{each}\n" for each in exits), encoding="utf-8")
    fake = f'echo "tft $@"\ncode=$(head -n 1 {tmp_path}/exits)\nsed -i 1d {tmp_path}/exits\nexit "$code"\n'
    slurm = Slurm(tmp_path, launch, fake)
    slurm.run(1, 4, ["train.py", "20 000"], TFT_LIGHTHOUSE="http://head:29510", NPROC="2", MAX_REQUEUES="2")
    output = slurm.outputs[1]
    host = os.uname().nodename
    assert re.findall(r"launching replica 1 \(attempt (\d)\) on (\S+)", output) == [
        (str(attempt), host) for attempt in range(1, attempts + 1)
    ]
    assert slurm.codes[1] in (code, 0), output  # after a requeue the script goes on until Slurm ends it
    assert (
        "tft launch --replicas 1 --first 1 --total 4 --nproc 2 --lighthouse http://head:29510 --logs tft-logs/slurm-7 "
        "-- train.py 20 000"
    ) in output
    assert ("is given up after 3 attempts" in output) == (len(exits) == 4)


def test_a_cancelled_task_is_not_requeued(launch: Launch, tmp_path: Path) -> None:
    fake = "trap 'exit 9' TERM\necho ready\nwhile :; do sleep 0.1; done\n"
    slurm = Slurm(tmp_path, launch, fake)
    process = slurm.start(0, 1, 1, ["train.py"], TFT_LIGHTHOUSE="http://head:29510")
    assert process.stdout is not None
    assert any("ready" in line for line in iter(process.stdout.readline, ""))
    slurm.state.write_text("COMPLETING\n", encoding="utf-8")
    process.send_signal(signal.SIGTERM)  # to the script, which hands it on
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 9, output  # its own code, not that of the signal
    assert "was cancelled, and is not requeued" in output
    assert not slurm.take_requeue(0)


def test_a_signal_before_the_launcher_has_started_reaches_it(launch: Launch, tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, launch, "while :; do sleep 0.1; done\n")
    slurm.program("hostname", "kill -TERM $PPID\necho node\n")  # the script calls it before it starts the launcher
    slurm.state.write_text("COMPLETING\n", encoding="utf-8")
    process = slurm.start(0, 1, 1, ["train.py"], TFT_LIGHTHOUSE="http://head:29510")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "was cancelled, and is not requeued" in output


@pytest.mark.parametrize("missing", ["TFT_LIGHTHOUSE", "SLURM_ARRAY_TASK_ID"])
def test_without_an_array_or_a_lighthouse_the_script_says_so(launch: Launch, tmp_path: Path, missing: str) -> None:
    slurm = Slurm(tmp_path, launch, "exit 9\n")
    more = {"TFT_LIGHTHOUSE": "http://head:29510"} | {missing: ""}
    output, _ = (process := slurm.start(0, 1, 1, ["train.py"], **more)).communicate(timeout=60)
    assert process.returncode not in (0, 9)
    assert missing in output


@pytest.mark.timeout(400)
@pytest.mark.in_parts
def test_a_killed_group_comes_back_and_all_end_with_one_digest(
    launch: Launch, tmp_path: Path, lighthouse: LighthouseServer
) -> None:
    words = " ".join(f"'{word}'" for word in TFT)
    slurm = Slurm(tmp_path, launch, f'exec {words} "$@"\n')
    train = tmp_path / "train.py"
    train.write_text(TRAINS.replace("replica == replicas - 1", "False"), encoding="utf-8")
    more = {"TFT_LIGHTHOUSE": lighthouse.address}
    tasks = [
        threading.Thread(target=slurm.run, args=(task, 2, [str(train)]), kwargs=more, name=f"slurm-task-{task}")
        for task in range(2)
    ]
    for each in tasks:
        each.start()
    killed = False
    while not killed:
        assert any(each.is_alive() for each in tasks)
        time.sleep(0.02)
        logs = list(tmp_path.glob("tft-logs/slurm-7/*/replica-1-attempt-1-rank-0.log"))
        if any("together" in log.read_text(encoding="utf-8") for log in logs):
            kill_launcher(str(train), first="1")
            killed = True
    for each in tasks:
        each.join(TIMEOUT_S)
    assert slurm.codes == {0: 0, 1: 0}, slurm.outputs
    assert "launching replica 1 (attempt 2) on" in slurm.outputs[1]
    text = "".join(log.read_text(encoding="utf-8") for log in tmp_path.glob("tft-logs/slurm-7/*/replica-*.log"))
    ends = re.findall(r"digest (\w+) step (\d+)", text)
    assert len(ends) == 2, text
    assert len(set(ends)) == 1, ends


def kill_launcher(train: str, *, first: str) -> None:
    """Kill the launcher of a task with kill -9."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        is_launcher = words[:1] == [sys.executable] and "launch" in words and train in words
        if is_launcher and words[words.index("--first") + 1] == first:
            process.kill()
            return
    raise AssertionError(f"there is no launcher of replica {first}")
