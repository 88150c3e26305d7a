"""The example of a custom outer update: replicas end with the same weights and momentum."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pytest

from integration_tests.conftest import ROOT, Spawn
from integration_tests.scripts import SECRET, Script
from tft_lighthouse import LighthouseServer

EXAMPLE: Final = ROOT / "examples" / "own_outer_update.py"
SYNCS: Final = 12


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=5_000, token=SECRET) as server:
        yield server


def syncs(script: Script) -> tuple[dict[int, str], list[float]]:
    """Return the digest by sync, and the losses."""
    lines = re.findall(r"^sync (\d+) of \d+, (\w+), loss ([\d.]+)$", script.ended(), re.MULTILINE)
    return {int(sync): digest for sync, digest, _ in lines}, [float(loss) for _, _, loss in lines]


def test_it_is_short_enough_to_copy() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 100


@pytest.mark.in_parts
def test_replicas_end_with_the_same_weights_and_momentum(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    job = {"TFT_LIGHTHOUSE": str(lighthouse.address), "TFT_TOKEN": SECRET}
    scripts = [Script(spawn, EXAMPLE, [str(SYNCS), "--replica", str(replica)], job) for replica in range(2)]
    (first, losses), (second, _) = (syncs(script) for script in scripts)
    common = first.keys() & second.keys()
    assert SYNCS in common
    assert len(common) >= SYNCS - 2
    assert {sync: first[sync] for sync in common} == {sync: second[sync] for sync in common}
    assert losses[-1] < losses[0]
