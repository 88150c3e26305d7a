"""What the two sides of a transfer over a process group say to each other, as bytes of known length.

Over a process group nobody can ask how long the next message is: both sides must know, and some backends end the
process if they don't agree. So everything begins with two forms of fixed length. The source sends an offer, which names
the state and says how long its manifest is; the receiver sends an answer. The manifest follows, and says how long the
chunks are.

Law of this file: pure; two frozen values, their bytes, and the refusal of bytes that can't be theirs.

An offer is b"TFTOFFER", version u32, 1 for an offer or 2 for a refusal u32, the key as four u64, length of what follows
u64, xxh3-64 of all that u64; little-endian. What follows is a manifest, or the sentence of a refusal in UTF-8. An
answer is b"TFTREPLY", version u32, code u32, a key as four u64, length of a sentence u64, xxh3-64 of all that and of
the sentence's field u64; then that field, 400 bytes, UTF-8 padded with zeros.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, final

from tft_ckpt.errors import CheckpointError, StateCorrupt, StateUnsupported
from tft_ckpt.key import StateKey
from tft_ckpt.manifest import checksum

__all__ = ["ANSWER_BYTES", "OFFER_BYTES", "SENTENCE_BYTES", "Answer", "Code", "Offer", "printable", "shortened"]

VERSION: Final = 1
SENTENCE_BYTES: Final = 400
"""Longest sentence that travels."""

_OFFER = struct.Struct("<8sII4QQ")
_ANSWER = struct.Struct("<8sII4QQ")
_SUM = struct.Struct("<Q")
_OFFER_MAGIC: Final = b"TFTOFFER"
_ANSWER_MAGIC: Final = b"TFTREPLY"

OFFER_BYTES: Final = _OFFER.size + _SUM.size
ANSWER_BYTES: Final = _ANSWER.size + _SUM.size + SENTENCE_BYTES


class Code(IntEnum):
    """What a receiver answers."""

    TAKE = 1
    """Go on."""
    LATER = 2
    """Not that state; it waits for a later one."""
    MISMATCH = 3
    """Not that state, and the one that it wants will not come."""
    DECLINE = 4
    """It can't take it; the sentence says why."""


@final
@dataclass(frozen=True, slots=True)
class Offer:
    """A source's first word.

    Fields:
        key: of the state.
        following_bytes: length of the message that follows if the receiver takes it, at least 1.
        is_refusal: what follows is a sentence that says why the state can't be had, and no manifest.
    """

    key: StateKey
    following_bytes: int
    is_refusal: bool = False

    def encode(self) -> bytes:
        """OFFER_BYTES bytes."""
        kind = 2 if self.is_refusal else 1
        body = _OFFER.pack(_OFFER_MAGIC, VERSION, kind, *_words(self.key), self.following_bytes)
        return body + _SUM.pack(checksum(body))

    @classmethod
    def decode(cls, data: bytes, *, source: str, bytes_max: int) -> Offer:
        """Read OFFER_BYTES bytes of which nothing is believed.

        Args:
            data: what arrived.
            source: who sent it, for the errors.
            bytes_max: longest manifest.
        Raises:
            StateCorrupt: it is damaged, or announces too much.
            StateUnsupported: it is of another version.
        """
        version, kind, key, length = _opened(_OFFER, _OFFER_MAGIC, data, b"", source=source, part="header")
        if version != VERSION:
            raise StateUnsupported(
                f"{source} offers states in version {version}, this process reads {VERSION}; install one release of "
                "tft-ckpt everywhere",
                path="state",
            )
        most = SENTENCE_BYTES if kind == 2 else bytes_max
        if kind not in (1, 2) or not 1 <= length <= most:
            raise StateCorrupt(
                f"the header from {source} is damaged: it announces {length} bytes of kind {kind}, and the limit is "
                f"{most}",
                part="header",
                source=source,
            )
        return cls(key, length, kind == 2)


@final
@dataclass(frozen=True, slots=True)
class Answer:
    """A receiver's word.

    Fields:
        code: what it wants.
        key: of the state that it wants.
        sentence: why it does not go on; cut to SENTENCE_BYTES bytes on the way.
    """

    code: Code
    key: StateKey
    sentence: str = ""

    def encode(self) -> bytes:
        """ANSWER_BYTES bytes."""
        text = shortened(self.sentence)
        body = _ANSWER.pack(_ANSWER_MAGIC, VERSION, self.code, *_words(self.key), len(text))
        padded = text.ljust(SENTENCE_BYTES, b"\0")
        return body + _SUM.pack(checksum(body + padded)) + padded

    @classmethod
    def decode(cls, data: bytes, *, receiver: str) -> Answer:
        """Read ANSWER_BYTES bytes of which nothing is believed. Raises: StateCorrupt: they are no answer."""
        padded = data[-SENTENCE_BYTES:]
        version, code, key, length = _opened(_ANSWER, _ANSWER_MAGIC, data, padded, source=receiver, part="answer")
        if version != VERSION or code not in set(Code) or length > SENTENCE_BYTES:
            raise StateCorrupt(
                f"the answer from {receiver} is damaged, or of another release: version {version}, code {code}",
                part="answer",
                source=receiver,
            )
        return cls(Code(code), key, printable(padded[:length]))


def shortened(sentence: str) -> bytes:
    """At most SENTENCE_BYTES of it, and never in the middle of a character."""
    text = sentence.encode("utf-8", "replace")
    if len(text) <= SENTENCE_BYTES:
        return text
    return text[:SENTENCE_BYTES].decode("utf-8", "ignore").encode()


def printable(text: bytes) -> str:
    """What a member wrote, as it may stand in an error or a log: in one line, without characters that steer."""
    return "".join(
        char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text.decode("utf-8", "replace")
    )


def _words(key: StateKey) -> tuple[int, int, int, int]:
    return key.quorum_id, key.nonce, key.step, key.lineage


def _opened(
    form: struct.Struct, magic: bytes, data: bytes, summed_too: bytes, *, source: str, part: str
) -> tuple[int, int, StateKey, int]:
    """Version, kind, key and length. Raises: StateCorrupt."""
    problem = "its checksum does not match"
    (expected,) = _SUM.unpack_from(data, form.size)
    if checksum(data[: form.size] + summed_too) == expected:
        found, version, kind, quorum_id, nonce, step, lineage, length = form.unpack_from(data)
        try:
            if found == magic:
                key = StateKey(quorum_id=quorum_id, nonce=nonce, step=step, lineage=lineage)
                return version, kind, key, length
            problem = "it is of another kind"
        except CheckpointError:
            problem = "its key can't be one"
    raise StateCorrupt(f"the {part} from {source} is damaged: {problem}", part=part, source=source)
