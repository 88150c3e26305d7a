"""One scheme for errors: a base for each package, exported names, and one row for each in docs/errors.md."""

from __future__ import annotations

import builtins
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import tft_suite

ROOT = Path(__file__).resolve().parent.parent
BASES = {
    "tft_coord": "CoordinationError",
    "tft_lighthouse": "CoordinationError",
    "tft_pg": "ProcessGroupError",
    "tft_ckpt": "CheckpointError",
    "tft_algos": "TrainingError",
    "tft_suite": "SuiteError",
}
LIBRARIES = [package for package in BASES if package != "tft_suite"]


def exported(package: str) -> dict[str, Any]:
    module = import_module(package)
    return {name: getattr(module, name) for name in module.__all__}


def errors(package: str) -> dict[str, type[BaseException]]:
    return {
        name: value
        for name, value in exported(package).items()
        if inspect.isclass(value) and issubclass(value, BaseException)
    }


def test_the_page_has_each_error_as_its_docstring_has_it() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "error_table.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", [package for package in BASES if package != "tft_lighthouse"])
def test_a_package_exports_the_classes_of_its_errors_module(package: str) -> None:
    module = import_module(f"{package}.errors")
    own = {
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and not name.startswith("_")
    }
    assert own
    assert own <= set(import_module(package).__all__)


@pytest.mark.parametrize("package", LIBRARIES)
def test_the_suite_exports_every_error(package: str) -> None:
    for name, error in errors(package).items():
        found = getattr(tft_suite, name)
        assert error in found if name == "ConfigError" else found is error


@pytest.mark.parametrize("package", BASES)
def test_an_error_has_the_base_of_the_package_that_defines_it(package: str) -> None:
    for name, error in errors(package).items():
        if name == "LeftJob":
            assert issubclass(error, SystemExit)
            continue
        home = "tft_algos" if error.__module__ == "tft_coord.core.step.errors" else error.__module__.split(".")[0]
        base = getattr(import_module(home), BASES[home])
        assert issubclass(error, base), f"{name} of {home} is no {base.__name__}"
        assert name.endswith("Error") or name == "ExceptionWithTraceback"


def test_a_name_means_one_error_and_a_wrong_setting_is_a_value_error_everywhere() -> None:
    homes: dict[str, set[type[BaseException]]] = {}
    for package in BASES:
        for name, error in errors(package).items():
            homes.setdefault(name, set()).add(error)
    assert {name for name, found in homes.items() if len(found) > 1} == {"ConfigError"}
    assert all(issubclass(error, ValueError) for error in homes["ConfigError"])


def described(package: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of each exported object and of each public method of it."""
    for name, value in exported(package).items():
        if not str(getattr(value, "__module__", "")).startswith("tft_"):
            continue
        yield name, inspect.getdoc(value) or ""
        for member, function in inspect.getmembers(value) if inspect.isclass(value) else ():
            inner = function.fget if isinstance(function, property) else function
            if not member.startswith("_") and str(getattr(inner, "__module__", "")).startswith("tft_"):
                yield f"{name}.{member}", inspect.getdoc(function) or ""


@pytest.mark.parametrize("package", [*LIBRARIES, "tft_sim", "tft_suite"])
def test_a_package_exports_the_errors_that_its_docstrings_name(package: str) -> None:
    names = set(import_module(package).__all__) | set(vars(builtins))
    unknown = {
        (where, error)
        for where, text in described(package)
        for error in re.findall(r"(?<![\w.])(?:tft_\w+\.)*([A-Z]\w*Error)\b", text)
        if error not in names
    }
    assert not unknown
