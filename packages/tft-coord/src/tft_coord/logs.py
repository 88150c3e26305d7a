"""The format of the servers' logs: text for people with short replica ids, or one JSON object a line for machines.

Law of this file: text of log lines; the records' own fields keep whole ids, for machines.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Final, final

from tft_coord.core.names import shorten

_NOT_PLAIN: Final = re.compile(r"""[\s="']|^$""")
FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def logger_for_people(name: str) -> logging.Logger:
    """Return the logger of that name; its lines have short replica ids."""
    logger = logging.getLogger(name)
    logger.addFilter(_short_ids)  # a repeated call adds nothing
    return logger


def configure_process(level: int, *, as_json: bool = False, job: str = "") -> None:
    """Configure a process of this package's own: log lines of that level and above on standard error, with the time.

    Args:
        level: of the logging module.
        as_json: write JSON objects instead of text.
        job: that this process belongs to; each line of text names it. "": the lines name their jobs themselves.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(_format_of(job)))
    logging.basicConfig(level=level, handlers=[handler])


def _format_of(job: str) -> str:
    return FORMAT.replace("%(message)s", f"job {job.replace('%', '%%')}: %(message)s") if job else FORMAT


def field(text: str) -> str:
    """Return a value for a line of `name=value`: as JSON if it could be read as another field, else unchanged."""
    return quoted(text) if _NOT_PLAIN.search(text) or not text.isprintable() else text


def quoted(text: str) -> str:
    """Return a text as JSON, in which every unprintable character is escaped."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


@final
class JsonFormatter(logging.Formatter):
    """One JSON object for each record, on one line.

    It has `time` (UTC), `level`, `logger` and `message`, the record's own additional fields such as `job`, and
    `exception` with the traceback, if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        seconds, milliseconds = divmod(int(record.created * 1_000), 1_000)
        found = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{milliseconds:03}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        found |= {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


_OF_EVERY_RECORD: Final = {*vars(logging.makeLogRecord({})), "message", "asctime"}


def _short_ids(record: logging.LogRecord) -> bool:
    record.msg, record.args = shorten(record.getMessage()), ()
    return True
