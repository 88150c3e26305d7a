"""The example of DiLoCo as users start it: shells, one killed and restarted, plain and streaming."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pytest

from integration_tests.conftest import ROOT, Spawn
from integration_tests.scripts import SECRET, Shells, refused
from tft_lighthouse import LighthouseServer

EXAMPLE: Final = ROOT / "examples" / "train_diloco.py"

pytestmark = pytest.mark.timeout(180)  # interpreters import torch, on a machine that may be busy


@pytest.fixture
def lighthouse(request: pytest.FixtureRequest) -> Iterator[LighthouseServer]:
    """Yield a lighthouse with the test's smallest quorum."""
    with LighthouseServer("127.0.0.1:0", min_replicas=request.param, join_timeout_ms=5_000, token=SECRET) as server:
        yield server


def shell(replica: int, lighthouse: LighthouseServer, streaming: bool) -> dict[str, str]:
    return {
        "TFT_LIGHTHOUSE": str(lighthouse.address),
        "TFT_TOKEN": SECRET,
        "REPLICA_GROUP_ID": str(replica),
        "NUM_REPLICA_GROUPS": "2",
        "USE_STREAMING": str(streaming),
    }


def test_it_is_short_enough_to_copy() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 95


@pytest.mark.in_parts
@pytest.mark.parametrize("lighthouse", [1], indirect=True)
def test_a_streaming_shell_that_is_killed_and_started_again_adopts_the_global_weights(
    spawn: Spawn, lighthouse: LighthouseServer
) -> None:
    with Shells(spawn, EXAMPLE, shell(0, lighthouse, streaming=True)) as shells:
        (first,) = shells.start(0, ["1000000"])
        at_first = float(first.wait_for(r"synchronization 5 participants 1 loss (\S+)")[1])
        (second,) = shells.start(1, ["1000000"])
        second.wait_for(r"\[replica_1:\S+/0 - step 0\] healing from replica_0:\S+ to step \d+")
        second.wait_for(r"healed from replica_0:\S+ to step \d+: \d+ bytes")
        at_last = float(second.wait_for(r"participants 2 loss (\S+)")[1])
        assert at_last < at_first
        first.wait_for(r"participants 2 loss")
        second.kill()
        first.wait_for(r"participants 1 loss")


@pytest.mark.in_parts
@pytest.mark.parametrize("lighthouse", [2], indirect=True)
def test_groups_of_two_processes_learn_together(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    with Shells(spawn, EXAMPLE, shell(0, lighthouse, streaming=False)) as shells:
        for script in [script for replica in range(2) for script in shells.start(replica, ["25"], ranks=2)]:
            written = script.ended()
            (loss,) = re.findall(r"synchronization 25 participants 2 loss (\d+\.\d+)", written)
            assert float(loss) < 1.2, written


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        ([], {"REPLICA_GROUP_ID": "2"}, "REPLICA_GROUP_ID is 2 of NUM_REPLICA_GROUPS 2; give 0 to 1"),
        ([], {"NUM_REPLICA_GROUPS": "0"}, "NUM_REPLICA_GROUPS is 0, synchronizations 100; give at least 1"),
        (["0"], {"NUM_REPLICA_GROUPS": ""}, "NUM_REPLICA_GROUPS is 2, synchronizations 0; give at least 1"),
        (
            [],
            {"USE_STREAMING": "maybe"},
            "error: argument --use_streaming: USE_STREAMING is 'maybe'; give True or False",
        ),
        (
            [],
            {"TFT_LIGHTHOUSE": ""},
            "the lighthouse address is not set; set TFT_LIGHTHOUSE (or torchft's TORCHFT_LIGHTHOUSE) to it, such as "
            "http://localhost:29510",
        ),
        (
            [],
            {"WORLD_SIZE": "2", "RANK": ""},
            "the replica group has 2 processes and RANK is not set; set RANK to this process's place in it, or start "
            "the script with torchrun",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    spawn: Spawn, words: list[str], environment: dict[str, str], sentence: str
) -> None:
    said = refused(spawn, EXAMPLE, words, environment)
    assert said == f"train_diloco.py: {sentence}\n"
