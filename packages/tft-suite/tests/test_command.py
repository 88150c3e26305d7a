"""The command line: what is wrong is said in one sentence."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tft_suite import __version__
from tft_suite.cli.main import exit_code_of, main


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["--version"]) == 0
    assert capsys.readouterr().out == f"tft {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(arguments) == 0
    assert "Usage: tft" in capsys.readouterr().out


def test_without_arguments_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of([]) == 2
    said = capsys.readouterr()
    assert "demo" in said.out
    assert said.err == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["demo", "--speed", "3"], "--speed"),
        (["demo", "--replicas", "many"], "--replicas"),
        (["demo", "--replicas"], "--replicas"),
        (["demo", "--replicas", "0"], "--replicas is 0"),
        (["demo", "--kills", "-1"], "--kills is -1"),
        (["demo", "--steps", "3", "--kills", "2"], "--kills 2 does not fit"),
        (["demo", "extra"], "extra"),
        (["dance"], "dance"),
    ],
)
def test_a_wrong_call_is_one_sentence_and_exit_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("tft: ")
    assert line.endswith(".")
    assert named in line


def test_an_output_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert exit_code_of(["demo", "--out", str(tmp_path / "file" / "demo")]) == 2
    assert "give another folder" in capsys.readouterr().err


def test_without_the_extra_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec

    def find_all_but_two(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in ("sklearn", "matplotlib") else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_all_but_two)
    assert exit_code_of(["demo"]) == 2
    assert capsys.readouterr().err == ('tft: tft demo needs scikit-learn, matplotlib: pip install "tft-suite[demo]"\n')


def test_the_console_script_exits_with_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["dance"])
    assert left.value.code == 2
