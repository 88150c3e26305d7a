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
class Aside:
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


def with_ours(member: Member, aside: Aside) -> Member:
    """Return the member for a lighthouse that passes on only `data` of this project's fields.

    Raises: ProtocolError: the user's text leaves no room.
    """
    ours: dict[str, Any] = {
        "job": aside.job,
        "word": aside.word,
        "held": None if aside.held is None else [aside.held.quorum_id, aside.held.nonce],
        "list": aside.list_digest,
        "seen": aside.seen,
        **{name: getattr(member, name) for name in _CARRIED},
    }
    users = _object(member.data)
    users.pop(KEY, None)  # the key is taken: such a text travels as a whole
    if _without_ours(users) != member.data:
        ours["data"] = member.data  # the text is no JSON object, or `json.dumps` spells it otherwise
    data = json.dumps({**users, KEY: ours})
    if len(data.encode()) > MAX_DATA_BYTES:
        raise ProtocolError(
            f"data of replica {member.replica_id} has {len(member.data.encode())} bytes, which leaves no room on a "
            f"lighthouse that hands on {MAX_DATA_BYTES} bytes in all; shorten it"
        )
    return replace(member, data=data)


def parted(member: Member) -> tuple[Member, Aside] | None:
    """Return the member as it described itself and its `Aside`; None for a member without this project's fields.

    Raises: ProtocolError: a field is invalid.
    """
    users = _object(member.data)
    ours = users.pop(KEY, None)
    if ours is None:
        return None
    if not isinstance(ours, dict):
        raise ProtocolError(f"replica {member.replica_id} carries {KEY!r} in its data, and it is no object")
    read = _Reader(member.replica_id, ours)
    held = read.one("held", list, type(None))
    if held is not None and (len(held) != 2 or any(type(number) is not int for number in held)):
        raise ProtocolError(f"replica {member.replica_id} holds {held!r}, which is no quorum; start it anew")
    key = None if held is None else QuorumKey(*held)
    if key is not None and key.quorum_id > HIGHEST_ID_BELIEVED:
        raise ProtocolError(f"replica {member.replica_id} holds quorum {key}, an id that no lighthouse gives")
    aside = Aside(
        read.name("job"),
        read.number("word", MAX_UINT64),
        key,
        read.number("list", MAX_UINT64),
        read.number("seen", MAX_UINT64),
    )
    whole = replace(
        member,
        **{name: read.of_kind(name, kind) for name, kind in _CARRIED.items()},
        data=read.text("data", read.one("data", str) if "data" in ours else _without_ours(users)),
        lease_ms=None,  # this lighthouse recalls no member and answers no beat: all ask in every step
    )
    return whole, aside


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
                f"replica {self._replica_id} says {name} {str(value)[:80]!r}; all replicas of a job need a tft-coord "
                "of one version"
            )
        return value

    def name(self, name: str) -> str:
        """Return a text that may stand in a log."""
        value = self.text(name, self.one(name, str), MAX_NAME_BYTES)
        if not value.isprintable():
            raise ProtocolError(f"replica {self._replica_id} says {name} {value[:80]!r}; give printable characters")
        return value

    def names(self, name: str, most: int) -> tuple[str, ...]:
        """Return a list of texts that may stand in a log."""
        values = self.one(name, list)
        if len(values) > most or not all(type(value) is str and value.isprintable() for value in values):
            raise ProtocolError(
                f"replica {self._replica_id} says {name} {str(values)[:80]!r}; give {most} names at most"
            )
        return tuple(self.text(name, value, MAX_NAME_BYTES) for value in values)

    def text(self, name: str, value: str, most_bytes: int = MAX_DATA_BYTES) -> str:
        """Return a text that can be passed on: JSON can spell what UTF-8 can't encode, and can hide a long text in a
        short one."""
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise ProtocolError(f"replica {self._replica_id} says a {name} that is no text: half a character") from None
        if size > most_bytes:
            raise ProtocolError(f"replica {self._replica_id} says a {name} of {size} bytes; at most {most_bytes}")
        return value

    def number(self, name: str, most: int) -> int:
        value: int = self.one(name, int)
        if not 0 <= value <= most:
            raise ProtocolError(f"replica {self._replica_id} says {name} {value}; it must be 0..{most}")
        return value


def _object(data: str) -> dict[str, Any]:
    """Return the JSON object in the text; {} if there is none."""
    try:
        found = json.loads(data) if data else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _without_ours(users: dict[str, Any]) -> str:
    """Return the user's text, from the fields that are left of it."""
    return json.dumps(users) if users else ""
