"""An unmodified torchft training job on tft's lighthouse, by torchft's rules. A job has one kind."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from integration_tests.conftest import Spawn
from integration_tests.torchft_peer import OF_A_SHELL
from integration_tests.training import Job
from tft_lighthouse import LighthouseServer

PROGRAM: Final = Path(__file__).with_name("torchft_program.py")
COMMIT: Final = re.compile(r"^commit (\d+) (\d+) (\w+)$", re.MULTILINE)
PATIENCE_S: Final = 120.0  # the wheel takes a minute to import on a machine that is busy


class Peer:
    """A torchft process, and its output."""

    def __init__(self, python: Path, name: str, lighthouse: LighthouseServer, log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [python, PROGRAM, name, lighthouse.address],
                env={**os.environ, **OF_A_SHELL},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def commits(self) -> dict[int, tuple[int, str]]:
        """Return the participants and the digest of the weights, by step."""
        return {int(step): (int(participants), digest) for step, participants, digest in COMMIT.findall(self.said)}

    def trains_with(self, participants: int) -> bool:
        """Return whether its last commits had that many participants."""
        last = [count for count, _ in self.commits.values()][-3:]
        return last == [participants] * 3

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(5)


Start: TypeAlias = Callable[[str], Peer]


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", join_timeout_ms=2_000, heartbeat_timeout_ms=1_500) as server:
        yield server


@pytest.fixture
def start(torchft_python: Path, lighthouse: LighthouseServer, tmp_path: Path) -> Iterator[Start]:
    peers: list[Peer] = []

    def start_one(name: str) -> Peer:
        peers.append(Peer(torchft_python, name, lighthouse, tmp_path / f"{len(peers)}.log"))
        return peers[-1]

    yield start_one
    for peer in peers:
        peer.kill()


def until(condition: Callable[[], bool], what: str, *peers: Peer) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}; {[peer.said[-1500:] for peer in peers]}"
        time.sleep(0.05)


@pytest.mark.in_parts
@pytest.mark.timeout(400)
def test_a_job_of_torchfts_trains_loses_one_and_heals_it(
    start: Start, lighthouse: LighthouseServer, spawn: Spawn
) -> None:
    a, b = start("a"), start("b")
    until(lambda: a.trains_with(2) and b.trains_with(2), "both train", a, b)
    b.kill()
    until(lambda: a.trains_with(1), "the survivor goes on", a)
    alone = max(a.commits)
    c = start("b")
    until(lambda: a.trains_with(2) and c.trains_with(2), "it is back, and both train", a, c)
    assert min(c.commits) > alone - 1  # it did not begin at 0
    for peer in (b, c):
        common = a.commits.keys() & peer.commits.keys()
        assert len(common) > 2
        assert all(a.commits[step] == peer.commits[step] for step in common), "their weights are equal"

    ours = Job(spawn, lighthouse).start("ours")
    assert isinstance(ours.connection.recv().kind, str)  # it is ready
    refused = ours.connection.recv()
    assert refused.kind == "end"
    words = r"replica ours:\S+ \(tft\) can't join job 'default', because replica [ab]:\S+ \(torchft\)"
    assert re.search(words, refused.text)
    before = max(a.commits)
    until(lambda: max(a.commits) > before + 2, "nobody is disturbed by it", a)


def test_one_of_torchfts_is_refused_where_ours_train(start: Start, lighthouse: LighthouseServer, spawn: Spawn) -> None:
    job = Job(spawn, lighthouse)
    ours = job.start("ours")
    job.until(lambda: ours.step > 2, "ours trains")
    theirs = start("theirs")
    # torchft's manager logs the refusal, and tells its trainer nothing. The trainer waits for its own timeout.
    until(lambda: "tft and torchft replicas never share a quorum" in theirs.said, "theirs is refused", theirs)
    before = ours.step
    job.until(lambda: ours.step > before + 3, "ours trains on")
    assert theirs.commits == {}
    assert ours.of_kind("failed") == []
    job.finish()
