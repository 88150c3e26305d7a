"""The view of a lighthouse for its operator, and its JSON: the schemas of `/api/v1/`.

Law of this file: frozen values, and how they read as JSON. docs/lighthouse-http.md documents each field.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tft_coord import RefusedError
from tft_coord.lighthouse import JobStatus, Limits, ReplicaState, ReplicaStatus, base_name, shorten
from tft_lighthouse.history import IN_ORDER, Incident

SCHEMA_VERSION: Final = 1
REPLICAS_LISTED_MOST: Final = 5_000  # of one job; a longer list would hold up the lighthouse
NAMES_SHOWN_MOST: Final = 20
JOB_SHOWN_MOST: Final = 64  # characters
GONE: Final = (ReplicaState.LOST, ReplicaState.LEFT, ReplicaState.FINISHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LighthouseView:
    """A lighthouse and its jobs.

    Args:
        version: of this package.
        started_ms, now_ms: milliseconds since 1970.
        cluster_id: of the lighthouses that replace each other.
        is_ready: no other lighthouse of the cluster serves its jobs.
        address: under which replicas come to it.
        has_secret: a replica and an operator must show the shared secret.
        min_replicas: smallest quorum.
        heartbeat_timeout_ms, join_timeout_ms: its timeouts.
        stragglers: its policy for stragglers.
        jobs: the known jobs.
        num_streams: open streams and waiting calls.
        limits: what clients may use.
        leader: address of the lighthouse that leads, as etcd names it; "": there is no election, or no leader.
    """

    version: str
    started_ms: int
    now_ms: int
    address: str
    has_secret: bool
    cluster_id: str
    is_ready: bool
    min_replicas: int
    heartbeat_timeout_ms: int
    join_timeout_ms: int
    stragglers: str
    jobs: tuple[JobStatus, ...]
    num_streams: int = 0
    limits: Limits = Limits()  # noqa: RUF009  # frozen
    leader: str = ""


def as_json(view: LighthouseView) -> dict[str, Any]:
    """Return the view as JSON, of schema version `SCHEMA_VERSION`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "now_ms": view.now_ms,
        "lighthouse": {
            "version": view.version,
            "started_ms": view.started_ms,
            "address": view.address,
            "has_secret": view.has_secret,
            "cluster_id": view.cluster_id,
            "is_ready": view.is_ready,
            "leader": view.leader or None,
            "min_replicas": view.min_replicas,
            "heartbeat_timeout_ms": view.heartbeat_timeout_ms,
            "join_timeout_ms": view.join_timeout_ms,
            "stragglers": view.stragglers,
        },
        "jobs": [_job(job) for job in view.jobs],
    }


def _job(job: JobStatus) -> dict[str, Any]:
    quorum = job.quorum
    return {
        "name": job.name,
        "kind": "torchft" if job.is_torchft else "tft",
        "state": job.state.value,
        "step": job.step,
        "min_replicas": job.min_replicas,
        "quorum": None
        if quorum is None
        else {
            "id": quorum.key.quorum_id,
            "nonce": str(quorum.key.nonce),  # 64 bits, more than JavaScript's numbers hold
            "age_ms": job.quorum_age_ms,
            "num_members": len(quorum.members),
            "broken": job.broken,
        },
        "waits": None if job.wait is None else {"sentence": job.wait.sentence, "lasted_ms": job.wait.lasted_ms},
        "ended": None if job.ended is None else {"step": job.ended.step, "replica_ids": list(job.ended.replica_ids)},
        "warnings": list(job.warnings),
        "num_replicas": len(job.replicas),
        "replicas": [_replica(replica) for replica in job.replicas[:REPLICAS_LISTED_MOST]],
    }


def _replica(replica: ReplicaStatus) -> dict[str, Any]:
    return {
        "replica_id": replica.replica_id,
        "name": base_name(replica.replica_id) or replica.replica_id,
        "state": replica.state.value,
        "rank": replica.rank,
        "address": replica.address,
        "pid": replica.pid or None,
        "session": replica.session,
        "step": replica.step,
        "phase": replica.phase.name.lower() if replica.phase is not None else None,
        "phase_ms": replica.phase_ms if replica.phase is not None else None,
        "own_step_ms": replica.own_ms or None,
        "heard_ms": replica.heard_ms,
        "healed_bytes": replica.healed_bytes,
        "reason": replica.reason or None,
        "gone_ms": replica.gone_ms if replica.reason else None,
    }


def incident_as_json(incident: Incident) -> dict[str, Any]:
    """Return one incident as JSON, of schema version `SCHEMA_VERSION`."""
    return {
        "number": incident.number,
        "change": incident.change,
        "job": incident.job,
        "kind": incident.kind.value,
        "is_open": incident.is_open,
        "replica_ids": list(incident.replica_ids),
        "num_replicas": incident.num_replicas,
        "reason": incident.reason,
        "began_ms": incident.began_ms,
        "lasted_ms": incident.lasted_ms,
        "cost_ms": incident.cost_ms,
        "phases_ms": {phase.value: incident.phases[phase] for phase in IN_ORDER if phase in incident.phases},
        "step": incident.step,
        "quorum_before": incident.quorum_before,
        "quorum_after": incident.quorum_after,
        "members_before": incident.members_before,
        "members_after": incident.members_after,
        "waited_for": incident.waited_for or None,
        "slowest": incident.slowest or None,
        "failed_rounds": incident.failed_rounds if incident.slowest else None,
        "num_reports": incident.num_reports,
    }


def unknown_job(job: str, known: Iterable[str]) -> str:
    """Return the sentence about a job that is none of the known ones."""
    names = ", ".join(sorted(known)[:NAMES_SHOWN_MOST]) or "none so far"
    return f"this lighthouse knows no job {job[:JOB_SHOWN_MOST]!r}; known jobs: {names}"


def find_replica(jobs: Sequence[JobStatus], replica: str, job: str | None) -> tuple[JobStatus, ReplicaStatus]:
    """Find the replica that an operator names.

    Args:
        jobs: the known jobs.
        replica: its id, the short form of the id, or the name in it. A name means the running replica of that name.
        job: its job; None: any.
    Raises: RefusedError: there is no such replica, or there are several; the message lists them.
    """
    known = [each for each in jobs if job is None or each.name == job]
    if not known and job is not None:
        raise RefusedError(unknown_job(job, [each.name for each in jobs]), code="unknown")
    everyone = [(each, member) for each in known for member in each.replicas]
    found = [pair for pair in everyone if pair[1].replica_id == replica]
    found = found or [pair for pair in everyone if shorten(pair[1].replica_id) == replica]
    if not found:
        found = [pair for pair in everyone if base_name(pair[1].replica_id) == replica]
        found = [pair for pair in found if pair[1].state not in GONE] or found
    if len(found) == 1:
        return found[0]
    there = sorted(each.replica_id for _, each in (found or everyone))
    names = ", ".join(there[:NAMES_SHOWN_MOST]) or "none"
    if found:
        message = f"{len(found)} replicas match {replica!r}; give the id of one of them, and its job: {names}"
        raise RefusedError(message, code="ambiguous")
    raise RefusedError(f"this lighthouse knows no replica {replica!r}; known replicas: {names}", code="unknown")
