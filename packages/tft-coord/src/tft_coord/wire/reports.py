"""The wire form of a trainer's report.

Nothing depends on a report, so an absurd one ends no stream: it counts as absent.

Law of this file: a report to its message and back, within bounds.
"""

from __future__ import annotations

from typing import Final

from tft_coord.core.progress import Progress
from tft_coord.core.stalls import LONGEST_MS, STALLS_MOST, Spent, Stall, TrainerReport
from tft_coord.core.types import MAX_INT64
from tft_coord.wire import coordination_pb2 as pb
from tft_coord.wire.limits import MAX_COUNT

_NAMES: Final = {each.value: each for each in Spent}


def report_to_wire(progress: Progress | None) -> pb.TrainerReport | None:
    """Return the message of a report; None: there is none."""
    report = progress.report if progress is not None else None
    if report is None:
        return None
    return pb.TrainerReport(
        total=pb.Spent(**{each.value: ms for each, ms in report.total_ms.items()}),
        stalls=[
            pb.Stall(
                number=each.number,
                quorum_before=each.quorum_before,
                quorum_after=each.quorum_after,
                step=each.step,
                failed_rounds=each.failed_rounds,
                spent=pb.Spent(**{part.value: ms for part, ms in each.spent_ms.items()}),
            )
            for each in report.stalls[-STALLS_MOST:]
        ],
    )


def report_from_wire(beat: pb.Beat | pb.RankBeat) -> TrainerReport | None:
    """Return the report of a beat; None: it has none, or an absurd one."""
    if not beat.HasField("report"):
        return None
    received = beat.report
    if len(received.stalls) > STALLS_MOST:
        return None
    total_ms, stalls = _spent(received.total), tuple(map(_stall, received.stalls))
    numbers = [each.number for each in stalls if each is not None]
    if total_ms is None or len(numbers) < len(stalls) or numbers != sorted(set(numbers)):
        return None
    return TrainerReport(total_ms, tuple(each for each in stalls if each is not None))


def _spent(message: pb.Spent) -> dict[Spent, int] | None:
    found = {_NAMES[field.name]: int(ms) for field, ms in message.ListFields() if field.name in _NAMES}
    return found if sum(found.values()) <= LONGEST_MS else None


def _stall(message: pb.Stall) -> Stall | None:
    spent_ms = _spent(message.spent)
    before = message.quorum_before if message.HasField("quorum_before") else None
    counts = (message.quorum_after, message.step, before or 0)
    is_sane = min(counts) >= 0 and 0 < message.number <= MAX_INT64 and message.failed_rounds <= MAX_COUNT
    if spent_ms is None or not is_sane:
        return None
    return Stall(message.number, before, message.quorum_after, message.step, message.failed_rounds, spent_ms)
