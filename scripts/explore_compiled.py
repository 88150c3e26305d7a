"""Search every order of events with compiled cores, about twice as fast. The arguments are those of the search.

    python scripts/explore_compiled.py --explore 6 --replicas 3

mypyc, which comes with mypy, compiles a copy of tft-coord and tft-sim in a temporary directory. It needs a C compiler
and a minute. The copy differs from the source in declarations alone. Classes may be created without their constructor,
as copying them does. Exceptions stay classes of the interpreter. Frozen dataclasses are not frozen. `num_states` and
`num_events` must equal those of the uncompiled search. --check compares a short one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent.parent / "packages"
SOURCES = (PACKAGES / "tft-coord" / "src" / "tft_coord", PACKAGES / "tft-sim" / "src" / "tft_sim")
COMPILED = (
    *("tft_coord/core/*.py", "tft_coord/testing/snapshots.py"),
    *("tft_sim/explore.py", "tft_sim/worlds.py", "tft_sim/invariants.py", "tft_sim/liveness_truth.py"),
)
SHORT = ("--explore", "3", "--replicas", "2")
FUTURE = "from __future__ import annotations\n"
# The docstring above explains each declaration.
DECLARATIONS = (
    (r"^((?:@dataclass.*\n)?class \w+:)", r"@mypyc_attr(allow_interpreted_subclasses=True)\n\1"),
    (r"^(class \w+\(AssertionError\):)", r"@mypyc_attr(native_class=False)\n\1"),
    (r"^@dataclass\(frozen=True, slots=True", "@dataclass(unsafe_hash=True"),
    (r'(getattr\(kind, "__dataclass_params__"\))\.frozen', r"(\1.frozen or \1.unsafe_hash)"),
    (r"tuple\(sorted\(vars\(value\)\)\)", 'tuple(getattr(kind, "__mypyc_attrs__", ()))'),
)


def compile_into(directory: Path) -> None:
    """Put both packages there, compiled. Raises SystemExit: compilation fails. The compiler's output is printed."""
    for source in SOURCES:
        shutil.copytree(source, directory / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    applied = [0] * len(DECLARATIONS)
    paths = sorted(path for pattern in COMPILED for path in directory.glob(pattern))
    for path in paths:
        text = path.read_text().replace(FUTURE, f"{FUTURE}from mypy_extensions import mypyc_attr\n", 1)
        for number, (pattern, declared) in enumerate(DECLARATIONS):
            text, count = re.subn(pattern, declared, text, flags=re.MULTILINE)
            applied[number] += count
        path.write_text(text)
    for (pattern, _), count in zip(DECLARATIONS, applied, strict=True):
        if not count:
            raise SystemExit(f"no line in {PACKAGES} matches {pattern!r}; update DECLARATIONS")
    names = [str(path.relative_to(directory)) for path in paths]
    done = subprocess.run(
        [sys.executable, "-m", "mypyc", *names], cwd=directory, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit("the packages can't be compiled; install mypy and a C compiler, or see their output above")


def search(where: Sequence[Path], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the search of these source trees to its end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, where))}
    capture = subprocess.PIPE if arguments == SHORT else None
    command = [sys.executable, "-m", "tft_sim", *arguments]
    return subprocess.run(command, env=environment, cwd=where[0], stdout=capture, text=True, check=False)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="tft-compiled-") as name:
        compile_into(Path(name))
        if sys.argv[1:] != ["--check"]:
            return search([Path(name)], *sys.argv[1:]).returncode
        compiled = search([Path(name)], *SHORT).stdout
        plain = search([source.parent for source in SOURCES], *SHORT).stdout
        print(compiled, end="")
        if not compiled or compiled != plain:
            print("the result without compilation differs:", plain, sep="\n", file=sys.stderr)
            return 1
        return 0


if __name__ == "__main__":
    sys.exit(main())
