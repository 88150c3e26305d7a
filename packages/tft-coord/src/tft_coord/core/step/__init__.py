"""The step of one rank: its decisions, as one state machine.

`StepCore.handle(event, now_ms)` returns effects; `StepCore.status` is a frozen value for readers. Events are in
`events`, effects in `effects`.
"""

from __future__ import annotations

from tft_coord.core.step.core import StepCore
from tft_coord.core.step.effects import Effect, Effects
from tft_coord.core.step.events import Event
from tft_coord.core.step.status import AttemptStatus, StepStatus
from tft_coord.core.step.values import Check, Healing, Phase, Stage, StepName, StepSettings

__all__ = [
    "AttemptStatus",
    "Check",
    "Effect",
    "Effects",
    "Event",
    "Healing",
    "Phase",
    "Stage",
    "StepCore",
    "StepName",
    "StepSettings",
    "StepStatus",
]
