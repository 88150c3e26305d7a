"""Log lines for machines: one JSON object each, with the facts of the record and no line end inside."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from tft_coord.logs import JsonFormatter, field

REPLICA = "a:3f2b0c1a-0000-4000-8000-000000000000"


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    logger = logging.Logger("tft_lighthouse")
    return logger.makeRecord(logger.name, logging.WARNING, __file__, 1, message, args, None, extra=extra)


def test_a_record_has_its_facts_and_whole_ids() -> None:
    found = json.loads(JsonFormatter().format(record("lost %s of job %s", REPLICA, "x", job="x", replica_id=REPLICA)))
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "WARNING",
        "logger": "tft_lighthouse",
        "message": f"lost {REPLICA} of job x",
        "job": "x",
        "replica_id": REPLICA,
    }


def test_an_error_and_what_is_no_json_are_on_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        failed = record("it failed", what={1, 2}.__class__)
        failed.exc_info = sys.exc_info()
    line = JsonFormatter().format(failed)
    assert "\n" not in line
    assert json.loads(line)["what"] == "<class 'set'>"
    assert json.loads(line)["exception"].endswith("ValueError: two\nlines")


@pytest.mark.parametrize("text", ["", "a b", "a\tb", "x=1", 'say "no"', "it's", "a\n", "\x9b31m", "\u2028", "\u202e"])
def test_a_value_that_could_be_read_as_another_field_is_quoted(text: str) -> None:
    written = field(text)
    assert written.startswith('"')
    assert written.isprintable()
    assert json.loads(written) == text


@pytest.mark.parametrize("text", ["a", REPLICA, "a:1,b:2,…", "http://[::1]:80/x", "größe"])
def test_a_plain_value_of_a_field_is_unchanged(text: str) -> None:
    assert field(text) == text
