"""The example of a custom strategy: the mean is over the first two of three replicas."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pytest

from integration_tests.conftest import ROOT, Spawn
from integration_tests.scripts import SECRET, Script
from tft_lighthouse import LighthouseServer

EXAMPLE: Final = ROOT / "examples" / "custom_strategy.py"
STEPS: Final = 20
PIECE_S: Final = 0.05
K: Final = 2


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=3, join_timeout_ms=5_000, token=SECRET) as server:
        yield server


def commits(script: Script) -> dict[int, tuple[bool, int, str]]:
    """Return by step: whether the replica's own gradient counted, participants, digest."""
    lines = re.findall(r"^step (\d+) (counted|late) of (\d+), (\w+)$", script.ended(), re.MULTILINE)
    return {int(step): (how == "counted", int(members), digest) for step, how, members, digest in lines}


def test_it_is_short_enough_to_copy() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 120


@pytest.mark.in_parts
def test_the_mean_is_over_the_first_two_of_three(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    job = {"TFT_LIGHTHOUSE": str(lighthouse.address), "TFT_TOKEN": SECRET}
    scripts = [
        Script(spawn, EXAMPLE, [str(STEPS), "--replica", str(replica), "--piece_s", str(piece_s)], job)
        for replica, piece_s in enumerate((0.0, 0.0, PIECE_S))
    ]
    told = [commits(script) for script in scripts]
    slow = told[2]
    assert sorted(slow) == list(range(1, STEPS + 1))
    for step in slow:
        counted, members, digests = zip(*(of_one[step] for of_one in told), strict=True)
        assert len(set(digests)) == 1, f"step {step}: {digests}"
        # In the first step one replica's weights go to the others, which contribute nothing.
        assert sum(counted) == min(K, members[0]), f"step {step}: {counted}"
    assert sum(counted for counted, _, _ in slow.values()) < STEPS / 2
