"""The parts of the slow tests cover all of them, and each commit runs the tests that are always run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.conftest import ROOT
from scripts.pytest_parts import EVERY_PART, PARTS, part_of, parts

TESTS = """
import pytest


@pytest.mark.in_parts
@pytest.mark.parametrize("case", range(20))
def test_slow(case): ...


@pytest.mark.in_parts(always=["kept"])
@pytest.mark.parametrize("case", ["rare", "kept"])
def test_one_is_kept(case): ...
"""


def test_the_hash_of_a_commit_chooses_a_part() -> None:
    assert part_of("56cad85") == 0x56CAD85 % PARTS
    assert part_of("3") == 3
    assert part_of(EVERY_PART) is None
    with pytest.raises(pytest.UsageError, match="--part is 'HEAD'; give a commit's hash"):
        part_of("HEAD")


def test_cases_of_one_function_go_to_successive_parts() -> None:
    first, *others = parts([(f"test_a.py::test_it[{case}]", "") for case in range(PARTS + 1)])
    assert others == [(first + case) % PARTS for case in range(1, PARTS + 1)]


def test_tests_that_share_their_cost_are_in_one_part() -> None:
    tests = [(f"test_a.py::{name}[{case}]", "story") for name in ("test_it", "test_that") for case in range(PARTS)]
    assert len(set(parts(tests))) == 1


def collected(folder: Path, *options: str) -> set[str]:
    """Return the tests of a file that pytest would run, in a pytest process with this tree's configuration."""
    (folder / "test_some.py").write_text(TESTS)
    options = ("--collect-only", "-q", "-p", "scripts.pytest_parts", "-p", "no:cacheprovider", *options)
    here = ("-c", ROOT / "pyproject.toml", "--rootdir", ROOT, f"--confcutdir={ROOT}", folder / "test_some.py")
    command: list[str | Path] = [sys.executable, "-m", "pytest", *options, *here]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}


def test_a_run_has_its_part_and_what_is_always_run(tmp_path: Path) -> None:
    every = collected(tmp_path)
    assert len(every) == 22
    kept = {"test_one_is_kept[kept]"}
    runs = [collected(tmp_path, f"--part={part}") for part in (0, 1)]
    assert runs[0] & runs[1] == kept
    for run in runs:
        assert kept < run < every
        assert len(run - kept) in (20 // PARTS, 20 // PARTS + 1, 20 // PARTS + 2)
