"""The messages between the two sides of a transfer over a process group, as bytes of known length.

A process group does not report the length of the next message. Both sides must know it, and some backends end the
process if they disagree. So everything begins with two forms of fixed length. The source sends an offer with the name
of the state and the length of its manifest, and the receiver sends an answer. The manifest follows, and contains the
length of the chunks.

Law of this file: pure; two frozen values, their bytes, and the refusal of invalid bytes.

An offer is b"TFTOFFER", version u32, kind u32 (1 for an offer, 2 for a refusal), the key as four u64, the length of the
next message u64, and xxh3-64 of all that u64. All numbers are little-endian. The next message is a manifest, or the
sentence of a refusal in UTF-8.

An answer is b"TFTREPLY", version u32, code u32, a key as four u64, the length of a sentence u64, a checksum u64, and
the sentence's field. The field has 400 bytes of UTF-8, padded with zeros. The checksum is xxh3-64 of everything before
it and of the field.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, final

from tft_ckpt.errors import CheckpointError, StateCorruptError, StateUnsupportedError
from tft_ckpt.key import StateKey
from tft_ckpt.state.manifest import checksum
from tft_ckpt.texts import printable

__all__ = ["ANSWER_BYTES", "OFFER_BYTES", "SENTENCE_BYTES", "Answer", "Code", "Offer", "shortened"]

VERSION: Final = 1
SENTENCE_BYTES: Final = 400
"""Maximum length of a sent sentence."""

_OFFER = struct.Struct("<8sII4QQ")
_ANSWER = struct.Struct("<8sII4QQ")
_CHECKSUM = struct.Struct("<Q")
_OFFER_MAGIC: Final = b"TFTOFFER"
_ANSWER_MAGIC: Final = b"TFTREPLY"

OFFER_BYTES: Final = _OFFER.size + _CHECKSUM.size
ANSWER_BYTES: Final = _ANSWER.size + _CHECKSUM.size + SENTENCE_BYTES


class Code(IntEnum):
    """The answers of a receiver."""

    TAKE = 1
    """The receiver takes the state, and the source continues."""
    LATER = 2
    """The receiver waits for a later state."""
    MISMATCH = 3
    """The receiver wants another state, which will not come."""
    DECLINE = 4
    """The receiver can't take the state; the sentence gives the reason."""


@final
@dataclass(frozen=True, slots=True)
class Offer:
    """The first message of a source.

    Fields:
        key: of the state.
        following_bytes: length of the next message if the receiver takes the offer, at least 1.
        is_refusal: whether the next message is a sentence with the reason of a refusal, instead of a manifest.
    """

    key: StateKey
    following_bytes: int
    is_refusal: bool = False

    def encode(self) -> bytes:
        """Return the offer as OFFER_BYTES bytes."""
        kind = 2 if self.is_refusal else 1
        body = _OFFER.pack(_OFFER_MAGIC, VERSION, kind, *_words(self.key), self.following_bytes)
        return body + _CHECKSUM.pack(checksum(body))

    @classmethod
    def decode(cls, data: bytes, *, source: str, bytes_max: int) -> Offer:
        """Parse OFFER_BYTES untrusted bytes.

        Args:
            data: the received bytes.
            source: the sender, for the errors.
            bytes_max: longest manifest.

        Raises:
            StateCorruptError: the offer is damaged, or announces too much.
            StateUnsupportedError: the offer has another version.
        """
        version, kind, key, length = _parse_form(_OFFER, _OFFER_MAGIC, data, b"", source=source, part="header")
        if version != VERSION:
            raise StateUnsupportedError(
                f"{source} sends offers of version {version}, but this process reads version {VERSION}; install the "
                "same release of tft-ckpt everywhere",
                path="state",
            )
        most = SENTENCE_BYTES if kind == 2 else bytes_max
        if kind not in (1, 2) or not 1 <= length <= most:
            raise StateCorruptError(
                f"the header from {source} is damaged: it announces {length} bytes of kind {kind}, and the limit is "
                f"{most}",
                part="header",
                source=source,
            )
        return cls(key, length, kind == 2)


@final
@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a receiver.

    Fields:
        code: the decision.
        key: of the state that the receiver wants.
        sentence: why the receiver does not continue; cut to SENTENCE_BYTES bytes.
    """

    code: Code
    key: StateKey
    sentence: str = ""

    def encode(self) -> bytes:
        """Return the answer as ANSWER_BYTES bytes."""
        text = shortened(self.sentence)
        body = _ANSWER.pack(_ANSWER_MAGIC, VERSION, self.code, *_words(self.key), len(text))
        padded = text.ljust(SENTENCE_BYTES, b"\0")
        return body + _CHECKSUM.pack(checksum(body + padded)) + padded

    @classmethod
    def decode(cls, data: bytes, *, receiver: str) -> Answer:
        """Parse ANSWER_BYTES untrusted bytes. Raises: StateCorruptError: they are not an answer."""
        padded = data[-SENTENCE_BYTES:]
        version, code, key, length = _parse_form(_ANSWER, _ANSWER_MAGIC, data, padded, source=receiver, part="answer")
        if version != VERSION or code not in set(Code) or length > SENTENCE_BYTES:
            raise StateCorruptError(
                f"the answer from {receiver} is damaged, or comes from another release: version {version}, code {code}",
                part="answer",
                source=receiver,
            )
        return cls(Code(code), key, printable(padded[:length]))


def shortened(sentence: str) -> bytes:
    """Return at most SENTENCE_BYTES bytes of the sentence, without a partial character."""
    text = sentence.encode("utf-8", "replace")
    if len(text) <= SENTENCE_BYTES:
        return text
    return text[:SENTENCE_BYTES].decode("utf-8", "ignore").encode()


def _words(key: StateKey) -> tuple[int, int, int, int]:
    return key.quorum_id, key.nonce, key.step, key.lineage


def _parse_form(
    form: struct.Struct, magic: bytes, data: bytes, also_checksummed: bytes, *, source: str, part: str
) -> tuple[int, int, StateKey, int]:
    """Check and parse a form. Returns: version, kind, key and length. Raises: StateCorruptError."""
    problem = "its checksum does not match"
    (expected,) = _CHECKSUM.unpack_from(data, form.size)
    if checksum(data[: form.size] + also_checksummed) == expected:
        found, version, kind, quorum_id, nonce, step, lineage, length = form.unpack_from(data)
        try:
            if found == magic:
                key = StateKey(quorum_id=quorum_id, nonce=nonce, step=step, lineage=lineage)
                return version, kind, key, length
            problem = "it is of another kind"
        except CheckpointError:
            problem = "its key is invalid"
    raise StateCorruptError(f"the {part} from {source} is damaged: {problem}", part=part, source=source)
