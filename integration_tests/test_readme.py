"""The READMEs and how-to pages are true: Python blocks run as printed, and commands of console blocks exist."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from integration_tests.conftest import Spawn
from integration_tests.pages import blocks, pattern_of
from integration_tests.scripts import Script
from tft_lighthouse import LighthouseServer

ROOT: Final = Path(__file__).resolve().parent.parent
HOW_TO: Final = sorted(ROOT.glob("docs/*.md"))
READMES: Final = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), *HOW_TO]
NAME: Final = "REPLICA_GROUP_ID"


def commands(readme: Path) -> Iterator[list[str]]:
    """Yield the commands of the console blocks as words, without the variables before them and the remarks after."""
    for block in blocks(readme, "console"):
        for line in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
            words = line.partition(" #")[0].split()
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            yield words


@pytest.fixture(scope="module")
def lighthouse_address() -> Iterator[str]:
    with LighthouseServer(bind="127.0.0.1:0", min_replicas=1) as lighthouse:
        yield lighthouse.address


def run_example(folder: Path, lighthouse_address: str) -> None:
    """Run example.py as a script in the child process, with its output in a file beside it."""
    os.chdir(folder)
    os.environ |= {"TFT_LIGHTHOUSE": lighthouse_address, NAME: "1", "NUM_REPLICA_GROUPS": "2", "HF_HUB_OFFLINE": "1"}
    with open("output", "w", encoding="utf-8", buffering=1) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.argv = ["example.py"]
        runpy.run_path(str(folder / "example.py"), run_name="__main__")


def examples() -> list[tuple[Path, int]]:
    return [(readme, index) for readme in READMES for index, _ in enumerate(blocks(readme, "python"))]


@pytest.mark.in_parts(always=["README.md-0"])
@pytest.mark.timeout(150)  # transformers takes seconds to import, and much longer on a busy machine
@pytest.mark.parametrize(
    ("readme", "index"),
    [pytest.param(readme, index, id=f"{readme.relative_to(ROOT)}-{index}") for readme, index in examples()],
)
def test_a_python_block_runs_as_printed(
    readme: Path, index: int, lighthouse_address: str, tmp_path: Path, spawn: Spawn
) -> None:
    (tmp_path / "example.py").write_text(blocks(readme, "python")[index], encoding="utf-8")
    process = spawn(run_example, tmp_path, lighthouse_address)
    process.join(120)
    assert process.exitcode == 0, (tmp_path / "output").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_a_replica_of_a_page_has_the_name_that_its_environment_gives(page: Path) -> None:
    """Otherwise a reader who starts the block in two shells has two replicas of one name."""
    managers = [block for block in blocks(page, "python") if re.search(r"\bManager\(", block)]
    assert [block for block in managers if NAME not in block or re.search(r'replica_id="', block)] == []


def test_no_page_shows_a_part_of_a_program() -> None:
    """A part can't run as it is printed, and the test above does not find it."""
    included = re.compile(r"\{literalinclude\} .*\.py$", re.MULTILINE)
    assert [page.name for page in READMES if included.search(page.read_text(encoding="utf-8"))] == []


def test_each_package_shows_an_example() -> None:
    assert {readme.parent.name for readme, _ in examples()} >= {path.name for path in (ROOT / "packages").iterdir()}


def shown(readme: Path) -> list[str]:
    """Return the output lines of the page, as patterns."""
    return [pattern_of(line) for line in "".join(blocks(readme, "text")).splitlines()]


@pytest.mark.timeout(120)
def test_the_first_steps_of_the_readme_show_what_it_says(spawn: Spawn, lighthouse_address: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks(ROOT / "README.md", "python")[0], encoding="utf-8")
    together, alone, healing, healed, again = shown(ROOT / "README.md")

    def shell(replica: int) -> Script:
        job = {"TFT_LIGHTHOUSE": lighthouse_address, "TFT_JOB_ID": "first steps", NAME: str(replica)}
        return Script(spawn, tmp_path / "train.py", ["100000000"], job)

    first = shell(0)
    first.wait_for(alone)
    second = shell(1)
    second.wait_for(together)
    first.wait_for(together)
    second.kill()
    first.wait_for(alone)
    second = shell(1)
    for line in (healing, healed, again):
        second.wait_for(line)
    for script in (first, second):
        script.kill()


def test_the_first_block_of_the_readme_is_the_two_commands() -> None:
    assert list(commands(ROOT / "README.md"))[:2] == [["make", "demo"], ["make", "test"]]


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: f"{readme.parent.name}-{readme.stem}")
def test_every_command_of_a_console_block_is_there(readme: Path) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    beside_python = Path(sys.executable).parent
    for words in commands(readme):
        program, *rest = words
        program = program.lstrip("(")
        if program == "make":
            assert {word for word in rest if re.fullmatch(r"[a-z]+", word)} <= targets, " ".join(words)
        elif program not in ("cd", "export", ".", "umask"):  # the shell's own commands
            assert shutil.which(program, path=f"{beside_python}{os.pathsep}{os.environ['PATH']}"), " ".join(words)
        for word in rest:
            if word.startswith(("examples/", "scripts/", "benchmarks/")):
                assert (ROOT / word).exists(), word
