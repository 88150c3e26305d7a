"""Fault tolerance for PyTorch training: Manager, DistributedDataParallel, Optimizer, FSDP2 across groups, DiLoCo.

Law of this file: names. The names of `local_sgd` and `parameter_server` are imported at their first use, so that a job
that synchronizes in every step does not wait for those imports.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tft_algos.data import DistributedSampler
from tft_algos.ddp import DistributedDataParallel
from tft_algos.errors import (
    ConfigError,
    ContributionError,
    DurableCheckpointError,
    ExceptionWithTraceback,
    HealingError,
    LeftJob,
    ManagerClosedError,
    QuorumBrokenError,
    ServerBusyError,
    ServerRestartedError,
    SessionRefusedError,
    StateDivergedError,
    StateLoadError,
    StepAbandonedError,
    SyncAbandonedError,
    TooManyFailuresError,
    TrainingError,
    UnknownSettingError,
    UnsupportedFeatureError,
    UsageError,
    UserStateError,
    ZeroWeightError,
)
from tft_algos.hsdp import extend_mesh, reduce_across
from tft_algos.manager import (
    Clock,
    Coordinator,
    DeferredStep,
    Incident,
    Manager,
    ManagerConfig,
    ManagerPhase,
    ManagerStatus,
    ProcessGroupLike,
    ResolvedConfig,
    StandingCoordinator,
    StepControl,
    WorldSizeMode,
    export_metrics,
    start_debug_server,
)
from tft_algos.optim import Optimizer
from tft_algos.pure_ddp import PureDistributedDataParallel
from tft_coord.errors import (
    CoordinationError,
    JobOverError,
    RefusedError,
    ReplicaGroupLostError,
    RequestTimeoutError,
    StaleQuorumError,
    UnreachableError,
)
from tft_pg.errors import AbortedError, ConfigureError, PeerDisconnectedError, UnsupportedOperationError

if TYPE_CHECKING:
    from tft_algos.local_sgd import (
        DiLoCo,
        LocalSGD,
        OuterFragment,
        OuterLoop,
        OuterUpdate,
        extract_local_tensor,
        fragment_model,
    )
    from tft_algos.parameter_server import ParameterServer

__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "Clock",
    "ConfigError",
    "ConfigureError",
    "ContributionError",
    "CoordinationError",
    "Coordinator",
    "DeferredStep",
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedSampler",
    "DurableCheckpointError",
    "ExceptionWithTraceback",
    "HealingError",
    "Incident",
    "JobOverError",
    "LeftJob",
    "LocalSGD",
    "Manager",
    "ManagerClosedError",
    "ManagerConfig",
    "ManagerPhase",
    "ManagerStatus",
    "Optimizer",
    "OuterFragment",
    "OuterLoop",
    "OuterUpdate",
    "ParameterServer",
    "PeerDisconnectedError",
    "ProcessGroupLike",
    "PureDistributedDataParallel",
    "QuorumBrokenError",
    "RefusedError",
    "ReplicaGroupLostError",
    "RequestTimeoutError",
    "ResolvedConfig",
    "ServerBusyError",
    "ServerRestartedError",
    "SessionRefusedError",
    "StaleQuorumError",
    "StandingCoordinator",
    "StateDivergedError",
    "StateLoadError",
    "StepAbandonedError",
    "StepControl",
    "SyncAbandonedError",
    "TooManyFailuresError",
    "TrainingError",
    "UnknownSettingError",
    "UnreachableError",
    "UnsupportedFeatureError",
    "UnsupportedOperationError",
    "UsageError",
    "UserStateError",
    "WorldSizeMode",
    "ZeroWeightError",
    "export_metrics",
    "extend_mesh",
    "extract_local_tensor",
    "fragment_model",
    "reduce_across",
    "start_debug_server",
]

_LATER = {
    "DiLoCo": "tft_algos.local_sgd",
    "LocalSGD": "tft_algos.local_sgd",
    "OuterFragment": "tft_algos.local_sgd",
    "OuterLoop": "tft_algos.local_sgd",
    "OuterUpdate": "tft_algos.local_sgd",
    "ParameterServer": "tft_algos.parameter_server",
    "extract_local_tensor": "tft_algos.local_sgd",
    "fragment_model": "tft_algos.local_sgd",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
