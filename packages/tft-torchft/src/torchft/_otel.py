"""Log records as OpenTelemetry's. Law of this file: it is imported only where OpenTelemetry is installed."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider, LoggingHandler
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, ConsoleLogExporter, LogExporter, LogExportResult
from opentelemetry.sdk.resources import Resource

__all__ = ["TeeLogExporter", "main", "setup_logger", "shutdown"]

_SEND_WITHIN_S = 5
_providers: dict[str, LoggerProvider] = {}


class TeeLogExporter(LogExporter):
    """An exporter that gives each batch to several others.

    Args:
        exporters: the others.
    """

    def __init__(self, exporters: Sequence[LogExporter]) -> None:
        self._exporters = exporters

    def export(self, batch: Any) -> LogExportResult:
        """Give a batch to all exporters. Returns: success, because logging must not stop a training."""
        for exporter in self._exporters:
            exporter.export(batch)
        return LogExportResult.SUCCESS

    def shutdown(self) -> None:
        """End all exporters."""
        for exporter in self._exporters:
            exporter.shutdown()


def setup_logger(name: str) -> None:
    """Add a handler for OpenTelemetry to a logger, once."""
    if name in _providers:
        return
    provider = _providers[name] = LoggerProvider(resource=Resource.create(_attributes(name)))
    exporter = TeeLogExporter([ConsoleLogExporter(), OTLPLogExporter(timeout=_SEND_WITHIN_S)])
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
    logger = logging.getLogger(name)
    logger.addHandler(LoggingHandler(level=logging.NOTSET, logger_provider=provider))
    logger.setLevel(logging.INFO)


def _attributes(name: str) -> dict[str, Any]:
    path = os.environ.get("TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON")
    if not path:
        return {}
    with open(path, encoding="utf-8") as file:
        attributes: dict[str, Any] = json.load(file).get(name, {})
    return attributes


def shutdown() -> None:
    """Send what is left, and end all exporters."""
    for provider in _providers.values():
        provider.shutdown()
    _providers.clear()


def main() -> None:
    """Log a line a second, for ever."""
    setup_logger("test_logger")
    while True:
        time.sleep(1)
        logging.getLogger("test_logger").info("hello world")
