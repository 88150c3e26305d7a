"""What the lighthouse tells its operator: one line for each new quorum, for each reason, for each loss.

Law of this file: sentences from the core's effects, given to the logger; nothing is configured here.
"""

from __future__ import annotations

import logging
from typing import Final

from tft_coord.core.effects import QuorumFormed, ReplicaLeft, ReplicaLost
from tft_coord.core.types import Member

logger = logging.getLogger("tft_lighthouse")

MEMBERS_SAID: Final = 50  # of a quorum of thousands


def quorum_formed(formed: QuorumFormed) -> None:
    """Two lines: the new quorum with its members, and why its id rose."""
    quorum_id = formed.quorum.key.quorum_id
    job = formed.job or "of clients without a stream"
    last = "the first" if formed.previous is None else f"{formed.age_ms / 1000:.1f} s after the last"
    members = "; ".join(_member(member) for member in formed.quorum.members[:MEMBERS_SAID])
    if len(formed.quorum.members) > MEMBERS_SAID:
        members += f"; and {len(formed.quorum.members) - MEMBERS_SAID} more"
    logger.info(
        "new quorum %d, job %s, %s, %d members: %s",
        quorum_id,
        job,
        last,
        len(formed.quorum.members),
        members,
        extra={"job": formed.job, "quorum_id": quorum_id, "nonce": formed.quorum.key.nonce, "age_ms": formed.age_ms},
    )
    before = "none" if formed.previous is None else str(formed.previous.key.quorum_id)
    logger.info(
        "quorum changed, id %s -> %d, because %s",
        before,
        quorum_id,
        formed.reason,
        extra={"job": formed.job, "quorum_id": quorum_id, "reason": formed.reason},
    )


def replica_lost(lost: ReplicaLost) -> None:
    """One line: who is lost, and why."""
    logger.info(
        "lost replica %s of job %s: %s",
        lost.replica_id,
        lost.job,
        lost.reason,
        extra={"job": lost.job, "replica_id": lost.replica_id, "session": lost.session, "reason": lost.reason},
    )


def replica_left(left: ReplicaLeft) -> None:
    """One line: who has left, and why."""
    logger.info(
        "replica %s of job %s has left: %s",
        left.replica_id,
        left.job,
        left.reason,
        extra={"job": left.job, "replica_id": left.replica_id, "session": left.session, "reason": left.reason},
    )


def _member(member: Member) -> str:
    return (
        f"replica_id={member.replica_id} address={member.address} store_address={member.store_address} "
        f"step={member.step} world_size={member.world_size} shrink_only={member.shrink_only} "
        f"commit_failures={member.commit_failures}"
    )
