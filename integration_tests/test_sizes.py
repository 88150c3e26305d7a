"""The sizes of files, classes and functions: no new size exceeds a limit, and listed ones only shrink."""

from __future__ import annotations

from textwrap import dedent

import pytest

from scripts import sizes


def test_nothing_is_larger_than_listed() -> None:
    assert sizes.changes(sizes.listed_sizes(), sizes.oversized()) == []


def test_lines_of_code_are_counted_without_prose() -> None:
    text = dedent('''\
        """A module
        with a docstring."""

        # A comment.
        class One:
            """A class."""

            def __init__(self) -> None:
                self.a, self._b = 1, """a string
                of two lines"""

            def public(self) -> None:
                def inside() -> None:
                    self.c = 3

            def _private(self) -> None: ...
        ''')
    assert list(sizes.sizes_of(text)) == [
        ("lines of a file", "", 8),
        ("lines of a class", "One", 8),
        ("attributes of a class", "One", 3),
        ("public names of a class", "One", 1),
        ("lines of a function", "One.__init__", 3),
        ("lines of a function", "One.public", 3),
        ("lines of a function", "One.public.inside", 2),
        ("lines of a function", "One._private", 1),
    ]


@pytest.mark.parametrize(
    ("listed", "found", "says"),
    [
        ({}, {"a.py": 501}, "a.py has 501 lines of a file, and the limit is 500: split it"),
        ({"a.py": 600}, {"a.py": 601}, "a.py has grown from 600 to 601 lines of a file: split it"),
        ({"a.py": 600}, {"a.py": 599}, "a.py has shrunk to 599 lines of a file: run `python scripts/sizes.py --lower`"),
        ({"a.py": 600}, {}, "a.py is within the limit for lines of a file: run `python scripts/sizes.py --lower`"),
    ],
)
def test_the_list_only_shrinks(listed: dict[str, int], found: dict[str, int], says: str) -> None:
    measured = {measure: dict[str, int]() for measure in sizes.LIMITS}
    measured["lines of a file"] = found
    assert sizes.changes({"lines of a file": listed}, measured) == [says]
