"""Log records as OpenTelemetry's, if TORCHFT_USE_OTEL asks for it.

Law of this file: what works without OpenTelemetry, and the import of what does not. The rest is in `_otel`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchft._otel import TeeLogExporter

__all__ = ["TeeLogExporter", "main", "setup_logger", "shutdown"]


def _needed() -> Any:
    """Return the module that needs OpenTelemetry. Raises: ImportError: it is not installed."""
    try:
        import torchft._otel
    except ImportError as error:
        raise ImportError(
            "OpenTelemetry is not installed; install tft-torchft[otel], or unset TORCHFT_USE_OTEL"
        ) from error
    return torchft._otel


def setup_logger(name: str) -> None:
    """Send the records of a logger to the console and to an OTLP collector, if TORCHFT_USE_OTEL is set and not "false".

    A second call for a name does nothing. Importing torchft never calls this.

    Raises: ImportError: OpenTelemetry is not installed.
    """
    if os.environ.get("TORCHFT_USE_OTEL", "false") != "false":
        _needed().setup_logger(name)


def shutdown() -> None:
    """Send what is left, and end the exporters that `setup_logger` has started."""
    if os.environ.get("TORCHFT_USE_OTEL", "false") != "false":
        _needed().shutdown()


def main() -> None:
    """Log a line a second, for ever, to try an OTLP collector. Raises: ImportError: OpenTelemetry is not installed."""
    _needed().main()


def __getattr__(name: str) -> Any:
    if name != "TeeLogExporter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _needed().TeeLogExporter
