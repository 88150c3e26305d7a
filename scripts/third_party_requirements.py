"""Print the external requirements of the development environment, one a line.

They are the packages' own dependencies with all their extras, plus the workspace's tools, minus the packages
themselves. Those are installed from the tree, so no index is ever asked for the project's own names. What can't be
installed beside the others is left out.

Law of this file: it runs before anything is installed, on any Python from 3.10 on. So it uses only the standard
library, and the TOML reader that pip carries, which Python 3.10 lacks.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# torchx needs an older urllib3 than the others.
LEFT_OUT = {"torchx"}
TOML_READER = "tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli"


def name_of(requirement: str) -> str:
    """Return the normalized name of a requirement such as `Foo_Bar[extra]>=1 ; python_version < "4"`."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]).lower()


def requirements(root: Path) -> Iterator[str]:
    """Yield every requirement of the workspace and of the packages under `root`, the packages' own names included."""
    read_toml: Any = importlib.import_module(TOML_READER).loads
    workspace = read_toml((root / "pyproject.toml").read_text(encoding="utf-8"))
    yield from workspace["dependency-groups"]["workspace"]
    for file in sorted(root.glob("packages/*/pyproject.toml")):
        project = read_toml(file.read_text(encoding="utf-8"))["project"]
        yield from project["dependencies"]
        for extra in project.get("optional-dependencies", {}).values():
            yield from extra


def main() -> None:
    siblings = {folder.name for folder in (ROOT / "packages").iterdir() if folder.is_dir()}
    found = {requirement for requirement in requirements(ROOT) if name_of(requirement) not in siblings | LEFT_OUT}
    print("\n".join(sorted(found)))


if __name__ == "__main__":
    main()
