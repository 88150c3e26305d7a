"""The events of a demo run, and their encoding.

The whole run is a list of these events. Everything that is shown, written or decided is computed from that list.

Law of this file: frozen values and their JSON. No clock (the observer gives `at_s`), no I/O.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TypeAlias, final

from tft_suite.errors import MessageError

MESSAGE_BYTES_MAX = 3_500  # below PIPE_BUF with its frame, so a killed replica never leaves half a message
TEXT_MAX = 500


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HealingStarted:
    """The replica takes part in a quorum whose plan heals it."""

    at_s: float
    replica: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    """The replica committed `step` with gradients of `participants` replicas, including its own if it `took_part`."""

    at_s: float
    replica: int
    step: int
    participants: int
    took_part: bool
    loss: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepDiscarded:
    """The step after `step` was not committed. `reason` says why."""

    at_s: float
    replica: int
    step: int
    reason: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnded:
    """The replica is at its last step, and still serves members that heal. The fields describe its state."""

    at_s: float
    replica: int
    step: int
    digest: str
    test_accuracy: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFailed:
    """The replica raised an error, and ends."""

    at_s: float
    replica: int
    error: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStarted:
    """A process of the replica was started: the first one, or the next one after a death."""

    at_s: float
    replica: int
    pid: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessKilled:
    """The supervisor sent kill -9 to the replica, which had just committed `step`."""

    at_s: float
    replica: int
    step: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnded:
    """The process of the replica has ended. `exit_code` is the negative signal number if a signal ended it."""

    at_s: float
    replica: int
    exit_code: int


ReplicaEvent: TypeAlias = HealingStarted | StepCommitted | StepDiscarded | TrainingEnded | ReplicaFailed
Event: TypeAlias = ReplicaEvent | ProcessStarted | ProcessKilled | ProcessEnded

_BY_NAME: dict[str, type[ReplicaEvent]] = {
    kind.__name__: kind for kind in (HealingStarted, StepCommitted, StepDiscarded, TrainingEnded, ReplicaFailed)
}
_TYPES = {"int": int, "float": float, "bool": bool, "str": str}


def encode(event: ReplicaEvent) -> bytes:
    """Return one line of JSON, at most MESSAGE_BYTES_MAX. The receiver adds its own `replica` and `at_s`."""
    facts = {key: value for key, value in asdict(event).items() if key not in ("at_s", "replica")}
    return json.dumps({"event": type(event).__name__, **facts}).encode()


def decode(message: bytes, *, replica: int, at_s: float) -> ReplicaEvent:
    """Return the event in a replica's message. `at_s`: the time at the receiver.

    Raises: MessageError: the message is not an event, or a field is missing, unknown, or of another type.
    """
    where = f"a message of replica {replica}"
    try:
        facts = json.loads(message)
    except ValueError as error:
        raise MessageError(f"{where} is not JSON; check that the replica runs this version of tft-suite.") from error
    kind = _BY_NAME.get(str(facts.pop("event", ""))) if isinstance(facts, dict) else None
    if kind is None:
        raise MessageError(f"{where} is not an event; check that the replica runs this version of tft-suite.")
    expected = {item.name: _TYPES[str(item.type)] for item in fields(kind) if item.name not in ("at_s", "replica")}
    if set(facts) != set(expected):
        raise MessageError(f"{where} has the fields {sorted(facts)}; a {kind.__name__} has {sorted(expected)}.")
    for name, wanted in expected.items():
        if type(facts[name]) is not wanted or (wanted is int and not 0 <= facts[name] < 2**63):
            raise MessageError(f"{where} has {name}={str(facts[name])[:80]!r}; a {wanted.__name__} is expected.")
    return kind(replica=replica, at_s=at_s, **facts)


def one_line(error: BaseException) -> str:
    """Return an error as one line of limited length for ReplicaFailed: its type, its message and its cause."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if error.__cause__ is not None:
        text += f" (because of {type(error.__cause__).__name__}: {' '.join(str(error.__cause__).split())})"
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"
