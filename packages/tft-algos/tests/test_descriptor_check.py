"""A trainer warns before torch ends it for want of file descriptors."""

from __future__ import annotations

from typing import Any

import pytest

from tft_algos.manager.lifecycle import descriptor_check
from tft_algos.testing import ManualClock, plan_of

SENTENCE = "nearly all of its 8 file descriptors"


def test_a_trainer_with_few_descriptors_left_warns_once_a_minute(
    rigs: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    rig = rigs(plan_of(7, size=2), clock=clock)
    rig.manager._life.look()
    assert "file descriptors" not in caplog.text
    monkeypatch.setattr(descriptor_check, "limit", lambda: 8)
    rig.manager._life.look()
    assert SENTENCE not in caplog.text, "it was checked a moment ago"
    clock.pass_s(descriptor_check.LOOK_EVERY_S)
    for _ in range(3):
        rig.manager._life.look()
    assert caplog.text.count(SENTENCE) == 1
    clock.pass_s(descriptor_check.AGAIN_S)
    rig.manager._life.look()
    assert caplog.text.count(SENTENCE) == 2
    clock.pass_s(descriptor_check.AGAIN_S)
    rig.manager.shutdown()
    rig.manager._life.look()
    assert caplog.text.count(SENTENCE) == 2, "the Manager has ended"


def test_a_process_without_a_free_descriptor_counts_as_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.open", none_left)
    assert descriptor_check._lowest_free(1024) == 1024
