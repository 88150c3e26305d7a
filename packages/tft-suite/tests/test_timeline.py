"""The lanes of the picture, and that it is drawn."""

from __future__ import annotations

from pathlib import Path

from demo_script import a_good_run, started
from matplotlib.image import imread

from tft_suite.demo.run_state import State
from tft_suite.demo.timeline import Span, draw, lanes


def test_the_lanes_have_no_gaps_and_no_overlaps() -> None:
    spans = lanes(a_good_run(), end_s=12.0)
    assert [span for span in spans if span.replica == 1] == [
        Span(1, State.STARTING, 0.0, 1.02),
        Span(1, State.TRAINING, 1.02, 4.03),
        Span(1, State.DEAD, 4.03, 4.05),
        Span(1, State.STARTING, 4.05, 5.5),
        Span(1, State.HEALING, 5.5, 6.53),
        Span(1, State.TRAINING, 6.53, 11.0),
    ]
    assert [span for span in spans if span.replica == 0] == [
        Span(0, State.STARTING, 0.0, 1.0),
        Span(0, State.TRAINING, 1.0, 11.0),
    ]


def test_a_run_that_was_given_up_has_lanes_to_its_end() -> None:
    assert lanes(a_good_run()[:3], end_s=2.0)[-1] == Span(2, State.STARTING, 0.0, 2.0)


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    draw(a_good_run(), replicas=3, end_s=12.0, title="a run", path=path)
    assert imread(path).shape == (900, 1500, 4)


def test_a_run_in_which_nothing_was_committed_has_a_picture_too(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    draw([started(0)], replicas=1, end_s=1.0, title="a run", path=path)
    assert path.stat().st_size > 0
