"""Fingerprints: the named parts that all replicas of a job must have in common, compared before the first collective.

Two replicas may differ in the shapes of their parameters, or their Managers may count participants by other rules. Such
replicas would crash each other in the first reduction, or silently train apart. Each replica therefore sends its
fingerprint with its first request for a quorum. A replica that differs from the present ones is refused by name. A part
that one side lacks is not compared.

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
LONGEST_PART: Final = f"give at most {MAX_PART_NAME_BYTES} bytes of name and {MAX_PART_VALUE_BYTES} of value"
MAX_PARTS: Final = 16_384
MAX_FINGERPRINT_BYTES: Final = 1024 * 1024
MAX_NAMED: Final = 3

# Parts with such names may differ between the ranks of a group, because each rank meets only the same rank of other
# groups. For example, the stages of a pipeline have different parameters. All other parts are the same on every rank.
OF_A_RANK: Final = "parameter/"
FURTHER: Final = "further parts"


@final
class FingerprintPart(NamedTuple):
    """One property in which replicas must not differ: printable texts of at most 256 bytes and 1 KiB."""

    name: str
    value: str


Fingerprint = tuple[FingerprintPart, ...]


def fingerprint_of(parts: Mapping[str, str]) -> Fingerprint:
    """Return a fingerprint inside the bounds, sorted, so that equal parts make equal fingerprints.

    A name or value that is too long is cut and ends with its digest. If there are too many parts or bytes, one part
    replaces the last ones and gives their number and digest.
    """
    return _bounded(FingerprintPart(_short(name, MAX_PART_NAME_BYTES), value) for name, value in parts.items())


def merged(by_rank: Mapping[int, Fingerprint]) -> Fingerprint:
    """Return the fingerprint of a group from those of its ranks, which must not differ (`differences_of_ranks`).

    A rank's own part (`OF_A_RANK`) becomes one part if all ranks have it alike, else one part for each rank.
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
    """Return the parts in which the ranks of one group differ and must not, one phrase for each part.

    Each rank is compared once, with the first rank that has the part.
    """
    first: dict[str, tuple[int, str]] = {}
    found: dict[str, str] = {}
    for rank, fingerprint in sorted(by_rank.items()):
        for name, value in fingerprint:
            there, other = first.setdefault(name, (rank, value))
            if other != value and not _is_of_a_rank(name):
                found.setdefault(name, f"{name} is {other!r} on rank {there} and {value!r} on rank {rank}")
    return list(found.values())


def differences(there: Mapping[str, str], here: Fingerprint) -> list[str]:
    """Return the parts in which a new replica differs from the present ones, one phrase each; []: it belongs to them.

    Args:
        there: name -> value.
        here: of the new replica.
    """
    return [
        f"{name} is {there[name]!r} there and {value!r} here"
        for name, value in here
        if name in there and there[name] != value
    ]


def list_differences(found: list[str]) -> str:
    """Return the differences in one phrase: the first three, and the number of the others."""
    more = len(found) - MAX_NAMED
    return "; ".join(found[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")


def check(fingerprint: Fingerprint) -> Fingerprint:
    """Return the fingerprint unchanged if it is valid.

    Raises: ProtocolError: it breaks a bound, or a part would break a line of a log.
    """
    if len(fingerprint) > MAX_PARTS:
        raise ProtocolError(f"a fingerprint has {len(fingerprint)} parts; give at most {MAX_PARTS}")
    total = 0
    for name, value in fingerprint:
        if not name or not (name.isprintable() and value.isprintable()):
            raise ProtocolError(f"fingerprint part {name[:80]!r} is not printable; give printable names and values")
        size = len(name.encode()), len(value.encode())
        if size[0] > MAX_PART_NAME_BYTES or size[1] > MAX_PART_VALUE_BYTES:
            raise ProtocolError(f"fingerprint part {name[:80]!r} is too long; {LONGEST_PART}")
        total += sum(size)
    if total > MAX_FINGERPRINT_BYTES:
        raise ProtocolError(f"a fingerprint has {total} bytes; give at most {MAX_FINGERPRINT_BYTES}")
    return fingerprint


def _is_of_a_rank(name: str) -> bool:
    return name.startswith(OF_A_RANK) or name == FURTHER


def _bounded(parts: Iterable[FingerprintPart]) -> Fingerprint:
    # Parameters are many and come last, so the part that replaces the last ones replaces parameters.
    ordered = sorted(
        (FingerprintPart(name, _short(value, MAX_PART_VALUE_BYTES)) for name, value in parts),
        key=lambda part: (_is_of_a_rank(part.name), part.name),
    )
    left = MAX_FINGERPRINT_BYTES - len(FURTHER) - 100  # the rest is reserved for the last part
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
    """Return the text on one line and inside the bound; the digest of a changed text tells it from a text that looks
    the same."""
    printable = text if text.isprintable() else "".join(each if each.isprintable() else " " for each in text)
    data = printable.encode(errors="replace")
    if printable == text and len(data) <= most_bytes:
        return text
    tail = f"… sha256 {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"
    return data[: most_bytes - len(tail.encode())].decode(errors="ignore") + tail
