"""Which sources are remembered as poor, and for how long."""

from __future__ import annotations

from tft_ckpt.transfer.failed_sources import KEPT_MOST, KEPT_S, SourceRecord


def test_a_failure_is_kept_until_the_source_gives_or_time_passes() -> None:
    record = SourceRecord()
    record.note({"a": "hung", "b": "lied"}, ["b", "c"], 0.0)
    assert record.failures(1.0) == {"a": "hung", "b": "lied"}, "b gave, and failed then"
    record.note({}, ["b"], 2.0)
    assert record.failures(3.0) == {"a": "hung"}
    assert record.failures(KEPT_S) == {}


def test_the_newest_failure_counts() -> None:
    record = SourceRecord()
    record.note({"a": "hung"}, [], 0.0)
    record.note({"a": "lied"}, [], KEPT_S - 1)
    assert record.failures(KEPT_S + 1) == {"a": "lied"}


def test_it_is_bounded_and_forgets_the_oldest_first() -> None:
    record = SourceRecord()
    for number in range(KEPT_MOST + 5):
        record.note({f"s{number}": "hung"}, [], float(number))
    assert set(record.failures(0.0)) == {f"s{number}" for number in range(5, KEPT_MOST + 5)}
