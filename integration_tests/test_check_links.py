"""scripts/check_links.py finds links that lead nowhere; the READMEs and changelogs of this tree have none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from scripts.check_links import broken_in_html, broken_in_markdown

ROOT: Final = Path(__file__).resolve().parent.parent


def test_every_relative_link_of_the_readmes_and_changelogs_resolves() -> None:
    assert list(broken_in_markdown(ROOT)) == []


def test_a_missing_file_and_a_missing_anchor_are_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="sub/page.html#here">ok</a> <a href="sub/page.html#gone">x</a> <a href="gone.html">x</a>'
        '<img src="gone.svg"> <a href="#top">ok</a> <a href="https://example.org/gone">not ours</a> <b id="top"></b>'
    )
    (tmp_path / "sub" / "page.html").write_text('<p id="here"></p><a href="../index.html">ok</a><a href="..">ok</a>')
    assert list(broken_in_html(tmp_path)) == [
        "index.html: gone.html: no such file",
        "index.html: gone.svg: no such file",
        "index.html: sub/page.html#gone: the page has no anchor #gone",
    ]


def test_a_missing_file_of_a_readme_is_found(tmp_path: Path) -> None:
    (tmp_path / "packages" / "one").mkdir(parents=True)
    (tmp_path / "README.md").write_text("[ok](packages/one/README.md#x) [x](docs/gone.md) `[code](gone)`\n")
    (tmp_path / "packages" / "one" / "README.md").write_text("[ok](../../README.md)\n```\n[code](gone)\n```\n")
    assert list(broken_in_markdown(tmp_path)) == ["README.md: docs/gone.md: no such file"]


def test_the_command_names_a_folder_without_pages(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "check_links.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert "docs/_build/html" in done.stderr
