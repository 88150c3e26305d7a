"""Measure how large files, classes and functions are, and hold them against the limits.

Code that is over a limit is listed in `sizes.toml` with its size. The list only shrinks: nothing new enters it, and no
number in it rises. `--lower` writes the sizes of today where they are lower, and drops what is within the limits.

Lines are lines of code: blank lines, comments and docstrings do not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Final

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT: Final = Path(__file__).resolve().parent.parent
LISTED: Final = Path(__file__).with_name("sizes.toml")
LIMITS: Final = {
    "lines of a file": 500,
    "lines of a class": 300,
    "lines of a function": 60,
    "attributes of a class": 15,
    "public names of a class": 20,
}
_NOT_CODE: Final = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Sizes = dict[str, dict[str, int]]


def oversized() -> Sizes:
    """Return the sizes over a limit: by measure and `path::name`."""
    found: Sizes = {measure: {} for measure in LIMITS}
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        if not path.stem.endswith("_pb2"):
            for measure, name, size in sizes_of(path.read_text(encoding="utf-8")):
                if size > LIMITS[measure]:
                    where = path.relative_to(ROOT).as_posix()
                    found[measure][f"{where}::{name}" if name else where] = size
    return found


def sizes_of(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield measure, name and size of one file and of all its definitions. The file itself has no name."""
    tree = ast.parse(text)
    lines = sorted(_lines_of_code(text, tree))
    yield "lines of a file", "", len(lines)
    for name, node in _definitions(tree, ""):
        number = bisect_right(lines, node.end_lineno or node.lineno) - bisect_left(lines, node.lineno)
        if not isinstance(node, ast.ClassDef):
            yield "lines of a function", name, number
            continue
        yield "lines of a class", name, number
        yield "attributes of a class", name, len(_attributes(node))
        yield "public names of a class", name, len(_public_names(node))


def changes(listed: Sizes, found: Sizes) -> list[str]:
    """Return a sentence for each size that differs from the list, or an empty list."""
    out = []
    for measure, limit in LIMITS.items():
        before, now = listed.get(measure, {}), found[measure]
        for name in sorted(now.keys() - before.keys()):
            out.append(f"{name} has {now[name]} {measure}, and the limit is {limit}: split it")
        for name in sorted(before.keys() - now.keys()):
            out.append(f"{name} is within the limit for {measure}: run `python scripts/sizes.py --lower`")
        for name in sorted(before.keys() & now.keys()):
            if now[name] > before[name]:
                out.append(f"{name} has grown from {before[name]} to {now[name]} {measure}: split it")
            elif now[name] < before[name]:
                out.append(f"{name} has shrunk to {now[name]} {measure}: run `python scripts/sizes.py --lower`")
    return out


def listed_sizes() -> Sizes:
    """Return the sizes that `sizes.toml` allows."""
    sizes: Sizes = tomllib.loads(LISTED.read_text(encoding="utf-8"))
    return sizes


def _lines_of_code(text: str, tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | _Definition) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        else:
            yield from _definitions(child, prefix)


def _attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that the class's methods set on `self`."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if isinstance(each.value, ast.Name) and each.value.id == "self"
    }


def _public_names(node: ast.ClassDef) -> set[str]:
    functions = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    return {each.name for each in functions if not each.name.startswith("_")}


def main() -> int:
    """Print the differences from the list, or lower the list. Returns: the exit code."""
    parser = argparse.ArgumentParser(description="Hold the sizes of files, classes and functions against their limits.")
    parser.add_argument("--lower", action="store_true", help="write the sizes of today where they are lower")
    found, listed = oversized(), listed_sizes()
    if parser.parse_args().lower:
        text = ["# Code that is over a limit of scripts/sizes.py. This list only shrinks.\n"]
        for measure in LIMITS:
            text.append(f'\n["{measure}"]\n')
            kept = sorted(found[measure].keys() & listed.get(measure, {}).keys())
            text += [f'"{name}" = {min(found[measure][name], listed[measure][name])}\n' for name in kept]
        LISTED.write_text("".join(text), encoding="utf-8")
        listed = listed_sizes()
    wrong = changes(listed, found)
    print("\n".join(wrong) or "all sizes are as listed")
    return len(wrong) > 0


if __name__ == "__main__":
    sys.exit(main())
