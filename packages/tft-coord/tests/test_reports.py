"""A trainer's report on the wire, its bounds, and how often it goes to the lighthouse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tft_coord.core import events
from tft_coord.core.progress import GroupProgress, Phase, Progress
from tft_coord.core.stalls import LONGEST_MS, STALLS_MOST, Spent, Stall, TrainerReport
from tft_coord.manager_server.report_gate import REPORT_EVERY_MS, ReportGate
from tft_coord.timeouts import Timeouts
from tft_coord.wire import codec, rank_codec
from tft_coord.wire import coordination_pb2 as pb

STALL = Stall(3, 17, 18, 6_410, 1, {Spent.DETECT: 300, Spent.COMMIT: 40})
FIRST = Stall(1, None, 17, 1, 0, {Spent.QUORUM: 2_000})
REPORT = TrainerReport({Spent.COMMIT: 50_000, Spent.START: 2_000, Spent.SERVE: 7}, (FIRST, STALL))
PROGRESS = Progress(6_410, Phase.OWN, 5, own_ms=20, report=REPORT)


def beat_of(message: pb.ToLighthouse) -> TrainerReport | None:
    event = codec.decode_to_lighthouse(1, message.SerializeToString())
    assert isinstance(event, events.BeatReceived)
    assert event.progress is not None, "an absurd report costs nothing else"
    return event.progress.report


def test_both_beats_carry_a_report() -> None:
    beat = events.BeatReceived(1, 5, PROGRESS, number=3)
    assert codec.decode_to_lighthouse(1, codec.encode_to_lighthouse(beat)) == beat
    of_rank = rank_codec.RankBeat(5, PROGRESS, 3)
    assert rank_codec.decode_from_rank(rank_codec.encode_from_rank(of_rank)) == of_rank


@pytest.mark.parametrize("spent", list(Spent))
def test_every_cause_has_its_field(spent: Spent) -> None:
    beat = events.BeatReceived(1, 0, replace(PROGRESS, report=TrainerReport({spent: 7})))
    assert codec.decode_to_lighthouse(1, codec.encode_to_lighthouse(beat)) == beat


def test_a_beat_without_a_report_is_as_before() -> None:
    beat = events.BeatReceived(1, 5, replace(PROGRESS, report=None), number=3)
    encoded = codec.encode_to_lighthouse(beat)
    assert not pb.ToLighthouse.FromString(encoded).beat.HasField("report")
    assert codec.decode_to_lighthouse(1, encoded) == beat


@pytest.mark.parametrize(
    "wrong",
    [
        {"number": 0},
        {"number": 2**63},
        {"quorum_before": -1},
        {"quorum_after": -(2**63)},
        {"step": -1},
        {"failed_rounds": 2**32 - 1},
        {"spent": pb.Spent(wait=2**64 - 1)},
        {"spent": pb.Spent(wait=LONGEST_MS, abort=1)},
    ],
)
def test_an_absurd_stall_makes_the_report_absent(wrong: dict[str, Any]) -> None:
    stall: dict[str, Any] = {"number": 1, "quorum_before": 1, "quorum_after": 2, "step": 3}
    message = pb.ToLighthouse(beat=pb.Beat(progress=pb.Progress()))
    message.beat.report.stalls.append(pb.Stall(**stall))
    assert beat_of(message) is not None
    message.beat.report.stalls[0].CopyFrom(pb.Stall(**(stall | wrong)))
    assert beat_of(message) is None


def test_too_many_or_unordered_stalls_and_years_make_the_report_absent() -> None:
    message = pb.ToLighthouse(beat=pb.Beat(progress=pb.Progress()))
    message.beat.report.stalls.extend(pb.Stall(number=number) for number in range(1, STALLS_MOST + 2))
    assert beat_of(message) is None
    message.beat.report.stalls.pop()
    assert beat_of(message) is not None
    message.beat.report.stalls.append(pb.Stall(number=1))
    del message.beat.report.stalls[0]
    assert beat_of(message) is None
    message.beat.report.Clear()
    message.beat.report.total.commit = LONGEST_MS + 1
    assert beat_of(message) is None


def test_the_report_of_a_group_is_that_of_rank_0() -> None:
    group = GroupProgress(2, Timeouts())
    group.reported(1, replace(PROGRESS, report=TrainerReport({Spent.REDO: 1})), 0)
    assert group.now(0) is not None
    assert group.now(0).report is None  # type: ignore[union-attr]
    group.reported(0, PROGRESS, 0)
    group.reported(0, replace(PROGRESS, report=None), 10)
    assert group.now(20).report is REPORT  # type: ignore[union-attr]


def test_the_lighthouse_gets_a_report_at_once_if_a_stall_is_new_and_else_now_and_then() -> None:
    said = [PROGRESS]
    gate = ReportGate(lambda _: said[0])

    def sends(now_ms: int) -> bool:
        progress = gate.progress(now_ms)
        assert progress is not None
        assert replace(progress, report=None) == replace(said[0], report=None)
        return progress.report is not None

    assert sends(0)
    assert not sends(1_000)
    said[0] = replace(PROGRESS, report=TrainerReport({}, (STALL, replace(STALL, number=4))))
    assert sends(2_000)
    assert not sends(3_000)
    assert not sends(2_000 + REPORT_EVERY_MS - 1)
    assert sends(2_000 + REPORT_EVERY_MS)
    said[0] = replace(PROGRESS, report=None)
    assert not sends(100_000)
    assert ReportGate(lambda _: None).progress(0) is None
