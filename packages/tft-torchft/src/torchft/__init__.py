"""torchft's module, over tft: scripts that were written for torchft run unchanged.

Law of this file: names. Each name and each submodule is imported at its first use, so importing torchft costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchft.data import DistributedSampler
    from torchft.ddp import DistributedDataParallel
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper as Optimizer
    from torchft.process_group import (
        ProcessGroupBabyNCCL,
        ProcessGroupBabyXCCL,
        ProcessGroupGloo,
        ProcessGroupNCCL,
        ProcessGroupXCCL,
    )

__version__ = "0.1.0"

__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "Manager",
    "Optimizer",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupXCCL",
]

_HOMES = {
    "DistributedDataParallel": ("ddp", "DistributedDataParallel"),
    "DistributedSampler": ("data", "DistributedSampler"),
    "Manager": ("manager", "Manager"),
    "Optimizer": ("optim", "OptimizerWrapper"),
    **{name: ("process_group", name) for name in __all__ if name.startswith("ProcessGroup")},
}
_SUBMODULES = frozenset(
    {
        "_torchft",
        "checkpointing",
        "collectives",
        "coordination",
        "data",
        "ddp",
        "futures",
        "http",
        "lighthouse",
        "local_sgd",
        "manager",
        "multiprocessing",
        "multiprocessing_dummy_context",
        "optim",
        "otel",
        "parameter_server",
        "process_group",
        "quantization",
        "reconfigure",
        "torchcomms",
        "torchx",
        "utils",
        "work",
    }
)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, own_name = _HOMES[name]
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), own_name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
