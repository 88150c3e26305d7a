"""A lighthouse in a separate process, with more clients than any real job has: it keeps nothing of them."""

from __future__ import annotations

import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil
import pytest

from benchmarks.swarm import Swarm, swarm
from integration_tests.hostile import Watched, serving
from tft_coord.core import events
from tft_coord.core.config import JOBS_MOST
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.types import Hello, Member
from tft_coord.wire import codec, services

WITHIN_S: Final = 30.0
TOGETHER: Final = 100
LIVES: Final = 1_500
# The allocator keeps some of a burst. Each life leaves some kilobytes until it is forgotten.
GROWTH_BYTES: Final = 16 << 20


@contextmanager
def a_lighthouse(folder: Path, heartbeat_timeout_ms: int = 600) -> Iterator[Watched]:
    command = [sys.executable, "-m", "tft_lighthouse", "--bind", "127.0.0.1:0", "--join-timeout-ms", "0"]
    command += ["--max-jobs", str(JOBS_MOST)]
    command += ["--heartbeat-timeout-ms", str(heartbeat_timeout_ms)]
    with serving(command, folder / "lighthouse.log") as server:
        yield server


def come(clients: Swarm, first: int) -> None:
    """Let each client say hello and ask for a quorum."""
    now_ms = time.time_ns() // 1_000_000
    for number, connection in enumerate(clients.connections, first):
        name, job = f"replica_{number}:u", "one" if number % 3 else f"job {number}"
        hello = events.HelloReceived(0, Hello(job, name, now_ms, f"host-{number}:1"))
        asked = events.QuorumRequested(0, 1, Member(name, data="x" * 2_000), None)
        connection.open_stream(services.LIGHTHOUSE_SESSION, codec.encode_to_lighthouse(hello))
        connection.send(connection.framed(codec.encode_to_lighthouse(asked)))
    clients.hear_until(lambda: all(connection.answers for connection in clients.connections), WITHIN_S)


def live_and_die(server: Watched, lives: int, first: int) -> None:
    for start in range(first, first + lives, TOGETHER):
        with swarm(server.port, TOGETHER) as clients:
            come(clients, start)


def until_back_to(process: psutil.Process, descriptors: int) -> None:
    end = time.monotonic() + WITHIN_S
    while process.num_fds() > descriptors:
        assert time.monotonic() < end, f"{process.num_fds()} descriptors are open where there were {descriptors}"
        time.sleep(0.02)


@pytest.mark.in_parts
def test_replicas_that_come_and_die_leave_no_memory_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    with a_lighthouse(tmp_path) as server:
        process = psutil.Process(server.pid)
        descriptors = process.num_fds()
        live_and_die(server, 3 * TOGETHER, first=0)
        until_back_to(process, descriptors + 2)
        before_bytes, threads = process.memory_info().rss, process.num_threads()
        live_and_die(server, LIVES, first=10_000)
        until_back_to(process, descriptors + 2)
        assert process.num_threads() <= threads + 4
        grown = process.memory_info().rss - before_bytes
        assert grown < GROWTH_BYTES, f"{LIVES} replicas that are gone cost {grown / 2**20:.1f} MiB"
        assert "Traceback" not in (tmp_path / "lighthouse.log").read_text()


@pytest.mark.soak
def test_nor_do_fifty_thousand(tmp_path: Path) -> None:
    with a_lighthouse(tmp_path) as server:
        process = psutil.Process(server.pid)
        live_and_die(server, 50 * TOGETHER, first=0)
        before_bytes = process.memory_info().rss
        live_and_die(server, 500 * TOGETHER, first=10_000)
        assert process.memory_info().rss - before_bytes < GROWTH_BYTES


def test_a_stream_that_does_not_read_is_ended_by_name_and_costs_no_memory(tmp_path: Path) -> None:
    # A client that does not answer pings either is detected by that, after a timeout.
    with a_lighthouse(tmp_path, heartbeat_timeout_ms=30_000) as server, swarm(server.port, 2) as clients:
        process = psutil.Process(server.pid)
        before_bytes = process.memory_info().rss
        deaf, honest = clients.connections
        now_ms = time.time_ns() // 1_000_000
        member = Member("deaf:1", data="x" * 60_000)
        hello = events.HelloReceived(0, Hello("job", "deaf:1", now_ms, "h:1", unpacks=False))
        deaf.open_stream(services.LIGHTHOUSE_SESSION, codec.encode_to_lighthouse(hello))
        ended = False
        most_bytes = 0
        for request in range(1, 3_000):
            # A member that reports no quorum receives the whole of it, which is long.
            asked = events.QuorumRequested(0, request, member, None)
            deaf.send(deaf.framed(codec.encode_to_lighthouse(asked, member if request > 1 else None)))
            if request % 50 == 0:
                time.sleep(0.01)
                most_bytes = max(most_bytes, process.memory_info().rss - before_bytes)
                ended = any("disconnected replica deaf:1 of job" in line for line in server.check_log("requests"))
                if ended:
                    break
        assert ended
        assert most_bytes < 100 << 20
        hello = events.HelloReceived(0, Hello("other", "honest:1", now_ms, "h:2"))
        honest.open_stream(services.LIGHTHOUSE_SESSION, codec.encode_to_lighthouse(hello))
        clients.hear_until(lambda: honest.answers >= 1, WITHIN_S)
        end = time.monotonic() + WITHIN_S
        while not any("lost replica deaf:1 of job job" in line for line in server.check_log("its end")):
            assert time.monotonic() < end, "its replica is not lost"
            time.sleep(0.02)


MESSAGES_PER_S: Final = 3_000
BEATING: Final = 300
FLAT_S: Final = 600.0
FLAT_BYTES: Final = 4 << 20


def page_of(log: Path) -> str:
    """Return the address of the HTTP port, which the lighthouse logs a moment after the other one."""
    end = time.monotonic() + WITHIN_S
    while (found := re.search(r"health at (http://\S+)", log.read_text())) is None:
        assert time.monotonic() < end, "it serves no page"
        time.sleep(0.05)
    return found[1]


def until_quiet(process: psutil.Process) -> None:
    """Wait until the lighthouse has handled what it has received; what waits takes memory."""
    end = time.monotonic() + 4 * WITHIN_S
    while process.cpu_percent(0.5) > 20.0:
        assert time.monotonic() < end, "it does not keep up with its clients"


def beat(clients: Swarm, page: str, seconds: float) -> float:
    """Send beats at an even pace, and read what an operator reads. Returns: the messages a second."""
    progress = Progress(1_000, Phase.REDUCING, since_ms=300, excused=False, slowest_step_ms=600_000)
    word = codec.encode_to_lighthouse(events.BeatReceived(0, 1 << 30, progress))
    words = [connection.framed(word) for connection in clients.connections]
    began_s, sent, read_s = time.monotonic(), 0, 0.0
    while (passed_s := time.monotonic() - began_s) < seconds:
        # A busy machine is late, and a backlog that grows would be another test.
        for _ in range(min(int(passed_s * MESSAGES_PER_S) - sent, MESSAGES_PER_S)):
            clients.connections[sent % BEATING].send(words[sent % BEATING])
            sent += 1
        clients.hear_for(0.01)
        if passed_s >= read_s:
            read_s = passed_s + 5.0
            for path in ("/metrics", "/api/v1/status", "/api/v1/incidents", "/"):
                with urllib.request.urlopen(page + path, timeout=WITHIN_S) as answer:
                    answer.read()
    return sent / (time.monotonic() - began_s)


@pytest.mark.soak
@pytest.mark.timeout(1_200)
def test_ten_minutes_of_three_thousand_messages_a_second_leave_no_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tft_lighthouse", "--bind", "127.0.0.1:0", "--http-bind", "127.0.0.1:0"]
    command += ["--heartbeat-timeout-ms", "60000"]  # a busy machine is no loss
    with serving(command, tmp_path / "lighthouse.log") as server, swarm(server.port, BEATING) as clients:
        process = psutil.Process(server.pid)
        come(clients, 0)
        page = page_of(tmp_path / "lighthouse.log")
        beat(clients, page, FLAT_S / 10)
        until_quiet(process)
        before_bytes = process.memory_info().rss
        rate = beat(clients, page, FLAT_S)
        until_quiet(process)
        grown = process.memory_info().rss - before_bytes
        print(f"{rate:.0f} messages a second, {before_bytes / 1e6:.1f} MB, grown by {grown / 1e6:.2f} MB")
        assert rate > 0.9 * MESSAGES_PER_S, "the machine was too busy for this test"
        assert grown < FLAT_BYTES, f"{FLAT_S:.0f} s cost {grown / 1e6:.2f} MB"
        assert "lost replica" not in (tmp_path / "lighthouse.log").read_text()
