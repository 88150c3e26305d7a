"""The guard of a launcher: whatever ends the launcher, no process that it started is left.

Each process that a launcher starts has a mark in its environment, which its own children inherit. The guard waits for
the end of the launcher, also by kill -9, and then kills what has the mark. So it finds processes of other sessions, and
those whose parent has died. It runs alone, before torch or anything else of a job is imported.

Law of this file: the standard library, /proc and kill. It runs as `python -I guard.py MARK`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

VARIABLE: Final = "TFT_LAUNCH_ID"
QUIET_S: Final = 0.5  # a process that was just forked has no mark until it runs its program
LOOK_EVERY_S: Final = 0.05
GIVE_UP_S: Final = 30.0  # a process that the kernel can't end


def mark_of(pid: int) -> str:
    """Return the mark of a process, or "" if it has none, has ended, or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return ""
    prefix = f"{VARIABLE}=".encode()
    return next((os.fsdecode(word[len(prefix) :]) for word in words if word.startswith(prefix)), "")


def marked(mark: str) -> Iterator[int]:
    """Yield the living processes with this mark, or with a mark that continues it after a slash."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            found = mark_of(int(name))
            if found == mark or found.startswith(f"{mark}/"):
                yield int(name)


def kill_marked(mark: str) -> int:
    """Kill all processes with this mark, also those that they fork meanwhile. Return how many were found at first."""
    num_found = None
    give_up_at = time.monotonic() + GIVE_UP_S
    while time.monotonic() < give_up_at:
        found = list(marked(mark))
        num_found = len(found) if num_found is None else num_found
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)
    return num_found or 0


def main() -> None:
    """Wait for the end of standard input, then kill."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides what a signal means
    while os.read(0, 4096):
        pass
    quiet_at = time.monotonic() + QUIET_S
    while kill_marked(sys.argv[1]) or time.monotonic() < quiet_at:
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    main()
