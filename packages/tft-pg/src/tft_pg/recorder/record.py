"""The content and the name of a flight record's file.

Torch's ring holds the collectives of all groups of a process. A record holds those of one configured group, and where
this rank is: so records of many ranks can be compared. Everything in a record is bounded.

Law of this file: pure functions from values to bytes and names.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Final, final

from tft_pg.errors import Where

__all__ = ["SUFFIX", "Snapshot", "encode", "file_stem"]

SUFFIX: Final = ".trace.json"
BYTES_MAX: Final = 8 << 20
_TENSORS_MAX: Final = 64
_TEXT_MAX: Final = 512
_PART_MAX: Final = 64


@final
@dataclass(frozen=True)
class Snapshot:
    """A flight record before it is converted.

    Args:
        where: the place of this rank in the group.
        group: the store prefix of the configuration.
        label: the name and the description of the group in torch's ring.
        backend: name of the group's backend.
        job: the job of this process.
        host, pid: of this process.
        reason: `abort`, `failure`, `end` or `request`.
        error: the error of the group; empty if it has none.
        unfinished: this many of the last collectives had not ended, and all others had. Torch's ring learns of an end
            later, and an abort ends operations while the ring is read. None: only the ring knows.
        time_ns: the time of the snapshot, in nanoseconds since 1970.
        ring: torch's whole ring, as JSON.
    """

    where: Where
    group: str
    label: tuple[str, str]
    backend: str
    job: str
    host: str
    pid: int
    reason: str
    error: str
    unfinished: int | None
    time_ns: int
    ring: bytes


def file_stem(snapshot: Snapshot) -> str:
    """Return the name of the file, without its number and suffix: job, replica, rank and quorum."""
    where = snapshot.where
    replica = f"{where.replica_id}_{where.group_rank}" if where.replica_id else f"rank{where.rank}"
    quorum = "none" if where.quorum_id is None else str(where.quorum_id)
    return ".".join(map(_part, (snapshot.job, replica, f"rank{where.rank}", f"quorum{quorum}")))


def _part(text: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", text)
    return plain if len(plain) <= _PART_MAX else f"{plain[: _PART_MAX - 9]}_{_digest(text)[:8]}"


def encode(snapshot: Snapshot, *, bytes_max: int = BYTES_MAX) -> bytes:
    """Return the content of the file. The oldest calls are left out if it would be larger than `bytes_max`."""
    where = snapshot.where
    calls = _calls(snapshot.ring, snapshot.label)
    content: dict[str, object] = {
        "format": "tft-trace",
        "version": 1,
        "job": _text(snapshot.job),
        "replica": _text(where.replica_id),
        "group_rank": where.group_rank,
        "rank": where.rank,
        "world_size": where.world_size,
        "quorum": where.quorum_id,
        "group": _text(snapshot.group),
        "backend": snapshot.backend,
        "host": _text(snapshot.host),
        "pid": snapshot.pid,
        "reason": snapshot.reason,
        "error": _text(snapshot.error),
        "time_ns": snapshot.time_ns,
    }
    if snapshot.unfinished is not None:
        collectives = [call for call in calls if not call["p2p"]]
        for index, call in enumerate(collectives):
            call["ended"] = index < len(collectives) - snapshot.unfinished
    encoded = [_json(call) for call in calls]  # one by one, so that other threads run in between
    head = _json(content)[:-1] + b',"calls":['
    size = len(head) + len(b"]}") + sum(len(call) + 1 for call in encoded)
    first = 0
    while size > bytes_max and first < len(encoded):
        size -= len(encoded[first]) + 1
        first += 1
    return head + b",".join(encoded[first:]) + b"]}"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _calls(ring: bytes, label: tuple[str, str]) -> list[dict[str, Any]]:
    """Return the calls of the group with this label, the oldest first.

    The hook is called for each entry. It lets other threads run, which a parser without a hook does not for its whole
    run, and it drops the entries of other groups at once.
    """
    found: list[dict[str, Any]] = []

    def keep(entry: dict[str, Any]) -> None:
        group = entry.get("process_group")
        if isinstance(group, list) and tuple(group) == label:
            found.append(_call(entry))

    json.loads(ring, object_hook=keep)
    return found


def _call(entry: dict[str, Any]) -> dict[str, Any]:
    is_p2p = bool(entry["is_p2p"])
    return {
        "number": entry["p2p_seq_id" if is_p2p else "collective_seq_id"],
        "name": _text(entry["profiling_name"].partition(":")[2] or entry["profiling_name"]),
        "p2p": is_p2p,
        "inputs": _tensors(entry["input_dtypes"], entry["input_sizes"]),
        "outputs": _tensors(entry["output_dtypes"], entry["output_sizes"]),
        "started_ns": entry["time_created_ns"],
        "ended": bool(entry["retired"]) or entry["state"] == "completed",
    }


def _tensors(dtypes: list[str], sizes: list[list[int]]) -> list[list[object]]:
    return [[dtype, size] for dtype, size in zip(dtypes[:_TENSORS_MAX], sizes[:_TENSORS_MAX], strict=True)]


def _text(text: str) -> str:
    plain = text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
    return plain if len(plain) <= _TEXT_MAX else f"{plain[: _TEXT_MAX - 17]}-{_digest(text)[:16]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
