"""The fields of a member for which torchft's wire has no room, carried in the user's `data` text.

torchft's lighthouse drops the fields that it does not know, and passes on the text called `data`, which is JSON of the
user. The fields of this project travel in it under one key. The user's own text comes out as it went in.

Law of this file: a member's fields to text and back. The text comes from an untrusted peer, so each field is checked;
nothing is decided.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from tft_coord.core.types import MAX_INT64, MAX_UINT64, POOR_SOURCES_MOST, Member, QuorumKey
from tft_coord.errors import ProtocolError

KEY: Final = "tft"
MAX_DATA_BYTES: Final = 64 * 1024  # a lighthouse passes on at most this much
HIGHEST_ID_BELIEVED: Final = MAX_INT64 - 2**32  # a quorum above it would leave no ids
MAX_COUNT: Final = 2**31 - 1
MAX_MEMBERS: Final = 100_000
MAX_NAME_BYTES: Final = 256

_TORCHFTS: Final = {
    "replica_id", "address", "store_address", "step", "world_size", "shrink_only", "data", "commit_failures",
    "reconfigure_handles",
}  # fmt: skip
# A lighthouse of torchft recalls no member, answers no beat and looks for no lost links.
_NOT_CARRIED: Final = {"unreached", "store_failed", "lease_ms"}
_MOST: Final = {"session": MAX_UINT64, "lineage": MAX_UINT64, "min_replica_size": MAX_MEMBERS}
_KINDS: Final = ("bool", "int", "int | None", "str", "tuple[str, ...]")


def carried_by(member: type[Any]) -> dict[str, str]:
    """Return the kind of each carried field of a member. Raises: TypeError: a field is of another kind."""
    found = {field.name: str(field.type) for field in fields(member) if field.name not in _TORCHFTS | _NOT_CARRIED}
    for name, kind in found.items():
        if kind not in _KINDS:
            raise TypeError(
                f"{member.__name__}.{name} is of type {kind}, which JSON does not check; name it in _NOT_CARRIED"
            )
    return found


_CARRIED: Final = carried_by(Member)


@dataclass(frozen=True, slots=True)
class RequestExtras:
    """The fields that a member sends with its request and that do not describe the member.

    Args:
        job: of the member.
        word: a random 64-bit number, another one with each request.
        held: key of the newest quorum that its ranks hold, or None.
        list_digest: of the member list of this quorum and of the lighthouse's id for it; 0 without.
        seen: digest of the newest answer that the member got, whether or not that changed the quorum; 0 without.
    """

    job: str
    word: int
    held: QuorumKey | None
    list_digest: int
    seen: int = 0


def pack_member(member: Member, extras: RequestExtras) -> Member:
    """Return the member for a lighthouse that passes on only `data` of this project's fields.

    Raises: ProtocolError: the user's text leaves no room.
    """
    packed: dict[str, Any] = {
        "job": extras.job,
        "word": extras.word,
        "held": None if extras.held is None else [extras.held.quorum_id, extras.held.nonce],
        "list": extras.list_digest,
        "seen": extras.seen,
        **{name: getattr(member, name) for name in _CARRIED},
    }
    user_fields = _json_object(member.data)
    user_fields.pop(KEY, None)  # the key is taken: such a text travels as a whole
    if _user_text(user_fields) != member.data:
        packed["data"] = member.data  # the text is no JSON object, or `json.dumps` spells it otherwise
    data = json.dumps({**user_fields, KEY: packed})
    if len(data.encode()) > MAX_DATA_BYTES:
        raise ProtocolError(
            f"data of replica {member.replica_id} has {len(member.data.encode())} bytes, which is too long for "
            f"a lighthouse that passes on {MAX_DATA_BYTES} bytes in total; shorten it"
        )
    return replace(member, data=data)


def unpack_member(member: Member) -> tuple[Member, RequestExtras] | None:
    """Return the member as it described itself, and its extras; None for a member without this project's fields.

    Raises: ProtocolError: a field is invalid.
    """
    user_fields = _json_object(member.data)
    packed = user_fields.pop(KEY, None)
    if packed is None:
        return None
    if not isinstance(packed, dict):
        raise ProtocolError(f"the data of replica {member.replica_id} has a key {KEY!r} that is not an object")
    read = _Reader(member.replica_id, packed)
    held = read.one("held", list, type(None))
    if held is not None and (len(held) != 2 or any(type(number) is not int for number in held)):
        raise ProtocolError(f"replica {member.replica_id} reports {held!r}, which is not a quorum's key; restart it")
    key = None if held is None else QuorumKey(*held)
    if key is not None and key.quorum_id > HIGHEST_ID_BELIEVED:
        raise ProtocolError(f"replica {member.replica_id} reports quorum {key}, whose id is too high; restart it")
    extras = RequestExtras(
        read.name("job"),
        read.number("word", MAX_UINT64),
        key,
        read.number("list", MAX_UINT64),
        read.number("seen", MAX_UINT64),
    )
    # An older version leaves out a field that it does not know. The field keeps its default then, as on the wire.
    whole = replace(
        member,
        **{name: read.of_kind(name, kind) for name, kind in _CARRIED.items() if name in packed},
        data=read.text("data", read.one("data", str) if "data" in packed else _user_text(user_fields)),
        lease_ms=None,  # this lighthouse recalls no member and answers no beat: all ask in every step
    )
    return whole, extras


class _Reader:
    """The fields of a received text, one by one."""

    def __init__(self, replica_id: str, fields: dict[str, Any]) -> None:
        self._replica_id = replica_id
        self._fields = fields

    def of_kind(self, name: str, kind: str) -> Any:
        """Return a field of the member; `kind` is its annotation."""
        if kind == "bool":
            return self.one(name, bool)
        if kind == "int":
            return self.number(name, _MOST.get(name, MAX_COUNT))
        if kind == "int | None":
            return None if self._fields.get(name) is None else self.number(name, _MOST.get(name, MAX_COUNT))
        return self.name(name) if kind == "str" else self.names(name, POOR_SOURCES_MOST)

    def one(self, name: str, *kinds: type) -> Any:
        """Return a field of one of these types."""
        value = self._fields.get(name)
        if type(value) not in kinds:
            raise ProtocolError(
                f"replica {self._replica_id} sent {name} {str(value)[:80]!r}; run the same version of tft-coord on all "
                "replicas of the job"
            )
        return value

    def name(self, name: str) -> str:
        """Return a text that may stand in a log."""
        value = self.text(name, self.one(name, str), MAX_NAME_BYTES)
        if not value.isprintable():
            raise ProtocolError(f"replica {self._replica_id} sent {name} {value[:80]!r}; give printable characters")
        return value

    def names(self, name: str, most: int) -> tuple[str, ...]:
        """Return a list of texts that may stand in a log."""
        values = self.one(name, list)
        if len(values) > most or not all(type(value) is str and value.isprintable() for value in values):
            raise ProtocolError(
                f"replica {self._replica_id} sent {name} {str(values)[:80]!r}; give at most {most} names"
            )
        return tuple(self.text(name, value, MAX_NAME_BYTES) for value in values)

    def text(self, name: str, value: str, most_bytes: int = MAX_DATA_BYTES) -> str:
        """Return a text that can be passed on: JSON can spell what UTF-8 can't encode, and can hide a long text in a
        short one."""
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise ProtocolError(f"replica {self._replica_id} sent a {name} that is not valid text") from None
        if size > most_bytes:
            raise ProtocolError(f"replica {self._replica_id} sent a {name} of {size} bytes; give at most {most_bytes}")
        return value

    def number(self, name: str, most: int) -> int:
        value: int = self.one(name, int)
        if not 0 <= value <= most:
            raise ProtocolError(f"replica {self._replica_id} sent {name} {value}; it must be 0..{most}")
        return value


def _json_object(data: str) -> dict[str, Any]:
    """Return the JSON object in the text; {} if there is none."""
    try:
        found = json.loads(data) if data else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _user_text(user_fields: dict[str, Any]) -> str:
    """Return the user's text, from the fields that are left of it."""
    return json.dumps(user_fields) if user_fields else ""
