"""The end of what runs in a broken quorum, while a Manager ends too."""

from __future__ import annotations

import threading

import pytest

from tft_algos.manager.quorum import aborter as aborter_module
from tft_algos.manager.quorum.aborter import QuorumAborter
from tft_algos.testing import FakeGroup


def test_an_abort_that_is_just_starting_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notices come on threads of the coordinator's, a shutdown on the user's."""
    group = FakeGroup()
    aborter = QuorumAborter(group)
    errors: list[BaseException] = []

    def close() -> None:
        try:
            aborter.close(wait=True)
        except BaseException as error:
            errors.append(error)

    closer = threading.Thread(target=close)

    class ClosedMeanwhile(threading.Thread):
        def start(self) -> None:
            closer.start()
            closer.join(0.2)  # as far as it comes before this thread runs
            super().start()

    monkeypatch.setattr(aborter_module.threading, "Thread", ClosedMeanwhile)
    aborter.break_all()
    closer.join()
    assert errors == []
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tft-")]


def test_nothing_is_aborted_after_the_end() -> None:
    group = FakeGroup()
    aborter = QuorumAborter(group)
    aborter.close(wait=True)
    aborter.break_all()
    assert group.errored() is None
