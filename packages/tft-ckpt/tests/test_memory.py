"""What is free, read from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tft_ckpt.state.buffers import Buffer, BufferPool
from tft_ckpt.state.memory import MARGIN_BYTES, FreeMemory, describe_shortage, free_memory, gibibytes

GIB = 1 << 30
MEMINFO = "MemTotal:       16000000 kB\nMemFree:          100000 kB\nMemAvailable:    8388608 kB\nHugePages_Total: 0\n"


class Machine:
    """A folder that looks like /proc, and others like mounted cgroups."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.mount = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(MEMINFO)

    def mounted(self, kind: str, *, root: str, own: str) -> None:
        of_v2 = kind == "cgroup2"
        options = "rw" if of_v2 else "rw,memory"
        (self.proc / "self" / "mountinfo").write_text(
            f"21 1 0:20 / /proc rw - proc proc rw\n35 31 0:32 {root} {self.mount} rw,relatime shared:9 - {kind} {kind} "
            f"{options}\n"
        )
        (self.proc / "self" / "cgroup").write_text("0::" + own if of_v2 else f"4:cpu:/\n3:memory:{own}\n0::/\n")

    def group(self, path: str, files: dict[str, str]) -> None:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def of_v2(limit: object, used: int, files: int = 0) -> dict[str, str]:
    stat = f"anon 1\ninactive_file {files}\nactive_file 7\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}


def of_v1(limit: int, used: int, files: int = 0) -> dict[str, str]:
    stat = f"inactive_file 5\ntotal_inactive_file {files}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}


def test_without_a_cgroup_it_is_the_machines(machine: Machine) -> None:
    assert free_memory(machine.proc) == FreeMemory(8 * GIB, "MemAvailable of /proc/meminfo")


def test_a_system_that_says_nothing_has_room(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    assert describe_shortage(1 << 60, None) == ""


def test_the_limit_of_a_cgroup_counts_less_what_is_used_but_not_files(machine: Machine) -> None:
    machine.mounted("cgroup2", root="/", own="/job/step")
    machine.group("job/step", of_v2("max", 3 * GIB))
    machine.group("job", of_v2(6 * GIB, 5 * GIB, files=2 * GIB))
    free = free_memory(machine.proc)
    assert free is not None
    assert free.num_bytes == 3 * GIB
    assert free.where == f"cgroup {machine.mount}/job: limit 6.00 GiB, used 3.00 GiB"


def test_the_tightest_cgroup_counts(machine: Machine) -> None:
    machine.mounted("cgroup2", root="/", own="/job/step")
    machine.group("job/step", of_v2(4 * GIB, 3 * GIB))
    machine.group("job", of_v2(6 * GIB, 5 * GIB + 1))
    machine.group("", of_v2("max", 9 * GIB))
    free = free_memory(machine.proc)
    assert free is not None
    assert free.num_bytes == GIB - 1


def test_in_a_container_the_path_is_below_what_is_mounted(machine: Machine) -> None:
    machine.mounted("cgroup", root="/docker/abc", own="/docker/abc/train")
    machine.group("train", of_v1(2 * GIB, GIB, files=GIB // 2))
    free = free_memory(machine.proc)
    assert free is not None
    assert free.num_bytes == 3 * GIB // 2


def test_a_path_beside_what_is_mounted_means_what_is_mounted(machine: Machine) -> None:
    machine.mounted("cgroup", root="/docker/abc", own="/elsewhere")
    machine.group("", of_v1(2 * GIB, 3 * GIB))
    free = free_memory(machine.proc)
    assert free is not None
    assert free.num_bytes == 0, "used may be more than a limit that was set later"


def test_no_limit_of_v1_is_a_number_that_is_never_the_least(machine: Machine) -> None:
    machine.mounted("cgroup", root="/", own="/")
    machine.group("", of_v1(9223372036854771712, GIB))
    assert free_memory(machine.proc) == FreeMemory(8 * GIB, "MemAvailable of /proc/meminfo")


def test_nonsense_in_the_files_is_passed_over(machine: Machine) -> None:
    machine.mounted("cgroup2", root="/", own="/job")
    machine.group("job", {"memory.max": "soon", "memory.current": "", "memory.stat": "inactive_file x y\n"})
    (machine.proc / "self" / "mountinfo").write_text("short - x\n - \n\n")
    assert free_memory(machine.proc) == FreeMemory(8 * GIB, "MemAvailable of /proc/meminfo")


def test_this_system_says_something() -> None:
    if not Path("/proc/meminfo").exists():
        pytest.skip("no /proc/meminfo")
    free = free_memory()
    assert free is not None
    assert free.num_bytes > 0


def test_a_margin_stays_free() -> None:
    needed = GIB + MARGIN_BYTES + GIB // 16
    assert describe_shortage(GIB, FreeMemory(needed, "somewhere")) == ""
    assert describe_shortage(GIB, FreeMemory(needed - 1, "somewhere")) == (
        "the copy needs 1.00 GiB and a margin of 0.19 GiB, but only 1.19 GiB are free (somewhere)"
    )
    assert gibibytes(3 << 29) == "1.50 GiB"


def test_what_is_kept_needs_no_more() -> None:
    pool = BufferPool()
    assert pool.fresh_bytes(4096) == 4096
    pool.give(Buffer(8192))
    assert pool.fresh_bytes(8192) == 0
    assert pool.fresh_bytes(1 << 30) == (1 << 30) - 8192, "the kept one is let go of first"
