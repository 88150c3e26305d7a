"""The shutdown of Managers that are still open when the interpreter exits.

A script may end without `shutdown()`: it returns, raises, calls sys.exit or is interrupted. Its Manager then has
threads and a child process that must not outlive the interpreter, and the other replicas must learn of the end.

Law of this file: the register of open Managers, and their end at exit.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import Protocol

logger = logging.getLogger("tft_algos.manager")


class Endable(Protocol):
    """An object that ends at exit."""

    def end_at_exit(self) -> None:
        """Shut down, because the interpreter exits."""
        ...


_open: weakref.WeakSet[Endable] = weakref.WeakSet()


def shut_down_at_exit(owner: Endable) -> None:
    """Shut `owner` down when the interpreter exits, unless `forget` comes first.

    The interpreter runs the latest registration first. The owner's parts registered their own ends while the owner was
    made. So each call moves this registration to the latest place.
    """
    _open.add(owner)
    atexit.unregister(_end_all)
    atexit.register(_end_all)


def forget(owner: Endable) -> None:
    """Remove `owner`, which was shut down."""
    _open.discard(owner)


def _end_all() -> None:
    for owner in list(_open):
        try:
            owner.end_at_exit()
        except Exception:
            logger.exception("a Manager could not be shut down at exit")
