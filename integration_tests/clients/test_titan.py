"""A trainer with torchtitan's calls of torchft: one of two groups is killed and restarted.

torchtitan itself is too large for this suite. `docs/migration.md` says how it was run, and what came out.
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

TRAINER: Final = Path(__file__).with_name("titan_trainer.py")
COMMIT: Final = re.compile(r"^commit (\d+) (\d+) (\d+) (\w+)$", re.MULTILINE)
TOGETHER: Final = r"^commit (\d+) 2 "
ALONE: Final = r"^commit (\d+) 1 "
COMMON: Final = 4  # commits
MORE: Final = 6  # commits

Start = Callable[[int], "list[Script]"]


@pytest.fixture
def start(request: pytest.FixtureRequest, spawn: Spawn, tmp_path: Path) -> Iterator[Start]:
    """Yield `start(number)`, which starts a replica group. The test's parameter is the algorithm and the ranks."""
    algorithm, ranks = request.param
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=5_000)
    with Shells(spawn, TRAINER, {"TORCHFT_LIGHTHOUSE": server.address(), "TORCHFT_TIMEOUT_SEC": "60"}) as shells:
        yield lambda number: shells.start(
            number, [algorithm, str(number), str(tmp_path / "last")], ranks, by_torchrun=True
        )
    server.shutdown()


def wait_together(*scripts: Script) -> int:
    """Wait until each script has some commits with two participants. Return the highest step."""
    return max(int(script.wait_for(TOGETHER)[1]) for _ in range(COMMON) for script in scripts)


@pytest.mark.in_parts(always=["step, one process"])
@pytest.mark.timeout(300)  # on a busy machine
@pytest.mark.parametrize(
    ("start", "counted"),
    [
        (("step", 1), 2),
        (("step", 2), 2),
        (("local_sgd", 1), 0),
        (("diloco", 1), 0),
        (("streaming", 2), 0),
    ],
    indirect=["start"],
    ids=["step, one process", "step, two processes", "LocalSGD", "DiLoCo", "DiLoCo, two fragments, two processes"],
)
def test_a_group_is_killed_and_restarted_and_equal_steps_have_equal_weights(
    start: Start, counted: int, tmp_path: Path
) -> None:
    """`counted`: the replicas in a reduction after a commit of both. 0: the algorithm has none."""
    first, second = start(0), start(1)
    killed_at = wait_together(*first, *second)
    for script in reversed(second):
        script.kill()
    alone = int(first[0].wait_for(ALONE)[1])
    third = start(1)
    joined = wait_together(*first, *third)
    (tmp_path / "last.new").write_text(str(joined + MORE))
    (tmp_path / "last.new").rename(tmp_path / "last")

    assert alone > killed_at - 1
    for rank, (survivor, newcomer) in enumerate(zip(first, third, strict=True)):
        ours, theirs = (commits_of(script.ended()) for script in (survivor, newcomer))
        common = sorted(step for step in ours.keys() & theirs.keys() if ours[step][0] == theirs[step][0] == 2)
        assert len(common) >= COMMON
        assert [(rank, step) for step in common if ours[step][2] != theirs[step][2]] == []
        assert {count for step in common[:COMMON] for _, count, _ in (ours[step], theirs[step])} == {counted}
        assert min(theirs) > alone - 1, "it began where the other was"


def commits_of(output: str) -> dict[int, tuple[int, int, str]]:
    """Return the participants, the counted replicas and the digest of each commit, by step."""
    return {
        int(step): (int(participants), int(counted), value)
        for step, participants, counted, value in COMMIT.findall(output)
    }
