"""The Manager: its configuration, its pure core, and the shell around it."""

from __future__ import annotations

from tft_algos.manager.config import ManagerConfig, ResolvedConfig, WorldSizeMode
from tft_algos.manager.debug_server import start_debug_server
from tft_algos.manager.interfaces import Clock, Coordinator, ProcessGroupLike, StandingCoordinator
from tft_algos.manager.manager import Manager
from tft_algos.manager.metrics import export_metrics
from tft_algos.manager.status import ManagerPhase, ManagerStatus
from tft_algos.manager.step.deferred import DeferredStep
from tft_algos.manager.step.event_log import Incident
from tft_algos.manager.strategy import StepControl

__all__ = [
    "Clock",
    "Coordinator",
    "DeferredStep",
    "Incident",
    "Manager",
    "ManagerConfig",
    "ManagerPhase",
    "ManagerStatus",
    "ProcessGroupLike",
    "ResolvedConfig",
    "StandingCoordinator",
    "StepControl",
    "WorldSizeMode",
    "export_metrics",
    "start_debug_server",
]
