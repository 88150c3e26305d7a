"""The Manager: its configuration, its pure core, and the shell around it."""

from __future__ import annotations

from tft_algos.manager.config import ManagerConfig, ResolvedConfig, WorldSizeMode
from tft_algos.manager.deferred import DeferredStep
from tft_algos.manager.manager import Manager
from tft_algos.manager.parts import Clock, Coordinator, Group, StandingCoordinator
from tft_algos.manager.status import ManagerPhase, ManagerStatus
from tft_algos.manager.strategy import StepControl

__all__ = [
    "Clock",
    "Coordinator",
    "DeferredStep",
    "Group",
    "Manager",
    "ManagerConfig",
    "ManagerPhase",
    "ManagerStatus",
    "ResolvedConfig",
    "StandingCoordinator",
    "StepControl",
    "WorldSizeMode",
]
