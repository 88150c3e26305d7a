"""Search every order of events with the cores compiled, about twice as fast: the arguments are those of the search.

    python scripts/explore_compiled.py --explore 6 --replicas 3

A copy of tft-coord is compiled by mypyc, which comes with mypy, in a directory of its own that is gone afterwards; it
needs a C compiler and a minute. The copy differs from the source in declarations alone: classes may be made without
their constructor, as copying them does, exceptions stay classes of the interpreter, and frozen dataclasses are not held
to it. `num_states` and `num_events` must be those of the search that is not compiled; --check compares a short one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "packages" / "tft-coord" / "src"
COMPILED = ("core/*.py", "testing/explore.py", "testing/snapshots.py", "testing/worlds.py", "testing/invariants.py")
SHORT = ("--explore", "3", "--replicas", "2")
FUTURE = "from __future__ import annotations\n"
# What each stands for is in the docstring above.
DECLARATIONS = (
    (r"^((?:@dataclass.*\n)?class \w+:)", r"@mypyc_attr(allow_interpreted_subclasses=True)\n\1"),
    (r"^(class \w+\(AssertionError\):)", r"@mypyc_attr(native_class=False)\n\1"),
    (r"^@dataclass\(frozen=True, slots=True", "@dataclass(unsafe_hash=True"),
    (r'(getattr\(kind, "__dataclass_params__"\))\.frozen', r"(\1.frozen or \1.unsafe_hash)"),
    (r"tuple\(sorted\(vars\(value\)\)\)", 'tuple(getattr(kind, "__mypyc_attrs__", ()))'),
)


def compile_into(directory: Path) -> None:
    """Put a compiled tft_coord there. Raises SystemExit: it can't be compiled; what the compiler said is printed."""
    shutil.copytree(SOURCE / "tft_coord", directory / "tft_coord", ignore=shutil.ignore_patterns("__pycache__"))
    applied = [0] * len(DECLARATIONS)
    paths = sorted(path for pattern in COMPILED for path in (directory / "tft_coord").glob(pattern))
    for path in paths:
        text = path.read_text().replace(FUTURE, f"{FUTURE}from mypy_extensions import mypyc_attr\n", 1)
        for number, (pattern, declared) in enumerate(DECLARATIONS):
            text, count = re.subn(pattern, declared, text, flags=re.MULTILINE)
            applied[number] += count
        path.write_text(text)
    for (pattern, _), count in zip(DECLARATIONS, applied, strict=True):
        if not count:
            raise SystemExit(f"nothing in {SOURCE} is {pattern!r} any more; bring DECLARATIONS up to date")
    names = [str(path.relative_to(directory)) for path in paths]
    done = subprocess.run(
        [sys.executable, "-m", "mypyc", *names], cwd=directory, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit("tft-coord can't be compiled; mypy and a C compiler are needed, what they said is above")


def search(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The search of that source tree, to its end."""
    environment = {**os.environ, "PYTHONPATH": str(where)}
    capture = subprocess.PIPE if arguments == SHORT else None
    command = [sys.executable, "-m", "tft_coord.testing", *arguments]
    return subprocess.run(command, env=environment, cwd=where, stdout=capture, text=True, check=False)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="tft-compiled-") as name:
        compile_into(Path(name))
        if sys.argv[1:] != ["--check"]:
            return search(Path(name), *sys.argv[1:]).returncode
        compiled, plain = search(Path(name), *SHORT).stdout, search(SOURCE, *SHORT).stdout
        print(compiled, end="")
        if not compiled or compiled != plain:
            print("not compiled it sees otherwise:", plain, sep="\n", file=sys.stderr)
            return 1
        return 0


if __name__ == "__main__":
    sys.exit(main())
