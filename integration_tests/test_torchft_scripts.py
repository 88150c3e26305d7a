"""Scripts that were written for torchft, on tft's module of that name: killed, restarted and healed.

One of the scripts is also run by torchft itself, in `test_torchft_job.py`. All run under the watch for pickles.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from integration_tests.conftest import Spawn
from integration_tests.scripts import run_script
from torchft.coordination import LighthouseServer

DDP: Final = Path(__file__).with_name("torchft_program.py")
OUTER: Final = Path(__file__).with_name("torchft_outer_program.py")
COMMIT: Final = re.compile(r"^commit (\d+) (\d+) (\w+)$", re.MULTILINE)
TOGETHER: Final = 4  # commits
PATIENCE_S: Final = 120.0

pytestmark = pytest.mark.timeout(240)


class Trainer:
    """A running script, whose output a thread reads.

    Args:
        spawn: the fixture.
        script: its file.
        words: its arguments.
    """

    def __init__(self, spawn: Spawn, script: Path, *words: str) -> None:
        read, write = multiprocessing.Pipe(duplex=False)
        self._process = spawn(run_script, script, words, {}, write)
        write.close()
        self._output = os.fdopen(os.dup(read.fileno()), encoding="utf-8")
        read.close()
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, name="reader")
        self._reader.start()

    def _read(self) -> None:
        for line in self._output:
            self._lines.append(line)

    @property
    def said(self) -> str:
        return "".join(tuple(self._lines))

    @property
    def commits(self) -> dict[int, tuple[int, str]]:
        """Return the participants and the digest of the weights, by step."""
        return {int(step): (int(participants), digest) for step, participants, digest in COMMIT.findall(self.said)}

    def num_with(self, participants: int) -> int:
        """Return the number of its commits with that many participants."""
        return sum(count == participants for count, _ in self.commits.values())

    def kill(self) -> None:
        self._process.kill()
        self._reader.join(PATIENCE_S)
        self._output.close()


Start = Callable[[str], Trainer]


@pytest.fixture
def start(request: pytest.FixtureRequest, spawn: Spawn) -> Iterator[Start]:
    """Yield a function that starts a replica by name. The test's parameter is the algorithm."""
    algorithm = request.param
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=5_000)
    trainers: list[Trainer] = []

    def start_one(name: str) -> Trainer:
        words = (name, server.address())
        made = Trainer(spawn, DDP, *words) if algorithm == "ddp" else Trainer(spawn, OUTER, algorithm, *words)
        trainers.append(made)
        return made

    yield start_one
    for trainer in trainers:
        trainer.kill()
    server.shutdown()


def until(condition: Callable[[], bool], what: str, *trainers: Trainer) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}; {[trainer.said[-2000:] for trainer in trainers]}"
        time.sleep(0.05)


@pytest.mark.in_parts(always=["ddp"])
@pytest.mark.parametrize("start", ["ddp", "local_sgd", "diloco", "streaming"], indirect=True)
def test_one_of_two_is_killed_and_restarted_and_their_weights_are_equal(start: Start) -> None:
    a, b = start("a"), start("b")
    until(lambda: min(a.num_with(2), b.num_with(2)) >= TOGETHER, "both train", a, b)
    b.kill()
    killed_at = max(b.commits)
    until(lambda: any(step > killed_at and count == 1 for step, (count, _) in a.commits.items()), "a goes on", a)
    alone = max(a.commits)
    c = start("b")
    until(lambda: c.num_with(2) >= TOGETHER and max(a.commits) > max(c.commits) - 1, "it is back", a, c)
    for other in (b, c):
        before = other.commits
        common = a.commits.keys() & before.keys()
        assert len(common) >= TOGETHER
        assert [step for step in common if a.commits[step] != before[step]] == []
    assert min(c.commits) > alone - 1, "it began where the other was"
