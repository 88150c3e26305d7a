"""Answers in torchft's shape: same names, same attributes.

Law of this file: frozen values and their construction from the core's; no I/O.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tft_coord.core import types
from tft_coord.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Timestamp:
    """Seconds since 1970 and the nanoseconds beyond them."""

    seconds: int
    nanos: int


@dataclass(frozen=True, slots=True)
class QuorumMember:
    """One replica group in a quorum.

    Args:
        replica_id: of the group.
        address, store_address: of its manager server, and of its store.
        step: its committed steps.
        world_size: number of its ranks.
        shrink_only: it wants no new members.
        data: the user's, or None.
    """

    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Quorum:
    """The lighthouse's answer.

    Args:
        quorum_id: rises with every change of the members.
        participants: sorted by replica id.
        created: when it formed.
    """

    quorum_id: int
    participants: list[QuorumMember]
    created: Timestamp


@dataclass(frozen=True, slots=True)
class DescribedJob:
    """One job of a lighthouse: its newest quorum (id 0: none yet), what its next one waits for, and its warnings."""

    name: str
    quorum_id: int
    num_members: int
    waiting_for: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LighthouseDescription:
    """A lighthouse's description of itself.

    Args:
        version: of tft-lighthouse.
        started_ms, now_ms: its clock, milliseconds since 1970.
        cluster_id: of the lighthouses that replace each other.
        min_replicas: smallest quorum.
        join_timeout_ms, heartbeat_timeout_ms, quorum_tick_ms: its timeouts.
        jobs: the known ones.
        torchft: of torchft's members, while one of them is alive.
        lost_state_timeout_ms: how long a job waits for a state whose holders fell silent; 0: an older version that does
            not say.
        stragglers: its policy, one phrase; "": an older version that does not say.
    """

    version: str
    started_ms: int
    now_ms: int
    cluster_id: str
    min_replicas: int
    join_timeout_ms: int
    heartbeat_timeout_ms: int
    quorum_tick_ms: int
    jobs: tuple[DescribedJob, ...]
    torchft: DescribedJob | None = None
    lost_state_timeout_ms: int = 0
    stragglers: str = ""


@dataclass(frozen=True, slots=True)
class QuorumResult:
    """A group rank's part in a quorum, with torchft's field names.

    Args:
        quorum_id: rises with every change of the members.
        replica_rank, replica_world_size: this group's place, and the number of groups.
        recover_src_manager_address, recover_src_replica_rank: of the source to heal from; "" and None without a need.
        recover_dst_replica_ranks: groups that heal from this one first.
        store_address: of this rank's rendezvous store.
        max_step: the step that this step's reduction starts from.
        max_replica_rank: this group's place among those whose gradients count, or None.
        max_world_size: the number of those.
        heal: this group fetches its state first.
        replica_ids: of all groups, by replica rank.
        commit_failures: failed commits in a row, the maximum over the groups.
        reconfigure_handles: of this rank, by replica rank.
    """

    quorum_id: int = 0
    replica_rank: int = 0
    replica_world_size: int = 1
    recover_src_manager_address: str = ""
    recover_src_replica_rank: int | None = None
    recover_dst_replica_ranks: list[int] = field(default_factory=list)
    store_address: str = ""
    max_step: int = 0
    max_replica_rank: int | None = None
    max_world_size: int = 1
    heal: bool = False
    replica_ids: list[str] = field(default_factory=list)
    commit_failures: int = 0
    reconfigure_handles: list[str] = field(default_factory=list)


def quorum_view(quorum: types.Quorum) -> Quorum:
    """Return the quorum in torchft's shape. Raises: ProtocolError: a member's data is not a JSON object."""
    seconds, milliseconds = divmod(quorum.created_ms, 1000)
    return Quorum(
        quorum.key.quorum_id,
        [_member_view(member) for member in quorum.members],
        Timestamp(seconds, milliseconds * 1_000_000),
    )


def result_view(plan: types.Plan) -> QuorumResult:
    """Return the plan in torchft's shape."""
    first = plan.sources[0] if plan.sources else None
    return QuorumResult(
        quorum_id=plan.key.quorum_id,
        replica_rank=plan.replica_rank,
        replica_world_size=plan.replica_world_size,
        recover_src_manager_address=f"http://{first.address}" if first else "",
        recover_src_replica_rank=first.replica_rank if first else None,
        recover_dst_replica_ranks=list(plan.recover_dst_replica_ranks),
        store_address=plan.store_address,
        max_step=plan.step,
        max_replica_rank=plan.participating_rank,
        max_world_size=plan.num_participants,
        heal=plan.heal,
        replica_ids=list(plan.replica_ids),
        commit_failures=plan.commit_failures,
        reconfigure_handles=list(plan.reconfigure_handles),
    )


def _member_view(member: types.Member) -> QuorumMember:
    try:
        data = json.loads(member.data) if member.data else None
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the data of replica {member.replica_id} is not JSON: {error}") from error
    if data is not None and not isinstance(data, dict):
        raise ProtocolError(f"the data of replica {member.replica_id} is not a JSON object; give a dict")
    return QuorumMember(
        member.replica_id,
        member.address,
        member.store_address,
        member.step,
        member.world_size,
        member.shrink_only,
        data,
    )
