"""The wire table: one row for each field of a member, a rank's request, a hello and a plan.

A row has the name of the field in the value, and serves each value that has a field of that name. It says how a
received field is checked, and how protobuf spells a field that it has no type for. The types' own order and the
numbers in `coordination.proto` say everything else.

Law of this file: a value to its message and back, field by field. A field that depends on another field is encoded and
decoded by hand in the codec.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass
from dataclasses import fields as fields_of
from typing import Any, Final, Generic, TypeVar, final

from google.protobuf.message import Message

from tft_coord.core.fingerprint import MAX_FINGERPRINT_BYTES
from tft_coord.core.types import (
    MAX_INT64,
    POOR_SOURCES_MOST,
    UNREACHED_MOST,
    Hello,
    Member,
    Plan,
    RankRequest,
)
from tft_coord.timeouts import LONGEST_MS
from tft_coord.wire import coordination_pb2 as pb
from tft_coord.wire import fields
from tft_coord.wire.limits import (
    MAX_ADDRESS_BYTES,
    MAX_DATA_BYTES,
    MAX_HANDLES_BYTES,
    MAX_MEMBERS,
    MAX_METADATA_BYTES,
    MAX_NAME_BYTES,
    MAX_SENTENCE_BYTES,
    MAX_WORLD_SIZE,
)

_V = TypeVar("_V")
_M = TypeVar("_M", bound=Message)

OURS_FROM: Final = 100  # a message of torchft has this project's fields from this number
NUMBER_BYTES: Final = 10  # the longest varint


@dataclass(frozen=True, slots=True)
class Row:
    """The wire's knowledge of one field.

    Args:
        decode: called with the name on the wire, the received value and `bound`, unless the value is 0 or empty;
            returns the checked value, or raises ProtocolError. None: every value is valid.
        bound: the third argument of `decode`; None: there is none.
        encode: returns protobuf's value. None: the value as it is.
        most_bytes: the longest encoding.
        is_needed: an empty value is checked too.
    """

    decode: Callable[..., Any] | None = None
    bound: int | None = None
    encode: Callable[[Any], Any] | None = None
    most_bytes: int = NUMBER_BYTES
    is_needed: bool = False


def count(most: int | None = None) -> Row:
    """Return the row of a number from 0 to `most`; None: to MAX_COUNT."""
    return Row(fields.checked_count, most)


def text(most_bytes: int) -> Row:
    """Return the row of any text."""
    return Row(fields.checked_text, most_bytes, most_bytes=most_bytes)


def printable(most_bytes: int) -> Row:
    """Return the row of a text that may appear in a log line."""
    return Row(fields.checked_printable, most_bytes, most_bytes=most_bytes)


def names(most: int) -> Row:
    """Return the row of a list of at most that many names. An empty text is refused; see `printables`."""
    return Row(fields.checked_names, most, most_bytes=most * MAX_NAME_BYTES)


def printables(most: int) -> Row:
    """Return the row of a list of at most that many texts for log lines, as long as a name or empty."""
    return Row(fields.checked_printables, most, most_bytes=most * (MAX_NAME_BYTES + NUMBER_BYTES))


FLAG: Final = Row()
NUMBER: Final = Row()  # of 64 bits, or 32 where the message says so
NAME: Final = Row(fields.checked_name, most_bytes=MAX_NAME_BYTES, is_needed=True)
ADDRESS: Final = Row(fields.checked_address, most_bytes=MAX_ADDRESS_BYTES)

FIELDS: Final[Mapping[str, Row]] = {
    "job": NAME,
    "replica_id": NAME,
    "replaces": printable(MAX_NAME_BYTES),
    "cluster_id": printable(MAX_NAME_BYTES),
    "store_replica_id": printable(MAX_NAME_BYTES),
    "session": NUMBER,
    "pid": NUMBER,
    "attempt": count(MAX_INT64),
    "num_answers": count(MAX_INT64),
    "lighthouse_started_ms": count(MAX_INT64),
    "address": ADDRESS,
    "store_address": ADDRESS,
    "step": count(MAX_INT64),
    "lineage": NUMBER,
    "held": Row(lambda _, key: fields.key_from_wire(key), encode=fields.key_to_wire, most_bytes=2 * NUMBER_BYTES),
    "world_size": count(MAX_WORLD_SIZE),
    "min_replica_size": count(MAX_MEMBERS),
    "commit_failures": count(),
    "failed_heals": count(),
    "lease_ms": count(LONGEST_MS),
    "ready": FLAG,
    "left": FLAG,
    "live": FLAG,
    "torn": FLAG,
    "heal": FLAG,
    "serve": FLAG,
    "needs_configure": FLAG,
    "store_failed": FLAG,
    "shrink_only": FLAG,
    "init_sync": FLAG,
    "allow_heal": FLAG,
    "use_async_quorum": FLAG,
    "fixed_with_spares": FLAG,
    "answers_probes": FLAG,
    "tries_peers": FLAG,
    "unpacks": FLAG,
    "poor_sources": names(POOR_SOURCES_MOST),
    "unreached": Row(
        lambda _, reports: fields.unreached_from_wire(reports),
        encode=fields.unreached_to_wire,
        most_bytes=UNREACHED_MOST * (MAX_NAME_BYTES + MAX_SENTENCE_BYTES + NUMBER_BYTES),
    ),
    "fingerprint": Row(
        lambda _, parts: fields.fingerprint_from_wire(parts),
        encode=fields.fingerprint_to_wire,
        most_bytes=MAX_FINGERPRINT_BYTES,
    ),
    "checkpoint_metadata": text(MAX_METADATA_BYTES),
    "data": text(MAX_DATA_BYTES),
    "reconfigure_handle": text(MAX_METADATA_BYTES),
    "reconfigure_handles": Row(lambda _, handles: fields.checked_handles(handles), most_bytes=MAX_HANDLES_BYTES),
}


def _compiled(lines: Sequence[str], known: dict[str, Any]) -> Callable[..., Any]:
    """Return the function of that source, as `dataclasses` makes its methods.

    A loop over the rows takes twice as long to encode, and a quorum has thousands of members. The source has names of
    this project's types only, and nothing that was received.
    """
    exec("\n    ".join(lines), known)
    function: Callable[..., Any] = known["function"]
    return function


def _encoder(names: Collection[str], on_wire: Mapping[str, str], message: type[Message]) -> Callable[..., Any]:
    """Return the function from a value, and further fields by name, to its message.

    It skips a field at protobuf's default, which is not on the wire.
    """
    empty = message()
    known: dict[str, Any] = {"message": message}
    lines = ["def function(value, further):", "made = message(**further) if further else message()"]
    for name in names:
        wire_name, encode = on_wire[name], FIELDS[name].encode
        known[f"encode_{name}"] = encode
        spelled = "each" if encode is None else f"encode_{name}(each)"
        is_set = " is not None" if message.DESCRIPTOR.fields_by_name[wire_name].has_presence else ""
        match getattr(empty, wire_name):
            case int() | float() | str() | bytes():
                sets = f"made.{wire_name} = {spelled}"
            case Message():
                sets = f"made.{wire_name}.CopyFrom({spelled})"
            case _:
                sets = f"made.{wire_name}.extend({spelled})"
        lines += [f"each = value.{name}", f"if each{is_set}: {sets}"]
    return _compiled([*lines, "return made"], known)


def _decoder(
    value: type[Any], of_value: Collection[Field[Any]], on_wire: Mapping[str, str], message: type[Message]
) -> Callable[..., Any]:
    """Return the function to the value from its message, whether this project sent it, and the fields by hand."""
    empty = message()
    known: dict[str, Any] = {"make": value}
    read = []
    for field in of_value:
        name, wire_name, row = field.name, on_wire[field.name], FIELDS[field.name]
        described = message.DESCRIPTOR.fields_by_name[wire_name]
        known |= {f"decode_{name}": row.decode, f"bound_{name}": row.bound, f"default_{name}": field.default}
        is_list = not described.has_presence and not isinstance(getattr(empty, wire_name), int | float | str | bytes)
        found = f"tuple(message.{wire_name})" if is_list else f"message.{wire_name}"
        if row.decode is not None:
            found = f"decode_{name}({wire_name!r}, {{}}" + ("" if row.bound is None else f", bound_{name}") + ")"
            if row.is_needed or described.has_presence:
                found = found.format(f"message.{wire_name}")
            else:
                found = f"({found.format('each')} if (each := message.{wire_name}) else {'()' if is_list else 'each'})"
        if described.has_presence:
            found = f"({found} if message.HasField({wire_name!r}) else None)"
        # Protobuf reads an absent field as 0, False or empty. Where the value has another default, torchft's senders
        # get that one.
        if described.number >= OURS_FROM and field.default is not MISSING and field.default:
            found = f"({found} if is_ours else default_{name})"
        read.append(f"{name}={found}")
    made = f"make({', '.join(read)}{', **by_hand' if len(of_value) < len(fields_of(value)) else ''})"
    return _compiled(["def function(message, is_ours, by_hand):", f"return {made}"], known)


@final
class Codec(Generic[_V, _M]):
    """The codec between a value and its message.

    Args:
        value: a dataclass.
        message: generated from `coordination.proto`. It has a field of the same name for each field of the value.
        renamed: the names on the wire of fields that have another name there.
        by_hand: the fields that the caller encodes and decodes.
        marks_ours: a field that every sender of this project sets. A message without it is torchft's: its sender knows
            none of this project's fields, and each one that is absent gets the default of the value.
    Raises: TypeError: a field has no row or no place in the message.
    """

    def __init__(
        self,
        value: type[_V],
        message: type[_M],
        *,
        renamed: Mapping[str, str] | None = None,
        by_hand: Collection[str] = (),
        marks_ours: str = "",
    ) -> None:
        of_value = [field for field in fields_of(value) if field.name not in by_hand]  # type: ignore[arg-type]
        on_wire = {field.name: (renamed or {}).get(field.name, field.name) for field in of_value}
        described = message.DESCRIPTOR.fields_by_name
        for name, wire_name in on_wire.items():
            if name not in FIELDS:
                raise TypeError(f"{value.__name__}.{name} has no row in FIELDS of tft_coord/wire/table.py; add one")
            if wire_name not in described:
                raise TypeError(
                    f"{value.__name__}.{name} is no field of message {message.DESCRIPTOR.name}; add it to "
                    "tft_coord/wire/coordination.proto and run `make proto`"
                )
        self._names = tuple(on_wire)
        self._marks_ours = marks_ours
        torchfts = [name for name, wire_name in on_wire.items() if described[wire_name].number < OURS_FROM]
        self._encode = _encoder(self._names, on_wire, message)
        self._encode_torchfts = _encoder(torchfts, on_wire, message)
        self._decode = _decoder(value, of_value, on_wire, message)

    def encode(self, value: _V, *, ours: bool = True, **further: Any) -> _M:
        """Return the message.

        Args:
            ours: False: with torchft's fields only.
            further: fields of the message that the caller encodes, by their names on the wire.
        """
        message: _M = (self._encode if ours else self._encode_torchfts)(value, further)
        return message

    def decode(self, message: _M, **by_hand: Any) -> _V:
        """Return the value, each field checked.

        Args:
            by_hand: the fields of the value that the caller decodes.
        Raises: ProtocolError: a field is out of bounds.
        """
        is_ours = not self._marks_ours or getattr(message, self._marks_ours) > 0
        value: _V = self._decode(message, is_ours, by_hand)
        return value

    def most_bytes(self) -> int:
        """Return the length of the longest valid message, tags and lengths included."""
        return sum(FIELDS[name].most_bytes + NUMBER_BYTES for name in self._names)


MEMBER: Final = Codec(Member, pb.QuorumMember, marks_ours="min_replica_size")
RANK_REQUEST: Final = Codec(RankRequest, pb.ManagerQuorumRequest, marks_ours="min_replica_size")
HELLO: Final = Codec(Hello, pb.Hello)
PLAN: Final = Codec(
    Plan,
    pb.ManagerQuorumResponse,
    renamed={"step": "max_step"},
    # The key, and what depends on the number of members.
    by_hand=(
        "key",
        "replica_id",
        "replica_rank",
        "replica_world_size",
        "replica_ids",
        "sources",
        "recover_dst_replica_ranks",
        "up_to_date",
        "participants",
        "participating_rank",
        "reconfigure_handles",
    ),
)
