"""The errors of the `tft` command, named by what the caller can do next.

Law of this file: exceptions that carry their facts, and a message of one sentence: what, where, what to do.
"""

from __future__ import annotations

from typing import final


class SuiteError(Exception):
    """Base of every error of the `tft` command."""


@final
class ConfigError(SuiteError, ValueError):
    """A setting of the command is wrong, and nothing has started. Next: correct it."""


@final
class MissingExtraError(SuiteError, ImportError):
    """A command needs an extra that is not installed. Next: install it with the printed line."""

    def __init__(self, command: str, *, extra: str, missing: tuple[str, ...]) -> None:
        self.command = command
        self.extra = extra
        self.missing = missing
        super().__init__(f'{command} needs {", ".join(missing)}: pip install "tft-suite[{extra}]"')


@final
class MessageError(SuiteError):
    """A message between the demo's supervisor and a replica is invalid. Next: start both from one version."""
