"""A script as a user starts it, but in a process of the forkserver, which has imported torch already.

Each script runs under the watch of `unpickles.py`: the process ends when anything in it is unpickled by name.

Law of this file: starting scripts and reading their output. The tests hold the expected output.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from integration_tests.conftest import ROOT, Spawn
from integration_tests.unpickles import watch

SECRET: Final = "made-by-openssl-rand"  # of a job of examples, which run as the documentation says
WATCHED: Final = str(ROOT / "integration_tests" / "unpickles.py")  # before a script: it runs under the watch
SECONDS_TO_END: Final = 120  # on a machine that is busy


def run_script(script: Path, words: Sequence[str], environment: Mapping[str, str], output: Connection) -> None:
    """Run `python script words`, with its output and its errors on one pipe."""
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    os.environ.update(environment)
    sys.argv = [str(script), *words]
    watch()
    runpy.run_path(str(script), run_name="__main__")


def _first_match(pattern: str, lines: Iterable[str], read: list[str]) -> re.Match[str]:
    """Return the first match. All lines that were read are added to `read`."""
    for line in lines:
        read.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"no line matches {pattern!r}: {''.join(read)}")


def wait_for(pattern: str, process: subprocess.Popen[str]) -> re.Match[str]:
    """Read lines of a process until one matches. The test's timeout bounds the wait."""
    assert process.stdout is not None
    return _first_match(pattern, process.stdout, [])


class Script:
    """A running script.

    Args:
        spawn: the fixture.
        script: its file.
        words: its arguments.
        environment: additional variables.
    """

    def __init__(self, spawn: Spawn, script: Path, words: Sequence[str], environment: Mapping[str, str]) -> None:
        read, write = multiprocessing.Pipe(duplex=False)
        self.process: ForkServerProcess = spawn(run_script, script, words, environment, write)
        write.close()
        self._output = os.fdopen(os.dup(read.fileno()), encoding="utf-8")
        read.close()
        self._read: list[str] = []

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read lines until one matches. The test's timeout bounds the wait."""
        return _first_match(pattern, self._output, self._read)

    def ended(self, exitcode: int = 0) -> str:
        """Return its whole output, after it has ended with that exit code."""
        self._read += self._output
        self._output.close()
        self.process.join(SECONDS_TO_END)
        written = "".join(self._read)
        assert self.process.exitcode == exitcode, written
        return written

    def kill(self) -> None:
        """Kill it with kill -9, if it still runs."""
        self.process.kill()
        self.process.join(SECONDS_TO_END)
        self._output.close()


class Shells:
    """Replica groups that run one script. All end with this context.

    Args:
        spawn: the fixture.
        script: its file.
        environment: of all groups.
    """

    def __init__(self, spawn: Spawn, script: Path, environment: Mapping[str, str]) -> None:
        self._spawn = spawn
        self._script = script
        self._environment = environment
        self._stores: list[TCPStore] = []
        self._scripts: list[Script] = []

    def __enter__(self) -> Shells:
        return self

    def __exit__(self, *_: object) -> None:
        for script in self._scripts:
            script.kill()
        self._stores.clear()  # the stores listen

    def start(self, replica: int, words: Sequence[str], ranks: int = 1, *, by_torchrun: bool = False) -> list[Script]:
        """Start a replica group of that many processes. Several, or with `by_torchrun` also one, have the environment
        that torchrun gives them."""
        own = {**self._environment, "REPLICA_GROUP_ID": str(replica)}
        if by_torchrun := by_torchrun or ranks > 1:
            self._stores.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        started = [
            Script(self._spawn, self._script, words, own | (self._launched(rank, ranks) if by_torchrun else {}))
            for rank in range(ranks)
        ]
        self._scripts += started
        return started

    def _launched(self, rank: int, ranks: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self._stores[-1].port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }


def refused(spawn: Spawn, script: Path, words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the output of a script with invalid settings, which ends with exit code 2."""
    return Script(spawn, script, words, environment).ended(exitcode=2)
