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
# The rest is for other files: a stranger who opens connections must not take all of them.
OF_CONNECTIONS: Final = 0.5  # of the limit
NEAR: Final = 0.8  # of that part
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


def most_connections() -> int:
    """Return how many connections a server of this process accepts; further ones are closed at once."""
    return max(1, int(OF_CONNECTIONS * limit()))


@final
class DescriptorWatch:
    """A watch that warns while few connections are left. It runs on one loop only.

    It counts open files, which costs nothing. Nearly all files of a server are connections.

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
        most, opened = most_connections(), _lowest_free()
        if opened < NEAR * most or self._loop.time() - self._warned_s < AGAIN_S:
            return
        self._warned_s = self._loop.time()
        logger.warning(
            "%s: this process has %d files open, and accepts at most %d connections, half of its %d file descriptors; "
            "list the connections (ss -tnp), limit those of one host (firewall), or raise the hard limit (ulimit -Hn, "
            "LimitNOFILE=)",
            self._server,
            opened,
            most,
            limit(),
        )


def _lowest_free() -> int:
    """Return the number that the next file gets: as many files are open, or a few more."""
    try:
        free = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return limit()
    os.close(free)
    return free
