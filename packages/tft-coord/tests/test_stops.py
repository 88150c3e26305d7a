"""Stopped processes: what looks at them mean, and what the kernel says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tft_coord.core import effects, events
from tft_coord.core.replica_group import ReplicaGroupCore
from tft_coord.core.stops import LocalProcess, StopWatch
from tft_coord.processes import is_stopped, this_process
from tft_coord.timeouts import Timeouts

TIMEOUTS = Timeouts()


def test_a_stop_counts_after_several_looks() -> None:
    watch = StopWatch()
    for now_ms in (0, 100, 200, 300):
        watch.seen({0: True, 1: False}, now_ms)
        assert watch.stopped(now_ms) == ()
        assert watch.is_stopped(0)
        assert not watch.is_stopped(1)
    watch.seen({0: True, 1: False}, 400)
    assert watch.stopped(400) == (0,)
    watch.seen({0: False}, 500)
    assert watch.stopped(500) == ()
    assert not watch.is_stopped()


def test_looks_that_were_held_up_themselves_prove_nothing() -> None:
    watch = StopWatch()
    watch.seen({0: True}, 0)
    watch.seen({0: True}, 5_000)
    assert watch.stopped(5_000) == ()


def test_it_looks_for_a_while_after_it_was_asked() -> None:
    watch = StopWatch()
    assert not watch.looks(0)
    watch.asked(0)
    assert watch.looks(1_499)
    assert not watch.looks(1_500)
    watch.seen({0: True}, 1_400)
    assert watch.looks(60_000)  # until it goes on


# --- in the group's core ------------------------------------------------------------------------------------------


def group(world_size: int = 1) -> ReplicaGroupCore:
    core = ReplicaGroupCore(
        replica_id="a", address="a:1", store_address="a:2", world_size=world_size, timeouts=TIMEOUTS
    )
    for rank in range(world_size):
        core.handle(events.RankConnected(rank, stream=rank + 1, session=1), 0)
    return core


def look(core: ReplicaGroupCore, stopped: bool, from_ms: int, to_ms: int) -> list[effects.GroupEffect]:
    out: list[effects.GroupEffect] = []
    for now_ms in range(from_ms, to_ms, 100):
        out += core.handle(events.RanksLookedAt({0: stopped}), now_ms)
        out += core.tick(now_ms)
    return out


def test_each_stop_is_reported_once_and_every_probe_hears_of_it() -> None:
    core = group()
    assert core.handle(events.ProbeCame(7), 0) == []
    assert core.looks(0)
    reason = "rank 0 is stopped (SIGSTOP or a debugger); continue it with SIGCONT, or end it"
    assert look(core, True, 0, 1_000) == [effects.ReportStop(reason, 400, is_news=True, probe=7)]
    assert core.stopped(1_000) == (reason, 1_000)
    assert core.is_hung(1_000)
    assert look(core, False, 1_000, 1_100) == []
    assert core.stopped(1_100) == ("", 0)
    assert not core.is_hung(1_100)
    assert look(core, True, 2_000, 3_000) == [effects.ReportStop(reason, 400, is_news=True, probe=7)]


def test_a_stopped_rank_whose_stream_breaks_is_not_dead() -> None:
    core = group()
    core.handle(events.ProbeCame(7), 0)
    core.handle(events.RankDisconnected(0, 1), 1_000)
    assert core.looks(1_000)
    first, *again = look(core, True, 1_000, 60_000)
    assert isinstance(first, effects.ReportStop)
    assert first.is_news
    assert first.stopped_ms >= TIMEOUTS.heartbeat_timeout_ms
    assert len(again) > 50, "it is said again, for where few wait nobody has it probed"
    assert not any(isinstance(each, effects.ReportStop) and each.is_news for each in again)
    assert core.lost is None
    assert look(core, False, 60_000, 62_000) == []
    core.handle(events.RankConnected(0, stream=5, session=1), 62_000)
    assert look(core, False, 62_000, 80_000) == []
    assert core.lost is None


def test_on_a_lighthouse_that_does_not_probe_it_is_dead_as_before() -> None:
    """Nobody there would go by a stop."""
    core = group()
    core.handle(events.RankDisconnected(0, 1), 1_000)
    assert effects.ReportDeath("rank 0's stream disconnected and did not return within 300 ms") in look(
        core, True, 1_000, 1_400
    )


def test_one_that_goes_on_and_does_not_come_back_is_lost() -> None:
    core = group()
    core.handle(events.ProbeCame(7), 0)
    core.handle(events.RankDisconnected(0, 1), 1_000)
    look(core, True, 1_000, 4_000)
    assert effects.ReportDeath("rank 0's stream disconnected and did not return within 300 ms") in look(
        core, False, 4_000, 10_000
    )


def test_a_stopped_rank_that_is_gone_is_stopped_no_more() -> None:
    """Nobody can look at it any more."""
    core = group(2)
    core.handle(events.ProbeCame(7), 0)
    look(core, True, 0, 500)
    core.handle(events.RanksLookedAt({}), 600)
    assert core.stopped(1_000) == ("", 0)


def test_a_rank_that_nobody_looks_at_has_the_grace() -> None:
    core = group(2)
    core.handle(events.RankDisconnected(1, 2), 1_000)
    assert look(core, True, 1_000, 1_300) == []
    assert effects.ReportDeath("rank 1's stream disconnected and did not return within 300 ms") in look(
        core, True, 1_300, 1_400
    )


# --- what the kernel says ---------------------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    code = "from tft_coord.processes import this_process as me; p = me(); print(p.pid, p.started, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def until(condition: bool, process: LocalProcess) -> bool:
    deadline = time.monotonic() + 20.0
    while is_stopped(process) is not condition and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_stopped(process) is condition


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells")
def test_the_kernel_says_who_is_stopped(child: subprocess.Popen[bytes]) -> None:
    own = this_process()
    assert own is not None
    assert own.pid == os.getpid()
    assert child.stdout is not None
    pid, started = map(int, child.stdout.readline().split())
    process = replace(own, pid=pid, started=started)
    assert not is_stopped(process)
    os.kill(pid, signal.SIGSTOP)
    assert until(True, process)
    assert not is_stopped(replace(process, started=started + 1)), "another process has had that number"
    os.kill(pid, signal.SIGCONT)
    assert until(False, process)
    child.kill()
    child.wait()
    assert not is_stopped(process)


def test_processes_of_other_hosts_and_containers_are_not_looked_at() -> None:
    own = LocalProcess(5, 100, "boot", 1)
    assert own.shares_host_with(LocalProcess(6, 200, "boot", 1))
    assert not own.shares_host_with(LocalProcess(6, 200, "another", 1))
    assert not own.shares_host_with(LocalProcess(6, 200, "boot", 2))
