"""A misspelt environment variable is named; the user's own variables are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tft_algos.manager.variables import warn_of_misspelt
from tft_coord.variables import KNOWN_VARIABLES

PACKAGES = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("TFT_HEARTBEAT_TIMEOUT", "TFT_HEARTBEAT_TIMEOUT_SEC"),
        ("TFT_LIGTHOUSE", "TFT_LIGHTHOUSE"),
        ("TFT_JOBID", "TFT_JOB_ID"),
        ("TFT_TOKENFILE", "TFT_TOKEN_FILE"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_nearest(
    name: str, nearest: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_misspelt({name: "1", "PATH": "/bin"})
    (record,) = caplog.records
    assert record.getMessage() == (f"the environment variable {name} is ignored; the nearest variable is {nearest}")


def test_known_variables_and_those_of_the_user_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_misspelt(dict.fromkeys(KNOWN_VARIABLES, "1") | {"TFT_MY_DATASET": "here", "TORCHFT_LIGHTHOUSE": "there"})
    assert caplog.records == []


def test_every_variable_that_the_packages_read_is_known() -> None:
    named = {
        name
        for file in PACKAGES.glob("*/src/**/*.py")
        if "tft-sim" not in file.parts
        for name in re.findall(r"\bTFT_[A-Z0-9_]*[A-Z0-9]\b", file.read_text(encoding="utf-8"))
    }
    assert named == KNOWN_VARIABLES
