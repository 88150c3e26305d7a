"""The server that decides membership for fault-tolerant training.

Names are imported on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tft_coord.errors import ConfigError, CoordinationClosedError, CoordinationError
    from tft_lighthouse.server import LighthouseServer

__version__ = "0.1.0"

__all__ = ["ConfigError", "CoordinationClosedError", "CoordinationError", "LighthouseServer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "LighthouseServer":
        from tft_lighthouse import server as home
    else:
        from tft_coord import errors as home  # type: ignore[no-redef]
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
