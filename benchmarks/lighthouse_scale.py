"""P10 to P13: the cost of a lighthouse with thousands of replica groups.

P10 and P11: n replicas, each on its own connection, ask for the quorum at once, as at the start of a step. The time
runs from the first request to the last answer. All bytes count, including requests and framing. The members are the
same in each round and all commit, so the quorum is unchanged.

P12: unary heartbeats by h2load, as torchft's managers send them ten times a second. P13: replica groups that one beat a
second keeps alive.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from benchmarks import peer, servers
from benchmarks.row import Row
from benchmarks.swarm import SPARE_DESCRIPTORS, Swarm, allow_descriptors, swarm
from tft_coord.core import effects, events
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.types import Hello, Member, QuorumKey
from tft_coord.wire import codec, services

SIZES = (10, 100, 1000, 2000)
TIME_BARS_MS = {10: 4.0, 100: 25.0, 1000: 250.0, 2000: 500.0}
RATIO_SIZE, RATIO_BAR = 1000, 0.35
BYTE_BARS_MB = {1000: 0.2, 2000: 0.4}
HEARTBEATS_BAR_PER_S = 6_000.0
STREAMS_BAR = 5_000
CORE_BAR = 0.6
# Streams are opened in batches, because a lighthouse that answers nothing for seconds takes them for silent.
OPENED_AT_ONCE = 250
# On a busy machine the peer's rounds with thousands of members exceed its usual timeout.
PATIENT = ("--heartbeat_timeout_ms", "60000")


def members(number: int, lease_ms: int | None = None) -> list[Member]:
    """Return groups of one rank as they report themselves. Without a lease they ask in every step."""
    return [
        Member(
            f"replica_{index}:{uuid.UUID(int=index)}",
            address=f"host-{index}:29500",
            store_address=f"host-{index}:29501",
            min_replica_size=1,
            lease_ms=lease_ms,
        )
        for index in range(number)
    ]


def at_step(member: Member, step: int) -> Member:
    """Return that member after it has committed that many steps."""
    return replace(member, step=step, lineage=step * 0x9E3779B97F4A7C15 % 2**64, live=step > 0)


def our_command() -> Path:
    """Return the path of tft's lighthouse command."""
    return Path(sys.executable).parent / "tft-lighthouse"


def open_sessions(clients: Swarm, groups: Sequence[Member]) -> None:
    """Say hello for each group and wait for its welcome.

    A missing connection is opened just before its hello, because the lighthouse ends a connection that is silent for
    half a minute.
    """
    now_ms = time.time_ns() // 1_000_000
    for first in range(0, len(groups), OPENED_AT_ONCE):
        batch = groups[first : first + OPENED_AT_ONCE]
        while len(clients.connections) < first + len(batch):
            clients.connect()
        some = list(zip(clients.connections[first:], batch, strict=False))
        for connection, member in some:
            hello = Hello("bench", member.replica_id, now_ms, member.address)
            connection.open_stream(
                services.LIGHTHOUSE_SESSION, codec.encode_to_lighthouse(events.HelloReceived(0, hello))
            )
        clients.hear_until(lambda some=some: all(connection.answers for connection, _ in some))  # type: ignore[misc]


def our_rounds(port: int, number: int, rounds: int) -> tuple[list[float], list[int]]:
    """Measure rounds of an unchanged quorum on tft's lighthouse, for a job whose lease is 0.

    Returns: the seconds and the bytes of each round.
    Raises: RuntimeError: an answer was not "unchanged".
    """
    groups = members(number, lease_ms=0)
    times_s, byte_counts = [], []
    with swarm(port, number) as clients:
        open_sessions(clients, groups)
        held: QuorumKey | None = None
        # The first round forms the quorum. After the second all members know it and have one live state.
        for step in range(rounds + 2):
            words = [
                connection.framed(
                    codec.encode_to_lighthouse(
                        events.QuorumRequested(0, step + 1, at_step(member, step), held),
                        at_step(member, step - 1) if step > 0 else None,
                    )
                )
                for connection, member in zip(clients.connections, groups, strict=True)
            ]
            for connection in clients.connections:
                connection.messages.clear()
            bytes_before = clients.bytes_so_far
            took_s = clients.exchange(words)
            answers = [codec.decode_from_lighthouse(one.messages[-1]) for one in clients.connections[:: number // 5]]
            if step >= 2:
                times_s.append(took_s)
                byte_counts.append(clients.bytes_so_far - bytes_before)
                if not all(isinstance(answer, effects.AnswerUnchanged) for answer in answers):
                    raise RuntimeError(
                        f"the lighthouse sent a whole quorum, although nothing had changed: {answers[0]}"
                    )
            if isinstance(answers[0], effects.AnswerQuorum):
                held = answers[0].quorum.key
    return times_s, byte_counts


def unary_rounds(port: int, number: int, rounds: int) -> tuple[list[float], list[int]]:
    """Measure the same rounds by torchft's unary calls, on any lighthouse."""
    groups = members(number)
    times_s, byte_counts = [], []
    with swarm(port, number) as clients:
        for step in range(rounds + 2):
            words = [
                connection.unary(services.LIGHTHOUSE_QUORUM, codec.encode_lighthouse_request(at_step(member, step)))
                for connection, member in zip(clients.connections, groups, strict=True)
            ]
            bytes_before = clients.bytes_so_far
            took_s = clients.exchange(words)
            if step >= 2:
                times_s.append(took_s)
                byte_counts.append(clients.bytes_so_far - bytes_before)
    return times_s, byte_counts


def _rounds(sizes: Sequence[int], rounds: int) -> dict[str, dict[int, tuple[float, float]]]:
    """Return median milliseconds and megabytes by system and size.

    A lighthouse serves one size only, so it never waits for members of the previous size.
    """
    systems: dict[str, tuple[Path, Callable[[int, int, int], tuple[list[float], list[int]]]]] = {
        "peer": (peer.lighthouse_command(), unary_rounds),
        "ours": (our_command(), our_rounds),
    }
    found: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in systems}
    for number in sizes:
        for name, (command, measure) in systems.items():
            allow_descriptors(number + SPARE_DESCRIPTORS)
            with servers.lighthouse(command, min_replicas=number, flags=PATIENT) as started:
                times_s, byte_counts = measure(started.port, number, rounds)
            found[name][number] = (statistics.median(times_s) * 1e3, statistics.median(byte_counts) / 1e6)
    return found


def measure_rounds(rounds: int, sizes: Sequence[int] = SIZES) -> Row:
    """Measure P10."""
    found = _rounds(sizes, rounds)
    ours, theirs = ([found[name][number][0] for number in sizes] for name in ("ours", "peer"))
    judged = RATIO_SIZE if RATIO_SIZE in sizes else sizes[-1]
    ratio = found["ours"][judged][0] / found["peer"][judged][0]
    within = all(found["ours"][number][0] <= TIME_BARS_MS[number] for number in sizes)
    return Row(
        name="P10",
        what=f"quorum of {'/'.join(map(str, sizes))}, ms",
        ours="/".join(f"{value:.1f}" for value in ours),
        peer="/".join(f"{value:.1f}" for value in theirs),
        other="",
        ratio=ratio,
        bar=f"<= {'/'.join(f'{TIME_BARS_MS[number]:.0f}' for number in sizes)}, <= {RATIO_BAR} x at {RATIO_SIZE}",
        met=within and ratio <= RATIO_BAR,
    )


def measure_bytes(rounds: int) -> Row:
    """Measure P11."""
    sizes = tuple(BYTE_BARS_MB)
    found = _rounds(sizes, rounds)
    return Row(
        name="P11",
        what=f"quorum of {'/'.join(map(str, sizes))}, MB",
        ours="/".join(f"{found['ours'][number][1]:.2f}" for number in sizes),
        peer="/".join(f"{found['peer'][number][1]:.0f}" for number in sizes),
        other="both directions",
        ratio=found["ours"][sizes[0]][1] / found["peer"][sizes[0]][1],
        bar=f"<= {'/'.join(str(bar) for bar in BYTE_BARS_MB.values())} MB",
        met=all(found["ours"][number][1] <= bar for number, bar in BYTE_BARS_MB.items()),
    )


def measure_heartbeats(turns: int, seconds: int) -> Row:
    """Measure P12. Raises: RuntimeError: h2load (Debian's nghttp2-client) is not installed, or a heartbeat failed."""
    bare = [sys.executable, "-m", "benchmarks.bare_handler"]
    commands: dict[str, Path | Sequence[str]] = {
        "peer": peer.lighthouse_command(),
        "ours": our_command(),
        "bare": bare,
    }
    found: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(turns):
        for name, command in commands.items():
            with servers.lighthouse(command, min_replicas=1) as started:
                found[name].append(_heartbeats_per_s(started.port, seconds))
    per_s = {name: statistics.median(values) for name, values in found.items()}
    return Row(
        name="P12",
        what="unary heartbeats, 20 x 10, k/s",
        ours=f"{per_s['ours'] / 1e3:.1f}",
        peer=f"{per_s['peer'] / 1e3:.1f}",
        other=f"bare grpc.aio {per_s['bare'] / 1e3:.1f}",
        ratio=per_s["ours"] / per_s["peer"],
        bar=f">= {HEARTBEATS_BAR_PER_S / 1e3:.0f} k/s",
        met=per_s["ours"] >= HEARTBEATS_BAR_PER_S,
    )


def _heartbeats_per_s(port: int, seconds: int) -> float:
    if shutil.which("h2load") is None:
        raise RuntimeError("h2load is not installed; it is in Debian's package nghttp2-client")
    heartbeat = codec.encode_heartbeat("replica_0:00000000-0000-0000-0000-000000000000")
    with tempfile.NamedTemporaryFile() as body:
        body.write(b"\0" + len(heartbeat).to_bytes(4, "big") + heartbeat)
        body.flush()
        done = subprocess.run(
            [
                *("h2load", "--clients=20", "--max-concurrent-streams=10", f"--duration={seconds}", "--warm-up-time=1"),
                *("--header=content-type: application/grpc", "--header=te: trailers", f"--data={body.name}"),
                f"http://127.0.0.1:{port}{services.LIGHTHOUSE_HEARTBEAT}",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    rate = re.search(r"finished in .*?, ([\d.]+) req/s", done.stdout)
    failed = re.search(r"(\d+) failed", done.stdout)
    if rate is None or failed is None or int(failed[1]):
        raise RuntimeError(f"h2load failed: {done.stdout}")
    return float(rate[1])


def measure_streams(seconds: float, number: int = STREAMS_BAR) -> Row:
    """Measure P13: the share of a core that this many groups cost. It grows with their number."""
    allow_descriptors(number + SPARE_DESCRIPTORS)
    groups = members(number)
    with servers.lighthouse(our_command(), min_replicas=number) as started, swarm(started.port, number) as clients:
        open_sessions(clients, groups)
        progress = Progress(1_000, Phase.REDUCING, since_ms=300, excused=False, slowest_step_ms=600_000)
        beat = codec.encode_to_lighthouse(events.BeatReceived(0, 1 << 30, progress))
        words = [connection.framed(beat) for connection in clients.connections]
        server = psutil.Process(started.pid)
        _beat(clients, words, 1.0)
        before = server.cpu_times()
        began = time.perf_counter()
        _beat(clients, words, seconds)
        took_s = time.perf_counter() - began
        after = server.cpu_times()
        # a loss would be reported on a stream
        num_unasked = sum(connection.answers for connection in clients.connections) - number
    cores = (after.user + after.system - before.user - before.system) / took_s
    streams = number * CORE_BAR / cores
    return Row(
        name="P13",
        what=f"streams on {CORE_BAR} of a core",
        ours=f"{streams:.0f}",
        peer="-",
        other=f"{number} cost {cores:.2f} of a core",
        ratio=cores / CORE_BAR,
        bar=f">= {STREAMS_BAR}, none lost",
        met=streams >= STREAMS_BAR and not num_unasked,
    )


def _beat(clients: Swarm, words: Sequence[bytes], seconds: float) -> None:
    """Send one beat a second for every client, spread over the second."""
    number = len(words)
    began, beaten = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        due = int(passed * number)
        for index in range(beaten, due):
            lap, which = divmod(index, number)
            connection = clients.connections[which]
            # A manager server's channel pings after half of heartbeat_timeout, which is less frequent than this.
            connection.send(words[which] + connection.ping() if lap % 2 else words[which])
        beaten = due
        clients.hear_for(0.01)
