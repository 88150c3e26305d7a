"""Shut down the Managers that a script leaves open when the interpreter exits.

A script may end without `shutdown()`: it returns, raises, calls sys.exit or is interrupted. Its Manager then runs
threads and a child process that must not outlive the interpreter's end, and the other replicas must hear of the end.

Law of this file: the register of open Managers, and their end at exit.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import Protocol

logger = logging.getLogger("tft_algos.manager")


class Endable(Protocol):
    """What ends at exit."""

    def end_at_exit(self) -> None:
        """Shut down; the interpreter exits."""
        ...


_open: weakref.WeakSet[Endable] = weakref.WeakSet()


def shut_down_at_exit(owner: Endable) -> None:
    """Shut `owner` down at the interpreter's exit, unless `forget` comes first.

    The interpreter runs first what was registered last. The owner's parts have registered their own ends while it was
    made, so each registration comes last again.
    """
    _open.add(owner)
    atexit.unregister(_end_all)
    atexit.register(_end_all)


def forget(owner: Endable) -> None:
    """`owner` was shut down."""
    _open.discard(owner)


def _end_all() -> None:
    for owner in list(_open):
        try:
            owner.end_at_exit()
        except Exception:
            logger.exception("a Manager could not be shut down at exit")
