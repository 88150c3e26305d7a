"""Write the table of errors in docs/errors.md from the docstrings of the error classes.

A docstring begins with "when it is raised. Next: what to do." and is the one source of a row.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"
BEGIN, END = "<!-- begin: written by scripts/error_table.py -->", "<!-- end -->"
PACKAGES = ("tft_coord", "tft_lighthouse", "tft_pg", "tft_ckpt", "tft_algos", "tft_suite")


def exported_errors(package: str) -> dict[str, type[BaseException]]:
    """Return the exception classes that a package exports, by name."""
    module = import_module(package)
    found = {name: getattr(module, name) for name in module.__all__}
    return {name: value for name, value in found.items() if inspect.isclass(value) and issubclass(value, BaseException)}


def row(error: type[BaseException]) -> tuple[str, str]:
    """Return when an error is raised, and what to do, from its docstring. Raises: ValueError: it says not both."""
    first = " ".join((inspect.getdoc(error) or "").split("\n\n")[0].split())
    when, found, following = first.partition(" Next: ")
    if found:
        return when, following[0].upper() + following[1:]
    if first.startswith("Base"):
        return first, "Catch it to catch all of them."
    raise ValueError(f"the docstring of {error.__module__}.{error.__name__} has no 'Next: ' in its first paragraph")


def lines() -> Iterator[str]:
    """Yield the lines of the tables, one table for each package that defines errors."""
    for package in PACKAGES:
        own = {n: e for n, e in exported_errors(package).items() if e.__module__.split(".")[0] == package}
        if package == "tft_algos":  # it exports what the step core of tft_coord raises
            own |= {n: e for n, e in exported_errors(package).items() if e.__module__ == "tft_coord.core.step.errors"}
        if package == "tft_suite":
            own["ConfigError"] = import_module("tft_suite.errors").ConfigError
        if not own:
            continue
        yield f"## {package}\n\n| error | when | what to do |\n|---|---|---|"
        bases_first = sorted(own, key=lambda name: (not (own[name].__doc__ or "").startswith("Base"), name))
        for name in bases_first:
            when, following = row(own[name])
            yield f"| `{name}` | {when} | {following} |"
        yield ""


def page() -> str:
    """Return the page with its tables as they should be now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n\n" + "\n".join(lines()) + END + after


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page is not up to date")
    if parser.parse_args().check:
        if page() != PAGE.read_text():
            print("docs/errors.md is not up to date; run python scripts/error_table.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
