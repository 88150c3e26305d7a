"""The exit codes by which a process tells its launcher what to do next.

Law of this file: numbers, and what they mean.
"""

from __future__ import annotations

import signal
from typing import Final

DONE: Final = 0  # the training is over, or the replica was drained
RESTART: Final = 1  # like each code that is not listed here, and each signal
NEVER: Final = 3  # a restart would fail in the same way


def describe(code: int) -> str:
    """Return the end of a process in words.

    Args:
        code: as `subprocess` has it: negative for a signal.
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
