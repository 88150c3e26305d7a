"""A child-process group at the limits of the machine: memory, descriptors, and processes that hang or answer nonsense."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tft_pg import ProcessGroup, ProcessGroupBabyGloo, ProcessGroupError
from tft_pg.child import segments
from tft_pg.child.nursery import NURSERY
from tft_pg.child.segments import Pool
from tft_pg.testing import Bench

GUARD: Final = timedelta(seconds=20)
MEBIBYTE: Final = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def nursery() -> Iterator[None]:
    NURSERY.child(check=lambda: None).close()
    yield
    NURSERY.end()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench(ProcessGroupBabyGloo, timeout=GUARD) as bench:
        yield bench


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + GUARD.total_seconds()
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def failure(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except ProcessGroupError as error:
        return error
    return None


def reduce(group: ProcessGroup, length: int = 3) -> None:
    tensor = torch.ones(length)
    group.allreduce([tensor]).wait()
    assert bool((tensor == 1).all())


def child_of(group: Any) -> int:
    pid = group.child_pid
    assert isinstance(pid, int)
    return pid


def descriptors_of(pid: int | str) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def segments_of(pid: int | str) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:tft-pg")


# --- shared memory --------------------------------------------------------------------------------------------------


def test_a_child_unmaps_the_segments_that_the_trainer_drops(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of operations needs more than may stay free, so each drops a segment."""
    monkeypatch.setattr(segments, "_FREE_BYTES_MAX", MEBIBYTE)
    group = bench.configured(1)[0]
    for _ in range(20):
        reduce(group, MEBIBYTE // 4)
        reduce(group)
    pid = child_of(group)
    until(lambda: segments_of(pid) <= 3, "the child keeps dropped segments")
    assert segments_of("self") <= 3


def test_a_segment_costs_no_descriptor_once_the_child_has_it(bench: Bench) -> None:
    groups = bench.configured(2)
    bench.all(groups, lambda rank, group: group.allreduce([torch.ones(3)]).wait())
    pid = child_of(groups[0])
    here, there = descriptors_of("self"), descriptors_of(pid)
    works = [groups[0].allreduce([torch.ones(3)]) for _ in range(50)]
    assert descriptors_of("self") <= here
    works += [groups[1].allreduce([torch.ones(3)]) for _ in range(50)]
    for work in works:
        work.wait()
    assert descriptors_of(pid) <= there + 2


def test_the_least_recently_used_segments_are_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_FREE_BYTES_MAX", MEBIBYTE)
    monkeypatch.setattr(segments, "_FREE_MAX", 3)
    pool = Pool()
    small, large, too_large = pool.take(9), pool.take(MEBIBYTE - 9), pool.take(MEBIBYTE + 9)
    for segment in (small, large, too_large):
        segment.close()  # the child has it
    pool.give(small)
    pool.give(large)
    assert pool.dropped() == [small.number]
    pool.give(too_large)
    assert pool.dropped() == [too_large.number]
    assert pool.take(MEBIBYTE - 9) is large
    several = [pool.take(9) for _ in range(4)]
    for segment in several:
        pool.give(segment)
    assert len(pool._free) == 3
    assert several[0].descriptor == -1
    assert pool.dropped() == []  # the child never had it
    pool.close()


def test_a_segment_is_about_as_large_as_what_it_holds() -> None:
    pool = Pool()
    for size in (1, 1 << 14, (1 << 14) + 1, 100_000, 513 * MEBIBYTE, 16 * MEBIBYTE):
        segment = pool.take(size)
        assert size <= segment.size <= max(1 << 14, size * 5 // 4, size + (1 << 14))
        pool.give(segment)
    assert segment.size == 16 * MEBIBYTE
    pool.close()
