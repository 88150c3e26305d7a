"""torchft's module, over tft: scripts that were written for torchft run unchanged.

Law of this file: names. The submodules that are not imported here are imported at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

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

_SUBMODULES = frozenset(
    {
        "_torchft",
        "checkpointing",
        "collectives",
        "coordination",
        "futures",
        "http",
        "lighthouse",
        "local_sgd",
        "multiprocessing",
        "multiprocessing_dummy_context",
        "otel",
        "parameter_server",
        "quantization",
        "reconfigure",
        "torchcomms",
        "torchx",
        "utils",
        "work",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})
