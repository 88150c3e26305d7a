"""The peer's own environment: torchft's wheel on the same torch version as the project's.

Only the benchmarks need it. The project itself never does.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEER_VENV = ROOT / ".venv-torchft"
REQUIREMENTS = ("torch==2.13.0", "torchft-nightly==2026.10.26", "numpy")


def python() -> Path:
    """Return the peer's interpreter. The first call creates its environment.

    Raises: subprocess.CalledProcessError: the environment can't be created. pip's output gives the reason.
    """
    interpreter = PEER_VENV / "bin" / "python"
    done = PEER_VENV / "made-for-benchmarks"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEER_VENV)], check=True)
        subprocess.run([str(interpreter), "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        done.write_text("\n".join(REQUIREMENTS) + "\n")
    return interpreter


def lighthouse_command() -> Path:
    """Return the path of the peer's lighthouse command."""
    return python().parent / "torchft_lighthouse"
