"""The imports of the tree: no circles inside a package, and only exported names between packages."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = sorted(folder.name for folder in (ROOT / "packages").iterdir() if folder.is_dir())

# The documented packages of tft-coord that others import from; each has an `__all__`.
PUBLIC: Final = ("tft_coord", "tft_coord.lighthouse")

# The modules of circles that are still there. Remove a module when its circle is gone; add none.


def modules_of(package: str) -> dict[str, Path]:
    """Return the files of a package by module name."""
    source = ROOT / "packages" / package / "src"
    found = {}
    for file in source.rglob("*.py"):
        parts = file.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_of(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for each import, also inside functions and behind `if TYPE_CHECKING`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield from ((node.module, alias.name) for alias in node.names)


def graph_of(package: str) -> dict[str, set[str]]:
    """Return the modules that each module of a package imports from it."""
    modules = modules_of(package)
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        named = {f"{source}.{name}" if f"{source}.{name}" in modules else source for source, name in imports_of(file)}
        graph[module] = (named & set(modules)) - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components of more than one module."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        left = [start]
        while left:
            new = graph[left.pop()] - found
            found |= new
            left += new
        return found

    reach = {module: reached(module) for module in graph}
    return [
        {other for other in reach[module] if module in reach[other]}
        for module in sorted(graph)
        if module in reach[module] and module == min(other for other in reach[module] if module in reach[other])
    ]


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_by_a_circle(package: str) -> None:
    graph = graph_of(package)
    in_circles = {module for circle in circles(graph) for module in circle}
    said = [f"{module} imports {', '.join(sorted(graph[module] & in_circles))}" for module in sorted(in_circles)]
    assert not in_circles, "\n".join(["break these circles of imports:", *said])


def test_the_lighthouse_imports_only_exported_names_of_tft_coord() -> None:
    pages = (ROOT / "docs/packages/tft-coord.md").read_text(encoding="utf-8")
    exported = {module: set(importlib.import_module(module).__all__) for module in PUBLIC}
    for module in PUBLIC:
        assert f"`{module}`" in pages, f"docs/packages/tft-coord.md does not name {module}"
    for file in modules_of("tft-lighthouse").values():
        for module, name in imports_of(file):
            if module.split(".")[0] == "tft_coord":
                assert name in exported.get(module, set()), f"{file.name} imports {name} of {module}, which is private"
