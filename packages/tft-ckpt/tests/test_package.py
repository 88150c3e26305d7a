"""What is true of the package as a whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import tft_ckpt

PACKAGE = Path(__file__).resolve().parent.parent


def test_nothing_received_can_be_executed() -> None:
    forbidden = re.compile(
        r"^\s*(?:import|from)\s+(?:pickle|cloudpickle|marshal|shelve|dill)\b|\btorch\.(?:load|save)\b|\b(?:eval|exec)\(",
        re.MULTILINE,
    )
    files = sorted((PACKAGE / "src").rglob("*.py"))
    assert files
    for file in files:
        found = forbidden.search(file.read_text(encoding="utf-8"))
        assert found is None, f"{file}: {found}"


def test_importing_does_nothing() -> None:
    code = (
        "import logging, threading, tft_ckpt, tft_ckpt.testing; "
        "assert threading.active_count() == 1; assert not logging.getLogger('tft_ckpt').handlers; "
        "assert not logging.getLogger().handlers"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_there() -> None:
    assert all(hasattr(tft_ckpt, name) for name in tft_ckpt.__all__)
