"""The base of every integration test: real processes, and the check that none of them outlives its module.

Law of this file: starting, killing and counting processes, threads and ports. The tests hold their own subjects.

Each process that a test starts, directly or through others, inherits an environment variable that only this pytest
process has set. So the check also finds processes whose parent was killed.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Final, TypeAlias, final

import psutil
import pytest

from integration_tests.torchft_peer import torchft_python as torchft_python  # the fixture, for all tests
from tft_pg.child.nursery import NURSERY

ROOT: Final = Path(__file__).resolve().parent.parent
MARK: Final = "TFT_TEST_SESSION"
SETTLE_S: Final = 5.0
STACKS_S: Final = 0.5

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # torch's stores look up each address before they continue
os.environ[MARK] = str(uuid.uuid4())

Spawn: TypeAlias = Callable[..., ForkServerProcess]
Launch: TypeAlias = Callable[..., "subprocess.Popen[str]"]
Kill: TypeAlias = Callable[[int], None]

SPAWNED: Final[list[ForkServerProcess]] = []  # processes of `spawning`, until they are killed


def started_by_us() -> list[psutil.Process]:
    """Return every living process of this session, except multiprocessing's two helpers of this process."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) != os.environ[MARK] or process.pid == os.getpid():
                continue
            if process.status() != psutil.STATUS_ZOMBIE and not is_kept(process):
                found.append(process)
    return found


def is_kept(process: psutil.Process) -> bool:
    """Return whether `process` is this process's own forkserver or resource tracker."""
    command = " ".join(process.cmdline())
    return process.ppid() == os.getpid() and (
        "multiprocessing.forkserver" in command or "multiprocessing.resource_tracker" in command
    )


def listening_ports() -> list[int]:
    connections = psutil.Process().net_connections(kind="tcp")
    return [connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN]


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """Check after each module that no process, tft thread or new listening port is left."""
    ports_before = set(listening_ports())
    yield
    NURSERY.end()  # a process keeps the helper of its child-process groups
    _, processes = psutil.wait_procs(started_by_us(), timeout=SETTLE_S)
    ours = [each for each in threading.enumerate() if each.name.startswith("tft-")]
    for thread in ours:
        thread.join(SETTLE_S)
    left = [f"thread {thread.name}" for thread in ours if thread.is_alive()]
    gc.collect()  # unreachable objects do not count as left behind
    left += [f"port {port}" for port in listening_ports() if port not in ports_before]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            left.append(f"process {process.pid}: {' '.join(process.cmdline())}")
            process.kill()
    assert not left, f"left behind by this module: {'; '.join(left)}"


@pytest.fixture(scope="session")
def forkserver() -> ForkServerContext:
    """Return a context whose children fork from a server that has imported torch. A child starts in some 20 ms."""
    context = multiprocessing.get_context("forkserver")
    # An optimizer imports the second. The last two take half a second in each process of a sharded model.
    context.set_forkserver_preload(
        ["torch", "torch._dynamo", "tft_algos", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
    )
    return context


@final
class Process(ForkServerProcess):
    """A process that is not signalled after an unseen end.

    Its pid may belong to another process by then, or to a thread, and a signal to a thread kills its process. It is the
    forkserver's child, so its pid is not reserved.
    """

    def kill(self) -> None:
        if self.is_alive():
            super().kill()

    def terminate(self) -> None:
        if self.is_alive():
            super().terminate()


@contextmanager
def spawning(forkserver: ForkServerContext) -> Iterator[Spawn]:
    """Yield `spawn(target, *args)`, which runs `target(*args)` in a process. Remaining processes are killed at the
    end."""
    processes: list[ForkServerProcess] = []

    def start(target: Callable[..., object], *args: object) -> ForkServerProcess:
        process = Process(target=_run, args=(target, *args))
        process.start()
        processes.append(process)
        SPAWNED.append(process)
        return process

    try:
        yield start
    finally:
        for process in processes:
            SPAWNED.remove(process)
            process.kill()
            process.join(SETTLE_S)
            process.close()


def _run(target: Callable[..., object], *args: object) -> None:
    """Run the target of a spawned process. SIGUSR1 and a crash print the stacks of its threads.

    A test that fails shows the log of its processes.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(process)d %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    target(*args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report the exit codes of a failed test's processes, and let the living ones print their stacks."""
    report = yield
    if call.when == "call" and report.failed and SPAWNED:
        ends = "\n".join(f"{process.pid}: {process.exitcode}" for process in SPAWNED)
        report.sections.append(("Exit codes of its processes", ends))
        for process in SPAWNED:
            if process.exitcode is None and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)
        time.sleep(STACKS_S)  # there is no signal that they have written, so the output is captured as of the teardown
    return report


@pytest.fixture
def spawn(forkserver: ForkServerContext) -> Iterator[Spawn]:
    """Yield `spawning` for one test."""
    with spawning(forkserver) as start:
        yield start


@pytest.fixture
def launch(request: pytest.FixtureRequest) -> Iterator[Launch]:
    """Yield `launch(command, env=..., cwd=...)`, which starts a command in a new process group, with its output as
    text.

    Standard output and standard error come on one pipe, `process.stdout`. The group is killed when the test ends.
    """
    processes: list[subprocess.Popen[str]] = []
    failed_before = request.session.testsfailed

    def start(
        command: Sequence[str | Path], *, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if request.session.testsfailed > failed_before and process.poll() is None:
            # the process prints the stack of each thread into the report of the failure
            process.send_signal(signal.SIGABRT)
            print(process.communicate(timeout=SETTLE_S)[0])
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=SETTLE_S)


@pytest.fixture
def kill() -> Kill:
    """Return `kill(pid)`, which sends kill -9 and returns when the process is gone."""

    def kill_and_wait(pid: int) -> None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            process.kill()
            process.wait(SETTLE_S)

    return kill_and_wait
