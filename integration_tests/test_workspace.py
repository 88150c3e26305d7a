"""The tree itself: imports between packages, metadata of each package, and forbidden content of files."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = sorted(folder.name for folder in (ROOT / "packages").iterdir() if folder.is_dir())
BELOW: Final = {
    "tft-coord": set[str](),
    "tft-lighthouse": {"tft-coord"},
    "tft-sim": {"tft-coord"},
    "tft-pg": set[str](),
    "tft-ckpt": set[str](),
    "tft-algos": {"tft-coord", "tft-pg", "tft-ckpt"},
    "tft-suite": {"tft-coord", "tft-lighthouse", "tft-pg", "tft-ckpt", "tft-algos"},
    "tft-torchft": {"tft-coord", "tft-lighthouse", "tft-pg", "tft-ckpt", "tft-algos", "tft-suite"},
}

# A pure core takes time and randomness as arguments. It imports nothing that has a clock, randomness, I/O or threads.
CORES: Final = ("tft-coord/src/tft_coord/core",)
IMPURE: Final = {
    "asyncio", "concurrent", "datetime", "http", "io", "logging", "multiprocessing", "os", "pathlib", "random",
    "secrets", "select", "signal", "socket", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "urllib",
    "uuid",
}  # fmt: skip
PURE_OF_OURS: Final = ("tft_coord.core", "tft_coord.errors", "tft_coord.timeouts")


def module_of(package: str) -> str:
    """Return the module that a package installs."""
    return {"tft-torchft": "torchft"}.get(package, package.replace("-", "_"))


def project_of(package: str) -> dict[str, Any]:
    text = (ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def files_of_the_tree() -> Iterator[Path]:
    """Yield every file that .gitignore does not exclude."""
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    folders = [".git", *(pattern.rstrip("/") for pattern in ignored)]

    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            inside = path.relative_to(ROOT).as_posix()
            if any(fnmatch.fnmatch(path.name, pattern) or inside == pattern for pattern in folders):
                continue
            if path.is_dir():
                yield from walk(path)
            else:
                yield path

    return walk(ROOT)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)


def test_a_lower_package_never_imports_a_higher_one_nor_a_sibling() -> None:
    done = run(Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo")
    assert done.returncode == 0, done.stdout + done.stderr


def test_generated_protobuf_code_is_not_stale() -> None:
    done = run(sys.executable, "scripts/proto.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_protobuf_range_is_what_the_generated_code_runs_on() -> None:
    generated = ROOT / "packages/tft-coord/src/tft_coord/wire/coordination_pb2.py"
    found = re.search(r"Protobuf Python Version: (\S+)", generated.read_text(encoding="utf-8"))
    assert found is not None
    (declared,) = (need for need in project_of("tft-coord")["dependencies"] if name_of(need) == "protobuf")
    major = int(found[1].split(".")[0])
    assert declared == f"protobuf>={found[1]},<{major + 2}", "generated code runs on its own major version and the next"


def imported_modules(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            assert node.module is not None
            yield node.module


@pytest.mark.parametrize("package", ["tft-coord", "tft-lighthouse", "tft-sim"])
def test_grpc_is_imported_in_one_place(package: str) -> None:
    """A single importer keeps grpc's fork handlers out of the project's processes."""
    importers = {
        file.relative_to(ROOT / "packages").as_posix()
        for file in (ROOT / "packages" / package / "src").rglob("*.py")
        if any(module.split(".")[0] == "grpc" for module in imported_modules(file))
    }
    assert importers == ({"tft-coord/src/tft_coord/rpc.py"} if package == "tft-coord" else set())


@pytest.mark.parametrize("core", CORES)
def test_a_core_imports_only_pure_things(core: str) -> None:
    place = ROOT / "packages" / core
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert files, f"{core} is gone: say here where the core is"
    for file in files:
        for module in imported_modules(file):
            top = module.split(".")[0]
            ours = any(module == pure or module.startswith(f"{pure}.") for pure in PURE_OF_OURS)
            pure = top in sys.stdlib_module_names and top not in IMPURE
            assert ours or pure, f"{file.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_of_itself_what_is_so(package: str) -> None:
    project = project_of(package)
    folder = ROOT / "packages" / package
    assert project["name"] == package
    assert project["requires-python"] == ">=3.10"
    assert project["license"] == "BSD-3-Clause"
    assert (folder / "LICENSE").read_text(encoding="utf-8") == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert (folder / "src" / module_of(package) / "py.typed").exists()
    assert "dev" in project["optional-dependencies"]
    version = project["version"]
    modules = [folder / "src" / module_of(package) / name for name in ("version.py", "__init__.py")]
    module = next(path for path in modules if path.exists()).read_text(encoding="utf-8")
    assert f'__version__ = "{version}"' in module
    changelog = (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(version)}\b[^\n]*\n+\S", changelog, re.MULTILINE), "say what this version holds"


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_declared_by_range_and_only_those_below(package: str) -> None:
    siblings = {name_of(need): need for need in project_of(package)["dependencies"] if name_of(need) in PACKAGES}
    assert set(siblings) == BELOW[package]
    for sibling, need in siblings.items():
        major, minor = project_of(sibling)["version"].split(".")[:2]
        assert need == f"{sibling}>={major}.{minor},<{major}.{int(minor) + 1}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_is_declared_and_every_dependency_imported(package: str) -> None:
    project = project_of(package)
    distribution = {
        "grpc": "grpcio",
        "google": "protobuf",
        "opentelemetry": "opentelemetry-api",
        "sklearn": "scikit-learn",
    }
    imported = {
        module.split(".")[0]
        for file in (ROOT / "packages" / package / "src").rglob("*.py")
        for module in imported_modules(file)
    }
    third_party = imported - set(sys.stdlib_module_names) - {module_of(package)}
    used = {distribution.get(name, name).replace("_", "-") for name in third_party}
    needed = {name_of(need) for need in project["dependencies"]}
    extras = project["optional-dependencies"]
    optional = {name_of(need) for extra in extras if extra != "dev" for need in extras[extra]}  # not for users
    assert used <= needed | optional, "imported, but not declared"
    assert needed - set(PACKAGES) <= used, "declared, but not imported"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_needs_numpy(package: str) -> None:
    # Torch does not depend on numpy, so no import shows what fails without it.
    for file in (ROOT / "packages" / package / "src").rglob("*.py"):
        if file.name == "numpy_values.py":
            continue  # reached only if a state holds numpy's values, which its extra is for
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = getattr(node, "attr", "") if isinstance(node, ast.Attribute) else ""
            where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            assert name not in {"numpy", "from_numpy", "__array__"}, f"{where} uses .{name}, which needs numpy"


def test_constraints_pin_one_version_each_and_name_none_of_ours() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    for pin in pins:
        assert re.fullmatch(r'[a-z0-9.-]+==[\w.]+( ; python_version (<|>=) "3\.11")?', pin), pin
    names = [pin.partition("==")[0] for pin in pins]
    assert not set(names) & set(PACKAGES)
    done = run(sys.executable, "scripts/third_party_requirements.py")
    asked = {name_of(line).lower() for line in done.stdout.splitlines()}
    assert asked
    assert asked <= set(names), "asked for, but not pinned"


def test_no_file_names_a_registry_or_a_path_of_one_machine() -> None:
    hosts = re.compile(r"pypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org|registry[.]npmjs|deb[.]debian[.]org")
    paths = re.compile(r"(?<![\w.}\])-])/(?:home|root|work|Users|tmp|opt)/\w")
    found = []
    for file in files_of_the_tree():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if hosts.search(line) or paths.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found


def test_make_lists_its_targets() -> None:
    done = run("make")
    assert done.returncode == 0, done.stderr
    listed = set(re.findall(r"^\s*make (\w+)\s+\S", done.stdout, re.MULTILINE))
    assert listed >= {"demo", "test", "lint", "bench", "soak", "wheels", "proto", "docs", "clean"}
