"""The content of each wheel, and the effects of importing each package."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = sorted(folder.name for folder in (ROOT / "packages").iterdir() if folder.is_dir())
SCRIPTS: Final = {"tft-lighthouse": "tft-lighthouse", "tft-suite": "tft", "tft-torchft": "torchft_lighthouse"}
MODULES: Final = {package: package.replace("-", "_") for package in PACKAGES} | {"tft-torchft": "torchft"}


def build(package: str, *, into: Path) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    command += ["--outdir", str(into), str(ROOT / "packages" / package)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = into.glob("*.whl")
    return zipfile.ZipFile(wheel)


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    (member,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return HeaderParser().parsestr(wheel.read(member).decode())


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_holds_the_package_and_nothing_else(package: str, tmp_path: Path) -> None:
    module = MODULES[package]
    with build(package, into=tmp_path) as wheel:
        names = wheel.namelist()
        inside = {name for name in names if name.startswith(f"{module}/")}
        source = ROOT / "packages" / package / "src"
        expected = {
            path.relative_to(source).as_posix()
            for path in source.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert inside == expected
        assert {name.split("/")[0] for name in names} == {module, f"{package.replace('-', '_')}-0.1.0.dist-info"}
        metadata = metadata_of(wheel)
        assert metadata["License-Expression"] == "BSD-3-Clause"
        assert metadata["License-File"] == "LICENSE"
        assert metadata["Requires-Python"] == ">=3.10"
        assert metadata["Description-Content-Type"] == "text/markdown"
        points = [wheel.read(name).decode() for name in names if name.endswith("entry_points.txt")]
        declared = [line.partition(" = ")[0] for text in points for line in text.splitlines() if " = " in line]
        assert declared == [SCRIPTS[package]] if package in SCRIPTS else not declared


@pytest.mark.parametrize("package", ["tft-coord", "tft-lighthouse"])
def test_what_runs_on_a_lighthouse_s_machine_carries_no_simulator(package: str, tmp_path: Path) -> None:
    simulator = {path.read_bytes() for path in (ROOT / "packages/tft-sim/src/tft_sim").glob("[a-z]*.py")}
    assert len(simulator) > 20
    with build(package, into=tmp_path) as wheel:
        assert simulator.isdisjoint(wheel.read(name) for name in wheel.namelist())
        assert not any("tft_sim" in name or "simulator" in name for name in wheel.namelist())
        assert [name for name in wheel.namelist() if b"tft_sim" in wheel.read(name)] == []
        assert "tft-sim" not in " ".join(metadata_of(wheel).get_all("Requires-Dist", []))


@pytest.mark.in_parts(always=["tft-coord"])
@pytest.mark.parametrize("package", PACKAGES)
def test_an_import_starts_nothing_and_brings_torch_only_where_it_is_declared(package: str) -> None:
    program = "\n".join(
        [
            "import logging, os, sys, threading",
            "before = dict(os.environ), logging.getLogger().handlers[:]",
            f"import {MODULES[package]}",
            "assert (dict(os.environ), logging.getLogger().handlers) == before",
            "assert not [thread.name for thread in threading.enumerate() if thread.name.startswith('tft-')]",
            "print('torch' in sys.modules)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    if package in ("tft-coord", "tft-lighthouse", "tft-sim"):
        assert done.stdout.strip() == "False"
