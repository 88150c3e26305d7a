"""`tft launch` on this machine: a killed group is restarted and ends with the digest of the others; nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import psutil
import pytest

from integration_tests.conftest import Kill, Launch
from integration_tests.scripts import wait_for
from tft_suite.errors import ConfigError
from tft_suite.launch.cut import check_cut
from tft_suite.launch.services import is_ready

TFT: Final = [sys.executable, "-c", "from tft_suite.cli.main import main; main()"]
QUICK: Final = ["--backoff", "0.1", "--logs", "logs"]
LOOK_S: Final = 120.0

# Trains until 40 steps after the first step of all replicas. Replica 2 kills itself once, at its 5th step with all.
TRAINS: Final = """
import logging, os, signal, sys, time, torch
from tft_algos.testing import digest
from tft_suite import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo, init_group

logging.basicConfig(level=logging.INFO, format="%(message)s")
replica, replicas, nproc = (int(os.environ[name]) for name in ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "WORLD_SIZE"))
torch.manual_seed(replica)
net = torch.nn.Linear(8, 1)
inner = torch.optim.AdamW(net.parameters())
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
with Manager(ProcessGroupGloo(), min_replica_size=1, replica_id=f"replica_{replica}") as manager:
    steps = {"until": 1_000_000, "together": 0}
    manager.register_state_dict_fn("net", net.load_state_dict, net.state_dict)
    manager.register_state_dict_fn("inner", inner.load_state_dict, inner.state_dict)
    manager.register_state_dict_fn("steps", steps.update, lambda: dict(steps))
    inside = init_group("cpu") if nproc > 1 else None
    model = DistributedDataParallel(manager, net, inside)
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < steps["until"]:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        time.sleep(0.02)
        if optimizer.step() and manager.num_participants() == replicas:
            steps["together"] += 1
            print("together", flush=True)
            if replica == replicas - 1 and is_first and steps["together"] == 5 and os.environ["RANK"] == str(nproc - 1):
                os.kill(os.getpid(), signal.SIGKILL)
            if steps["together"] == 40:
                steps["until"] = manager.current_step() + 5
    print("digest", digest(net.state_dict(), inner.state_dict()), "step", manager.current_step(), flush=True)
"""
# Starts a grandchild in a session of its own, and waits.
WAITS: Final = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def run_of(folder: Path) -> Path:
    (found,) = (folder / "logs").iterdir()
    return found


def until(launcher: subprocess.Popen[str], log: Path, text: str) -> None:
    """Wait until a rank has written a text. The test's timeout bounds the wait."""
    while not (log.exists() and text in log.read_text(encoding="utf-8")):
        assert launcher.poll() is None
        time.sleep(0.02)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("replicas", "nproc"), [(3, 1), (2, 2)])
@pytest.mark.in_parts(always=["3-1"])
def test_a_killed_group_is_restarted_and_all_end_with_one_digest(
    launch: Launch, tmp_path: Path, replicas: int, nproc: int
) -> None:
    options = ["--replicas", str(replicas), "--nproc", str(nproc), *QUICK]
    launcher = launch([*TFT, "launch", *options, "--", script(tmp_path, TRAINS)], cwd=tmp_path)
    output, _ = launcher.communicate(timeout=390)
    logs = {path.name: path.read_text(encoding="utf-8") for path in run_of(tmp_path).glob("replica-*.log")}
    assert launcher.returncode == 0, (output, logs)
    last = replicas - 1
    assert re.search(rf"replica {last}(, rank 1)? ended with SIGKILL", output), output
    assert f"launching replica {last} (attempt 2) on " in output
    assert "(attempt 3)" not in output
    digests = [re.findall(r"digest (\w+) step (\d+)", text) for text in logs.values()]
    ends = [found[0] for found in digests if found]
    assert len(ends) == replicas * nproc, logs
    assert len(set(ends)) == 1, ends
    healed = logs[f"replica-{last}-attempt-2-rank-0.log"]
    assert "healed from replica_" in healed, healed


@pytest.mark.timeout(240)
def test_kill_9_of_the_launcher_leaves_no_process(launch: Launch, kill: Kill, tmp_path: Path) -> None:
    name = script(tmp_path, WAITS)
    launcher = launch([*TFT, "launch", "--replicas", "2", *QUICK, "--", name], cwd=tmp_path)
    wait_for(r"launching replica 1", launcher)
    for replica in range(2):
        until(launcher, run_of(tmp_path) / f"replica-{replica}-attempt-1-rank-0.log", "started")
    processes = psutil.Process(launcher.pid).children(recursive=True)
    assert len(processes) == 6  # the guard, the lighthouse, 2 ranks and their children
    kill(launcher.pid)
    _, left = psutil.wait_procs(processes, timeout=LOOK_S)
    assert not left


@pytest.mark.timeout(240)
@pytest.mark.in_parts
def test_a_killed_lighthouse_is_restarted_at_its_address(launch: Launch, kill: Kill, tmp_path: Path) -> None:
    name = script(tmp_path, WAITS)
    launcher = launch([*TFT, "launch", "--replicas", "1", *QUICK, "--", name], cwd=tmp_path)
    page = wait_for(r"its page is (http://\S+)", launcher).group(1)
    wait_for(r"launching replica 0", launcher)
    (lighthouse,) = (
        each for each in psutil.Process(launcher.pid).children() if "tft_lighthouse" in " ".join(each.cmdline())
    )
    kill(lighthouse.pid)
    wait_for(r"the lighthouse ended with SIGKILL, and is restarted in 0.1 s", launcher)
    wait_for(r"restarted the lighthouse", launcher)
    while not is_ready(page.removeprefix("http://"), {}):
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=LOOK_S)
    assert launcher.returncode == 128 + signal.SIGTERM


@pytest.mark.timeout(240)
def test_ctrl_c_drains_and_a_second_one_kills(launch: Launch, tmp_path: Path) -> None:
    stubborn = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
    name = script(tmp_path, stubborn + "print('ready', flush=True)\nwhile True:\n    time.sleep(1)\n")
    launcher = launch([*TFT, "launch", "--replicas", "1", "--grace", "600", *QUICK, "--", name], cwd=tmp_path)
    wait_for(r"launching replica 0", launcher)
    log = run_of(tmp_path) / "replica-0-attempt-1-rank-0.log"
    until(launcher, log, "ready")
    launcher.send_signal(signal.SIGINT)
    wait_for(r"received SIGINT: draining all replicas; a second signal kills them", launcher)
    until(launcher, log, "asked")
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=LOOK_S)
    assert "received SIGTERM: killing all replicas" in output
    assert launcher.returncode == 128 + signal.SIGINT


@pytest.mark.timeout(400)
@pytest.mark.in_parts
def test_a_signal_drains_the_replicas_through_the_lighthouse(launch: Launch, tmp_path: Path) -> None:
    name = script(tmp_path, TRAINS.replace("replica == replicas - 1", "False").replace("== 40", "< 0"))
    launcher = launch([*TFT, "launch", "--replicas", "2", *QUICK, "--", name], cwd=tmp_path)
    wait_for(r"launching replica 1", launcher)
    for _ in range(2):
        wait_for(r"has joined job default as replica_\d:\w+", launcher)
    for replica in range(2):
        until(launcher, run_of(tmp_path) / f"replica-{replica}-attempt-1-rank-0.log", "together")
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=LOOK_S)
    assert launcher.returncode == 128 + signal.SIGTERM, output
    assert output.count("ended with exit code 0") == 2, output
    logs = [path.read_text(encoding="utf-8") for path in run_of(tmp_path).glob("replica-*.log")]
    assert all("the launcher ends" in text for text in logs), logs


@pytest.mark.timeout(400)
@pytest.mark.in_parts
@pytest.mark.parametrize("kinds", ["kill,stop,slow", "cut"])
def test_chaos_breaks_replicas_that_the_launcher_brings_back(launch: Launch, tmp_path: Path, kinds: str) -> None:
    if kinds == "cut":
        try:
            check_cut()
        except ConfigError as error:  # without root or nft, or in a container
            if os.environ.get("TFT_NEED_NFT") == "1":
                raise
            pytest.skip(str(error))
    name = script(tmp_path, TRAINS.replace("replica == replicas - 1", "False").replace("== 40", "< 0"))
    launcher = launch([*TFT, "launch", "--replicas", "2", *QUICK, "--", name], cwd=tmp_path)
    address = wait_for(r"its page is (http://\S+)", launcher).group(1)
    for replica in range(2):
        log = run_of(tmp_path) / f"replica-{replica}-attempt-1-rank-0.log"
        until(launcher, log, "together")
    options = [
        "--http",
        address,
        "--kinds",
        kinds,
        "--rate",
        "60",
        "--duration",
        "20",
        "--baseline",
        "5",
        "--lasts",
        "0.5",
        "--seed",
        "3",
    ]
    chaos = launch([*TFT, "chaos", *options], cwd=tmp_path)
    output, _ = chaos.communicate(timeout=230)
    assert chaos.returncode == 0, output
    assert re.search(r"(kill|stop|slow|cut) replica_\d:\w+ \(pid \d+\) at step [1-9]", output), output
    assert re.search(r"goodput \d+\.\d %; with faults: [1-9]\d* steps", output), output
    killed = re.findall(r"kill (replica_\d):", output)
    for each in killed[:1]:
        wait_for(rf"launching replica {each[-1]} \(attempt 2\)", launcher)


@pytest.mark.timeout(240)
@pytest.mark.in_parts(always=["exit code 3", "given up"])
@pytest.mark.parametrize(
    ("text", "options", "words", "code", "said"),
    [
        ("import sys; sys.exit(0)", [], [], 0, "replica 0 is done"),
        ("import sys; sys.exit(3)", [], [], 3, "replica 0 is not restarted: exit code 3"),
        ("raise SyntaxError", [], [], 3, "replica 0 is not restarted: exit code 3"),
        ("from tft_coord import ConfigError\nraise ConfigError('no')", [], [], 3, "ConfigError: no"),
        ("import argparse\nargparse.ArgumentParser().parse_args()", [], ["--nonsense"], 3, "unrecognized arguments"),
        ("raise OSError('disk')", ["--max-restarts", "1"], [], 1, "given up after 2 failures in a row"),
    ],
    ids=["done", "exit code 3", "syntax", "setting", "argument", "given up"],
)
def test_exit_codes(
    launch: Launch, tmp_path: Path, text: str, options: list[str], words: list[str], code: int, said: str
) -> None:
    name = script(tmp_path, text)
    options = ["--replicas", "1", "--lighthouse", "localhost:1", *options, *QUICK]
    launcher = launch([*TFT, "launch", *options, "--", name, *words], cwd=tmp_path)
    output, _ = launcher.communicate(timeout=230)
    assert launcher.returncode == code, output
    assert said in output
