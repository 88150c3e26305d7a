"""The errors of the `tft` command, named by what the caller can do next.

Law of this file: exceptions that carry their facts, and a message of one sentence: what, where, what to do.
"""

from __future__ import annotations

from typing import final


class SuiteError(Exception):
    """The base class of this package's errors."""


@final
class SettingError(SuiteError, ValueError):
    """A setting is wrong. Correct it. Nothing has started."""


@final
class MissingExtraError(SuiteError, ImportError):
    """A command needs packages of an extra that is not installed. Install the extra."""

    def __init__(self, command: str, *, extra: str, missing: tuple[str, ...]) -> None:
        self.command = command
        self.extra = extra
        self.missing = missing
        super().__init__(f'{command} needs {", ".join(missing)}: pip install "tft-suite[{extra}]"')


@final
class MessageError(SuiteError):
    """A message between supervisor and replica is invalid in this version, and was refused."""
