"""Stopped ranks of a group: the kernel's view of their processes, seen several times in a row.

A stopped trainer (SIGSTOP, a debugger, a suspended job) does not beat, and neither does one that holds its interpreter
lock. The kernel tells the two apart. The manager server looks at the processes of its ranks on its own host, while
others wait or a rank's stream is broken. A stop counts when every look for a while has found it.

Law of this file: the meaning of looks; the caller looks, and gives the time.
Source: docs/protocol/sessions-and-quorums.md, "Silence and probes".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

LOOK_EVERY_MS: Final = 100
LOOKS_LEAST: Final = 4
STOPPED_MS: Final = 400  # every look of so long has found the rank stopped
REPORT_AGAIN_MS: Final = 500  # for a rank that has been stopped for so long that its stream has ended
LOOKS_FOR_MS: Final = 1_500  # after a probe: three times as long as the pace of probes


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """A process, with the host and namespace in which its number is valid.

    Args:
        pid: in its own namespace.
        started: in the kernel's ticks since it booted; the same number is given to another process later.
        boot_id: of the kernel; tells hosts apart.
        pid_namespace: of the process; containers on one host have namespaces of their own.
    """

    pid: int
    started: int
    boot_id: str
    pid_namespace: int

    def shares_host_with(self, other: LocalProcess) -> bool:
        """Return whether the two can look at each other by their numbers."""
        return (self.boot_id, self.pid_namespace) == (other.boot_id, other.pid_namespace)


@dataclass(slots=True)
class _Found:
    since_ms: int  # the first look of this stop
    num_looks: int


@final
class StopWatch:
    """The looks at one group's processes."""

    def __init__(self) -> None:
        self._found: dict[int, _Found] = {}
        self._look_until_ms: int | None = None

    def asked(self, now_ms: int) -> None:
        """Note a probe, because a replica waits for this group: looks are needed for a while."""
        self._look_until_ms = now_ms + LOOKS_FOR_MS

    def looks(self, now_ms: int) -> bool:
        """Return whether looks are needed: a probe came lately, or a rank was found stopped."""
        return bool(self._found) or (self._look_until_ms is not None and now_ms < self._look_until_ms)

    def seen(self, stopped: Mapping[int, bool], now_ms: int) -> None:
        """Record which ranks a look has found stopped or running. Each look covers all ranks that can be looked at."""
        self._found = {rank: found for rank, found in self._found.items() if rank in stopped}
        for rank, is_stopped in stopped.items():
            if not is_stopped:
                self._found.pop(rank, None)
            elif rank in self._found:
                self._found[rank].num_looks += 1
            else:
                self._found[rank] = _Found(now_ms, 1)

    def forget(self, rank: int) -> None:
        """Forget a rank that has ended, or whose place another process has taken."""
        self._found.pop(rank, None)

    def is_stopped(self, rank: int | None = None) -> bool:
        """Return whether the last look has found that rank, or any, stopped."""
        return rank in self._found if rank is not None else bool(self._found)

    def stopped_ms(self, now_ms: int) -> int:
        """Return the longest time for which a rank has been found stopped; 0: none is."""
        return max((now_ms - found.since_ms for found in self._found.values()), default=0)

    def stopped(self, now_ms: int) -> tuple[int, ...]:
        """Return the ranks that have been stopped for long enough to report."""
        return tuple(
            rank
            for rank, found in sorted(self._found.items())
            if found.num_looks >= LOOKS_LEAST and now_ms - found.since_ms >= STOPPED_MS
        )


def stop_reason(ranks: tuple[int, ...]) -> str:
    """Return the phrase about a group with stopped ranks."""
    which = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {which} is stopped (SIGSTOP or a debugger); continue it with SIGCONT, or end it"
