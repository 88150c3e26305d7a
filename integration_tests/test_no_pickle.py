"""Whole runs of the examples unpickle nothing, so that access to a port of the job does not allow running code.

A run has one process, or a group of two, whose ranks write and read checkpoints together. A group also recovers its
state from another one. torchrun's agent is torch's own program and is not checked. Its workers are.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from integration_tests.conftest import ROOT, Launch
from integration_tests.scripts import SECRET, wait_for
from integration_tests.unpickles import FOUND
from tft_lighthouse import LighthouseServer

WATCH = str(ROOT / "integration_tests" / "unpickles.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
WITHIN_S = 170
SMALL = "--width=32 --layers=1 --context=32 --batch=12 --characters=100000 --print_every=2"
STREAMING = "--fault_tolerance.semi_sync_method=diloco --fault_tolerance.sync_steps=2"
LOCAL_SGD = "--fault_tolerance.semi_sync_method=local_sgd --fault_tolerance.sync_steps=2"
# The keys are the possible numbers of processes of a group.
RUNS = {
    (1, 2): [
        "train_ddp.py 30",
        "durable_checkpoint.py --every 3 6",
        "train_diloco.py 3",
        f"train_lm.py --steps=4 {SMALL}",
        f"train_lm.py --steps=4 {SMALL} {STREAMING}",
    ],
    (1,): ["custom_strategy.py 5 --k 1", "own_outer_update.py 5", f"train_lm.py --steps=4 {SMALL} {LOCAL_SGD}"],
}
FOR_EVER = 1_000_000


@pytest.fixture
def job(tmp_path: Path) -> Iterator[dict[str, str]]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=5_000, token=SECRET) as lighthouse:
        (tmp_path / "token").write_text(SECRET + "\n")
        yield {"TFT_LIGHTHOUSE": str(lighthouse.address), "TFT_TOKEN_FILE": str(tmp_path / "token")}


def run(launch: Launch, folder: Path, job: dict[str, str], command: list[str]) -> None:
    """Run one replica group to its end."""
    shell = launch(command, env={**job, "REPLICA_GROUP_ID": "0", "NUM_REPLICA_GROUPS": "1"}, cwd=folder)
    output, _ = shell.communicate(timeout=WITHIN_S)
    assert shell.returncode == 0, output[-5_000:]


@pytest.mark.timeout(2 * WITHIN_S + 10)
@pytest.mark.parametrize(
    ("words", "ranks"),
    [(words, ranks) for numbers, runs in RUNS.items() for words in runs for ranks in numbers],
    ids=lambda value: str(value).replace(f" {SMALL}", ""),
)
def test_no_example_unpickles(launch: Launch, job: dict[str, str], tmp_path: Path, words: str, ranks: int) -> None:
    script, *more = words.split()
    start = [sys.executable] if ranks == 1 else TORCHRUN
    command = [*start, WATCH, str(ROOT / "examples" / script), *more]
    run(launch, tmp_path, job, command)
    if script == "durable_checkpoint.py":  # again, from the disk
        run(launch, tmp_path, job, [*command[:-1], "9"])


def test_no_example_is_left_out() -> None:
    named = {words.partition(" ")[0] for runs in RUNS.values() for words in runs}
    assert named == {path.name for path in (ROOT / "examples").glob("*.py")} - {"__init__.py"}


@pytest.mark.timeout(2 * WITHIN_S + 10)
@pytest.mark.parametrize(
    ("words", "ranks", "meets"),
    [
        (f"train_ddp.py {FOR_EVER}", 1, r"step \d+ participants 2 loss"),
        (f"train_diloco.py {FOR_EVER}", 1, r"participants 2 loss"),
        (f"train_lm.py --steps={FOR_EVER} {SMALL}", 1, r"participants 2 loss"),
        (f"train_lm.py --steps={FOR_EVER} {SMALL}", 2, r"participants 2 loss"),
        (f"custom_strategy.py {FOR_EVER} --k 1", 1, r"step \d+ \w+ of 2"),
        (f"own_outer_update.py {FOR_EVER}", 1, r"sync \d+ of 2, "),
    ],
    ids=lambda value: str(value).partition(" ")[0],
)
def test_no_group_that_recovers_from_another_unpickles(
    launch: Launch, job: dict[str, str], tmp_path: Path, words: str, ranks: int, meets: str
) -> None:
    script, *more = words.split()
    command = [*([sys.executable] if ranks == 1 else TORCHRUN), WATCH, str(ROOT / "examples" / script), *more]
    groups: list[subprocess.Popen[str]] = []
    try:
        for number in range(2):
            own = ["--replica", str(number)] if script in ("custom_strategy.py", "own_outer_update.py") else []
            environment = {**job, "REPLICA_GROUP_ID": str(number), "NUM_REPLICA_GROUPS": "2"}
            groups.append(launch([*command, *own], env=environment, cwd=tmp_path))
            if number == 0:
                wait_for(r"participants 1 loss|of 1, ", groups[0])  # there is something to recover
            elif not own:
                wait_for(r"healed from replica_0:\S+ to step \d+", groups[1])
        for group in groups:
            wait_for(meets, group)  # a group that had unpickled would have ended, and the other would be alone
    finally:
        for group in groups:
            end(group)


def end(group: subprocess.Popen[str]) -> None:
    """Kill a group with the processes that torchrun has started for it, in sessions of their own."""
    processes = [psutil.Process(group.pid), *psutil.Process(group.pid).children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, WITHIN_S)


def test_the_watch_sees_a_pickle(launch: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import pickle, fractions\npickle.loads(pickle.dumps(fractions.Fraction(1, 2)))\n")
    process = launch([sys.executable, WATCH, str(script)])
    output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == FOUND, output
    assert "unpickles" in output
