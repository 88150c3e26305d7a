"""Per-step fault tolerance for PyTorch training: Manager, DistributedDataParallel, Optimizer."""

from __future__ import annotations

from tft_algos.ddp import DistributedDataParallel
from tft_algos.errors import (
    Closed,
    ExceptionWithTraceback,
    HealingFailed,
    LeftJob,
    NoWeight,
    QuorumBroken,
    SettingError,
    StateDiverged,
    StateUnavailable,
    TooManyFailures,
    TrainingError,
    UnknownSetting,
    Unsupported,
    UsageError,
)
from tft_algos.hsdp import extend_mesh, reduce_across
from tft_algos.manager import Clock, Coordinator, Group, Manager, ManagerConfig, WorldSizeMode
from tft_algos.optim import Optimizer
from tft_algos.pure_ddp import PureDistributedDataParallel

__version__ = "0.1.0"

__all__ = [
    "Clock",
    "Closed",
    "Coordinator",
    "DistributedDataParallel",
    "ExceptionWithTraceback",
    "Group",
    "HealingFailed",
    "LeftJob",
    "Manager",
    "ManagerConfig",
    "NoWeight",
    "Optimizer",
    "PureDistributedDataParallel",
    "QuorumBroken",
    "SettingError",
    "StateDiverged",
    "StateUnavailable",
    "TooManyFailures",
    "TrainingError",
    "UnknownSetting",
    "Unsupported",
    "UsageError",
    "WorldSizeMode",
    "extend_mesh",
    "reduce_across",
]
