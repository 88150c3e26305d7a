"""Child processes made in every way that a user may make them, for tests of what they inherit.

Law of this file: making and ending children; the tests state the requirements.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

__all__ = ["FORKS", "PROGRAMS", "WAYS", "end_children", "fork_child"]

LIVES_S: Final = 300
"""After which a child ends that nobody has ended."""

FORKS: Final = ("os.fork", "fork")
"""Ways to make a child that holds a copy of every descriptor of its parent's."""

PROGRAMS: Final = ("spawn", "forkserver", "subprocess", "subprocess that inherits")
"""Ways to make a child that runs another program."""

WAYS: Final = FORKS + PROGRAMS


def fork_child(way: str) -> int:
    """Make a child that does nothing and outlives this process. Returns: its process id.

    Args:
        way: one of `WAYS`.
    """
    if way == "os.fork":
        child = os.fork()
        if child == 0:
            time.sleep(LIVES_S)
            os._exit(0)
        return child
    if way.startswith("subprocess"):
        return subprocess.Popen(["sleep", str(LIVES_S)], close_fds=way == "subprocess").pid
    process = multiprocessing.get_context(way).Process(target=time.sleep, args=(LIVES_S,), daemon=True)  # type: ignore[attr-defined]
    process.start()
    return int(process.pid)


def end_children(pids: Iterable[int]) -> None:
    """End these processes, also those of other parents, and reap this process's own children."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
