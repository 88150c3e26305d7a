"""The log lines of a rank's times: one for each incident, and on request one for each step.

The names and their order in a line do not change, so that a program can read it.

Law of this file: times to lines.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from tft_algos.manager.step.error_reporter import ErrorReporter
from tft_algos.manager.step.time_account import StepTimes
from tft_coord.core.stalls import Spent, Stall
from tft_coord.core.step import StepName
from tft_coord.core.types import Plan
from tft_coord.logs import field

SECOND_MS: Final = 1_000


def log_stall(reports: ErrorReporter, job: str, stall: Stall) -> None:
    """Log an incident that this replica has come through: what it cost, and what the time went to."""
    reports.log(
        logging.INFO,
        "incident=%d job=%s step=%d quorum=%s->%d failed_rounds=%d lasted_s=%.3f%s",
        stall.number,
        field(job),
        stall.step,
        "none" if stall.quorum_before is None else stall.quorum_before,
        stall.quorum_after,
        stall.failed_rounds,
        stall.lasted_ms / SECOND_MS,
        _parts({each: ms / SECOND_MS for each, ms in stall.spent_ms.items()}),
    )


def log_step(
    reports: ErrorReporter, job: str, name: StepName, plan: Plan | None, times: StepTimes, *, committed: bool
) -> None:
    """Log the end of a step, and what the time since the end of the last one went to."""
    reports.log(
        logging.INFO,
        "step=%d job=%s attempt=%d committed=%s quorum=%s members=%d participants=%d lasted_s=%.4f%s",
        name.step,
        field(job),
        name.attempt,
        "true" if committed else "false",
        "none" if plan is None else plan.key.quorum_id,
        0 if plan is None else plan.replica_world_size,
        0 if plan is None else plan.num_participants,
        times.lasted_s,
        _parts(times.spent_s, digits=4),
    )


def _parts(spent_s: Mapping[Spent, float], digits: int = 3) -> str:
    return "".join(f" {each.value}_s={spent_s[each]:.{digits}f}" for each in Spent if spent_s.get(each))
