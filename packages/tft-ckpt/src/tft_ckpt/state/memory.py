"""The free memory of this process, and whether a second copy of a state fits into it.

The kernel reports the free memory of the machine and of each control group (cgroup) above this process. The smallest
value counts. A process that takes more is not refused but killed later, at some other place. So callers check before
they take memory. A cgroup's usage contains cached files, which the kernel frees first. They are not counted here, as in
MemAvailable.

Law of this file: it reads a few small files of the kernel, and decides only whether a number of bytes fits. If the
kernel reports nothing, as outside Linux, memory counts as free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MARGIN_BYTES", "FreeMemory", "describe_shortage", "free_memory", "gibibytes"]

MARGIN_BYTES: Final = 128 << 20
"""The memory that always stays free, because a step needs more than is in use between two steps."""
_MARGIN_SHARE: Final = 16  # share of a copy, because a larger model has larger batches beside it


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The amount of free memory.

    Fields:
        num_bytes: the amount, 0 or more.
        where: the origin of the number, for a message.
    """

    num_bytes: int
    where: str


def free_memory(proc: Path = Path("/proc")) -> FreeMemory | None:
    """Measure the memory that this process can still get: the least of the machine's and its cgroups' free memory.

    Returns: the free memory, or None if the kernel does not report it.
    """
    found = [*_of_machine(proc), *_of_cgroups(proc)]
    return min(found, key=lambda free: free.num_bytes) if found else None


def describe_shortage(num_bytes: int, free: FreeMemory | None) -> str:
    """Return why this many more bytes don't fit beside a margin, with the figures. Empty if they fit."""
    margin_bytes = MARGIN_BYTES + num_bytes // _MARGIN_SHARE
    if free is None or num_bytes + margin_bytes <= free.num_bytes:
        return ""
    return (
        f"the copy needs {gibibytes(num_bytes)} and a margin of {gibibytes(margin_bytes)}, but only "
        f"{gibibytes(free.num_bytes)} are free ({free.where})"
    )


def gibibytes(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    return f"{num_bytes / (1 << 30):.2f} GiB"


def _of_machine(proc: Path) -> Iterator[FreeMemory]:
    for line in _read(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if name == "MemAvailable" and words and words[0].isdigit():
            yield FreeMemory(int(words[0]) << 10, "MemAvailable of /proc/meminfo")


def _of_cgroups(proc: Path) -> Iterator[FreeMemory]:
    """Yield the free memory of each cgroup with a limit that contains this process."""
    for folder, is_v2 in _folders(proc):
        names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_read(folder / name).strip() for name in names)
        if limit.isdigit() and used.isdigit():
            files_bytes = _stat(folder, "inactive_file" if is_v2 else "total_inactive_file")
            used_bytes = max(int(used) - files_bytes, 0)
            where = f"cgroup {folder}: limit {gibibytes(int(limit))}, used {gibibytes(used_bytes)}"
            yield FreeMemory(max(int(limit) - used_bytes, 0), where)


def _folders(proc: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's memory cgroups, from its own to the outermost, and whether each is v2."""
    paths: dict[bool, str] = {}
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if (number, controllers) == ("0", ""):
            paths[True] = path
        elif "memory" in controllers.split(","):
            paths[False] = path
    for line in _read(proc / "self" / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        mount, kind = before.split(), after.split()
        if len(mount) < 5 or not kind or kind[0] not in ("cgroup", "cgroup2"):
            continue
        is_v2 = kind[0] == "cgroup2"
        if is_v2 not in paths or not (is_v2 or "memory" in kind[-1].split(",")):
            continue
        top, at = Path(mount[4]), Path(paths[is_v2])
        # In a container the path may be the host's, below the mounted folder or beside it.
        inside = at.relative_to(mount[3]) if at.is_relative_to(mount[3]) else Path()
        folder = top / inside
        yield from ((each, is_v2) for each in (folder, *folder.parents) if each.is_relative_to(top))


def _stat(folder: Path, name: str) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
