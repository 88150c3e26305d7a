"""The log of requests that aiohttp can't read or answer: one sentence each, and only a few a minute.

Law of this file: log records of aiohttp.
"""

from __future__ import annotations

import logging
from typing import final

from aiohttp.http_exceptions import HttpProcessingError

__all__ = ["request_logger"]

_WARNINGS_A_MINUTE = 20


@final
class _RequestLogFilter(logging.Filter):
    """A filter that logs one sentence for bad requests and lost readers. Internal errors keep their traceback.

    After a number of such records in one minute, the filter suppresses the rest. Otherwise any host could fill the log.
    """

    def __init__(self) -> None:
        super().__init__()
        self._minute = 0
        self._num_logged = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        # UnicodeError: aiohttp quotes an Expect header in its answer, with arbitrary bytes.
        if isinstance(error, (HttpProcessingError, ConnectionError, UnicodeError)):
            # Without the text after the first colon. That is the received data, which may be long, or a token.
            why = error.message if isinstance(error, HttpProcessingError) else str(error)
            what = record.getMessage()
            minute = int(record.created // 60)
            self._num_logged = self._num_logged + 1 if minute == self._minute else 1
            self._minute = minute
            if self._num_logged > _WARNINGS_A_MINUTE:
                return False
            last = "; more of these are suppressed for this minute" if self._num_logged == _WARNINGS_A_MINUTE else ""
            record.msg = "%s: the request can't be read or answered (%s), so its connection is closed%s"
            record.args = (what, why.partition(":")[0].strip(), last)
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.exc_info = record.exc_text = None
        return True


def request_logger(parent: logging.Logger) -> logging.Logger:
    """Return the logger for aiohttp's complaints about requests, separate from the program's logging configuration."""
    log = logging.Logger(f"{parent.name}.requests")
    log.parent = parent
    log.addFilter(_RequestLogFilter())
    return log
