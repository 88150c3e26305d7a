"""The limit of open files of this process, and a warning before it is reached.

Each connection is a descriptor. A process without free descriptors accepts no connection, opens no log and dials no
server. Its limit is therefore raised as far as the system allows, and the operator is warned before it is reached.

Law of this file: the limit and the distance to it; other code opens the files.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from contextlib import suppress
from typing import Final, final

logger = logging.getLogger(__name__)

MOST: Final = 1 << 20  # for a limit of "any number"
NEAR: Final = 0.9  # of the limit
LOOK_EVERY_S: Final = 5.0
AGAIN_S: Final = 60.0


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one. Returns: the limit from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= most:
        return limit()
    with suppress(OSError, ValueError):  # this system has another limit as well
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return limit()


def limit() -> int:
    """Return how many files this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft


@final
class DescriptorWatch:
    """A watch that warns while few descriptors are left. It runs on one loop only.

    Args:
        server: its user, for the message.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._warned_s = -AGAIN_S
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)

    def end(self) -> None:
        """Stop the watch."""
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)
        most = limit()
        if _lowest_free() < NEAR * most or self._loop.time() - self._warned_s < AGAIN_S:
            return
        self._warned_s = self._loop.time()
        logger.warning(
            "%s: this process uses nearly all of its %d file descriptors, and accepts no connection at the limit; "
            "list the connections (ss -tnp), or raise the hard limit (ulimit -Hn, LimitNOFILE=)",
            self._server,
            most,
        )


def _lowest_free() -> int:
    """Return the number that the next file gets: as many files are open, or a few more."""
    try:
        free = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return limit()
    os.close(free)
    return free
