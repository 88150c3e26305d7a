"""A script ends in any way and leaves nothing: no process, no traceback but its own, no replica that is waited for.

Each script is a real interpreter that really exits. A process of the forkserver ends by os._exit and runs no exit
handler.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from integration_tests.conftest import Launch
from tft_lighthouse import LighthouseServer

pytestmark = pytest.mark.timeout(120)

SOON_S: Final = 60.0  # a real interpreter imports torch on a busy machine
HEARD_WITHIN_S: Final = 3.0  # bound on the report of a script's end, while a silent replica would be lost after 20 s

# The exit handler is registered before all imports, so it runs after the handlers of everything that the script
# imports. Anything that still runs then was forgotten.
BEGIN: Final = """
import atexit, time
atexit.register(time.sleep, 0.5)
import os, signal, sys, threading, torch
from tft_suite import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

def make(**settings):
    global net, inner, manager, model, optimizer
    net = torch.nn.Linear(8, 1)
    inner = torch.optim.AdamW(net.parameters())
    manager = Manager(
        ProcessGroupGloo(),
        lambda state: None,
        lambda: {"net": net.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        replica_id="script",
        **settings,
    )
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, inner)

def step(end=lambda: None):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    end()
    loss.backward()
    optimizer.step()

def train(steps=3):
    while manager.current_step() < steps:
        step()

def raises():
    raise RuntimeError("the script's own")
"""

# The ends of a script: its code, its exit code, and its additional output.
QUIET: Final = {
    "without shutdown": ("make(); train()", 0),
    "after a step that began": ("make(); train(); optimizer.zero_grad()", 0),
    "by sys.exit in the middle of a step": ("make(); train(); step(lambda: sys.exit(3))", 3),
    "by os._exit": ("make(); train(); os._exit(4)", 4),
    "by SIGTERM": ("make(); train(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(20)", -signal.SIGTERM),
    "while the manager server starts": ("make()", 0),
    "with a Manager that was dropped": ("def f():\n make(); train()\nf(); del manager, model, optimizer", 0),
    "beside a daemon thread that trains": (
        "make(); trains = threading.Event()\n"
        "def forever():\n while True: step(); trains.set()\n"
        "threading.Thread(target=forever, daemon=True).start(); trains.wait()",
        0,
    ),
    "before a thread that trains on": ("make(); threading.Thread(target=train).start()", 0),
    "while a quorum is waited for": (
        "make(lighthouse_addr='127.0.0.1:9'); optimizer.zero_grad(); time.sleep(0.5)",
        0,
    ),
    "with two Managers": ("make(job='one'); train(); make(job='two'); train()", 0),
    "after shutdown": ("make(); train(); manager.shutdown()", 0),
}
LOUD: Final = {
    "by an exception in the middle of a step": ("make(); train(); step(raises)", 1, "RuntimeError: the script's own"),
    "by an exception inside the with": ("make()\nwith manager: train(); raises()", 1, "RuntimeError: the script's own"),
    # A background process of a shell is started with SIGINT ignored. At exit, an exit handler of torch imports tabulate
    # where it is installed. CPython forgets an interrupt if an exit handler compiles code, as that import does, and
    # exits with 1. So the script imports it first.
    "by Ctrl-C": (
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import contextlib\n"
        "with contextlib.suppress(ImportError): import tabulate\n"
        "make(); train(); os.kill(os.getpid(), signal.SIGINT)",
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "with settings that can't be": ("make(nonsense=1)", 1, "UnknownSettingError"),
}


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=20_000) as lighthouse:
        yield lighthouse


@pytest.fixture
def script(launch: Launch, lighthouse: LighthouseServer, tmp_path: Path) -> Start:
    return Start(launch, lighthouse.address, tmp_path)


class Start:
    """A launcher of scripts, each in a separate file."""

    def __init__(self, launch: Launch, lighthouse: str, folder: Path) -> None:
        self._launch, self._lighthouse, self._folder = launch, lighthouse, folder

    def __call__(self, name: str, code: str, **environment: str) -> subprocess.Popen[str]:
        path = self._folder / f"{name}.py"
        path.write_text(BEGIN + code + "\n", encoding="utf-8")
        return self._launch([sys.executable, path], env={"TFT_LIGHTHOUSE": self._lighthouse, **environment})


def ended(process: subprocess.Popen[str], exit_code: int) -> list[str]:
    """Return the lines that a script has written, without the warning that there is no secret."""
    written = process.communicate(timeout=SOON_S)[0]
    assert process.returncode == exit_code, written
    return [line for line in written.splitlines() if not line.startswith("no token is set")]


def nobody_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """Check, by the lighthouse's log, that every replica of a quorum has left or is lost."""
    give_up_at = time.monotonic() + HEARD_WITHIN_S
    while True:
        lines = [record.getMessage() for record in caplog.records if record.name == "tft_lighthouse"]
        came = {word for line in lines if line.startswith("new quorum") for word in line.split() if "script:" in word}
        ids = {word.removeprefix("replica_id=") for word in came}
        ends = [line for line in lines if any(end in line for end in ("lost replica", " left", "has finished"))]
        gone = {name for name in ids if any(name in line for line in ends)}
        if ids == gone:
            return
        assert time.monotonic() < give_up_at, lines
        time.sleep(0.05)


@pytest.mark.in_parts(always=["without shutdown", "by SIGTERM"])
@pytest.mark.parametrize("name", QUIET)
def test_a_script_ends_quietly(name: str, script: Start, caplog: pytest.LogCaptureFixture) -> None:
    code, exit_code = QUIET[name]
    with caplog.at_level(logging.INFO, "tft_lighthouse"):
        assert ended(script("quiet", code), exit_code) == []
        nobody_is_left(caplog)


@pytest.mark.in_parts(always=["by an exception in the middle of a step"])
@pytest.mark.parametrize("name", LOUD)
def test_a_script_that_fails_says_that_alone(name: str, script: Start, caplog: pytest.LogCaptureFixture) -> None:
    code, exit_code, says = LOUD[name]
    with caplog.at_level(logging.INFO, "tft_lighthouse"):
        lines = ended(script("loud", code), exit_code)
        assert lines[-1].startswith(says) or says in lines[-1], lines
        assert sum(line.startswith("Traceback") for line in lines) == 1, lines
        nobody_is_left(caplog)


@pytest.mark.in_parts
def test_a_manager_server_that_is_killed_while_it_starts_is_replaced(script: Start) -> None:
    kills = "import psutil\nmake()\nfor child in psutil.Process().children(): child.kill()\ntrain(); manager.shutdown()"
    lines = ended(script("killed", kills), 0)
    assert len(lines) == 1, lines
    assert "(exit code -9) before it was ready" in lines[0]
    assert lines[0].endswith("starting another one")


@pytest.mark.in_parts
def test_a_manager_server_that_is_stopped_before_its_rank_has_connected_is_replaced(script: Start) -> None:
    stops = """
import datetime, psutil, tft_coord
address, stopped = tft_coord.ManagerServer.address, []
def stop(server):
    served = address(server)
    if not stopped:
        stopped.extend(psutil.Process().children())
        for child in stopped: child.suspend()
    return served
tft_coord.ManagerServer.address = stop
make(job="stopped", connect_timeout=datetime.timedelta(seconds=12)); train(); manager.shutdown()
"""
    lines = [line for line in ended(script("stopped", stops), 0) if "has not started for 5 s" not in line]
    assert len(lines) == 1, lines
    assert "was not accepted within 4 s" in lines[0]
    assert lines[0].endswith("starting another one")
