"""How many files this process may open.

A trainer holds connections to the other members, data files, and the readers of its state. Each is a descriptor, and
without any nothing works, so the limit is raised as far as the system lets it.

Law of this file: the limit; who opens what is not known here.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Final

__all__ = ["limit", "raise_limit"]

MOST: Final = 1 << 20  # where the limit says "any number", or there is none


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard one, as far as the system lets it."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # this system has a limit besides
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def limit() -> int:
    """How many files this process may open."""
    if sys.platform == "win32":
        return MOST
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft
