"""Lineages: equal step numbers are not equal states.

A lineage is a 64-bit digest of the way a state was reached: the job at step 0, then one fold for every commit with the
quorum's key and the step. Two replicas with the same step and lineage hold the same weights.

Law of this file: digests of plain values; nothing else.
"""

from __future__ import annotations

import hashlib
import struct

from tft_coord.core.types import QuorumKey


def initial_lineage(job: str) -> int:
    """Return the lineage of a fresh state of that job, at step 0."""
    return _digest(b"tft.start", job.encode())


def fold_lineage(lineage: int, key: QuorumKey, step: int) -> int:
    """Return the lineage after a commit in that quorum.

    Args:
        lineage: before the commit.
        key: of the quorum whose reduction was committed.
        step: committed steps after the commit.
    """
    return _digest(b"tft.commit", struct.pack("<QQQQ", lineage, key.quorum_id, key.nonce, step))


def checked_lineage(lineage: int, state_digest: bytes) -> int:
    """Return the lineage of a state whose bytes were checked; replicas with other bytes get other lineages.

    Args:
        lineage: before.
        state_digest: of the replica group's state, the same number of bytes everywhere.
    """
    return _digest(b"tft.check", struct.pack("<Q", lineage), state_digest)


def state_check(step: int, lineage: int) -> int:
    """Return a 40-bit digest of a state, so small that the sum over all members of a quorum fits into 63 bits.

    Args:
        step, lineage: of the state.
    """
    return _digest(b"tft.word", struct.pack("<QQ", step, lineage)) >> 24


def adopted_lineage(key: QuorumKey, step: int, replica_id: str, *, created_ms: int = 0) -> int:
    """Return the lineage that a state without one gets from the first quorum that makes it the reference.

    The lineage is a function of the quorum, so the holder and all that heal from it get the same one. A key can be
    formed more than once. The time tells the state from another one that the user loads by hand at the same step later.

    Args:
        key, created_ms: of the quorum.
        step, replica_id: of the holder.
    """
    words = struct.pack("<QQQQ", key.quorum_id, key.nonce, step, created_ms)
    return _digest(b"tft.adopt", words, replica_id.encode())


def _digest(kind: bytes, *parts: bytes) -> int:
    digest = hashlib.blake2b(digest_size=8, person=kind.ljust(16, b"\0"))
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")
