"""The pages of the documentation as tests read them: code blocks, commands, and the output that a page shows.

Law of this file: text in, text out. Nothing runs here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


def blocks(page: Path, language: str) -> list[str]:
    """Return the content of the page's code blocks of a language, in the order of the page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def pattern_of(line: str) -> str:
    """Return a regular expression for an output line of a page.

    An ellipsis stands for anything, a number for any number, and a digest or an id for any other. The number of
    participants and the numbers in names (`replica_1`) must be the same.
    """
    pattern = re.sub(r"\b(?=[a-f\d]*\d)[a-f\d]{8,}\b", "DIGEST", line)
    pattern = re.sub(r"(?<!_)(?<!participants\\ )\d+", r"\\d+", re.escape(pattern))
    return pattern.replace("…", ".*").replace("DIGEST", r"[a-f\d]+")


@dataclass(frozen=True)
class Typed:
    """A command that a page shows, in the order of the page.

    Args:
        shell: number of the shell, from the last heading of the form **Shell 1** or **Shells 2 and 3**.
        command: as printed. Empty: only output is shown.
        shown: lines of output that follow.
    """

    shell: int
    command: str
    shown: tuple[str, ...]


def typed(page: Path) -> Iterator[Typed]:
    """Yield the commands of a page that says in which shell each of them is typed."""
    shell = 1
    parts = re.compile(r"^\*\*Shell (\d)\b|^```(?:console|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for part in parts.finditer(page.read_text(encoding="utf-8")):
        if part[1]:
            shell = int(part[1])
            continue
        output, *commands = re.split(r"^\$ ", part[2], flags=re.MULTILINE)
        if output:
            yield Typed(shell, "", tuple(output.splitlines()))
        for each in commands:
            command, *shown = each.splitlines()
            yield Typed(shell, command, tuple(shown))
