"""Write the table of the settings of the lighthouse into its pages, from the one in `tft_lighthouse.settings`.

The pages then always say what the command takes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tft_lighthouse.settings import SETTINGS, Kind, Setting

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs/run-a-lighthouse.md", ROOT / "packages/tft-lighthouse/README.md")
BEGIN, END = "<!-- begin: written by scripts/settings_table.py -->", "<!-- end -->"


def row(setting: Setting) -> str:
    """Return the row of a setting."""
    default = "" if setting.default is None else f"`{setting.default}`"
    if setting.kind is Kind.SWITCH:
        default = "`true`" if setting.default else "`false`"
    in_words = f"; {setting.allowed}" if setting.kind in (Kind.NUMBER, Kind.RATIO) else ""
    in_words = f": {', '.join(f'`{each}`' for each in setting.choices)}" if setting.choices else in_words
    when = "SIGHUP" if setting.reloads else "restart"
    return f"| `{setting.name}` | `{setting.environment}` | {default} | {setting.help}{in_words} | {when} |"


def table() -> str:
    """Return the table."""
    head = "| setting | variable | default | meaning | a change needs |\n|---|---|---|---|---|\n"
    return head + "\n".join(map(row, SETTINGS)) + "\n"


def page(path: Path) -> str:
    """Return a page with its table as it should be now. Raises: ValueError: it has no place for it."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no line {BEGIN!r} with {END!r} after it")
    return f"{before}{BEGIN}\n\n{table()}\n{END}{after}"


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is not up to date")
    old = [path for path in PAGES if page(path) != path.read_text(encoding="utf-8")]
    if parser.parse_args().check:
        for path in old:
            print(f"{path.relative_to(ROOT)} is not up to date; run python scripts/settings_table.py", file=sys.stderr)
        return 1 if old else 0
    for path in old:
        path.write_text(page(path), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
