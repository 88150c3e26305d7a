"""The Manager: its configuration, its pure core, and the shell around it."""

from __future__ import annotations

from tft_algos.manager.config import ManagerConfig, ResolvedConfig, WorldSizeMode
from tft_algos.manager.interfaces import Clock, Coordinator, ProcessGroupLike, StandingCoordinator
from tft_algos.manager.manager import Manager
from tft_algos.manager.status import ManagerPhase, ManagerStatus
from tft_algos.manager.step.deferred import DeferredStep
from tft_algos.manager.strategy import StepControl

__all__ = [
    "Clock",
    "Coordinator",
    "DeferredStep",
    "Manager",
    "ManagerConfig",
    "ManagerPhase",
    "ManagerStatus",
    "ProcessGroupLike",
    "ResolvedConfig",
    "StandingCoordinator",
    "StepControl",
    "WorldSizeMode",
]
