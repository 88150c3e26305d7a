"""The peer's own environment: torchft's wheel on the same torch as ours.

It is a requirement of the benchmarks alone; the project itself never needs it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEER_VENV = ROOT / ".venv-torchft"
REQUIREMENTS = ("torch==2.13.0", "torchft-nightly==2026.10.26", "numpy")


def python() -> Path:
    """The peer's interpreter; makes its environment on the first call.

    Raises: subprocess.CalledProcessError: the environment can't be made; pip says why.
    """
    interpreter = PEER_VENV / "bin" / "python"
    done = PEER_VENV / "made-for-benchmarks"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEER_VENV)], check=True)
        subprocess.run([str(interpreter), "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        done.write_text("\n".join(REQUIREMENTS) + "\n")
    return interpreter


def lighthouse_command() -> Path:
    """The peer's lighthouse command."""
    return python().parent / "torchft_lighthouse"
