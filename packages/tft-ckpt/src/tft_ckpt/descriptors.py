"""The limit on open files of this process.

A trainer holds connections to the other members, data files, and the connections of its state's readers. Each needs a
descriptor, so this file raises the limit as far as the system allows.

Law of this file: the limit; the users of descriptors are not known here.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Final

__all__ = ["limit", "raise_limit"]

MOST: Final = 1 << 20  # used if the limit is unlimited, or does not exist


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard one, as far as the system allows."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # this system has an additional limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def limit() -> int:
    """Return how many files this process may open."""
    if sys.platform == "win32":
        return MOST
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft
