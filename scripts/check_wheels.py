"""Install each wheel of dist/ alone, with its declared requirements, into an empty environment, and use it there.

External requirements are installed first, from the wheels' own metadata and with the limits of constraints.txt. Then
the wheel itself comes from dist/ without any index. So no index is ever asked for the project's own names.

An import does not show missing requirements: torch imports without numpy, and fails when a tensor becomes an array. So
each package runs there: the examples of its README as they are printed, and the help of each of its commands. In these
examples, tft-pg loses a rank and is configured again, and tft-ckpt transfers a state. A package that trains also loses
a replica, which is restarted and heals (wheel_recovery.py). The lighthouse is that of its own wheel.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import venv
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import final

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
RECOVERY = Path(__file__).resolve().parent / "wheel_recovery.py"
WITHOUT_TORCH = ("tft-coord", "tft-lighthouse", "tft-sim")
TRAINS = ("tft-algos", "tft-suite")
SERVES = "tft-lighthouse"
HELP_S_MAX = 0.7
HELP_RUNS = 5
OF_A_JOB = ("TFT_", "TORCHFT_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "PYTHONPATH", "PYTHONHOME")
COMMANDS_OF = re.compile(r"^\W*(demo|doctor|drain)\b", re.MULTILINE)
# Torch is by far the largest, and four packages need it. It is unpacked and compiled once, and linked into the others.
BASE = "torch"
COMPILES = "import torch.distributed.fsdp, torch.distributed.checkpoint, torch._dynamo"


@final
@dataclass(frozen=True)
class Wheel:
    """One wheel of dist/: its name, version, README, commands and the requirements that hold without any extra."""

    name: str
    version: str
    requirements: tuple[str, ...]
    readme: str
    commands: tuple[str, ...]

    @property
    def module(self) -> str:
        return {"tft-torchft": "torchft"}.get(self.name, self.name.replace("-", "_"))


def read(path: Path) -> Wheel:
    with zipfile.ZipFile(path) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(member).decode())
        points = [archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt")]
    needed = [line for line in headers.get_all("Requires-Dist", []) if "extra ==" not in line]
    return Wheel(
        name=headers["Name"],
        version=headers["Version"],
        requirements=tuple(needed),
        readme=str(headers.get_payload()),
        commands=tuple(re.findall(r"^(\S+) = ", "".join(points), re.MULTILINE)),
    )


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def third_party(wheel: Wheel, wheels: dict[str, Wheel]) -> set[str]:
    """Return the requirements of `wheel` and of its siblings, minus the siblings themselves."""
    found: set[str] = set()
    for requirement in wheel.requirements:
        sibling = wheels.get(name_of(requirement))
        found |= third_party(sibling, wheels) if sibling else {requirement}
    return found


def run(command: Sequence[str | Path], *, cwd: Path, **environment: str) -> str:
    """Run to the end and return the standard output. Raises SystemExit with all output if the command fails."""
    done = subprocess.run(
        command, cwd=cwd, env=clean(**environment), capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\nended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def clean(**environment: str) -> dict[str, str]:
    """Return this process's environment without the variables of a job or of another Python."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(OF_A_JOB)}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # with it each process would compile all of torch again
    return {"OMP_NUM_THREADS": "1", **kept, **environment}


def pip(home: Path, *words: str | Path) -> None:
    """Run this Python's pip for the environment in `home`."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        home / "venv/bin/python",
        "--disable-pip-version-check",
        "-q",
    ]
    run([*command, *words], cwd=home)


def environment(home: Path, *, base: Path | None) -> Path:
    """Make an empty environment in `home`, or one with the packages of `base`. Returns: the folder of its packages."""
    home.mkdir()
    venv.create(home / "venv", with_pip=False, symlinks=True)
    (packages,) = (home / "venv").glob("lib/python*/site-packages")
    if base is not None:
        (source,) = (base / "venv").glob("lib/python*/site-packages")
        shutil.copytree(source, packages, copy_function=os.link, dirs_exist_ok=True)
    return packages


def install_base(home: Path, requirements: set[str]) -> None:
    """Install torch in `home`, and compile its used parts."""
    environment(home, base=None)
    pip(home, "install", "--no-compile", "-c", CONSTRAINTS, *sorted(requirements))
    run([home / "venv/bin/python", "-W", "ignore", "-c", COMPILES], cwd=home)


def install(wheel: Wheel, wheels: dict[str, Wheel], *, dist: Path, home: Path, base: Path) -> Path:
    """Make an environment in `home` and install `wheel` there. Returns its folder of commands."""
    outside = third_party(wheel, wheels)
    needs_base = BASE in map(name_of, outside)
    environment(home, base=base if needs_base else None)
    pip(home, "install", "--no-compile", "-c", CONSTRAINTS, *sorted(outside))
    pip(home, "install", "--no-index", "--find-links", dist, f"{wheel.name}=={wheel.version}")
    pip(home, "check")
    return home / "venv/bin"


def use(wheel: Wheel, wheels: dict[str, Wheel], commands: Path, *, lighthouse: str) -> str:
    """Use `wheel` where it was installed. Returns a short summary."""
    home = commands.parent.parent
    others = [name for name in wheels if name != wheel.name]
    seen = run([commands / "python", "-c", program(wheel, others=others)], cwd=home).split()
    if seen[0] != wheel.version:
        raise SystemExit(
            f"{wheel.module}.__version__ is {seen[0]} in the wheel of {wheel.version}; give both the same version."
        )
    siblings = seen[2:]
    parts = [f"with {' '.join(siblings)}" if siblings else "nothing else of ours"]
    parts.append("torch" if seen[1] == "True" else "no torch")
    parts.append(f"{run_examples(wheel, commands, lighthouse=lighthouse)} examples of its README run")
    if wheel.name in TRAINS:
        job = {"TFT_LIGHTHOUSE": lighthouse, "TFT_JOB_ID": f"{wheel.name}-recovery"}
        parts.append(run([commands / "python", RECOVERY, wheel.module], cwd=home, **job).strip())
    for command in wheel.commands:
        parts.append(help_time(commands / command, cwd=home, bounded=wheel.name in WITHOUT_TORCH))
    return ", ".join(parts)


def run_examples(wheel: Wheel, commands: Path, *, lighthouse: str) -> int:
    """Run each Python block of the README as a script. Returns: their number. Raises SystemExit: there is none."""
    home = commands.parent.parent
    examples = re.findall(r"^```python\n(.*?)^```$", wheel.readme, re.MULTILINE | re.DOTALL)
    if not examples:
        raise SystemExit(f"the README of {wheel.name} has no example; add one in a block of ```python.")
    for index, example in enumerate(examples):
        script = home / f"example_{index}.py"
        script.write_text(example, encoding="utf-8")
        run([commands / "python", script], cwd=home, TFT_LIGHTHOUSE=lighthouse, TFT_JOB_ID=wheel.name)
    return len(examples)


def program(wheel: Wheel, *, others: Sequence[str]) -> str:
    """Return the program for the fresh environment: it prints the version, whether torch is there, and siblings."""
    lines = [
        "import sys, importlib.metadata, importlib.util",
        f"import {wheel.module}",
        "torch = importlib.util.find_spec('torch') is not None",
        "names = {distribution.name for distribution in importlib.metadata.distributions()}",
        f"print({wheel.module}.__version__, torch, *sorted(names & set({list(others)!r})))",
    ]
    if "numpy" not in map(name_of, wheel.requirements):
        lines.append("assert importlib.util.find_spec('numpy') is None, 'numpy is installed, and no wheel requires it'")
    if wheel.name in WITHOUT_TORCH:
        lines.append("assert not torch and 'torch' not in sys.modules")
    return "\n".join(lines)


@contextmanager
def serving(commands: Path) -> Iterator[str]:
    """Run the lighthouse of `commands` on a free port. Yields: its address."""
    process = subprocess.Popen(
        [commands / SERVES, "--bind", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True, env=clean()
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    address = re.search(r"listening at (\S+)", first)
    if address is None:
        process.kill()
        raise SystemExit(f"{SERVES} printed no address:\n{first}{process.communicate()[1]}")
    # reads the log, because a full pipe would block the process
    drain = threading.Thread(target=process.stderr.read, name="tft-drain")
    drain.start()
    try:
        yield address[1]
    finally:
        process.terminate()
        process.wait(30)
        drain.join()


def help_time(command: Path, *, cwd: Path, bounded: bool) -> str:
    """Ask `command` for --help five times, and each of its own commands once. Returns: a summary.

    Raises SystemExit: the median time of a bounded command is too long.
    """
    taken_s = []
    for _ in range(HELP_RUNS):
        begin = time.perf_counter()
        output = run([command, "--help"], cwd=cwd)
        taken_s.append(time.perf_counter() - begin)
    median_s = statistics.median(taken_s)
    if bounded and median_s > HELP_S_MAX:
        raise SystemExit(
            f"{command.name} --help took {median_s:.2f} s in the median; at most {HELP_S_MAX} s is allowed."
        )
    inner = COMMANDS_OF.findall(output)
    for name in inner:
        run([command, name, "--help"], cwd=cwd)
    return f"{command.name} {' '.join(f'({name})' for name in inner)} --help in {median_s:.2f} s".replace("  ", " ")


def newest(dist: Path) -> dict[str, Wheel]:
    """Return the wheels of dist/ by name. Raises SystemExit: one is missing, or two have one name."""
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
    wheels, dist = newest(options.dist), options.dist.resolve()
    names = list(options.names or wheels)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=os.cpu_count()) as executor:
        base = Path(folder, BASE)
        install_base(base, {need for wheel in wheels.values() for need in wheel.requirements if name_of(need) == BASE})

        def installed(name: str) -> Path:
            return install(wheels[name], wheels, dist=dist, home=Path(folder, name), base=base)

        def used(name: str) -> str:
            return use(wheels[name], wheels, commands[name], lighthouse=lighthouse)

        commands = dict(zip(wheels, executor.map(installed, wheels), strict=True))
        with serving(commands[SERVES]) as lighthouse:
            # What is timed runs alone, all else several at once.
            timed = {name: used(name) for name in names if name in WITHOUT_TORCH}
            others = [name for name in names if name not in timed]
            for name, seen in (timed | dict(zip(others, executor.map(used, others), strict=True))).items():
                print(f"{name} {wheels[name].version} installs alone: {seen}", flush=True)


if __name__ == "__main__":
    main()
