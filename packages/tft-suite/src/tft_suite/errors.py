"""What can go wrong in the `tft` command, named by what the caller can do next.

Law of this file: exceptions that carry their facts, and a message of one sentence: what, where, what to do.
"""

from __future__ import annotations

from typing import final


class SuiteError(Exception):
    """Any error of this package."""


@final
class SettingError(SuiteError, ValueError):
    """A setting is wrong: correct it. Nothing has started."""


@final
class MissingExtraError(SuiteError, ImportError):
    """A command needs packages of an extra that is not installed: install it."""

    def __init__(self, command: str, *, extra: str, missing: tuple[str, ...]) -> None:
        self.command = command
        self.extra = extra
        self.missing = missing
        super().__init__(f'{command} needs {", ".join(missing)}: pip install "tft-suite[{extra}]"')


@final
class MessageError(SuiteError):
    """A message between supervisor and replica is not one that this version speaks: it has been refused."""
