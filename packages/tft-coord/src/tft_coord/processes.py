"""The kernel's view of a process on this host: whether it is stopped.

Only Linux shows this in a file; on other systems no process is ever found stopped.

Law of this file: reading /proc; other files decide which processes to look at, and what the result means.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Final

from tft_coord.core.stops import LocalProcess

_STOPPED: Final = frozenset(b"Tt")  # by a signal, or by a debugger


def this_process() -> LocalProcess | None:
    """Return the identity of this process for others; None where the kernel does not show it."""
    host = _host(os.getpid())
    stat = _stat(os.getpid())
    return None if host is None or stat is None else LocalProcess(os.getpid(), stat[1], *host)


@lru_cache(maxsize=1)
def _host(_pid: int) -> tuple[str, int] | None:  # a forked child may be in another namespace
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        return boot_id, os.stat("/proc/self/ns/pid").st_ino
    except (OSError, UnicodeDecodeError):
        return None


def is_stopped(process: LocalProcess) -> bool:
    """Return whether a process of this host is stopped now; False: it runs, has ended, or its state is unknown."""
    stat = _stat(process.pid)
    return stat is not None and stat[1] == process.started and stat[0] in _STOPPED


def _stat(pid: int) -> tuple[int, int] | None:
    """Return the state of a process, one letter, and its start time."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            line = file.read(4096)
        # The name in brackets may contain anything, even brackets. Field 3 is the state, field 22 the start time.
        fields = line[line.rindex(b")") + 2 :].split()
        return fields[0][0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
