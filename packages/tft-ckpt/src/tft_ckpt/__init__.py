"""Live state transfer between training processes: a manifest and raw bytes, checked, without pickle."""

from __future__ import annotations

from tft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    StateCorruptError,
    StateLayoutError,
    StateMismatchError,
    StateUnavailableError,
    StateUnsupportedError,
    TransferTimeoutError,
    TransportClosedError,
)
from tft_ckpt.key import StateKey
from tft_ckpt.pg.transport import PGTransport
from tft_ckpt.state.sharding import LocalShard, Placement, Sharding
from tft_ckpt.state.tree import Limits, register_named_tuple, register_tensor_subclass
from tft_ckpt.transfer import HTTPTransport, ReceiveReport
from tft_ckpt.transfer.tls import TLS
from tft_ckpt.transport import CheckpointTransport, StagedCheckpoint

__version__ = "0.1.0"

__all__ = [
    "TLS",
    "CheckpointError",
    "CheckpointTransport",
    "ConfigError",
    "HTTPTransport",
    "Limits",
    "LocalShard",
    "PGTransport",
    "Placement",
    "ReceiveReport",
    "Sharding",
    "StagedCheckpoint",
    "StateCorruptError",
    "StateKey",
    "StateLayoutError",
    "StateMismatchError",
    "StateUnavailableError",
    "StateUnsupportedError",
    "TransferTimeoutError",
    "TransportClosedError",
    "register_named_tuple",
    "register_tensor_subclass",
]
