"""Check that each internal link of the built documentation, and each relative link of a README or changelog, resolves.

    python scripts/check_links.py docs/_build/html

A link of a page resolves if its file exists and, where it names an anchor, the target page has that id. Links to other
hosts are not followed, so the check needs no network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

ROOT: Final = Path(__file__).resolve().parent.parent
_MARKDOWN_LINK: Final = re.compile(r"\]\(([^()\s]+)\)")
_MARKDOWN_CODE: Final = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)


class _Page(HTMLParser):
    """The ids and the links of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids.update(filter(None, (found.get("id"), found.get("name"))))
        self.links += [link for link in (found.get("href"), found.get("src")) if link]


def broken_in_html(folder: Path) -> Iterator[str]:
    """Yield one line for each internal link of the pages under `folder` that leads nowhere."""
    folder = folder.resolve()
    pages = {path: _Page(path) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        for link in sorted(set(page.links)):
            where = _target(path, link)
            if where is None:
                continue
            target, anchor = where
            if not target.is_file():
                yield f"{path.relative_to(folder)}: {link}: no such file"
            elif anchor and target in pages and anchor not in pages[target].ids:
                yield f"{path.relative_to(folder)}: {link}: the page has no anchor #{anchor}"


def broken_in_markdown(root: Path) -> Iterator[str]:
    """Yield one line for each relative link of a README.md or CHANGELOG.md in the tree to a file that is not there."""
    for path in [root / "README.md", *sorted(root.glob("packages/*/*.md"))]:
        text = _MARKDOWN_CODE.sub("", path.read_text(encoding="utf-8"))
        for link in _MARKDOWN_LINK.findall(text):
            where = _target(path, link)
            if where is not None and not where[0].exists():
                yield f"{path.relative_to(root)}: {link}: no such file"


def _target(source: Path, link: str) -> tuple[Path, str] | None:
    """Return the file and the anchor that a link means; None: the link leaves these files."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    target = (source.parent / unquote(parts.path)).resolve() if parts.path else source
    return (target / "index.html" if target.is_dir() and source.suffix == ".html" else target), unquote(parts.fragment)


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1], "index.html").is_file():
        print(
            "give the folder of the built pages, such as docs/_build/html; run make docs to build it", file=sys.stderr
        )
        return 2
    broken = [*broken_in_html(Path(sys.argv[1])), *broken_in_markdown(ROOT)]
    print("\n".join(broken), file=sys.stderr, end="\n" if broken else "")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
