"""`tft demo` as a user starts it: it heals, it reports errors, and it leaves nothing behind after any end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from matplotlib.image import imread
from rich.console import Console

from integration_tests.conftest import Launch, started_by_us
from tft_algos.manager.quorum.coordinator import GroupCoordinator
from tft_coord.core.types import Verdict
from tft_suite.demo.events import ReplicaEvent, StepCommitted
from tft_suite.demo.link import Link
from tft_suite.demo.process import ReplicaTask
from tft_suite.demo.replica import train
from tft_suite.demo.run import run_demo
from tft_suite.demo.settings import DemoSettings

TFT: Final = Path(sys.executable).with_name("tft")
GONE_WITHIN_S: Final = 20.0

pytestmark = pytest.mark.timeout(300)  # real training takes seconds on two free cores, and 2 s a step on busy ones


def read_until(process: subprocess.Popen[str], pattern: str, *, within_s: float) -> list[str]:
    """Return the lines of `process` up to the first that matches `pattern`."""
    assert process.stdout is not None
    lines: list[str] = []
    deadline = threading.Timer(within_s, process.kill)
    deadline.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if re.search(pattern, line):
                return lines
    finally:
        deadline.cancel()
    pytest.fail(f"no line matched {pattern!r} within {within_s} s:\n{''.join(lines)}")


def nothing_of_it_is_left() -> bool:
    _, alive = psutil.wait_procs(started_by_us(), timeout=GONE_WITHIN_S)
    return not alive


@pytest.mark.in_parts
def test_a_short_run_kills_heals_and_reports(launch: Launch, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    another_job = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
        "TFT_TOKEN": "theirs",
    }
    command = [TFT, "demo", "--steps", "60", "--kills", "1", "--seed", "1", "--out", out]
    process = launch(command, env=another_job)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    assert "OK: all 3 replicas ended at step 60 with one digest" in output
    assert "heals from a peer" in output
    report = json.loads((out / "report.json").read_text())
    assert list(report) == ["replicas", "steps", "faults", "digests", "identical", "test_accuracy", "wall_s"]
    (fault,) = report["faults"]
    assert 9 <= fault["at_step"] <= 30
    assert 0 < fault["stall_s"] < 10  # no wait for Gloo's timeout, or for the lighthouse's:
    lost = f"lost replica replica_{fault['replica']}:"
    (loss, *_) = [line for line in (out / "lighthouse.log").read_text().splitlines() if lost in line]
    assert "its manager server reports: rank 0 ended: its process ended" in loss
    assert fault["stall_s"] < fault["rejoin_s"]
    assert report["identical"] is True
    assert len(report["digests"]) == 3
    assert report["test_accuracy"] >= 0.95
    assert imread(out / "timeline.png").shape == (900, 1500, 4)
    log = (out / f"replica-{fault['replica']}.log").read_text()
    assert re.search(r"\[replica_\d:[0-9a-f]{8}/0 - step \d+\] healed from replica_\d:\S+ to step \d+: \d+ b", log)
    assert nothing_of_it_is_left()


@pytest.mark.in_parts
@pytest.mark.parametrize(
    ("signals", "exit_code"),
    [([signal.SIGINT], 130), ([signal.SIGINT, signal.SIGINT], 130), ([signal.SIGTERM], 143)],
    ids=["ctrl-c", "ctrl-c twice", "sigterm"],
)
def test_a_signal_to_the_whole_group_leaves_nothing_behind(
    signals: list[signal.Signals], exit_code: int, launch: Launch, tmp_path: Path
) -> None:
    process = launch([TFT, "demo", "--out", tmp_path / "demo"])
    read_until(process, "participants 1 -> [23]|participants 2 -> 3", within_s=100)
    for number in signals:
        os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == exit_code, output
    assert f"Ended by {signals[0].name} after" in output
    assert "Traceback" not in output
    assert nothing_of_it_is_left()


@pytest.mark.in_parts
def test_ctrl_c_while_the_processes_start_is_one_line(launch: Launch, tmp_path: Path) -> None:
    process = launch([TFT, "demo", "--out", tmp_path / "demo"])
    supervisor = psutil.Process(process.pid)
    while not any("forkserver" in word for child in supervisor.children() for word in child.cmdline()):
        assert process.poll() is None, "it ended before it had started a process"
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    first, last = output.splitlines()
    assert "3 replicas to step 400" in first
    assert re.fullmatch(r"Ended by SIGINT after \S+ s; no process is left\.", last)
    assert nothing_of_it_is_left()


@pytest.mark.in_parts
def test_kill_9_of_the_command_itself_leaves_nothing_behind(launch: Launch, tmp_path: Path) -> None:
    process = launch([TFT, "demo", "--out", tmp_path / "demo"])
    read_until(process, "commits step 1, its first", within_s=100)
    process.kill()
    assert nothing_of_it_is_left()


def train_and_fail(task: ReplicaTask, link: Link) -> None:
    """Train, and fail in replica 1 in the middle, with a Manager and its server alive."""
    tell = link.send

    def tell_or_fail(event: ReplicaEvent) -> None:
        if task.replica == 1 and isinstance(event, StepCommitted) and event.step >= 5:
            raise ValueError("the disk is full")
        tell(event)

    link.send = tell_or_fail  # type: ignore[method-assign]
    train(task, link)


def lose_the_last_step(task: ReplicaTask, link: Link) -> None:
    """Train, and change replica 1's last vote to a no, once, after the others know its yes: it stays one step
    behind."""
    vote = GroupCoordinator.vote
    lost: list[int] = []

    def vote_or_lose(coordinator: GroupCoordinator, step: int, yes: bool, timeout: timedelta, **more: Any) -> Verdict:
        verdict = vote(coordinator, step, yes, timeout, **more)
        if task.replica == 1 and step == task.steps - 1 and not lost:
            lost.append(step)
            return Verdict(False)
        return verdict

    GroupCoordinator.vote = vote_or_lose  # type: ignore[assignment, method-assign]
    train(task, link)


def run(body: Callable[[ReplicaTask, Link], None], out: Path, *, steps: int) -> tuple[int, str]:
    """Return the exit code and the output of a run whose replicas run `body`."""
    output = StringIO()
    settings = DemoSettings(replicas=3, steps=steps, kills=0, out=out)
    return run_demo(settings, console=Console(file=output), body=f"{__name__}:{body.__name__}"), output.getvalue()


@pytest.mark.in_parts
def test_a_replica_that_fails_is_reported_with_its_error(tmp_path: Path) -> None:
    exit_code, output = run(train_and_fail, tmp_path / "demo", steps=100)
    assert exit_code == 1
    assert "FAILED: replica 1 failed: ValueError: the disk is full" in output
    assert "Traceback" in (tmp_path / "demo" / "replica-1.log").read_text()
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert (report["identical"], report["digests"], report["test_accuracy"]) == (False, [], None)
    assert nothing_of_it_is_left()


@pytest.mark.in_parts
def test_a_replica_that_lost_the_last_step_heals_before_anybody_leaves(tmp_path: Path) -> None:
    exit_code, output = run(lose_the_last_step, tmp_path / "demo", steps=40)
    assert "replica 1 discards the step after 39: the vote was no" in output
    assert "replica 0 is at its last step, 40" in output
    assert "replica 0 discards" not in output
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["identical"] is True, output
    assert "to step 40:" in (tmp_path / "demo" / "replica-1.log").read_text()
    assert exit_code == (0 if report["test_accuracy"] >= 0.95 else 1)


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--speed", "3"], "--speed"), (["--replicas", "1"], "--kills needs --replicas 2")]
)
def test_a_wrong_call_is_one_sentence(arguments: list[str], named: str, tmp_path: Path) -> None:
    command = [str(TFT), "demo", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert named in line
    assert not list(tmp_path.iterdir())
