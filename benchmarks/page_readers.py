"""P10 with the lighthouse's page open in 20 browsers: a quorum of 1,000 with and without 20 readers.

A reader asks as the page's connection.js does: the status and what is new in the timeline at the moments that all pages
share, the events on a connection that stays, and once more soon after each incident. The readers run in a process of
their own with the lowest priority, because browsers run on other machines. What they cost the lighthouse is what
counts, so its processor time is measured too.

The process of the readers: `python -m benchmarks.page_readers HTTP_ADDRESS READERS`.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import psutil

from benchmarks import servers
from benchmarks.lighthouse_scale import PATIENT, our_command, our_rounds
from benchmarks.row import Row
from benchmarks.swarm import SPARE_DESCRIPTORS, allow_descriptors

REPLICAS: Final = 1_000
READERS: Final = 20
FEW: Final = 200
OFTEN_MS: Final = 2_000
SELDOM_MS: Final = 5_000
SOON_S: Final = 0.15
RATIO_BAR: Final = 1.1  # the noise of P10 itself


class Reader:
    """One open page.

    Args:
        session: of aiohttp.
        address: of the HTTP port.
    """

    def __init__(self, session: Any, address: str) -> None:
        self._session = session
        self._address = address
        self._after_ms = 0
        self._soon = asyncio.Event()

    async def run(self) -> None:
        """Read until the task is cancelled."""
        await asyncio.gather(self._follow(), self._ask())

    async def _follow(self) -> None:
        async with self._session.get(f"{self._address}/api/v1/events", timeout=None) as events:
            async for line in events.content:
                if line.startswith(b"event:"):
                    self._soon.set()

    async def _ask(self) -> None:
        while True:
            status = json.loads(await self._get("status"))
            if status["jobs"]:
                query = f"timeline?job={status['jobs'][0]['name']}&after={self._after_ms}"
                with suppress(KeyError):  # not looked at yet
                    self._after_ms = json.loads(await self._get(query))["now_ms"]
            most = max((job["num_replicas"] for job in status["jobs"]), default=0)
            every_ms = SELDOM_MS if most > FEW else OFTEN_MS
            wait_ms = every_ms - status["now_ms"] % every_ms + 1
            self._soon.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._soon.wait(), wait_ms / 1_000)
                await asyncio.sleep(SOON_S)

    async def _get(self, path: str) -> bytes:
        async with self._session.get(f"{self._address}/api/v1/{path}") as answer:
            body: bytes = await answer.read()
            return body


async def read(address: str, number: int) -> None:
    """Keep that many pages open. Prints a line when all of them have the first answer."""
    from aiohttp import ClientSession, TCPConnector

    async with ClientSession(connector=TCPConnector(limit=0)) as session:
        pages = [asyncio.ensure_future(Reader(session, address).run()) for _ in range(number)]
        await asyncio.sleep(2 * OFTEN_MS / 1_000)
        print("open", flush=True)
        await asyncio.gather(*pages)


@contextmanager
def readers(address: str, number: int) -> Iterator[None]:
    """Keep that many pages open in another process. Raises: RuntimeError: a reader failed."""
    if not number:
        yield
        return
    command = [sys.executable, "-m", "benchmarks.page_readers", address, str(number)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=lambda: os.nice(19))
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the readers ended with {process.returncode}; their error is above")
    finally:
        process.kill()
        process.communicate()


def measured(number: int, rounds: int) -> tuple[float, float, float]:
    """Measure P10 of `REPLICAS` with that many pages open.

    Returns: median milliseconds of a round, seconds of the lighthouse's processor time, and its resident megabytes.
    """
    allow_descriptors(REPLICAS + SPARE_DESCRIPTORS)
    with servers.lighthouse(our_command(), min_replicas=REPLICAS, flags=PATIENT) as started:
        address = f"http://127.0.0.1:{started.port + 1}"
        urllib.request.urlopen(f"{address}/healthz", timeout=30).close()
        server = psutil.Process(started.pid)
        with readers(address, number):
            before = server.cpu_times()
            times_s, _ = our_rounds(started.port, REPLICAS, rounds)
            after = server.cpu_times()
        cpu_s = after.user + after.system - before.user - before.system
        return statistics.median(times_s) * 1e3, cpu_s, server.memory_info().rss / 1e6


def measure(turns: int, rounds: int) -> Row:
    """Measure P10 with and without the pages, in turns."""
    found: dict[int, list[tuple[float, float, float]]] = {0: [], READERS: []}
    for _ in range(turns):
        for number, results in found.items():
            results.append(measured(number, rounds))
    alone, read_by = ([statistics.median(each) for each in zip(*found[number], strict=True)] for number in (0, READERS))
    ratio = read_by[0] / alone[0]
    return Row(
        name="page",
        what=f"quorum of {REPLICAS}, {READERS} pages, ms",
        ours=f"{read_by[0]:.1f}",
        peer="-",
        other=f"{alone[0]:.1f} without, CPU {read_by[1]:.2f} / {alone[1]:.2f} s, {read_by[2]:.0f} MB",
        ratio=ratio,
        bar=f"<= {RATIO_BAR} x without",
        met=ratio <= RATIO_BAR,
    )


if __name__ == "__main__":
    asyncio.run(read(sys.argv[1], int(sys.argv[2])))
