"""What the replicas of a job must have in common: a list of named parts, compared before the first collective.

Two replicas whose parameters differ in shape, or whose Managers count participants by other rules, would end each other
in the first reduction, or train apart without a word. So each says what it is made of when it first asks for a quorum,
and who differs from those that are there is refused by name. A part that one side lacks is not compared.

Law of this file: functions of fingerprints; bounds; no state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, final

from tft_coord.errors import ProtocolError

PROTOCOL_VERSION: Final = 1

MAX_PART_NAME_BYTES: Final = 256
MAX_PART_VALUE_BYTES: Final = 1024
MAX_PARTS: Final = 16_384
MAX_FINGERPRINT_BYTES: Final = 1024 * 1024
SAID_MOST: Final = 3

# Parts of such names may differ between the ranks of a group, each of which meets only those of its own number: the
# stages of a pipeline have other parameters. All other parts are the same on every rank.
OF_A_RANK: Final = "parameter/"
FURTHER: Final = "further parts"


@final
class FingerprintPart(NamedTuple):
    """One thing in which replicas must not differ: printable texts, at most 256 bytes and 1 KiB."""

    name: str
    value: str


Fingerprint = tuple[FingerprintPart, ...]


def fingerprint_of(parts: Mapping[str, str]) -> Fingerprint:
    """A fingerprint inside the bounds, sorted, so that equal parts make equal fingerprints.

    A name or value that is too long is cut and ends with its digest. Where the parts are too many or too much, the last
    ones are replaced by one part that says how many they are, and their digest.
    """
    return _bounded(FingerprintPart(_short(name, MAX_PART_NAME_BYTES), value) for name, value in parts.items())


def merged(by_rank: Mapping[int, Fingerprint]) -> Fingerprint:
    """The fingerprint of a group from those of its ranks, of which none differ (`differences_of_ranks`).

    A rank's own part (`OF_A_RANK`) that all ranks have alike is one part; else each stands under its rank.
    """
    if len(set(by_rank.values())) == 1:
        return next(iter(by_rank.values()))
    values: dict[str, dict[int, str]] = {}
    for rank, fingerprint in sorted(by_rank.items()):
        for name, value in fingerprint:
            values.setdefault(name, {})[rank] = value
    parts: dict[str, str] = {}
    for name, of_ranks in values.items():
        first = next(iter(of_ranks.values()))
        if _is_of_a_rank(name) and (len(of_ranks) < len(by_rank) or set(of_ranks.values()) != {first}):
            parts.update((f"{name} of rank {rank}", value) for rank, value in of_ranks.items())
        else:
            parts[name] = first
    return fingerprint_of(parts)


def differences_of_ranks(by_rank: Mapping[int, Fingerprint]) -> list[str]:
    """In which parts the ranks of one group differ and must not, one phrase each; no ranks are compared twice."""
    first: dict[str, tuple[int, str]] = {}
    found: dict[str, str] = {}
    for rank, fingerprint in sorted(by_rank.items()):
        for name, value in fingerprint:
            there, other = first.setdefault(name, (rank, value))
            if other != value and not _is_of_a_rank(name):
                found.setdefault(name, f"{name} is {other!r} on rank {there} and {value!r} on rank {rank}")
    return list(found.values())


def differences(there: Mapping[str, str], here: Fingerprint) -> list[str]:
    """In which parts one who comes differs from those that are there, one phrase each; none: it belongs to them.

    Args:
        there: name -> value.
        here: of the one who comes.
    """
    return [
        f"{name} is {there[name]!r} there and {value!r} here"
        for name, value in here
        if name in there and there[name] != value
    ]


def said(found: list[str]) -> str:
    """Differences in one phrase: the first three, and how many more there are."""
    more = len(found) - SAID_MOST
    return "; ".join(found[:SAID_MOST]) + (f"; and {more} more" if more > 0 else "")


def check(fingerprint: Fingerprint) -> Fingerprint:
    """The same. Raises: ProtocolError: it breaks a bound, or a part would break a line of a log."""
    if len(fingerprint) > MAX_PARTS:
        raise ProtocolError(f"a fingerprint has {len(fingerprint)} parts; at most {MAX_PARTS} are taken")
    total = 0
    for name, value in fingerprint:
        if not name or not (name.isprintable() and value.isprintable()):
            raise ProtocolError(f"a fingerprint's part is {name[:80]!r}; give printable names and values")
        size = len(name.encode()), len(value.encode())
        if size[0] > MAX_PART_NAME_BYTES or size[1] > MAX_PART_VALUE_BYTES:
            raise ProtocolError(f"a fingerprint's part {name[:80]!r} is longer than a name or value may be; shorten it")
        total += sum(size)
    if total > MAX_FINGERPRINT_BYTES:
        raise ProtocolError(f"a fingerprint has {total} bytes; at most {MAX_FINGERPRINT_BYTES} are taken")
    return fingerprint


def _is_of_a_rank(name: str) -> bool:
    return name.startswith(OF_A_RANK) or name == FURTHER


def _bounded(parts: Iterable[FingerprintPart]) -> Fingerprint:
    # Parameters are many, and come last, so that it is of them that the last ones are put together.
    ordered = sorted(
        (FingerprintPart(name, _short(value, MAX_PART_VALUE_BYTES)) for name, value in parts),
        key=lambda part: (_is_of_a_rank(part.name), part.name),
    )
    left = MAX_FINGERPRINT_BYTES - len(FURTHER) - 100  # what the last part may have
    for place, (name, value) in enumerate(ordered):
        left -= len(name.encode()) + len(value.encode())
        if left < 0 or (place == MAX_PARTS - 1 and len(ordered) > MAX_PARTS):
            return (*ordered[:place], _further(ordered[place:]))
    return tuple(ordered)


def _further(parts: list[FingerprintPart]) -> FingerprintPart:
    digest = hashlib.sha256()
    for part in parts:
        for text in part:
            digest.update(text.encode() + b"\0")
    return FingerprintPart(FURTHER, f"{len(parts)} parts, sha256 {digest.hexdigest()}")


def _short(text: str, most_bytes: int) -> str:
    """On one line, and inside the bound; what was changed is told from what looks the same by its digest."""
    printable = text if text.isprintable() else "".join(each if each.isprintable() else " " for each in text)
    data = printable.encode(errors="replace")
    if printable == text and len(data) <= most_bytes:
        return text
    tail = f"… sha256 {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"
    return data[: most_bytes - len(tail.encode())].decode(errors="ignore") + tail
