"""Numbers, names and other parts of messages, each checked before use.

Law of this file: one part of a message at a time; the codecs know the message around it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from tft_coord.core.fingerprint import Fingerprint, FingerprintPart
from tft_coord.core.fingerprint import check as check_fingerprint
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.stragglers import PaceKind, StragglerNotice
from tft_coord.core.types import (
    MAX_INT64,
    TRIED_MOST,
    UNREACHED_MOST,
    LossNotice,
    PeerAddresses,
    QuorumKey,
    QuorumNews,
    Refusal,
    Unreached,
    Via,
)
from tft_coord.errors import ProtocolError
from tft_coord.wire import coordination_pb2 as pb
from tft_coord.wire.limits import (
    ADDRESSES_MOST,
    MAX_ADDRESS_BYTES,
    MAX_COUNT,
    MAX_HANDLES_BYTES,
    MAX_MEMBERS,
    MAX_METADATA_BYTES,
    MAX_NAME_BYTES,
    MAX_SENTENCE_BYTES,
)
from tft_coord.wire.reports import report_from_wire

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")


def refused_from_wire(message: pb.Refused) -> tuple[Refusal, str]:
    sentence = checked_sentence("message", message.message)
    try:
        return Refusal(message.code), sentence
    except ValueError:
        raise ProtocolError(
            f"the lighthouse refused with code {message.code[:64]!r}, which this version does not know: {sentence}"
        ) from None


def notice_to_wire(notice: LossNotice) -> pb.LossNotice:
    return pb.LossNotice(
        key=key_to_wire(notice.key),
        replica_id=notice.replica_id,
        session=notice.session,
        reason=clip(notice.reason),
        lives=notice.lives,
    )


def notice_from_wire(message: pb.LossNotice) -> LossNotice:
    return LossNotice(
        key=key_from_wire(message.key),
        replica_id=checked_name("replica_id", message.replica_id),
        session=message.session,
        reason=checked_sentence("reason", message.reason),
        lives=message.lives,
    )


def quorum_news_to_wire(news: QuorumNews) -> pb.QuorumNews:
    return pb.QuorumNews(
        key=key_to_wire(news.key), broken=news.broken, recalled=news.recalled, beat=news.beat, age_ms=news.age_ms
    )


def quorum_news_from_wire(message: pb.QuorumNews) -> QuorumNews:
    return QuorumNews(
        key_from_wire(message.key) if message.HasField("key") else None,
        message.broken,
        message.recalled,
        checked_count("beat", message.beat, MAX_INT64),
        checked_count("age_ms", message.age_ms, MAX_INT64),
    )


def fingerprint_to_wire(fingerprint: Fingerprint) -> list[pb.FingerprintPart]:
    return [pb.FingerprintPart(name=name, value=value) for name, value in fingerprint]


def fingerprint_from_wire(parts: Collection[pb.FingerprintPart]) -> Fingerprint:
    if not parts:
        return ()
    return check_fingerprint(tuple(FingerprintPart(part.name, part.value) for part in parts))


def unreached_to_wire(unreached: Collection[Unreached]) -> list[pb.Unreached]:
    return [pb.Unreached(replica_id=each.replica_id, via=each.via.name, why=clip(each.why)) for each in unreached]


def unreached_from_wire(parts: Collection[pb.Unreached]) -> tuple[Unreached, ...]:
    if len(parts) > UNREACHED_MOST:
        raise ProtocolError(f"a report names {len(parts)} unreachable peers; at most {UNREACHED_MOST} are allowed")
    return tuple(
        Unreached(checked_name("replica_id", part.replica_id), _via(part.via), checked_sentence("why", part.why))
        for part in parts
    )


def trial_to_wire(number: int, peers: Collection[PeerAddresses]) -> pb.TryPeers:
    return pb.TryPeers(
        number=number,
        peers=[pb.PeerAddresses(replica_id=each.replica_id, addresses=each.addresses) for each in peers],
    )


def peers_from_wire(message: pb.TryPeers) -> tuple[PeerAddresses, ...]:
    if len(message.peers) > TRIED_MOST:
        raise ProtocolError(f"a trial names {len(message.peers)} peers; at most {TRIED_MOST} are allowed")
    if any(len(peer.addresses) > ADDRESSES_MOST for peer in message.peers):
        raise ProtocolError(f"a peer in a trial has more than {ADDRESSES_MOST} addresses")
    return tuple(
        PeerAddresses(
            checked_name("replica_id", peer.replica_id),
            tuple(checked_address("address", address) for address in peer.addresses),
        )
        for peer in message.peers
    )


def _via(number: int) -> Via:
    try:
        return Via[pb.Via.Name(number)]
    except (ValueError, KeyError):
        raise ProtocolError(f"a peer is unreachable via {number}, which this version does not know") from None


def straggler_to_wire(news: StragglerNotice) -> pb.Straggler:
    return pb.Straggler(
        replica_id=news.replica_id,
        kind=news.kind.name,
        own_ms=news.own_ms,
        median_ms=news.median_ms,
        share=news.share,
        pause_ms=news.pause_ms,
        sentence=clip(news.sentence),
    )


def straggler_from_wire(message: pb.Straggler) -> StragglerNotice:
    try:
        kind = PaceKind(message.kind)
    except ValueError:
        raise ProtocolError(f"a straggler notice has kind {message.kind}, which this version does not know") from None
    if not 0.0 < message.share <= 1.0:
        raise ProtocolError(f"share is {message.share}; it must be above 0 and at most 1")
    return StragglerNotice(
        checked_name("replica_id", message.replica_id),
        kind,
        checked_count("own_ms", message.own_ms, MAX_INT64),
        checked_count("median_ms", message.median_ms, MAX_INT64),
        message.share,
        checked_count("pause_ms", message.pause_ms, MAX_INT64),
        checked_sentence("sentence", message.sentence),
    )


def own_ms_to_wire(progress: Progress | None) -> int:
    return 0 if progress is None else progress.own_ms


def progress_to_wire(progress: Progress | None) -> pb.Progress | None:
    if progress is None:
        return None
    return pb.Progress(
        step=progress.step,
        phase=progress.phase.name,
        since_ms=progress.since_ms,
        excused=progress.excused,
        slowest_step_ms=progress.slowest_step_ms,
    )


def finished_step_from_wire(leave: pb.Leave | pb.RankLeaves) -> int | None:
    if not leave.HasField("finished_step"):
        return None
    return checked_count("finished_step", leave.finished_step, MAX_INT64)


def progress_from_wire(beat: pb.Beat | pb.RankBeat) -> Progress | None:
    if not beat.HasField("progress"):
        return None
    received = beat.progress
    try:
        phase = Phase(received.phase)
    except ValueError:
        raise ProtocolError(f"a beat reports phase {received.phase}, which this version does not know") from None
    return Progress(
        step=checked_count("step", received.step, MAX_INT64),
        phase=phase,
        since_ms=checked_count("since_ms", received.since_ms, MAX_INT64),
        excused=received.excused,
        slowest_step_ms=checked_count("slowest_step_ms", received.slowest_step_ms, MAX_INT64),
        own_ms=checked_count("own_ms", beat.own_ms, MAX_INT64),
        report=report_from_wire(beat),
    )


def key_to_wire(key: QuorumKey | None) -> pb.QuorumKey | None:
    return None if key is None else pb.QuorumKey(quorum_id=key.quorum_id, nonce=key.nonce)


def key_from_wire(message: pb.QuorumKey) -> QuorumKey:
    return QuorumKey(message.quorum_id, message.nonce)


def parse(kind: type[_M], data: bytes) -> _M:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"{len(data)} bytes are not a {kind.DESCRIPTOR.name} message: {error}") from None


def checked_text(field: str, text: str, most_bytes: int) -> str:
    # A character has at least one byte and at most four, so most texts need no encoding for this check.
    if len(text) > most_bytes or (4 * len(text) > most_bytes and len(text.encode()) > most_bytes):
        raise ProtocolError(f"{field} is longer than {most_bytes} bytes; shorten it")
    return text


def checked_name(field: str, text: str) -> str:
    if not text:
        raise ProtocolError(f"{field} is empty; give it a name")
    return checked_printable(field, text, MAX_NAME_BYTES)


def checked_address(field: str, text: str) -> str:
    return checked_printable(field, text, MAX_ADDRESS_BYTES)


def checked_printable(field: str, text: str, most_bytes: int) -> str:
    # Names and addresses appear in the logs of all peers, where a line break would forge a line.
    if not checked_text(field, text, most_bytes).isprintable():
        raise ProtocolError(f"{field} is {text[:80]!r}; give printable characters only, without line breaks")
    return text


def checked_sentence(field: str, text: str) -> str:
    """Return a peer's sentence for the local logs: on one line, whatever it contains."""
    if not text.isprintable():
        text = "".join(character if character.isprintable() else " " for character in text)
    return checked_text(field, text, MAX_SENTENCE_BYTES)


def checked_handles(handles: Collection[str]) -> tuple[str, ...]:
    # These belong to one member. The quorum carries them to every other member, so their total is bounded more tightly.
    if len(handles) + sum(map(len, handles)) > MAX_HANDLES_BYTES:
        raise ProtocolError(f"the reconfigure_handles are longer than {MAX_HANDLES_BYTES} bytes together; shorten them")
    return tuple(checked_text("reconfigure_handle", handle, MAX_METADATA_BYTES) for handle in handles)


def checked_names(field: str, names: Collection[str], most: int) -> tuple[str, ...]:
    """Return at most that many names, none of them empty. Raises: ProtocolError."""
    if len(names) > most:
        raise ProtocolError(f"{field} has {len(names)} names, above the limit of {most}")
    return tuple(checked_name(field, name) for name in names)


def checked_printables(field: str, texts: Collection[str], most: int) -> tuple[str, ...]:
    """Return at most that many texts for log lines, as long as a name or empty. Raises: ProtocolError."""
    if len(texts) > most:
        raise ProtocolError(f"{field} has {len(texts)} texts, above the limit of {most}")
    return tuple(checked_printable(field, text, MAX_NAME_BYTES) for text in texts)


def checked_count(field: str, number: int, most: int = MAX_COUNT) -> int:
    if not 0 <= number <= most:
        raise ProtocolError(f"{field} is {number}; it must be 0..{most}")
    return number


def checked_rank(field: str, number: int, size: int) -> int:
    if not 0 <= number < size:
        raise ProtocolError(f"{field} is replica rank {number} in a quorum of {size}; check the peer's version")
    return number


def checked_ranks(field: str, numbers: Collection[int], size: int) -> tuple[int, ...]:
    return tuple(checked_rank(field, number, size) for number in few(field, numbers))


def few(field: str, items: Collection[_T]) -> Collection[_T]:
    if len(items) > MAX_MEMBERS:
        raise ProtocolError(f"{field} has {len(items)} entries; at most {MAX_MEMBERS} are allowed")
    return items


def clip(sentence: str) -> str:
    return sentence.encode("utf-8", "replace")[:MAX_SENTENCE_BYTES].decode("utf-8", "ignore")
