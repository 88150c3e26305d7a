"""Transports of live state. Law of this folder: torchft's names over the transports of tft_ckpt."""

from __future__ import annotations

from torchft.checkpointing.http_transport import HTTPTransport
from torchft.checkpointing.transport import CheckpointTransport

__all__ = ["HTTPTransport", "CheckpointTransport"]  # noqa: RUF022  # torchft's order
