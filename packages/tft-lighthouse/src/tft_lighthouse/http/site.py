"""The files of the page at `/`: HTML, style and scripts of this package, sent as they are.

The policy lets a browser run and load the files of this port, and nothing else: no script in the page itself, and
nothing from another host.

Law of this file: files and their headers; what the page shows comes from `/api/v1/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Final

INDEX: Final = "index.html"
TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True)
class File:
    """One file: its bytes, its type, and additional headers."""

    body: bytes
    content_type: str
    headers: Mapping[str, str] = field(default_factory=dict)


def load() -> dict[str, File]:
    """Read all files of the page, by name."""
    found = {}
    for each in files("tft_lighthouse.http").joinpath("assets").iterdir():
        content_type = TYPES.get(each.name.rpartition(".")[2])
        if content_type is not None:
            headers = {"Content-Security-Policy": POLICY} if each.name == INDEX else {}
            found[each.name] = File(each.read_bytes(), content_type, headers)
    if INDEX not in found:
        raise FileNotFoundError(f"tft_lighthouse/http/assets/{INDEX} is missing; install tft-lighthouse again")
    return found
