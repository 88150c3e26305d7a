"""`tft drain`: who is asked to leave, and what is said where nobody can be."""

from __future__ import annotations

import pytest

from tft_lighthouse import LighthouseServer
from tft_suite.cli.main import exit_code_of


def test_a_replica_that_nobody_knows_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with LighthouseServer("127.0.0.1:0") as lighthouse:
        assert exit_code_of(["drain", "a", "--lighthouse", str(lighthouse.address)]) == 2
    assert "a was not asked to leave: " in (told := capsys.readouterr().err)
    assert "this lighthouse knows no job 'default'" in told


def test_a_lighthouse_must_be_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TFT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)
    assert exit_code_of(["drain", "a"]) == 2
    assert "give --lighthouse, or set TFT_LIGHTHOUSE" in capsys.readouterr().err
    assert exit_code_of(["drain", "a", "--timeout", "0"]) == 2
