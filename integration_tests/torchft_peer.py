"""torchft's wheel in a separate environment, for tests that compare its programs with tft's.

A test asks for the fixture `torchft_python` and receives the path of an interpreter that imports torchft and the same
torch as tft. `torchft_lighthouse` (torchft's command) lies beside it, as `torchft_lighthouse(python)` returns. If the
wheel is unavailable (no index, no wheel for this machine), the test is skipped with the reason.

The environment is made once, in some seconds, below the root of the tree. Its torch is that of the tests.
The project's packages can't be imported there.

    def test_something(torchft_python: Path, launch: Launch) -> None:
        process = launch([torchft_python, "-c", "import torchft"], env=OF_A_SHELL)

Law of this file: making that environment, and the paths of its programs, but no test.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
WHEEL: Final = "torchft-nightly==2026.10.26"
MAKE_WITHIN_S: Final = 120.0
# Variables for torchft's programs, which unset the project's variables for import.
OF_A_SHELL: Final = {"PYTHONPATH": "", "TORCHFT_LIGHTHOUSE": ""}


class _CannotBeMadeError(Exception):
    """An environment that can't be made. The message is one sentence."""


def torchft_lighthouse(python: Path) -> Path:
    """Return the path of torchft's lighthouse command."""
    return python.parent / "torchft_lighthouse"


@pytest.fixture(scope="session")
def torchft_python() -> Path:
    """Return an interpreter that imports torchft, or skip the test if there can be none."""
    try:
        return _made()
    except _CannotBeMadeError as error:
        pytest.skip(str(error))


def _made() -> Path:
    place = ROOT / f".venv-torchft-{sys.version_info.major}.{sys.version_info.minor}"
    place.mkdir(exist_ok=True)
    home = place / "environment"
    python, done = home / "bin" / "python", home / "made-for-tests"
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the tests run in several processes
        if not done.exists():
            _make(home, python)
            done.write_text(WHEEL + "\n")
    return python


def _make(home: Path, python: Path) -> None:
    """Make an environment that takes torch, and other installed packages, from the environment of the tests."""
    _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)])
    packages = next(home.glob("lib/python*/site-packages"))
    # Entries of a .pth file come last in the search, and .pth files in those folders are not read. The project's own
    # packages are installed by one, so they stay out.
    (packages / "packages-of-the-tests.pth").write_text(f"{_own_packages()}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", "--retries", "1", WHEEL])
    _run([str(python), "-c", "import torchft"])


def _own_packages() -> Path:
    return Path(pytest.__file__).resolve().parent.parent


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=MAKE_WITHIN_S)
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise _CannotBeMadeError(f"{WHEEL} can't be had here: {output[-1] if output else error!r}") from error
