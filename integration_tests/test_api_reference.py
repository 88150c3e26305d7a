"""The API reference: every exported name is on its package's page, and docstrings become reStructuredText."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = sorted(folder.name for folder in (ROOT / "packages").iterdir() if folder.is_dir())


def load_extension() -> Any:
    path = ROOT / "docs" / "_extensions" / "api_reference.py"
    spec = importlib.util.spec_from_file_location("api_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXTENSION: Final = load_extension()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_is_on_the_page_of_its_package(package: str) -> None:
    page = (ROOT / "docs" / "reference" / f"{package}.md").read_text(encoding="utf-8")
    modules = [importlib.import_module(name) for name in EXTENSION.MARKER.findall(page)]
    own = {"tft-torchft": "torchft"}.get(package, package.replace("-", "_"))
    assert own in [module.__name__ for module in modules]
    for module in modules:
        text = EXTENSION.reference(module)
        listed = set(re.findall(r"^\| {py:obj}`(\w+) <", text, re.MULTILINE))
        assert listed == set(module.__all__) - {"__version__"}
        for name in listed:
            home = re.search(rf"`{name} <([\w.]+)\.{name}>`", text)
            assert home is not None
            assert f":: {home[1]}.{name}\n" in EXTENSION.reference(importlib.import_module(home[1]))


def test_the_index_lists_every_page_of_the_reference() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert all(f"\nreference/{package}\n" in index for package in PACKAGES)


def test_a_new_export_is_on_the_page() -> None:
    module = ModuleType("new_module")

    def added() -> None:
        """Do a new thing."""

    vars(module).update(__all__=["added"], added=added)
    text = EXTENSION.reference(module)
    assert "| {py:obj}`added <new_module.added>` | Do a new thing. |" in text
    assert ".. autofunction:: new_module.added" in text


def test_sections_of_a_docstring_become_fields() -> None:
    docstring = """
Wait for `Manager.status`, or for *all* `host:port` pairs.

    code(unchanged, *args)

Args:
    step, attempt: of the round;
        the first is 0.
Returns: whether it ended
    in time.
Raises: UsageError: too early. Manager(1) says more.
"""
    names = {"Manager": "tft_algos.Manager", "UsageError": "tft_algos.UsageError"}
    text = "\n".join(EXTENSION.to_rst(docstring.strip().split("\n"), names))
    assert re.sub(r"\n\n+", "\n", text).strip().split("\n") == [
        r"Wait for :py:obj:`Manager.status <tft_algos.Manager.status>`, or for \*all\* ``host:port`` pairs.",
        "::",
        "    code(unchanged, *args)",
        ":Arguments:",
        "    * **step**, **attempt**: of the round; the first is 0.",
        ":Returns: whether it ended in time.",
        ":Raises: :py:obj:`UsageError <tft_algos.UsageError>`: too early. "
        r":py:obj:`Manager <tft_algos.Manager>`\ (1) says more.",
    ]
