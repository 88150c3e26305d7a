"""Everything for fault-tolerant PyTorch training in one import, and the `tft` command.

A training script needs a few names, and should not have to know their packages: `from tft_suite import Manager,
DistributedDataParallel, Optimizer, ProcessGroupGloo`. A strategy of your own imports the small packages instead.

Law of this file: names. Each name is imported from its package at its first use. So `import tft_suite` is cheap and
does not import torch, and the command line starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tft_algos import (
        DiLoCo,
        DistributedDataParallel,
        DistributedSampler,
        LocalSGD,
        Manager,
        ManagerConfig,
        Optimizer,
        PureDistributedDataParallel,
        WorldSizeMode,
        extend_mesh,
        extract_local_tensor,
        fragment_model,
        reduce_across,
    )
    from tft_ckpt import TLS, CheckpointTransport, HTTPTransport, PGTransport
    from tft_coord import (
        LighthouseClient,
        ManagerClient,
        ManagerServer,
        PaceKind,
        StragglerAction,
        StragglerNews,
        StragglerPolicy,
        Timeouts,
    )
    from tft_lighthouse import LighthouseServer
    from tft_pg import (
        ErrorSwallowingProcessGroupWrapper,
        FakeProcessGroupWrapper,
        ManagedProcessGroup,
        ProcessGroup,
        ProcessGroupDummy,
        ProcessGroupGloo,
        ProcessGroupNCCL,
        ProcessGroupWrapper,
        ProcessGroupXCCL,
        extend_device_mesh,
        init_group,
    )

__version__ = "0.1.0"

__all__ = [
    "TLS",
    "CheckpointTransport",
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedSampler",
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "HTTPTransport",
    "LighthouseClient",
    "LighthouseServer",
    "LocalSGD",
    "ManagedProcessGroup",
    "Manager",
    "ManagerClient",
    "ManagerConfig",
    "ManagerServer",
    "Optimizer",
    "PGTransport",
    "PaceKind",
    "ProcessGroup",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "ProcessGroupXCCL",
    "PureDistributedDataParallel",
    "StragglerAction",
    "StragglerNews",
    "StragglerPolicy",
    "Timeouts",
    "WorldSizeMode",
    "extend_device_mesh",
    "extend_mesh",
    "extract_local_tensor",
    "fragment_model",
    "init_group",
    "reduce_across",
]

_HOMES = {
    "tft_algos": (
        "DiLoCo",
        "DistributedDataParallel",
        "DistributedSampler",
        "LocalSGD",
        "Manager",
        "ManagerConfig",
        "Optimizer",
        "PureDistributedDataParallel",
        "WorldSizeMode",
        "extend_mesh",
        "extract_local_tensor",
        "fragment_model",
        "reduce_across",
    ),
    "tft_ckpt": ("TLS", "CheckpointTransport", "HTTPTransport", "PGTransport"),
    "tft_coord": (
        "LighthouseClient",
        "ManagerClient",
        "ManagerServer",
        "PaceKind",
        "StragglerAction",
        "StragglerNews",
        "StragglerPolicy",
        "Timeouts",
    ),
    "tft_lighthouse": ("LighthouseServer",),
    "tft_pg": (
        "ErrorSwallowingProcessGroupWrapper",
        "FakeProcessGroupWrapper",
        "ManagedProcessGroup",
        "ProcessGroup",
        "ProcessGroupDummy",
        "ProcessGroupGloo",
        "ProcessGroupNCCL",
        "ProcessGroupWrapper",
        "ProcessGroupXCCL",
        "extend_device_mesh",
        "init_group",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
