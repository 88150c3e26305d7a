"""A bounded wait for the end of a thread.

Law of this file: one wait.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

__all__ = ["join_within"]

logger = logging.getLogger(__name__)

_WITHIN_S: Final = 10.0


def join_within(thread: threading.Thread, within_s: float = _WITHIN_S) -> bool:
    """Wait until the thread has ended, and return whether it has. A thread that still runs is a daemon and is
    left alone.
    """
    thread.join(within_s)
    if thread.is_alive():
        logger.warning(
            "thread %s did not end within %g s and is left alone; this machine may be overloaded. If it is not, please "
            "report this with the output of py-spy dump",
            thread.name,
            within_s,
        )
        return False
    return True
