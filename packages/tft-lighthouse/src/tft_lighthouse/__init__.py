"""The server that decides membership for fault-tolerant training.

Names are imported on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tft_lighthouse.version import __version__

if TYPE_CHECKING:
    from tft_coord import ConfigError, CoordinationClosedError, CoordinationError
    from tft_coord.lighthouse import JobSettings, Limits
    from tft_lighthouse.server import LighthouseServer

__all__ = [
    "ConfigError",
    "CoordinationClosedError",
    "CoordinationError",
    "JobSettings",
    "LighthouseServer",
    "Limits",
    "__version__",
]
_HOMES = {
    "LighthouseServer": "tft_lighthouse.server",
    "JobSettings": "tft_coord.lighthouse",
    "Limits": "tft_coord.lighthouse",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES.get(name, "tft_coord")), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
