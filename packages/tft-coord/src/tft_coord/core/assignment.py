"""The plan: which replicas hold the state, which heal and from which source, and whose gradients count.

Every member computes the plan from the quorum alone and gets the same one, so no message is needed. The reference is
the state that the step starts from: the highest step, and among several states at that step the one that most members
share. A member that holds another state heals before its gradients count.

Law of this file: functions of a quorum; no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tft_coord.core.lineage import adopted_lineage
from tft_coord.core.types import Member, Plan, Quorum, QuorumKey, Source
from tft_coord.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Assignment:
    """The part of the plan that is the same for all members.

    Args:
        step, lineage: the reference.
        up_to_date: replica ranks that hold it, in order; at least one.
        recovering: replica ranks that heal, in order.
        participants: replica ranks whose gradients count.
        min_replica_size: participants needed for a commit; lower than the setting where only the first of the fresh
            replicas can have a gradient that counts.
        lease_ms: of the quorum, see `Quorum.lease_ms`.
    """

    step: int
    lineage: int
    up_to_date: tuple[int, ...]
    recovering: tuple[int, ...]
    participants: tuple[int, ...]
    min_replica_size: int
    lease_ms: int | None = None


def assign(quorum: Quorum) -> Assignment:
    """Decide the common part of the plan.

    Args:
        quorum: any quorum.
    Returns: an assignment in which at least one member is up to date. Only the up-to-date members start the reduction
        from their own state.
    Raises: ProtocolError: every member is torn, so that no member holds a state to go on from.
    Source: docs/protocol/the-step.md, "The plan".
    """
    members = quorum.members
    holders = _holders(quorum.key, members)
    lineage = members[holders[0]].lineage
    step = members[holders[0]].step
    if lineage is None:
        first = members[holders[0]].replica_id
        lineage = adopted_lineage(quorum.key, step, first, created_ms=quorum.created_ms)
    # At step 0 every fresh replica has the same lineage but its own random weights. The weights of the first one count.
    first_counts = step == 0 and members[holders[0]].init_sync
    if first_counts:
        holders = holders[:1]
    held = set(holders)
    may_heal = all(member.allow_heal for member in members)
    recovering = tuple(rank for rank in range(len(members)) if rank not in held) if may_heal else ()
    # A synchronous member heals before the reduction starts and takes part in it. An asynchronous one gives zeros.
    recovers = set(recovering)
    counted = [
        rank
        for rank, member in enumerate(members)
        if rank in held or (rank in recovers and not member.use_async_quorum)
    ]
    reference = members[holders[0]]
    if reference.fixed_with_spares:
        # Members that hold the state come first: a healthy spare is better than a member that heals.
        preferred = [*holders, *(rank for rank in counted if rank not in held)]
        counted = sorted(preferred[: reference.min_replica_size])
    needed = reference.min_replica_size
    if first_counts and len(counted) < needed <= len(holders) + len(recovering):
        # A member that heals at step 0 would heal again the next time, and the job would never have enough
        # participants.
        needed = len(counted)
    return Assignment(
        step=step,
        lineage=lineage,
        up_to_date=holders,
        recovering=recovering,
        participants=tuple(counted),
        min_replica_size=needed,
        lease_ms=quorum.lease_ms,
    )


def plan_for(quorum: Quorum, replica_id: str, group_rank: int, assignment: Assignment | None = None) -> Plan:
    """Decide what one group rank does in a quorum.

    Args:
        quorum: that contains the replica.
        replica_id: of the group.
        group_rank: 0-based; spreads the rendezvous stores over the up-to-date groups.
        assignment: of this quorum, if the caller has it already.
    Returns: the plan; equal inputs give equal plans everywhere.
    Raises: ProtocolError: the replica is not in the quorum, or no member of it holds a state.
    """
    common = assignment if assignment is not None else assign(quorum)
    members = quorum.members
    own = next((rank for rank, member in enumerate(members) if member.replica_id == replica_id), None)
    if own is None:
        raise ProtocolError(f"replica {replica_id} is not in quorum {quorum.key}; ask for the next quorum")
    stores = _stores(members, common.up_to_date)
    store = members[stores[group_rank % len(stores)]]
    givers, poor = _givers(members, common.up_to_date)
    num_sources = len(givers)
    heal = own in common.recovering
    sources: tuple[Source, ...] = ()
    if heal:
        first = common.recovering.index(own) % num_sources
        order = givers[first:] + givers[:first] + poor
        sources = tuple(Source(rank, members[rank].replica_id, members[rank].address) for rank in order)
    served = tuple(rank for index, rank in enumerate(common.recovering) if givers[index % num_sources] == own)
    return Plan(
        key=quorum.key,
        replica_id=replica_id,
        replica_rank=own,
        replica_world_size=len(members),
        replica_ids=quorum.replica_ids,
        step=common.step,
        lineage=common.lineage,
        heal=heal,
        sources=sources,
        recover_dst_replica_ranks=served,
        serve=bool(common.recovering) and own in common.up_to_date,
        store_address=store.store_address,
        up_to_date=common.up_to_date,
        participants=common.participants,
        participating_rank=common.participants.index(own) if own in common.participants else None,
        min_replica_size=common.min_replica_size,
        commit_failures=max(member.commit_failures for member in members),
        reconfigure_handles=tuple(_handle(member, group_rank) for member in members),
        store_replica_id=store.replica_id,
        lease_ms=common.lease_ms,
    )


def _stores(members: Sequence[Member], up_to_date: tuple[int, ...]) -> Sequence[int]:
    """Return the replica ranks whose rendezvous stores serve; unreachable stores are avoided while others are left."""
    well = [rank for rank, member in enumerate(members) if not member.store_failed]
    return [rank for rank in up_to_date if rank in well] or well or up_to_date


def all_at(members: Sequence[Member], step: int, lineage: int | None) -> bool:
    """Return whether every member is intact and at exactly that state, so that no member heals and no message is
    needed."""
    if lineage is None:
        return False
    fresh = step == 0 and len(members) > 1 and any(member.init_sync for member in members)
    return not fresh and all(
        member.step == step and member.lineage == lineage and not member.torn for member in members
    )


def _givers(members: Sequence[Member], up_to_date: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the replica ranks of the sources to ask first, at least one, and of the sources to ask last.

    The latter are sources that some member has found silent, wrong or slow.
    """
    named = {name for member in members for name in member.poor_sources if name != member.replica_id}
    givers = tuple(rank for rank in up_to_date if members[rank].replica_id not in named)
    return (givers, tuple(rank for rank in up_to_date if rank not in givers)) if givers else (up_to_date, ())


def _holders(key: QuorumKey, members: Sequence[Member]) -> tuple[int, ...]:
    """Return the replica ranks that hold the reference: highest step, most shared lineage, smallest replica id."""
    whole = [rank for rank, member in enumerate(members) if not member.torn]
    if not whole:
        raise ProtocolError(
            f"the ranks of every member of quorum {key} are in different states, so no member has a whole state; "
            "restart the job from its last durable checkpoint"
        )
    highest = max(members[rank].step for rank in whole)
    by_lineage: dict[int | tuple[str], list[int]] = {}
    for rank in whole:
        if members[rank].step == highest:
            # An unknown lineage equals nothing, so its holder is alone.
            lineage = members[rank].lineage
            by_lineage.setdefault((members[rank].replica_id,) if lineage is None else lineage, []).append(rank)
    # Members are sorted by replica id, so the smallest rank has the smallest id.
    largest = max(len(ranks) for ranks in by_lineage.values())
    return tuple(min(ranks for ranks in by_lineage.values() if len(ranks) == largest))


def _handle(member: Member, group_rank: int) -> str:
    handles = member.reconfigure_handles
    return handles[group_rank] if group_rank < len(handles) else ""
