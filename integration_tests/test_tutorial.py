"""The tutorial is true: shells run its commands as printed, and print what the page shows.

One thing differs from the page: the lighthouse listens at a free port, because other tests run beside this one.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Final, final

import pytest

from integration_tests.conftest import ROOT, Launch
from integration_tests.pages import blocks, pattern_of, typed

PAGE: Final = ROOT / "docs" / "tutorial.md"
SCRIPTS: Final = ROOT / "examples" / "tutorial"
PORT: Final = "29510"  # as printed
PROGRESS: Final = re.compile(r"step (\d+) loss .* participants (\d) state (\w+)")


@final
class Shell:
    """A bash that runs one command after another, as a terminal does.

    Args:
        launch: the fixture.
        folder: working directory, and home.
        number: of the shell on the page.
    Attributes:
        runs: for each replica that was started here, the participants and the digest of the state at each printed step.
    """

    def __init__(self, launch: Launch, folder: Path, number: int) -> None:
        # Bash reads the commands from a named pipe. Its own standard input would be that of the scripts, too.
        pipe = folder / f"shell-{number}"
        os.mkfifo(pipe)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._bash = launch(["bash", pipe], env={"HOME": str(folder), "PATH": path}, cwd=folder)
        self._commands = pipe.open("w", encoding="utf-8", buffering=1)
        self._read: list[str] = []
        self.runs: list[dict[int, tuple[int, str]]] = []

    def run(self, command: str) -> None:
        self._commands.write(f"{command}\n")

    def wait_for(self, shown: str) -> None:
        """Read the output until a line is as shown. The test's timeout bounds the wait."""
        assert self._bash.stdout is not None
        for line in self._bash.stdout:
            self._read.append(line)
            if line.startswith("resumed step"):
                self.runs.append({})
            elif match := PROGRESS.match(line):
                self.runs[-1][int(match[1])] = int(match[2]), match[3]
            if re.match(pattern_of(shown), line):
                return
        raise AssertionError(f"no line is {shown!r}: {''.join(self._read)}")

    def end(self) -> None:
        """Kill the shell and all that it has started."""
        self._commands.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)


def assert_same_states(one: dict[int, tuple[int, str]], other: dict[int, tuple[int, str]]) -> None:
    common = one.keys() & other.keys()
    assert common, (one, other)
    assert [one[step] for step in sorted(common)] == [other[step] for step in sorted(common)]
    assert {one[step][0] for step in common} == {2}


@pytest.mark.timeout(300)  # half a minute, and much longer on a busy machine: it imports torch six times
def test_the_shells_print_what_the_tutorial_shows(launch: Launch, tmp_path: Path) -> None:
    shutil.copytree(SCRIPTS, tmp_path / "examples" / "tutorial")
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    shells = [Shell(launch, tmp_path, number) for number in (1, 2, 3)]
    try:
        for step in typed(PAGE):
            shell = shells[step.shell - 1]
            if step.command:
                shell.run(step.command.replace(PORT, port))
            for line in step.shown:
                shell.wait_for(line)
    finally:
        for shell in shells:
            shell.end()

    _, (survivor, resumed), (killed, returned, resumed_beside) = (shell.runs for shell in shells)
    # Replica 0 trains alone, with replica 1, alone after the kill, and with replica 1 again. It never goes back.
    assert [num for num, _ in itertools.groupby(num for num, _ in survivor.values())][:4] == [1, 2, 1, 2]
    assert list(survivor) == sorted(survivor)
    assert_same_states(survivor, killed)
    assert_same_states(survivor, returned)
    assert_same_states(resumed, resumed_beside)


def test_the_page_shows_the_scripts() -> None:
    plain, replicas = ((SCRIPTS / name).read_text(encoding="utf-8") for name in ("plain.py", "replicas.py"))
    assert blocks(PAGE, "python") == [plain]
    changes = difflib.unified_diff(
        plain.splitlines(), replicas.splitlines(), "plain.py", "replicas.py", lineterm="", n=1
    )
    assert "".join(blocks(PAGE, "diff")).splitlines() == list(changes)
