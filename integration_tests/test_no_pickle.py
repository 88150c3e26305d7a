"""No run of an example unpickles anything, so that access to a port of the job does not allow running code.

The watch is in the tests that run the examples: each process ends at the first thing that it unpickles by name, and its
test fails. These runs have one process or a group of two, read checkpoints, and recover a state from another group.
torchrun's agent is torch's own program and is not checked. Its workers are.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from integration_tests.conftest import ROOT, Launch, Spawn
from integration_tests.scripts import WATCHED, Script
from integration_tests.unpickles import FOUND

WITHIN_S: Final = 60
UNPICKLES: Final = "import pickle, fractions\npickle.loads(pickle.dumps(fractions.Fraction(1, 2)))\n"
# The starts of an example: in a shell, under torchrun, and in a process that has imported torch.
STARTS: Final = (
    r"\[sys\.executable, (?P<watched>WATCHED, )?str\(EXAMPLE\), ",
    r"\*TORCHRUN, (?P<watched>WATCHED, )?str\(EXAMPLE\)",
    r"(?P<watched>(Shells|Script)\(spawn), EXAMPLE",
)


def runs() -> dict[str, list[bool]]:
    """Return for each example whether its starts, in the test module that is about it, are under the watch."""
    found: dict[str, list[bool]] = {}
    for module in sorted((ROOT / "integration_tests").glob("test_*.py")):
        text = module.read_text(encoding="utf-8")
        if named := re.search(r'^EXAMPLE: Final = .*"examples" / "(\w+\.py)"$', text, re.MULTILINE):
            starts = [match for pattern in STARTS for match in re.finditer(pattern, text)]
            found.setdefault(named[1], []).extend(bool(match["watched"]) for match in starts)
    return found


@pytest.mark.parametrize("example", [path.name for path in sorted((ROOT / "examples").glob("[a-z]*.py"))])
def test_every_example_runs_under_the_watch(example: str) -> None:
    starts = runs()[example]
    assert starts
    assert all(starts)


def test_the_watch_sees_a_pickle_in_a_shell(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNPICKLES)
    process: subprocess.Popen[str] = launch([sys.executable, WATCHED, tmp_path / "script.py"])
    output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == FOUND, output
    assert "unpickles" in output


def test_the_watch_sees_a_pickle_in_a_process_that_has_imported_torch(spawn: Spawn, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNPICKLES)
    assert "unpickles" in Script(spawn, tmp_path / "script.py", [], {}).ended(exitcode=FOUND)
