"""How the two sides of a session join: they configure their group, and prove to each other that they know its key.

Torch's store has no authentication, so everybody who reaches its port can read where a session meets, and join in the
place of one side. The session's key is never in the store. Each side sends a random challenge over the group, and
answers the other's challenge with an HMAC under the key.

Law of this file: what both sides share of a session's beginning. It knows no HTTP and no thread.
"""

from __future__ import annotations

import hmac
import secrets
import time
from datetime import timedelta

from tft_algos.parameter_server.routes import OpenedSession
from tft_pg import AbortedError, ConfigureError, ProcessGroup, ProcessGroupError
from tft_pg.word import exchange_word_by_allreduce

__all__ = ["join", "why_not_joined"]

_CHALLENGE_BYTES = 32
_VALUE_BYTES = 4  # the sum of two such values fits into a word's 64 bits
_LEAST_S = 0.001


def join(group: ProcessGroup, session: OpenedSession, rank: int, timeout: timedelta) -> bool:
    """Configure a group of two, and check whether the other side knows the session's key.

    Args:
        group: not configured.
        session: its address and its key.
        rank: of this side: 0 for the server, 1 for the client.
        timeout: for the whole call.

    Returns: whether the other side knows the key.
    Raises: ConfigureError: the group was not built, or the other side sent no proof in time. AbortedError: `abort` was
        called.
    """
    deadline_s = time.monotonic() + timeout.total_seconds()
    # By keywords, because a group that was written for torchft has another order.
    group.configure(store_addr=session.store_addr, replica_id="", rank=rank, world_size=2, timeout=timeout)
    try:
        mine = secrets.token_bytes(_CHALLENGE_BYTES)
        theirs = _exchange(group, mine, 0, deadline_s)
        key = bytes.fromhex(session.key)
        proof = _exchange(group, _proof(key, rank, theirs), 1, deadline_s)
    except AbortedError:
        raise
    except ProcessGroupError as error:
        raise ConfigureError(
            f"rank {1 - rank} has joined, but sent no proof of the session's key ({type(error).__name__})",
            where=error.where,
        ) from error
    return hmac.compare_digest(proof, _proof(key, 1 - rank, mine))


def _proof(key: bytes, rank: int, challenge: bytes) -> bytes:
    """Return the answer to a challenge. With the rank in it, no side can answer with what the other side sent."""
    return hmac.digest(key, bytes([rank]) + challenge, "sha256")


def _exchange(group: ProcessGroup, mine: bytes, round_number: int, deadline_s: float) -> bytes:
    """Send bytes to the other side. Returns: as many bytes of the other side. Raises: ProcessGroupError."""
    values = [int.from_bytes(mine[at : at + _VALUE_BYTES], "big") for at in range(0, len(mine), _VALUE_BYTES)]
    left = timedelta(seconds=max(_LEAST_S, deadline_s - time.monotonic()))
    # The connections of the tensors are the ones to check. A group of devices can't reduce tensors of the CPU.
    if "gloo" in group.getBackendName() or not hasattr(group, "exchange_word"):
        exchange = exchange_word_by_allreduce(group, values, round_number=round_number, timeout=left)
    else:
        exchange = group.exchange_word(values, round_number=round_number, timeout=left)
    theirs = (total - value for total, value in zip(exchange.wait(), values, strict=True))
    # A stranger may send values of another size, which prove nothing.
    return b"".join((value % (1 << 8 * _VALUE_BYTES)).to_bytes(_VALUE_BYTES, "big") for value in theirs)


def why_not_joined(error: ProcessGroupError, peer: str) -> str:
    """Return why a group was not built, without the advice for the members of a quorum.

    Args:
        error: of `join`.
        peer: the other side of the session, as the subject of a sentence.
    """
    if isinstance(error, ConfigureError) and error.missing_ranks:
        return f"{peer} did not join in time"
    return str(error).partition(";")[0]  # the advice follows: a new quorum, or a fresh prefix
