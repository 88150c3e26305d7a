"""The server that decides membership for fault-tolerant training.

Names are imported on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tft_lighthouse.server import LighthouseServer

__version__ = "0.1.0"

__all__ = ["LighthouseServer"]


def __getattr__(name: str) -> Any:
    if name != "LighthouseServer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tft_lighthouse.server import LighthouseServer

    globals()[name] = LighthouseServer
    return LighthouseServer


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
