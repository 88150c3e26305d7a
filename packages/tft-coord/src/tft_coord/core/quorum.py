"""The quorum rule: which replicas train together next, and when to stop waiting.

A quorum forms at once when all members of the last quorum are back, newcomers included. Otherwise the rule needs a
majority of the healthy replicas and waits for the rest up to join_timeout. It never leaves out every survivor of the
last quorum while one of them is healthy. It never starts over while a holder of the state may only have a bad link.

Law of this file: functions of what is known now; no state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from tft_coord.core.names import listed
from tft_coord.core.types import Member, Quorum
from tft_coord.core.waits import LOST_STATE

REASONS_MOST = 50  # of a quorum of thousands


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of the rule.

    Args:
        waiting: replica id -> the member that it asks to be; healthy and with an open request.
        healthy: ids of healthy ready replicas, the waiting ones included.
        healing: ids of healthy replicas whose healing still receives bytes.
        stalled: ids of healthy replicas that wait for a state of which no byte has come.
        ineligible: ids that failed to heal too often, for a while.
        left_out: ids that are left out as stragglers, for a while.
        previous: the newest quorum, or None.
        min_replicas: smallest quorum.
        join_timeout_ms: how long the rule waits for healthy replicas that have not asked.
        asked_ms: replica id -> since when it waits, for each of the waiting.
        fast_only: the lighthouse has just started and does not know yet which replicas train.
        reference_step: of the state that the previous quorum started from; 0: no state is worth waiting for.
        lost_sources: replica id -> since when it is lost, for each that held that state and may come back with it.
        lost_state_ms: how long the rule waits for them at most, for the sentence.
        left: ids that have left the job; the rule does not wait for them.
        kept_out: ids that some others can't reach; the rule does not wait for them.
        now_ms: the time.
    """

    waiting: Mapping[str, Member]
    healthy: Collection[str]
    previous: Quorum | None
    min_replicas: int
    join_timeout_ms: int
    asked_ms: Mapping[str, int]
    now_ms: int
    healing: Collection[str] = ()
    stalled: Collection[str] = ()
    ineligible: Collection[str] = ()
    fast_only: bool = False
    reference_step: int = 0
    lost_sources: Mapping[str, int] = field(default_factory=dict)
    lost_state_ms: int = 0
    left: Collection[str] = ()
    left_out: Collection[str] = ()
    kept_out: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Form:
    """The decision to form a quorum of these now, sorted by replica id.

    `kept_out` wait too, and could be in it if all others could reach them.
    """

    members: tuple[Member, ...]
    kept_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """The decision to form no quorum yet; `reason` says what is missing.

    At least `more` requests must come before the rule can decide otherwise, as long as nothing else happens. With a
    thousand members the rule must not run a thousand times for one quorum.
    """

    reason: str
    more: int = field(default=1, compare=False)


def decide(situation: Situation) -> Form | Wait:
    """Apply the rule.

    Returns: `Form` with at least `min_replicas` members, or `Wait` with a sentence.
    Source: docs/protocol/sessions-and-quorums.md, "The quorum rule".
    """
    previous = situation.previous.replica_ids if situation.previous is not None else ()
    members_before = frozenset(previous).difference(situation.left)
    before = members_before.difference(situation.kept_out)
    shrink_only = any(member.shrink_only for replica_id, member in situation.waiting.items() if replica_id in before)
    eligible = set(situation.healthy).difference(situation.ineligible, situation.stalled, situation.left_out)
    if shrink_only:
        eligible &= members_before
    kept_out = eligible.intersection(situation.kept_out)
    eligible -= kept_out
    candidates = {replica_id for replica_id in situation.waiting if replica_id in eligible}
    form = Form(
        tuple(situation.waiting[replica_id] for replica_id in sorted(candidates)),
        tuple(sorted(kept_out.intersection(situation.waiting))),
    )
    if len(candidates) < situation.min_replicas:
        wait = Wait(f"{len(candidates)} of min_replicas {situation.min_replicas} have asked")
    elif (awaited := before.difference(situation.left_out)) and awaited <= candidates:
        return form
    elif situation.fast_only:
        wait = Wait("the lighthouse has just started and waits for running replicas to reconnect")
    else:
        found = _majority(situation, candidates, eligible, before) or _lost_state(situation, form.members)
        if found is None:
            return form
        wait = found
    # A request without shrink_only after one with it makes more replicas eligible than its own.
    return wait if shrink_only else replace(wait, more=_requests_needed(situation, candidates, eligible, before))


def _requests_needed(
    situation: Situation, candidates: Collection[str], eligible: Collection[str], before: frozenset[str]
) -> int:
    """Return the minimum number of missing requests: each adds at most one candidate, and makes no other one
    unnecessary."""
    least = max(1, situation.min_replicas - len(candidates))
    awaited = before.difference(situation.left_out)
    fast = max(least, len(awaited.difference(candidates))) if awaited else None
    if situation.fast_only:
        return least if fast is None else fast
    slow = max(least, len(eligible) // 2 + 1 - len(candidates))
    if candidates and _remaining_ms(situation, candidates) > 0:
        slow = max(slow, len(eligible) - len(candidates))
    return slow if fast is None else min(slow, fast)


def _remaining_ms(situation: Situation, candidates: Collection[str]) -> int:
    """Return the rest of join_timeout. An ineligible replica may have asked long ago; its waiting time does not
    count."""
    first_asked_ms = min(situation.asked_ms[replica_id] for replica_id in candidates)
    return first_asked_ms + situation.join_timeout_ms - situation.now_ms


def _majority(situation: Situation, candidates: set[str], eligible: set[str], before: Collection[str]) -> Wait | None:
    """Return what the slow path still waits for, or None."""
    if 2 * len(candidates) <= len(eligible):
        return Wait(f"{len(candidates)} of {len(eligible)} healthy replicas have asked, and a majority is needed")
    survivors = [replica_id for replica_id in before if replica_id in situation.healthy]
    if survivors and not any(replica_id in candidates for replica_id in survivors):
        return Wait(f"a survivor of the last quorum is healthy and has not asked: {listed(survivors)}")
    missing = sorted(eligible - candidates)
    healing = [replica_id for replica_id in missing if replica_id in situation.healing]
    if healing:
        return Wait(f"{listed(healing)} is healing and receives data")
    remaining_ms = _remaining_ms(situation, candidates)
    if missing and remaining_ms > 0:
        return Wait(f"{listed(missing)} is healthy and has not asked; join_timeout ends in {remaining_ms} ms")
    return None


def _lost_state(situation: Situation, members: Collection[Member]) -> Wait | None:
    """Return a wait if these would go on from an older state while a holder of the last quorum's state may come
    back."""
    step = situation.reference_step
    if not situation.lost_sources or any(member.step >= step and not member.torn for member in members):
        return None
    newest = max(sorted(situation.lost_sources), key=lambda replica_id: situation.lost_sources[replica_id])
    ago_ms = situation.now_ms - situation.lost_sources[newest]
    left_ms = max(0, situation.lost_state_ms - ago_ms)
    return Wait(
        f"{LOST_STATE}{step}, which {newest} held until it was lost {ago_ms // 1_000} s ago; continue or restart that "
        f"replica, or the others resume from an older step in {-(-left_ms // 1_000)} s"
    )


def reason_for_new_id(
    previous: Quorum | None,
    members: tuple[Member, ...],
    broken: str | None,
    left: Collection[str] = (),
    *,
    kept_out: Collection[str] = (),
    left_out: Collection[str] = (),
) -> str | None:
    """Return why the id must rise, or None if the previous key stands.

    Args:
        previous: the newest quorum.
        members: of the next one, sorted.
        broken: why the previous one can't be used, or None.
        left: ids that have left the job.
        kept_out: ids that some others can't reach.
        left_out: ids that are left out as stragglers.
    """
    if previous is None:
        return "it is the first quorum"
    before = {member.replica_id: member for member in previous.members}
    after = {member.replica_id: member for member in members}
    reasons = [f"{replica_id} joined" for replica_id in after if replica_id not in before]
    gone = [replica_id for replica_id in before if replica_id not in after]
    for replica_id in gone:
        how = (
            "has left"
            if replica_id in left
            else "can't be reached"
            if replica_id in kept_out
            else "is left out as a straggler"
            if replica_id in left_out
            else "is gone"
        )
        reasons.append(f"{replica_id} {how}")
    for replica_id in [replica_id for replica_id in after if replica_id in before]:
        # Where a member is gone, the failed step of another one is a consequence, and the survivor is not to blame.
        reasons += _changes(before[replica_id], after[replica_id], somebody_is_gone=bool(gone))
    if broken is not None and not reasons:
        reasons.append(broken)
    if len(reasons) > REASONS_MOST:
        reasons[REASONS_MOST:] = [f"and {len(reasons) - REASONS_MOST} more"]
    return ", ".join(reasons) if reasons else None


def _changes(before: Member, after: Member, *, somebody_is_gone: bool) -> list[str]:
    reasons = []
    if after.reconfigure_handles != before.reconfigure_handles:
        # A torch group changes its handle in each reconfigure. If that asked for another one, there would be no end.
        before = replace(before, reconfigure_handles=after.reconfigure_handles)
    if after.identity != before.identity:
        what = "has a newer session" if after.session != before.session else "has other addresses or another world size"
        reasons.append(f"{after.replica_id} {what}")
    if somebody_is_gone:
        return reasons
    if after.commit_failures > 0:
        reasons.append(f"{after.replica_id} failed to commit ({after.commit_failures} in a row)")
    if after.needs_configure:
        reasons.append(f"{after.replica_id} asks for a new process group")
    return reasons
