"""What is true of the package as a whole."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tft_ckpt

PACKAGE = Path(__file__).resolve().parent.parent


FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "code",
    "runpy",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_NAMES = {"torch.load", "torch.save", "torch.serialization", "torch.package", "importlib.import_module"}


def spelt(node: ast.expr) -> str:
    """An attribute as it is written, such as torch.load."""
    return f"{spelt(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def forbidden_in(source: str) -> list[str]:
    """What could turn bytes into running code, as it is spelt in the source of a module."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.func.id] if node.func.id in FORBIDDEN_CALLS else []
            continue
        elif isinstance(node, ast.Attribute):
            names = [spelt(node)]
        else:
            continue
        found += [
            name
            for name in names
            if name.split(".")[0] in FORBIDDEN_MODULES or any(name.startswith(bad) for bad in FORBIDDEN_NAMES)
        ]
    return found


def test_nothing_received_can_be_executed() -> None:
    files = sorted((PACKAGE / "src").rglob("*.py"))
    assert files
    for file in files:
        assert not (found := forbidden_in(file.read_text(encoding="utf-8"))), f"{file}: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "import os, pickle",
        "from pickle import loads",
        "import torch\nx = torch.load(f)",
        "from torch import load",
        "from torch.serialization import add_safe_globals",
        "eval(x)",
        "def f():\n    exec(x)",
        "__import__(name)",
        "import importlib\nimportlib.import_module(name)",
    ],
)
def test_what_could_execute_is_found(source: str) -> None:
    assert forbidden_in(source)


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
