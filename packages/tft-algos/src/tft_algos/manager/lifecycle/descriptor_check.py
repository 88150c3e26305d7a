"""A warning before a trainer runs out of file descriptors.

Each connection to a process group, to a store or to the state server is a descriptor. Torch ends the process when it
gets none. Torch's own ports keep the connections of strangers until the next process group is built.

Law of this file: the distance to the limit. No descriptor is kept open, and no thread is started.
"""

from __future__ import annotations

import logging
import os
from typing import Final, final

from tft_algos.manager.interfaces import Clock
from tft_algos.manager.step.error_reporter import ErrorReporter
from tft_ckpt.descriptors import limit

NEAR: Final = 0.9  # of the limit
LOOK_EVERY_S: Final = 5.0
AGAIN_S: Final = 60.0


@final
class DescriptorCheck:
    """The check of one trainer's descriptors.

    Args:
        reports: the log.
        clock: limits how often the check runs and warns.
    """

    def __init__(self, reports: ErrorReporter, clock: Clock) -> None:
        self._reports = reports
        self._clock = clock
        self._next_s = clock.monotonic()

    def look(self) -> None:
        """Warn if few descriptors are left, at most once a minute. Called once a beat."""
        now_s = self._clock.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_EVERY_S
        most = limit()
        if _lowest_free(most) < NEAR * most:
            return
        self._next_s = now_s + AGAIN_S
        self._reports.log(
            logging.WARNING,
            "this process uses nearly all of its %d file descriptors, and torch ends it at the limit; list the "
            "connections (ss -tnp), keep strangers from its ports by a firewall, or raise the hard limit (ulimit -Hn, "
            "LimitNOFILE=)",
            most,
        )


def _lowest_free(most: int) -> int:
    """Return the number that the next file gets: as many files are open, or a few more. `most`: no file is left."""
    try:
        free = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return most
    os.close(free)
    return free
