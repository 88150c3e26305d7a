"""The messages between a process and the child that runs its group: JSON of a bounded length, never pickled.

A message is one packet of a local socket. An error crosses as the name of its class, its text and its fields. Only the
classes of `tft_pg.errors` and a few of Python's come back as themselves.

Law of this file: pure functions between messages and values; no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tft_pg import errors
from tft_pg.errors import OperationRefusedError, ProcessGroupError, StoreAddressError, Where

__all__ = [
    "DESCRIPTORS_MAX",
    "ENVIRONMENT",
    "MESSAGE_BYTES_MAX",
    "SEVERED",
    "decode",
    "decode_error",
    "encode",
    "encode_answer",
    "encode_error",
]

MESSAGE_BYTES_MAX: Final = 1 << 16
"""The largest message. A socket's default buffer holds several of them."""

DESCRIPTORS_MAX: Final = 1
"""The most descriptors with one message."""

SEVERED: Final = -1
"""The number in the answer of a child that has ended its operations because it was told to."""

ENVIRONMENT: Final = ("GLOO_", "TORCH_", "NCCL_", "CUDA_")
"""The variables that begin with one of these are passed on at each `configure`."""

_SHORT: Final = 512
_ERRORS: Final = ("error", "latched")

_KINDS: Final[dict[str, type[Exception]]] = {
    **{
        kind.__name__: kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, ProcessGroupError)
    },
    "TypeError": TypeError,
    "ValueError": ValueError,
}
_FIELDS: Final = ("is_own", "host", "port", "why", "rank", "address")


def encode(message: Mapping[str, object]) -> bytes:
    """Return the packet of a message. Raises: OperationRefusedError: it is too long."""
    packet = json.dumps(message, separators=(",", ":")).encode()
    if len(packet) > MESSAGE_BYTES_MAX:
        raise OperationRefusedError(
            f"the call needs a message of {len(packet)} bytes to the group's child process, and {MESSAGE_BYTES_MAX} is "
            "the most; pass fewer tensors in one call"
        )
    return packet


def encode_answer(answer: Mapping[str, object]) -> bytes:
    """Return the packet of a child's answer. If its errors are too long for one, their texts are cut short.

    Their lists of ranks are left out then, because a list that is not complete would mislead.
    """
    try:
        return encode(answer)
    except OperationRefusedError:
        return encode({name: _shortened(value) if name in _ERRORS else value for name, value in answer.items()})


def _shortened(record: object) -> object:
    if not isinstance(record, dict):
        return record
    kept = {name: value for name, value in record.items() if name not in ("missing_ranks", "unreached")}
    return {name: value[:_SHORT] if isinstance(value, str) else value for name, value in kept.items()}


def decode(packet: bytes) -> dict[str, Any]:
    """Return the message of a packet. Raises: ValueError: it is no message."""
    message = json.loads(packet)
    if not isinstance(message, dict):
        raise ValueError(f"a message is an object, but this one is a {type(message).__name__}")
    return message


def encode_error(error: BaseException) -> dict[str, object]:
    """Return an error in a form that a message can hold."""
    text = str(error.args[0]) if error.args else str(error)
    record: dict[str, object] = {"kind": type(error).__name__, "text": text[:4096]}
    where = getattr(error, "where", None)
    if isinstance(where, Where):
        record["where"] = [where.rank, where.world_size, where.replica_id, where.quorum_id, where.group_rank]
    for name in _FIELDS:
        value = getattr(error, name, None)
        if isinstance(value, (bool, int, str)):
            record[name] = value
    missing = getattr(error, "missing_ranks", ())
    if missing:
        record["missing_ranks"] = list(missing)
    unreached = getattr(error, "unreached", {})
    if unreached:
        record["unreached"] = [[rank, reason] for rank, reason in unreached.items()]
    return record


def decode_error(record: Mapping[str, Any]) -> Exception:
    """Return the error of a message. Raises: ValueError, TypeError, KeyError: it holds none."""
    text = str(record["text"])
    kind = _KINDS.get(record["kind"])
    if kind is None:
        return RuntimeError(f"{record['kind']}: {text}")
    if kind is StoreAddressError:
        return StoreAddressError(text, address=str(record.get("address", "")))
    if not issubclass(kind, ProcessGroupError):
        return kind(text)
    where = Where(*record["where"]) if "where" in record else None
    error = kind(text, where=where)
    for name in _FIELDS:
        if name in record and hasattr(error, name):
            setattr(error, name, record[name])
    if "missing_ranks" in record and hasattr(error, "missing_ranks"):
        error.missing_ranks = tuple(int(rank) for rank in record["missing_ranks"])
    if "unreached" in record and hasattr(error, "unreached"):
        error.unreached = {int(rank): str(reason) for rank, reason in record["unreached"]}
    return error
