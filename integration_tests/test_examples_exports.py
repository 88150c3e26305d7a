"""The examples of custom parts use exported names alone, so that users can copy them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest

from integration_tests.conftest import ROOT

NAMES: Final = ("custom_strategy", "own_outer_update", "parameter_server")
EXAMPLES: Final = [ROOT / "examples" / f"{name}.py" for name in NAMES]
PACKAGES: Final = {"tft_algos", "tft_algos.testing", "tft_pg"}
OURS: Final = ("tft_",)


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import of the project's packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(OURS):
                    yield alias.name, ""
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OURS):
            for alias in node.names:
                yield node.module or "", alias.name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_imports_exported_names_alone(path: Path) -> None:
    found = list(imported(ast.parse(path.read_text(encoding="utf-8"))))
    assert {module for module, _ in found} <= PACKAGES
    for module, name in found:
        assert name, f"import {module} says no names; use from {module} import ..."
        assert name in import_module(module).__all__, f"{module} does not export {name}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_reads_no_private_attribute_of_what_it_was_given(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    private = {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        # Private attributes of `self` are allowed.
        if not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }
    assert private == set()
