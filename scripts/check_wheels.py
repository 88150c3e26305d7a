"""Install each wheel of dist/ alone, with what it says it needs, into an empty environment, and use it there.

What comes from outside is installed first, from the wheels' own metadata and held to constraints.txt; then the wheel
itself from dist/ with no index at all. So a dependency that is not declared fails here, and nobody's index is ever
asked for one of our names.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import final

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
WITHOUT_TORCH = ("tft-coord", "tft-lighthouse")
HELP_S_MAX = 0.7
HELP_RUNS = 5
COMMANDS = {"tft-lighthouse": "tft-lighthouse", "tft-suite": "tft"}


@final
@dataclass(frozen=True)
class Wheel:
    """One wheel of dist/: its name, its version and the requirements that hold without any extra."""

    name: str
    version: str
    requirements: tuple[str, ...]

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")


def read(path: Path) -> Wheel:
    with zipfile.ZipFile(path) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(member).decode())
    needed = [line for line in headers.get_all("Requires-Dist", []) if "extra ==" not in line]
    return Wheel(name=headers["Name"], version=headers["Version"], requirements=tuple(needed))


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def third_party(wheel: Wheel, wheels: dict[str, Wheel]) -> set[str]:
    """The requirements of `wheel` and of the siblings below it, less the siblings themselves."""
    found: set[str] = set()
    for requirement in wheel.requirements:
        sibling = wheels.get(name_of(requirement))
        found |= third_party(sibling, wheels) if sibling else {requirement}
    return found


def run(command: Sequence[str | Path], *, cwd: Path) -> str:
    """Run to the end and return its standard output. Raises SystemExit with all its output: it failed."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\nended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def install(wheel: Wheel, wheels: dict[str, Wheel], *, dist: Path, home: Path) -> Path:
    """Make an environment in `home` and install `wheel` there. Returns its folder of commands."""
    home.mkdir()
    venv.create(home / "venv", with_pip=False, symlinks=True)
    commands = home / "venv" / "bin"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", commands / "python"]
    pip += ["--disable-pip-version-check", "-q"]
    outside = sorted(third_party(wheel, wheels))
    run([*pip, "install", "--no-compile", "-c", CONSTRAINTS, *outside], cwd=home)
    run([*pip, "install", "--no-index", "--find-links", dist, f"{wheel.name}=={wheel.version}"], cwd=home)
    run([*pip, "check"], cwd=home)
    return commands


def use(wheel: Wheel, wheels: dict[str, Wheel], commands: Path) -> str:
    """Use `wheel` where it was installed. Returns what was seen, in a few words."""
    home = commands.parent.parent
    others = [name for name in wheels if name != wheel.name]
    seen = run([commands / "python", "-c", program(wheel, others=others)], cwd=home).split()
    if seen[0] != wheel.version:
        raise SystemExit(f"{wheel.module}.__version__ is {seen[0]} in the wheel of {wheel.version}: make them one.")
    siblings = seen[2:]
    parts = [f"with {' '.join(siblings)}" if siblings else "nothing else of ours"]
    parts.append("torch" if seen[1] == "True" else "no torch")
    if command := COMMANDS.get(wheel.name):
        parts.append(help_time(commands / command, cwd=home, bounded=wheel.name in WITHOUT_TORCH))
    return ", ".join(parts)


def program(wheel: Wheel, *, others: Sequence[str]) -> str:
    """What the fresh environment runs: import the package; print its version, whether torch is there, and who else."""
    lines = [
        "import sys, importlib.metadata, importlib.util",
        f"import {wheel.module}",
        "torch = importlib.util.find_spec('torch') is not None",
        "names = {distribution.name for distribution in importlib.metadata.distributions()}",
        f"print({wheel.module}.__version__, torch, *sorted(names & set({list(others)!r})))",
    ]
    if wheel.name in WITHOUT_TORCH:
        lines.append("assert not torch and 'torch' not in sys.modules")
    return "\n".join(lines)


def help_time(command: Path, *, cwd: Path, bounded: bool) -> str:
    """Ask `command` for --help five times. Raises SystemExit: a bounded one took too long in the median."""
    taken_s = []
    for _ in range(HELP_RUNS):
        begin = time.perf_counter()
        run([command, "--help"], cwd=cwd)
        taken_s.append(time.perf_counter() - begin)
    median_s = statistics.median(taken_s)
    if bounded and median_s > HELP_S_MAX:
        raise SystemExit(
            f"{command.name} --help took {median_s:.2f} s in the median; at most {HELP_S_MAX} s is allowed."
        )
    return f"{command.name} --help in {median_s:.2f} s"


def newest(dist: Path) -> dict[str, Wheel]:
    """The wheels of dist/ by name. Raises SystemExit: one is missing, or there are two of a name."""
    wheels = [read(path) for path in sorted(dist.glob("*.whl"))]
    names = sorted(folder.name for folder in (ROOT / "packages").iterdir() if folder.is_dir())
    if sorted(wheel.name for wheel in wheels) != names:
        raise SystemExit(f"{dist} must hold one wheel each of {', '.join(names)}: run `make clean wheels`.")
    return {wheel.name: wheel for wheel in wheels}


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="packages to check; all without")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the wheels are")
    options = parser.parse_args(None if arguments is None else list(arguments))
    wheels = newest(options.dist)
    names = list(options.names or wheels)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=os.cpu_count()) as executor:

        def installed(name: str) -> Path:
            return install(wheels[name], wheels, dist=options.dist.resolve(), home=Path(folder, name))

        # Several at once: most of it is the unpacking of torch. Used one by one, because that is timed.
        for name, commands in list(zip(names, executor.map(installed, names), strict=True)):
            print(f"{name} {wheels[name].version} installs alone: {use(wheels[name], wheels, commands)}", flush=True)


if __name__ == "__main__":
    main()
