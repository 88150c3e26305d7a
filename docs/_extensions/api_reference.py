"""Sphinx extension: the API reference, made from `__all__` and from the docstrings.

A page under `docs/reference/` has a line `<!-- exports: tft_coord -->`. The extension puts every exported name of that
module in its place: tables of the names first, then one entry a name by autodoc. So a new export is on its page without
an edit.

Docstrings here are plain text, with code in single backticks and sections such as `Args:` and `Raises:`, also on one
line. The extension writes them as reStructuredText: a section becomes a field, an exported name becomes a link, and
characters that have a meaning there are escaped.

Law of this file: pure functions from modules and text to text; `setup` alone knows Sphinx.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final, Generic, Protocol

MARKER: Final = re.compile(r"^<!-- exports: ([\w.]+) -->$", re.MULTILINE)
LONGEST_VALUE: Final = 100  # characters of a constant's value that its entry shows
KINDS: Final = ("Classes", "Functions", "Constants and types", "Errors")
# The lower ones come first.
LAYERS: Final = ("tft_coord", "tft_lighthouse", "tft_pg", "tft_ckpt", "tft_algos", "tft_suite", "torchft")
_SECTION: Final = re.compile(r"^(Args|Fields|Returns|Yields|Raises|Attributes|Source|Sources):(?: (.+))?$")
_CODE: Final = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)
_NAME: Final = re.compile(r"[A-Za-z_][\w.]*(\(\))?")
_END: Final = "\0"  # stands behind markup until it is known whether a separator must follow
_SPECIAL: Final = re.compile(r"([*|\\]|(?<=\w)_(?!\w))")


def is_ours(module: str) -> bool:
    """Return whether a module of that name belongs to the project."""
    return module.startswith("tft_") or module.partition(".")[0] == "torchft"


def exported(module: ModuleType) -> dict[str, str]:
    """Return the kind of every name in the module's `__all__`, in that order; `__version__` is left out."""
    return {name: _kind(getattr(module, name)) for name in module.__all__ if name != "__version__"}


def _kind(value: object) -> str:
    if inspect.isclass(value):
        return "Errors" if issubclass(value, BaseException) else "Classes"
    return "Functions" if inspect.isroutine(value) else "Constants and types"


def reference(module: ModuleType) -> str:
    """Return the Markdown of a module's reference: for each kind a table of its names, then each name's entry.

    A name that another package of the project exports too has its entry there.
    """
    parts: list[str] = []
    depth = 2 + module.__name__.count(".")  # a submodule has a heading of its own on the page
    for kind in KINDS:
        homes = {name: _home(module, name) for name, its_kind in exported(module).items() if its_kind == kind}
        if not homes:
            continue
        parts += [f"{'#' * depth} {kind}", "", "| name | what it is |", "|---|---|"]
        parts += [f"| {{py:obj}}`{name} <{home}.{name}>` | {_summary(module, name)} |" for name, home in homes.items()]
        parts.append("")
        for name, home in homes.items():
            if home == module.__name__:
                parts += ["```{eval-rst}", *_entry(module, name, kind), "```", ""]
    return "\n".join(parts)


def _home(module: ModuleType, name: str) -> str:
    """Return the package that documents this name: the first below this module's package that exports it, or this
    one."""
    value = getattr(module, name)
    if not is_ours(_package_of(value)):
        return module.__name__
    for package in LAYERS:
        if package == module.__name__.partition(".")[0]:
            break
        if getattr(importlib.import_module(package), name, None) is value:
            return package
    return module.__name__


def _package_of(value: object) -> str:
    return str(getattr(value, "__module__", None) or "").partition(".")[0]


def _entry(module: ModuleType, name: str, kind: str) -> Iterator[str]:
    value = getattr(module, name)
    directive = {"Classes": "autoclass", "Functions": "autofunction", "Errors": "autoexception"}.get(kind, "autodata")
    yield f".. {directive}:: {module.__name__}.{name}"
    if inspect.isclass(value):
        yield "   :members:"
        if issubclass(value, enum.Enum):
            yield "   :undoc-members:"
        if not {object, Generic, Protocol} & set(value.__bases__):
            yield "   :show-inheritance:"
    elif kind == "Constants and types" and len(repr(value)) > LONGEST_VALUE:
        yield "   :no-value:"


def _summary(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    if _kind(value) == "Constants and types":
        return f"`{value!r}`" if isinstance(value, int | float | str) else f"a `{type(value).__name__}`"
    paragraph = (inspect.getdoc(value) or "").split("\n\n", maxsplit=1)[0]
    sentence = re.split(r"(?<=[.:]) (?=[A-Z])|:\n", " ".join(paragraph.split()), maxsplit=1)[0]
    return sentence.replace("|", "\\|")


def to_rst(lines: list[str], names: Mapping[str, str]) -> list[str]:
    """Return a docstring's lines as reStructuredText.

    Args:
        lines: the docstring, without the indentation of its code.
        names: the full name behind each name that the docstring may link to.
    """
    blocks: list[str] = []
    rest = [line.rstrip() for line in lines]
    while rest:
        title = _SECTION.match(rest[0])
        first, rest = rest[0], rest[1:]
        if title:
            body, rest = _indented(rest)
            blocks += ["", *_field(title[1], title[2], body, names), ""]
        elif first.startswith("    "):  # below no section: code
            body, rest = _indented(rest)
            blocks += ["", "::", "", first, *body, ""]
        else:
            text = [first]
            while rest and rest[0] and not rest[0].startswith("    ") and not _SECTION.match(rest[0]):
                text.append(rest.pop(0))
            blocks += _inline("\n".join(text), names).split("\n")
    return blocks


def _indented(lines: list[str]) -> tuple[list[str], list[str]]:
    """Split off the indented lines at the start, with the blank lines between them."""
    num = 0
    for position, line in enumerate(lines, start=1):
        if line.startswith("    "):
            num = position
        elif line:
            break
    return lines[:num], lines[num:]


def _field(title: str, start: str, body: list[str], names: Mapping[str, str]) -> Iterator[str]:
    """Yield one field: a paragraph if the section begins on the line of its title, else one item an entry."""
    title = {"Args": "Arguments"}.get(title, title)
    if start or not body:
        yield f":{title}: {_inline(_joined([start, *body]), names)}"
        return
    yield f":{title}:"
    entries: list[list[str]] = []
    for line in filter(None, body):
        if not entries or not line.startswith("     "):
            entries.append([])
        entries[-1].append(line)
    for entry in entries:
        head, colon, text = _joined(entry).partition(": ")
        if colon and re.fullmatch(r"[\w*]+(, [\w*]+)*", head):
            yield f"    * {_inline(head, names, bold=True)}: {_inline(text, names)}"
        else:
            yield f"    * {_inline(_joined(entry), names)}"


def _joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines if line.strip())


def _inline(text: str, names: Mapping[str, str], *, bold: bool = False) -> str:
    """Return text with its code as literals or links, its exported names as links, and all else escaped."""
    parts = _CODE.split(text)
    marked = (_span(part, names) if part.startswith("`") else _words(part, names, bold) for part in parts)
    return re.sub(f"{_END}(?=[^\\s'\")\\]}}>/:.,;!?-])", r"\\ ", "".join(marked)).replace(_END, "")


def _span(code: str, names: Mapping[str, str]) -> str:
    inner = " ".join(code.strip("`").split())
    name, dot, member = inner.removesuffix("()").partition(".")
    if _NAME.fullmatch(inner) and name in names:
        return f":py:obj:`{inner} <{names[name]}{dot}{member}>`{_END}"
    return f"``{inner}``{_END}"


def _words(text: str, names: Mapping[str, str], bold: bool) -> str:
    def word(found: re.Match[str]) -> str:
        if found[0] in names and found[0][0].isupper():
            return f":py:obj:`{found[0]} <{names[found[0]]}>`{_END}"
        return f"**{found[0]}**{_END}" if bold else found[0]

    escaped = _SPECIAL.sub(r"\\\1", text)
    return re.sub(r"(?<![\w.`])[A-Za-z_]\w*(?![\w`])", word, escaped)


@functools.cache
def linkable(module: ModuleType) -> dict[str, str]:
    """Return the full name of every exported name that code of this module can mean by a name alone."""
    package = module.__name__.partition(".")[0]
    found: dict[str, str] = {}
    for name, value in vars(module).items():
        home = _package_of(value)
        if is_ours(home) and name in importlib.import_module(home).__all__:
            found[name] = f"{home}.{name}"
    own = importlib.import_module(package)
    return {**found, **{name: f"{package}.{name}" for name in own.__all__}}


def setup(app: Any) -> dict[str, Any]:
    """Connect the two hooks to Sphinx."""

    def fill_page(app: Any, _docname: str, source: list[str]) -> None:
        def fill(found: re.Match[str]) -> str:
            module = importlib.import_module(found[1])
            for file in (module.__file__, __file__):  # autodoc notes the modules of the names themselves
                app.env.note_dependency(file)
            return reference(module)

        source[0] = MARKER.sub(fill, source[0])

    def rewrite_docstring(_app: Any, _what: str, name: str, value: object, _options: Any, lines: list[str]) -> None:
        home = str(getattr(value, "__module__", None) or name.partition(".")[0])
        if is_ours(home) and getattr(value, "__doc__", None) != type(value).__doc__:
            lines[:] = to_rst(lines, linkable(importlib.import_module(home)))
        else:
            lines.clear()  # a constant: the docstring is that of its type

    app.connect("source-read", fill_page)
    app.connect("autodoc-process-docstring", rewrite_docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
