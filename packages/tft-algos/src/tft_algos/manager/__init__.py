"""The Manager: its configuration, its pure core, and the shell around it."""

from __future__ import annotations

from tft_algos.manager.config import ManagerConfig, ResolvedConfig, WorldSizeMode
from tft_algos.manager.coordinator import Coordinator, ServerRestarted
from tft_algos.manager.manager import Manager

__all__ = ["Coordinator", "Manager", "ManagerConfig", "ResolvedConfig", "ServerRestarted", "WorldSizeMode"]
