"""Log records as OpenTelemetry's. Law of this file: it is imported only where OpenTelemetry is installed."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from typing import Any, Final, final

from opentelemetry._logs import SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import (
    BatchLogRecordProcessor,
    ConsoleLogRecordExporter,
    LogRecordExporter,
    LogRecordExportResult,
)
from opentelemetry.sdk.resources import Resource

__all__ = ["TeeLogExporter", "main", "setup_logger", "shutdown"]

_SEND_WITHIN_S = 5
_SEVERITIES: Final = (
    (logging.CRITICAL, SeverityNumber.FATAL),
    (logging.ERROR, SeverityNumber.ERROR),
    (logging.WARNING, SeverityNumber.WARN),
    (logging.INFO, SeverityNumber.INFO),
    (logging.NOTSET, SeverityNumber.DEBUG),
)
_OF_EVERY_RECORD: Final = frozenset(vars(logging.makeLogRecord({})))
_providers: dict[str, LoggerProvider] = {}


class TeeLogExporter(LogRecordExporter):
    """An exporter that gives each batch to several others.

    Args:
        exporters: the others.
    """

    def __init__(self, exporters: Sequence[LogRecordExporter]) -> None:
        self._exporters: Sequence[Any] = exporters  # some releases have no annotations

    def export(self, batch: Any) -> LogRecordExportResult:
        """Give a batch to all exporters. Returns: success, because logging must not stop a training."""
        for exporter in self._exporters:
            exporter.export(batch)
        return LogRecordExportResult.SUCCESS

    def force_flush(self, timeout_millis: int = 10_000) -> bool:
        """Send what is left in the exporters that keep something. Returns: whether all could."""
        flushes = [getattr(each, "force_flush", None) for each in self._exporters]
        return min((flush(timeout_millis) for flush in flushes if callable(flush)), default=True)

    def shutdown(self) -> None:
        """End all exporters."""
        for exporter in self._exporters:
            exporter.shutdown()


@final
class _Handler(logging.Handler):
    """A handler that gives records to OpenTelemetry, with what `extra` has added as attributes."""

    def __init__(self, provider: LoggerProvider, name: str) -> None:
        super().__init__()
        self._logger = provider.get_logger(name)

    def emit(self, record: logging.LogRecord) -> None:
        added = {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
        self._logger.emit(
            timestamp=round(record.created * 1e9),
            severity_number=next(number for level, number in _SEVERITIES if record.levelno >= level),
            severity_text=record.levelname,
            body=record.getMessage(),
            attributes={name: value for name, value in added.items() if value is not None},
        )


def setup_logger(name: str) -> None:
    """Add a handler for OpenTelemetry to a logger, once."""
    if name in _providers:
        return
    provider = _providers[name] = LoggerProvider(resource=Resource.create(_attributes(name)))
    exporter = TeeLogExporter([ConsoleLogRecordExporter(), OTLPLogExporter(timeout=_SEND_WITHIN_S)])
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
    logger = logging.getLogger(name)
    logger.addHandler(_Handler(provider, name))
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
