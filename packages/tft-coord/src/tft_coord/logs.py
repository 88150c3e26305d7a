"""The format of the servers' logs for people: one format, and short replica ids.

Law of this file: text of log lines; the records' own fields keep whole ids, for machines.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

from tft_coord.core.names import shorten

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def logger_for_people(name: str) -> logging.Logger:
    """Return the logger of that name; its lines have short replica ids."""
    logger = logging.getLogger(name)
    logger.addFilter(_short_ids)  # a repeated call adds nothing
    return logger


def configure_process(level: int) -> None:
    """Configure a process of this package's own: log lines of that level and above on standard error, with the time."""
    logging.basicConfig(stream=sys.stderr, level=level, format=FORMAT)


def _short_ids(record: logging.LogRecord) -> bool:
    record.msg, record.args = shorten(record.getMessage()), ()
    return True
