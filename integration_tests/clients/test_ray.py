"""Workers with the calls of Ray Train's TorchftConfig and its example: one of two is killed and started again.

Ray itself is too large for this suite. `docs/migration.md` says how it was run, and what came out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from integration_tests.conftest import Spawn
from integration_tests.scripts import Script, Shells
from torchft.coordination import LighthouseServer

WORKER: Final = Path(__file__).with_name("ray_worker.py")
COMMIT: Final = re.compile(r"^commit (\d+) 2 (\w+)$", re.MULTILINE)
COMMON: Final = 4  # commits
MORE: Final = 6  # commits

Start = Callable[[int], Script]


@pytest.fixture
def start(spawn: Spawn, tmp_path: Path) -> Iterator[Start]:
    """Yield `start(number)`, which starts a worker of the job."""
    lighthouse_kwargs = {"bind": "[::]:0", "min_replicas": 1}  # as Ray completes what a user gave
    server = LighthouseServer(**lighthouse_kwargs)  # type: ignore[arg-type]
    with Shells(spawn, WORKER, {}) as shells:
        yield lambda number: shells.start(number, [server.address(), str(number), str(tmp_path / "last")])[0]
    server.shutdown()


def wait_together(*scripts: Script) -> int:
    """Wait until each script has some commits with two participants. Return the highest step."""
    return max(int(script.wait_for(r"^commit (\d+) 2 ")[1]) for _ in range(COMMON) for script in scripts)


@pytest.mark.timeout(300)  # on a busy machine
def test_a_worker_is_killed_and_restarted_and_equal_steps_have_equal_weights(start: Start, tmp_path: Path) -> None:
    first, second = start(0), start(1)
    wait_together(first, second)
    second.kill()
    alone = int(first.wait_for(r"^commit (\d+) 1 ")[1])
    third = start(1)
    joined = wait_together(first, third)
    (tmp_path / "last.new").write_text(str(joined + MORE))
    (tmp_path / "last.new").rename(tmp_path / "last")
    ours, theirs = (dict(COMMIT.findall(script.ended())) for script in (first, third))
    common = ours.keys() & theirs.keys()
    assert len(common) >= COMMON
    assert {step for step in common if ours[step] != theirs[step]} == set()
    assert min(int(step) for step in theirs) > alone, "it began where the other was"
